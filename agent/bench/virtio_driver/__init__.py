"""The other end of a virtio-fs device: a driver and a vhost-user front-end in Python.

Tests and benchmarks put it before agent/fs/virtiofs, where QEMU and a guest's kernel would stand. It
imports agent.virtio (layouts) and the standard library alone, so the two ends share no logic.

Read ring.py (a split ring from the driver's side), front_end.py (what QEMU says to a device),
fuse_client.py (FUSE requests over the queues), then machine.py, which puts them together.
"""
