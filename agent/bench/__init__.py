"""`g35 bench`: the numbers, each beside its floor, all from one run.

catalog.py says which names there are, records.py what becomes of a number, rounds.py how a number is
taken: every name in several short rounds, one after the other and round again, so that a machine that
slows down meanwhile slows all of them. sites.py starts what is measured and ends it. The probes
themselves are in floors.py, pool_probes.py, redis_probes.py and single_probes.py.
"""
