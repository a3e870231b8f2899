"""The agent as a whole: its threads, its doors, the order in which they start and stop."""
