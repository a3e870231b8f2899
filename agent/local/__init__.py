"""Tier 0: this server's own SSDs, read and written in place, and served to the other agents of the pool."""
