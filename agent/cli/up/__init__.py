"""`g35 up` and `g35 down`: a whole pool on this machine, as one thing that starts and ends.

layout.py says which files lie where in the state folder, children.py starts and watches processes,
up_verb.py and down_verb.py are the verbs.
"""
