"""A slot that a put has taken for its value, and the number that this write has."""

from __future__ import annotations

from typing import Final

from agent.inline.random_bytes import random_bytes
from agent.pool.directory_cache import CachedSet
from agent.pool.slot import SlotSealer


class Reservation:
    """The slot of a set, how it is sealed, and at which byte of the namespace it lies."""

    __slots__ = ("cached", "offset", "sealer", "slot")

    def __init__(self, cached: CachedSet, slot: int, sealer: SlotSealer, offset: int) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.sealer: Final = sealer
        self.offset: Final = offset


def new_generation(wall: float) -> int:
    """A number that no other write has: microseconds since the epoch and a random byte."""
    # Its order only breaks ties between two entries of one key; a clock that jumps costs a hit at most.
    return int(wall * 1e6) << 8 | random_bytes(1)[0]
