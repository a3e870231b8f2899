"""The counters of the query door."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class QueryCounters:
    """Since the start; `connections` is the present number."""

    connections: int = 0
    connections_refused: int = 0
    requests: int = 0
    """Of known tenants, answered or refused."""
    tokens_refused: int = 0
    over_rate: int = 0
    prompts: int = 0
    keys: int = 0
    keys_in_memory: int = 0
    keys_on_flash: int = 0
    holes: Counter[str] = field(default_factory=Counter)
    """By the cause of the first key that cannot be served."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By the status of HTTP."""

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "connections": self.connections,
            "connections_refused": self.connections_refused,
            "requests": self.requests,
            "tokens_refused": self.tokens_refused,
            "over_rate": self.over_rate,
            "prompts": self.prompts,
            "keys": self.keys,
            "keys_in_memory": self.keys_in_memory,
            "keys_on_flash": self.keys_on_flash,
            "holes": dict(self.holes),
            "refusals": dict(self.refusals),
        }
