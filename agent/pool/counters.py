"""Counters of one worker: requests, results, and the cause of each miss.

A worker has a `Tally` of its own and is the only one to write to it, so counting needs no lock and no
count is lost; a reader sums the tallies of all workers (`total`). That the causes
add up to the misses holds by construction: a get is counted once, in `miss` or in `gets_hit`.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Final


class MissCause(enum.Enum):
    """Why a get found nothing. The numbers are those of `host_shim.control_wire.Outcome`.

    No IntEnum: mypyc makes a plain int of a name that holds either an int (bytes served) or an IntEnum.
    """

    NEVER_STORED = 1
    EVICTED = 2
    EXPIRED = 3
    CORRUPT = 4
    WRONG_KEY = 5
    LATE = 6
    ENCLOSURE_DOWN = 7
    G4_LATE = 8
    """The directory says that the value is in G4, and it did not come by the deadline, or would not."""
    G4_LOST = 9
    """A copy in G4 that is not there, or that lies under a dropped key."""
    G4_CORRUPT = 10
    """A copy in G4 whose bytes do not prove themselves."""


CAUSES: Final = tuple(MissCause)


@dataclass(slots=True)
class Tally:
    """Counts since the worker began. Bytes are those of values, but for `flash_*` and `local_*`.

    The help of the metrics (`VOLUME_COUNTERS` in agent/telemetry/metrics.py) says what each counts.
    """

    gets_hit: int = 0
    misses: dict[MissCause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    bytes_read: int = 0
    lookups: int = 0
    lookups_absent: int = 0
    puts: int = 0
    puts_already_there: int = 0
    puts_refused: int = 0
    bytes_written: int = 0
    deletes: int = 0
    evictions: int = 0
    evictions_expired: int = 0
    directory_reads: int = 0
    stale_hints: int = 0
    corrupt_entries: int = 0
    prestage_hits: int = 0
    prestaged_bytes: int = 0
    gets_gated: int = 0
    gets_from_g4: int = 0
    bytes_from_g4: int = 0
    puts_declined: int = 0
    puts_written_back: int = 0
    puts_lost: int = 0
    bytes_copied: int = 0
    copies_made: int = 0
    copy_bytes: int = 0
    hedged_reads: int = 0
    hedge_wins: int = 0
    hedge_bytes: int = 0
    other_copy_reads: int = 0
    prefix_requests: int = 0
    prefix_asked: int = 0
    prefix_found: int = 0
    prefix_usable: int = 0
    prefix_stored: int = 0
    prefix_loaded: int = 0
    prefix_load_ms: int = 0
    prefix_saved_ms: int = 0
    prefix_cost_ms: int = 0
    prefix_holes_unknown: int = 0
    prefix_holes: dict[MissCause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    flash_bytes_read: int = 0
    flash_bytes_written: int = 0
    local_bytes_read: int = 0
    local_bytes_written: int = 0

    def miss(self, cause: MissCause) -> None:
        self.misses[cause] += 1

    @property
    def gets_missed(self) -> int:
        return sum(self.misses.values())


_BY_CAUSE: Final = ("misses", "prefix_holes")
_PLAIN_FIELDS: Final = tuple(each.name for each in fields(Tally) if each.name not in _BY_CAUSE)


def total(tallies: Iterable[Tally]) -> Tally:
    summed = Tally()
    for tally in tallies:
        for name in _PLAIN_FIELDS:
            setattr(summed, name, getattr(summed, name) + getattr(tally, name))
        for cause, count in tally.misses.items():
            summed.misses[cause] += count
        for cause, count in tally.prefix_holes.items():
            summed.prefix_holes[cause] += count
    return summed
