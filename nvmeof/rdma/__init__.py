"""What both roles of NVMe/RDMA share, without I/O: work requests, the send queue, registered buffers."""
