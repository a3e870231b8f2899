"""`pyverbs.providers`: what single vendors' devices do besides. There is no vendor's device here."""

raise ImportError("the emulated device is no vendor's: pyverbs.providers does not exist for it")
