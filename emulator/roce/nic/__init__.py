"""The emulated RDMA device: memory, queues and the RC and UD transports, without I/O. See `device.py`."""
