"""What is read before it is asked for."""
