"""Hold: are all of these keys there, by directories that are read now? If so, this agent keeps them a while.

The keys are held before the directories are read. So an eviction that is begun later leaves them alone, and
one that was begun earlier has taken its key from the remembered directory by then (slot_allocation.py).

Of the sets that a key may lie in, the one that is remembered to name it is read. The others are read with it
where none is, and after it where it does not name the key any more. A set that names what is asked of it is
not read again within `directory_fresh`: with that the operator says that no other agent changes it. That a
key is not there is believed of no set that is not read now.

Of one set no more than half is held or pinned, and of a tenant's quota no more than half is held. What is
beyond that is found and touched, and not held: others have to find room. The same goes for a holder who has
no room left (agent/pool/volume/eviction_holds.py).

Who has just stored a value holds it by `keep`, which reads nothing. `are_named` looks only at what is
remembered: enough to tell that this agent has evicted nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.eviction_holds import Hold
from agent.pool.volume.quota import Limits
from agent.pool.volume.volume import MANY, Found, Volume
from agent.pool.write.delete_and_pin import PINNED_SLOTS_MAX
from agent.pool.write.set_transaction import SetTransaction

HELD_AT_ONCE: Final = 4096
"""Keys of one call."""
LOOKED_AT_ONCE: Final = 256
"""Keys of one call whose directories are in use at a time."""
LOADS_IN_FLIGHT: Final = 32
"""Directory reads under way: sixteen keys in one round trip. A queue takes 64 commands."""


def hold(
    volume: Volume, channel: IoChannel, keys: Sequence[bytes], deadline: float, holder: Holder
) -> Steps[Hold | MissCause]:
    """The keys, held until `Hold.let_go`; or why the first that is not there is not. Then none is held."""
    if len(keys) > HELD_AT_ONCE:
        raise BadPut(f"{len(keys)} keys are to be held; {HELD_AT_ONCE} at once are the most")
    if volume.erased:
        return MissCause.WRONG_KEY
    pseudonyms = [volume.placement.pseudonym(key) for key in dict.fromkeys(keys)]
    held = volume.holds.take(pseudonyms, holder)
    is_held = False
    try:
        cause: MissCause | None = None
        looked = 0
        while cause is None and looked < len(pseudonyms):
            part = pseudonyms[looked : looked + LOOKED_AT_ONCE]
            cause = yield from _look(volume, channel, part, held, deadline)
            looked += len(part)
        tally = channel.tally(volume.settings.name)
        tally.lookups += looked
        tally.lookups_absent += cause is not None
        if cause is not None:
            return cause
        is_held = True
        return held
    finally:
        if not is_held:
            held.let_go()


def keep(volume: Volume, channel: IoChannel, pseudonyms: Sequence[bytes], held: Hold) -> bool:
    """Hold keys, too, that a remembered directory names, for it was just written. False: not all are held,
    by the bounds of `hold`, or since a directory was forgotten already."""
    if not held.add(pseudonyms):
        return False
    before = held.kept
    for pseudonym, sets in zip(pseudonyms, _remembered(volume, pseudonyms), strict=True):
        known = [cached for cached in sets if cached is not None]
        if found := volume.find(known, pseudonym):
            _bound(volume, channel, pseudonym, found, held)
        else:
            held.leave(pseudonym)
    return held.kept == before


def are_named(volume: Volume, channel: IoChannel, keys: Sequence[bytes]) -> bool | None:
    """Whether remembered directories name all of these keys. False: all directories of one are remembered,
    and none names it. None: those of one are not remembered, or another process has written them since."""
    named: bool | None = True
    pseudonyms = volume.pseudonyms(keys)
    for pseudonym, sets in zip(pseudonyms, _remembered(volume, pseudonyms), strict=True):
        are_all = True
        for cached in sets:
            if cached is None or cached.directory is None or cached.is_overtaken():
                are_all = False
            elif any(found.is_live(channel) for found in volume.find((cached,), pseudonym)):
                break
        else:
            if are_all:
                return False
            named = None
    return named


def _remembered(volume: Volume, pseudonyms: Sequence[bytes]) -> Iterable[Sequence[CachedSet | None]]:
    """For each key its sets, None where one is not remembered, for a look at once."""
    if len(pseudonyms) >= MANY:
        return zip(
            *(volume.cache.look(*rank) for rank in volume.places_of_many(b"".join(pseudonyms))), strict=True
        )
    places = map(volume.places, pseudonyms)
    return [
        volume.cache.look([each.namespace for each in sets], map(volume.set_offset, sets)) for sets in places
    ]


def _look(
    volume: Volume, channel: IoChannel, pseudonyms: Sequence[bytes], held: Hold, deadline: float
) -> Steps[MissCause | None]:
    """None where directories that are read now name all keys; else why not the first that is missing."""
    borrowed = [volume.borrow_sets(pseudonym) for pseudonym in pseudonyms]
    try:
        if _are_believed(volume, channel, pseudonyms, borrowed, held):
            return None
        likely: dict[int, CachedSet] = {}
        for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
            found = volume.find(sets, pseudonym)
            likely.update((id(cached), cached) for cached in ([found[0].cached] if found else sets))
        before = {id(cached): cached.writes for sets in borrowed for cached in sets}
        came = _believed(volume, channel, pseudonyms, borrowed, likely)
        trouble = yield from volume.load(
            channel, list(likely.values()), deadline, came=came, in_flight=LOADS_IN_FLIGHT
        )
        read = {id(cached) for cached in came}
        others: dict[int, CachedSet] = {}
        for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
            if _missing(volume, channel, pseudonym, sets, read, None) is not None:
                others.update((id(cached), cached) for cached in sets if id(cached) not in likely)
        if others:
            worse = yield from volume.load(
                channel, list(others.values()), deadline, came=came, in_flight=LOADS_IN_FLIGHT
            )
            if worse is not None and (trouble is None or worse.value > trouble.value):
                trouble = worse
            read = {id(cached) for cached in came}
        for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
            cause = _missing(volume, channel, pseudonym, sets, read, trouble)
            if cause is not None and any(cached.was_written(before[id(cached)]) for cached in sets):
                cause = yield from _missing_still(volume, channel, pseudonym, sets, deadline)
            if cause is not None:
                return cause
        for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
            _use(volume, channel, pseudonym, volume.find(sets, pseudonym), held)
        return None
    finally:
        for sets in borrowed:
            volume.give_back_sets(sets)


def _are_believed(
    volume: Volume,
    channel: IoChannel,
    pseudonyms: Sequence[bytes],
    borrowed: Sequence[Sequence[CachedSet]],
    held: Hold,
) -> bool:
    """Whether no set need be read, as `_believed` says for each: then all keys are there, and in use.

    Each open of a file asks with a single agent, so every key is looked for once."""
    if not volume.timing.directory_fresh:
        return False
    named: list[list[Found]] = []
    for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
        found = volume.find(sets, pseudonym)
        if not (found and volume.is_fresh(found[0].cached, channel) and found[0].is_live(channel)):
            return False
        named.append(found)
    for pseudonym, found in zip(pseudonyms, named, strict=True):
        _use(volume, channel, pseudonym, found, held)
    return True


def _believed(
    volume: Volume,
    channel: IoChannel,
    pseudonyms: Sequence[bytes],
    borrowed: Sequence[Sequence[CachedSet]],
    likely: dict[int, CachedSet],
) -> list[CachedSet]:
    """Of the sets that are likely to name keys, take out and return those that need not be read: they name
    all that is asked of them, and the operator says that no other agent has changed them since."""
    fresh = {number for number, cached in likely.items() if volume.is_fresh(cached, channel)}
    if fresh:
        for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
            if _missing(volume, channel, pseudonym, sets, fresh, None) is not None:
                fresh.difference_update(id(cached) for cached in sets)
    return [likely.pop(number) for number in fresh]


def _missing(
    volume: Volume,
    channel: IoChannel,
    pseudonym: bytes,
    sets: Sequence[CachedSet],
    read: set[int],
    trouble: MissCause | None,
) -> MissCause | None:
    """Why a key is not there; None where a set that was read now names it."""
    found = volume.find([cached for cached in sets if id(cached) in read], pseudonym)
    cause: MissCause | None = None
    for each in found:
        if each.is_live(channel):
            return None
        expiry = each.entry.expiry
        cause = cause or (MissCause.EXPIRED if 0 < expiry <= channel.wall() else MissCause.EVICTED)
    if cause is not None:
        return cause
    away = any(id(cached) not in read for cached in sets)
    return volume.absence(sets, pseudonym, trouble if away else None)


def _missing_still(
    volume: Volume, channel: IoChannel, pseudonym: bytes, sets: Sequence[CachedSet], deadline: float
) -> Steps[MissCause | None]:
    """As `_missing`, with no write of this agent under way, which would hide what another agent wrote."""
    with SetTransaction(volume, channel, *sets) as change:
        trouble = yield from change.begin(deadline)
        read = {id(cached) for cached in change.writable}
        return _missing(volume, channel, pseudonym, sets, read, trouble)


def _use(volume: Volume, channel: IoChannel, pseudonym: bytes, named: Sequence[Found], held: Hold) -> None:
    """Count the use of a key that is there, and bound what is held. `named`: its entries."""
    now_us = int(channel.wall() * 1e6)
    for found in named:
        with found.cached.guard:
            directory = found.cached.directory
            if directory is not None and directory.find(pseudonym) == found.slot:
                directory.touch(found.slot, now_us)
    _bound(volume, channel, pseudonym, named, held)


def _bound(volume: Volume, channel: IoChannel, pseudonym: bytes, named: Sequence[Found], held: Hold) -> None:
    """Hold a key no longer where its set is crowded, or its tenant's quota. `named`: its entries."""
    wall, quota = channel.wall(), volume.quota
    for found in named:
        with found.cached.guard:
            directory = found.cached.directory
            if directory is not None and directory.find(pseudonym) == found.slot:
                may_be_crowded = directory.taken > PINNED_SLOTS_MAX
                if may_be_crowded and directory.count_kept(volume.holds.held, wall) > PINNED_SLOTS_MAX:
                    held.leave(pseudonym)
    if quota is not None and quota.limits.of_room and _is_half_of(quota.limits, volume):
        held.leave(pseudonym)


def _is_half_of(limits: Limits, volume: Volume) -> bool:
    """Whether more than half of what its tenant may have is held, in all of the tenant's volumes."""
    owners = volume.siblings if volume in volume.siblings else (*volume.siblings, volume)
    slots = size = 0
    for each in owners:
        held = 2 * len(each.holds)
        slots += held
        size += held * each.settings.slot_bytes
    return 0 < limits.slots < slots or 0 < limits.bytes < size
