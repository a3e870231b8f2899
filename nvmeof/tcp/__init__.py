"""NVMe/TCP framing for both roles, without I/O: PDUs (`pdu`), the receive half (`receiver`), the digest."""
