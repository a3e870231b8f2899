"""Enclosures that join and leave: candidates, the join, what is still to be moved."""
