"""The configuration file: its sections, its reference, sizes with units."""
