"""The way of a get."""
