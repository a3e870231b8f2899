"""A pod in virtual time: the agent's own code on flash, links and misfortune of one seed (docs/pod.md).

Only `g35 sim` and the tests import it (decision 53).
"""
