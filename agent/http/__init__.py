"""HTTP doors: listeners, connections, their clocks and their threads. Read `door.py` first."""
