"""`g35 bench`: the numbers, each beside its floor, all from one run.

names_and_units.py has the names, rounds.py how a number is taken, records.py its record and row; sites.py
starts what is measured. The probes are in floors.py and in *_probes.py.
"""
