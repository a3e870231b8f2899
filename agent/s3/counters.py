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
    requests: Counter[str] = field(default_factory=Counter)
    """By operation, successful or not."""
