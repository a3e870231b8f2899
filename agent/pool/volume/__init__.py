"""The state of one volume."""
