"""Gets of many values by one call: their reads leave together, and each value is opened as it arrives.

This is the way of the common case alone: a value of one unit, whole in its target, that a directory names,
in a volume of one copy. Directories that are not remembered are read first, all together; what none of them
names then is a miss. Any other key is left to a reader of its own (agent/pool/read/get.py).
"""

from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause, Tally
from agent.pool.format.directory import KEY_BYTES
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import miss_cause_of
from agent.pool.steps import IoChannel, Pending, Read, Steps, Wait
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Named, Volume

PART_BYTES: Final = 1 << 20
"""The bytes of the worker's receive buffer for the reads that leave together. While the worker opens them,
as many are under way."""
PART_VALUES: Final = 16
"""The most values that leave together."""


class _Asked:
    """One value that a directory names, and where the read that brings it puts it."""

    __slots__ = ("at", "found", "number", "size")

    def __init__(self, number: int, found: Named, at: int, size: int) -> None:
        self.number: Final = number
        """The number of the value's key in the batch."""
        self.found: Final = found
        self.at: Final = at
        """Where in the part's buffer its header begins; the value follows, then room for one proof."""
        self.size: Final = size
        """Bytes of the value on flash, without its header."""


def read_together(
    volume: Volume,
    channel: IoChannel,
    keys: Sequence[bytes],
    targets: Sequence[memoryview],
    wait_seconds: float,
) -> Steps[list[int | MissCause | None]]:
    """For each key the length of its value, which is in its target, or why it is a miss; None where a reader
    of its own must look. Hits and misses are counted, what is None is not.

    `wait_seconds`: how long the directories and each part may take. A target that got no value holds what it
    held, or zeros.
    """
    became: list[int | MissCause | None] = [None] * len(keys)
    pseudonyms = volume.placement.pseudonyms(b"".join(keys))
    borrowed = volume.borrow_sets_of_many(pseudonyms)
    buffer = channel.receive_buffer(2 * PART_BYTES)
    halves = (buffer[:PART_BYTES], buffer[PART_BYTES:])
    tally = channel.tally(volume.settings.name)
    # Of a tenant with a rate nothing is read before it is admitted.
    limited = volume.bandwidth if volume.bandwidth is not None and volume.bandwidth.rate else None
    sent: list[Pending] = []
    names = [pseudonyms[at : at + KEY_BYTES] for at in range(0, len(pseudonyms), KEY_BYTES)]
    try:
        found = yield from _find(volume, channel, names, borrowed, wait_seconds, became, tally)
        parts = _parts(volume, channel, found, targets)
        under_way: list[_Asked] = []
        pendings: Sequence[Pending] = ()
        for number in range(len(parts) + 1):
            ahead = parts[number] if number < len(parts) else []
            until = channel.now() + wait_seconds
            if limited is not None and ahead and not (yield from limited.admit(channel, until)):
                break
            pendings_ahead: Sequence[Pending] = ()
            if ahead:
                pendings_ahead = _send(volume, channel, ahead, halves[number % 2])
                sent = [*pendings, *pendings_ahead]
            if limited is not None:
                under_way, ahead = ahead, []
                pendings, pendings_ahead = pendings_ahead, ()
            half = halves[(number if limited is not None else number - 1) % 2]
            deadline = channel.now() + wait_seconds
            late: set[int] = set()
            at = 0
            while at < len(under_way):
                arrived = channel.arrived(pendings, at)
                if arrived == at:
                    pending, place = pendings[at], under_way[at].found.cached.namespace
                    has_come = pending.done
                    if has_come:
                        channel.took(pending)
                    elif place not in late:
                        # One late answer is enough to say so: the others are given up without a wait.
                        has_come = yield Wait(pending, deadline)
                    cause = miss_cause_of(channel, pending, has_come)
                    if cause is None:
                        arrived = at + 1
                    elif cause is MissCause.LATE:
                        late.add(place)
                wall_us = int(channel.wall() * 1e6)
                for asked in under_way[at:arrived]:
                    it = asked.number
                    key, name, target = keys[it], names[it], targets[it]
                    became[it] = _open(volume, channel, key, name, asked, half, target, tally, wall_us)
                at = max(arrived, at + 1)
            under_way, pendings = ahead, pendings_ahead
        sent = []
        return became
    finally:
        for pending in sent:
            if not pending.done:
                channel.abandon(pending)
        volume.give_back_sets([cached for sets in borrowed for cached in sets])


