"""What a replay counts. Each player thread has a `Tally` of its own; sums are made by the reader."""

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from agent.replay.latencies import Latencies, merged
from host_shim.control_wire import Outcome


class Cause(enum.StrEnum):
    """Why a block reference was no hit. The first ten are the agent's own causes."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    LATE = "late"
    ENCLOSURE_DOWN = "enclosure_down"
    G4_LATE = "g4_late"
    G4_LOST = "g4_lost"
    G4_CORRUPT = "g4_corrupt"
    BEHIND_A_HOLE = "behind_a_hole"
    """It is there, but an earlier block of the prefix is not, so an engine has no use for it."""
    AGENT_DOWN = "agent_down"
    """Nobody was there to say."""
    WRONG_BYTES = "wrong_bytes"
    """It was served and was not what had been stored. This must not happen."""


def cause_of(outcome: Outcome | None) -> Cause:
    """The cause that stands for an agent's answer about a block that did not come."""
    if outcome is None:
        return Cause.AGENT_DOWN
    try:
        return Cause(outcome.name.lower())
    except ValueError:
        # A hint said that it is there, and then there was nothing: somebody else took the place.
        return Cause.EVICTED


@dataclass(slots=True)
class Tally:
    """Counts of blocks, tokens and bytes. Every block reference is a hit or has one cause."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    tokens: int = 0
    tokens_saved: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    wrong_bytes: int = 0
    wrong_blocks: int = 0
    puts: int = 0
    puts_refused: int = 0
    misses: Counter[Cause] = field(default_factory=Counter)
    get_latencies: Latencies = field(default_factory=Latencies)
    put_latencies: Latencies = field(default_factory=Latencies)


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of several tallies, as a copy that goes on changing with none of them."""
    parts = list(tallies)
    summed = Tally()
    for count in fields(Tally):
        if count.default == 0:
            setattr(summed, count.name, sum(getattr(part, count.name) for part in parts))
    for part in parts:
        for cause in Cause:
            summed.misses[cause] += part.misses[cause]
    summed.get_latencies = merged(part.get_latencies for part in parts)
    summed.put_latencies = merged(part.put_latencies for part in parts)
    return summed
