"""What every door over HTTP counts, for the agent's status."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def summed(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of several doors of one kind, as `DoorCounters.snapshot` has them."""
    found: dict[str, Any] = {}
    for snapshot in snapshots:
        for name, value in snapshot.items():
            if isinstance(value, Mapping):
                found[name] = dict(Counter(found.get(name, {})) + Counter(value))
            else:
                found[name] = found.get(name, 0) + value
    return found


@dataclass(slots=True)
class DoorCounters:
    """Since the start; `connections` is the present number."""

    connections: int = 0
    connections_refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Mapping[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
