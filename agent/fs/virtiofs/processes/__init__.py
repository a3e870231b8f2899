"""Queues of a guest that other processes of the agent serve (docs/processes.md)."""
