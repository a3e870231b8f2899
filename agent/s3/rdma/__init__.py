"""Objects over RDMA: the door moves an object's bytes from and to memory that a client names (service.py)."""
