"""What the S3 door counts of itself; written in its event loop alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class S3Counters:
    """Since the start, but for `connections`, which is now."""

    connections: int = 0
    connections_refused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bodies_broken_off: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """By operation, whatever came of them."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By S3's code."""

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "connections": self.connections,
            "connections_refused": self.connections_refused,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bodies_broken_off": self.bodies_broken_off,
            "requests": dict(self.requests),
            "refusals": dict(self.refusals),
        }
