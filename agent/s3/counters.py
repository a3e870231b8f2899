"""The counters of the S3 door, written in its event loop alone."""

from collections import Counter
from dataclasses import dataclass, field

from agent.http.counters import DoorCounters


@dataclass(slots=True)
class S3Counters(DoorCounters):
    """`refusals` are by S3's code."""

    bytes_read: int = 0
    bytes_written: int = 0
    bodies_broken_off: int = 0
    rdma_bytes_read: int = 0
    """Of `bytes_read`, those that were written into clients' memory by RDMA."""
    rdma_bytes_written: int = 0
    rdma_failures: int = 0
    """Requests that failed because a transfer by RDMA did, or could not be made whole."""
    requests: Counter[str] = field(default_factory=Counter)
    """By operation, successful or not."""
