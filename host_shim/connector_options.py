"""What every engine's connector is told: the same keys in the JSON of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of a connector. A value that makes no sense raises ValueError as the engine starts."""

    mount: str
    """Where the pool is mounted."""
    volume: str = "kv"
    """Volume of kind `kv`, with slots at least 64 bytes longer than the engine's blocks."""
    threads: int = 4
    """Tasks of each direction (load, store) that are under way at a time."""
    parallel: int = 4
    """Transfers that one task has under way at a time."""
    ttl: float | None = None
    """Seconds after which blocks expire; None: as the volume says."""
    prestage: bool = True
    """Whether a lookup brings what it found into the agent's memory."""

    def __post_init__(self) -> None:
        if not self.mount or not isinstance(self.mount, str):
            raise ValueError('g35: the option "mount" names the folder where the pool is mounted')
        if not 1 <= self.threads <= 64 or not 1 <= self.parallel <= 64:
            raise ValueError('g35: "threads" and "parallel" are 1 to 64')
        if self.ttl is not None and not 0 < self.ttl < 1 << 32:
            raise ValueError('g35: "ttl" is a number of seconds above 0; without it, the volume decides')

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ConnectorOptions:
        """Options out of JSON. Unknown keys raise ValueError: a typing error must not go unseen."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(found) - known)
        if unknown:
            raise ValueError(
                f"g35: unknown options {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        if "mount" not in found:
            raise ValueError('g35: the option "mount" is missing')
        return cls(**found)
