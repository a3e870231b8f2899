"""The counters of the query door."""

from collections import Counter
from dataclasses import dataclass, field

from agent.http.counters import DoorCounters


@dataclass(slots=True)
class QueryCounters(DoorCounters):
    """`refusals` are by the status of HTTP."""

    requests: int = 0
    """Of known tenants, answered or refused."""
    tokens_refused: int = 0
    over_rate: int = 0
    prompts: int = 0
    keys: int = 0
    keys_in_memory: int = 0
    keys_on_flash: int = 0
    keys_in_g4: int = 0
    holes: Counter[str] = field(default_factory=Counter)
    """By the cause of the first key that cannot be served."""
