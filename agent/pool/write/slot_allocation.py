"""Slots for new values: the choice of one, and its reservation until it is named.

Puts, copies, moves and reseals reserve here. A reserved slot is nobody else's: it is no victim and not free,
a directory that is read again does not change it, and its set stays in the cache.
"""

from collections.abc import Collection, Sequence
from typing import Final

from agent.pool.format.directory import FREE, SLOTS_PER_SET
from agent.pool.format.eviction_choice import Choice, choose_slot
from agent.pool.format.mark_block import wide_mark
from agent.pool.format.sealed_slot import SlotSealer
from agent.pool.format.spill_mark import MARK_BYTES, decode, is_mark
from agent.pool.steps import IoChannel
from agent.pool.volume.directory_cache import LEGAL, CachedSet, SlotState
from agent.pool.volume.volume import Volume


class Reservation:
    """The slot of a put, how it is sealed, and at which byte of the namespace it lies."""

    __slots__ = ("cached", "offset", "sealer", "slot")

    def __init__(self, cached: CachedSet, slot: int, sealer: SlotSealer, offset: int) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.sealer: Final = sealer
        self.offset: Final = offset


def best_choice(
    sets: Sequence[CachedSet],
    channel: IoChannel,
    pseudonym: bytes,
    held: Collection[bytes],
    *,
    exchange: bool = False,
    replaces: bool = False,
) -> tuple[CachedSet, Choice] | None:
    """The slot that a key would take: in the emptier set, or of the victim that costs least where both are
    full, or for `exchange`. None: all are taken. The values of the keys in `held` are no victims.

    A namespace that is under suspicion takes what the other one has no room for, and no more. `replaces`: the
    key's own value is no victim either, and two agents that replace it at once seldom choose one free slot.
    """
    own = pseudonym if replaces else FREE
    wall = channel.wall()
    start = (int(wall * 1e6) if replaces else pseudonym[-1]) % SLOTS_PER_SET
    best: tuple[CachedSet, Choice] | None = None
    best_rank: tuple[bool, int, float] | None = None
    for cached in sets:
        choice: Choice | None = None
        with cached.guard:
            directory = cached.directory
            if directory is not None:
                taken = cached.unavailable(channel.now())
                if exchange:
                    taken = taken | directory.free_slots()
                choice = choose_slot(directory, taken, wall, start, held, own)
        if choice is None:
            continue
        trusted = choice.free_slots > 0 and channel.trusts(cached.namespace)
        rank = (trusted, choice.free_slots, choice.cost)
        if best_rank is None or rank > best_rank:
            best, best_rank = (cached, choice), rank
    return best


def is_eviction(choice: Choice) -> bool:
    """Whether the slot holds a value that has not expired."""
    return choice.victim is not None and choice.cost != float("inf")


def reserve(
    volume: Volume, channel: IoChannel, cached: CachedSet, choice: Choice, *, keep: bool = False
) -> bool:
    """Reserve a chosen slot, and drop the entry of its victim here. False: another worker was faster.

    Flash learns of the victim's end with the entry of the new value. `keep`: the victim's entry stays, for
    the slot is to hold the same value.
    """
    with cached.guard:
        directory = cached.directory
        state = cached.slot_state(choice.slot, channel.now())
        if directory is None or (state, SlotState.RESERVED) not in LEGAL:
            return False
        present, victim = directory.entry(choice.slot), choice.victim
        if (present and present.generation) != (victim and victim.generation):
            return False
        # Since the choice somebody may have begun to hold it.
        if (
            present is not None
            and not keep
            and is_eviction(choice)
            and present.pseudonym in volume.holds.held
        ):
            return False
        if present is not None and not keep:
            ghost = left_by(volume, cached, choice)
            directory.clear(choice.slot, ghost=ghost)
            cached.dropped[choice.slot] = present.generation
            cached.covered = cached.covered or {}
            cached.covered[choice.slot] = present.pseudonym
            if ghost is not None and is_mark(ghost) and len(ghost) == MARK_BYTES:
                cached.victims = cached.victims or {}
                wide = wide_mark(decode(ghost), choice.slot, present.pseudonym)
                cached.victims[choice.slot] = present.generation, wide
            count_eviction(volume, channel, choice)
        cached.reserved.add(choice.slot)
    volume.cache.borrow(cached.namespace, cached.offset)
    return True


def left_by(volume: Volume, cached: CachedSet, choice: Choice) -> bytes | None:
    """What the choice's victim leaves: the mark of its copy in G4, or else its ghost. A ghost does not take
    the place of a mark: None, and the mark stays; without G4 below it does, for no mark is followed here."""
    if choice.victim is None or not is_eviction(choice):
        return None
    mark = volume.spill_copies.mark_for((cached.namespace, cached.offset), choice.slot, choice.victim)
    stays = volume.below is not None and is_mark(choice.victim.ghost)
    return mark or (None if stays else ghost_of(choice))


def ghost_of(choice: Choice) -> bytes | None:
    """The ghost that the choice's victim leaves; an expired value leaves none."""
    return choice.victim.pseudonym if choice.victim is not None and is_eviction(choice) else None


def count_eviction(volume: Volume, channel: IoChannel, choice: Choice) -> None:
    tally = channel.tally(volume.settings.name)
    tally.evictions += is_eviction(choice)
    tally.evictions_expired += not is_eviction(choice)


def release(volume: Volume, cached: CachedSet, slot: int) -> None:
    """End a reservation: the value is named in the slot, or the slot is free."""
    cached.end_reservation(slot)
    volume.cache.give_back(cached)
