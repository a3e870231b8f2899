"""What every door over HTTP counts, for the agent's status."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class DoorCounters:
    """Since the start; `connections` is the present number."""

    connections: int = 0
    connections_refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Mapping[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
