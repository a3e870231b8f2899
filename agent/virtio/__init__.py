"""virtio and vhost-user as bytes: layouts and constants that a device and a driver share. No I/O, no state.

Read vhost_user.py (the control socket), split_ring.py (the queues in shared memory), memory_table.py
(where the guest's addresses lie) and inflight.py (what survives a restart of the device). The device is
agent/fs/virtiofs, the driver that tests and benchmarks put before it is agent/virtio_driver.

Words: the *front-end* is QEMU, which owns the guest's memory; the *back-end* is the device.
"""