def _find(
    volume: Volume,
    channel: IoChannel,
    names: Sequence[bytes],
    borrowed: Sequence[Sequence[CachedSet]],
    wait_seconds: float,
    became: list[int | MissCause | None],
    tally: Tally,
) -> Steps[list[Named | None]]:
    """Which entry names each key, the newest where there are several. The directories of the keys that no
    remembered one names are read. A key that none of them names then is a miss, unless G4 may have it."""
    began = channel.now()
    found = [volume.find_newest(sets, name) for sets, name in zip(borrowed, names, strict=True)]
    unsure: set[int] = set()
    if volume.cache.follows:
        named = [each.cached for each in found if each is not None]
        if any(map(CachedSet.is_overtaken, named)):
            yield from volume.catch_up(channel, named, began + wait_seconds)
            found = [volume.find_newest(sets, name) for sets, name in zip(borrowed, names, strict=True)]
            unsure = {at for at, each in enumerate(found) if each is not None and each.cached.is_overtaken()}
            found = [None if at in unsure else each for at, each in enumerate(found)]
    unnamed = [at for at, each in enumerate(found) if each is None and at not in unsure]
    if not unnamed:
        return found
    wanted = {
        id(cached): cached
        for number in unnamed
        for cached in borrowed[number]
        if not volume.is_fresh(cached, channel)
    }
    came: list[CachedSet] = []
    if wanted:
        yield from volume.load(channel, list(wanted.values()), began + wait_seconds, came=came)
    known = {id(cached) for cached in came}
    for number in unnamed:
        sets = borrowed[number]
        found[number] = volume.find_newest(sets, names[number])
        is_known = all(id(cached) in known or id(cached) not in wanted for cached in sets)
        if is_known and volume.below is None and found[number] is None:
            cause = volume.absence(sets, names[number], None)
            became[number] = cause
            tally.miss(cause)
    return found


def _parts(
    volume: Volume, channel: IoChannel, found: Sequence[Named | None], targets: Sequence[memoryview]
) -> list[list[_Asked]]:
    """The values that can be had so, in the order of their keys, in as few parts as their bytes and the
    channel's queues allow, each with as many values."""
    codec, wall = volume.codec, channel.wall()
    wanted: list[tuple[int, Named, int]] = []
    whole = 0
    for number, each in enumerate(found):
        if each is None:
            continue
        length, expiry = each.length, each.expiry
        if not 0 < length <= min(codec.unit_bytes, len(targets[number])) or (expiry and expiry <= wall):
            continue
        size = codec.padded(length)
        if HEADER_BYTES + size + PROOF_BYTES <= PART_BYTES:
            wanted.append((number, each, size))
            whole += _room(size, codec.lba_bytes)
    # All may go to one enclosure, where two parts are under way, and some that were abandoned.
    most = max(1, min(PART_VALUES, 3 * channel.queue_depth() // 8))
    least_parts = max(1, -(-len(wanted) // most), -(-whole // PART_BYTES))
    in_each = -(-len(wanted) // least_parts)
    parts: list[list[_Asked]] = []
    room = 0
    for number, each, size in wanted:
        taken = _room(size, codec.lba_bytes)
        if taken > room or len(parts[-1]) == in_each:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(_Asked(number, each, PART_BYTES - room, size))
        room -= taken
    return parts


def _room(size: int, lba_bytes: int) -> int:
    """The bytes of a part's buffer for a value of `size`. Beginnings stay at LBAs, as a medium wants its
    buffers."""
    return -(-(HEADER_BYTES + size + PROOF_BYTES) // lba_bytes) * lba_bytes


def _send(
    volume: Volume, channel: IoChannel, part: Sequence[_Asked], buffer: memoryview
) -> Sequence[Pending]:
    """Ask for the values of a part."""
    reads: list[Read] = []
    for asked in part:
        cached = asked.found.cached
        at, end = asked.at, asked.at + HEADER_BYTES + asked.size
        reads.append((cached.namespace, volume.slot_offset(cached, asked.found.slot), buffer[at:end]))
    return channel.read_many(reads)


def _open(
    volume: Volume,
    channel: IoChannel,
    key: bytes,
    name: bytes,
    asked: _Asked,
    buffer: memoryview,
    into: memoryview,
    tally: Tally,
    wall_us: int,
) -> int | None:
    """Open a value that has arrived into its target; its length, None where it does not prove itself."""
    found, size = asked.found, asked.size
    cached, slot = found.cached, found.slot
    header_at, data_at = asked.at, asked.at + HEADER_BYTES
    place = volume.place(cached, slot)
    opened = volume.codec.open(buffer[header_at:data_at], key, place, found.generation)
    if isinstance(opened, MissCause) or opened.length != found.length:
        return None
    if opened.expiry and opened.expiry * 1_000_000 <= wall_us:
        return None
    end = data_at + size + PROOF_BYTES
    with_room = buffer[data_at:end]
    length = opened.length
    if size <= len(into):
        proven = opened.open_with_room(0, with_room, into[:size])
        if not proven:
            into[:size] = bytes(size)  # It is the host's own memory: nothing unproven stays in it.
    else:
        aside = volume.unit_buffers.borrow()
        proven = opened.open_with_room(0, with_room, aside[:size])
        if proven:
            into[:length] = aside[:length]
            tally.bytes_copied += length
        volume.unit_buffers.give_back(aside)
    if not proven:
        return None
    cached.bear_out(slot)
    volume.touch(cached, slot, name, found.generation, wall_us)
    tally.gets_hit += 1
    tally.bytes_read += length
    if volume.bandwidth is not None:
        volume.bandwidth.charge(channel, length)
    return length
