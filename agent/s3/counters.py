"""The counters of the S3 door, written in its event loop alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class S3Counters:
    """Since the start; `connections` is the present number."""

    connections: int = 0
    connections_refused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bodies_broken_off: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """By operation, successful or not."""
    refusals: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Mapping[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
