"""A slot that a put has taken for its value, and which set it is best in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent.pool.format.directory import SLOTS_PER_SET, Choice, choose_slot
from agent.pool.format.slot import SlotSealer
from agent.pool.steps import Lanes
from agent.pool.volume.directory_cache import CachedSet


class Reservation:
    """The slot of a set, how it is sealed, and at which byte of the namespace it lies."""

    __slots__ = ("cached", "offset", "sealer", "slot")

    def __init__(self, cached: CachedSet, slot: int, sealer: SlotSealer, offset: int) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.sealer: Final = sealer
        self.offset: Final = offset


def best_choice(
    sets: Sequence[CachedSet], lanes: Lanes, pseudonym: bytes, *, exchange: bool
) -> tuple[CachedSet, Choice] | None:
    """The slot that a key would take: in the emptier set, or of the victim that costs least where both are
    full, or for `exchange`. None: all are taken.

    A namespace that is under suspicion takes what the other one has no room for, and no more.
    """
    wall = lanes.wall()
    best: tuple[CachedSet, Choice] | None = None
    best_rank: tuple[bool, int, float] | None = None
    for cached in sets:
        assert cached.directory is not None
        with cached.guard:
            taken = cached.unavailable(lanes.now())
            if exchange:
                taken = taken | cached.directory.free_slots()
            choice = choose_slot(cached.directory, taken, wall, pseudonym[-1] % SLOTS_PER_SET)
        if choice is None:
            continue
        trusted = choice.free_slots > 0 and lanes.trusts(cached.namespace)
        rank = (trusted, choice.free_slots, choice.cost)
        if best_rank is None or rank > best_rank:
            best, best_rank = (cached, choice), rank
    return best
