"""A RoCEv2 NIC in userspace: wire formats, the device, its connection manager, links and verbs."""
