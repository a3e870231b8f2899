"""Volumes whose values lie in namespaces of the NVMe Key Value command set."""
