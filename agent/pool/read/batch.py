"""Gets of many values by one call: their reads leave together, and each value is opened as it arrives.

This is the way of the common case alone: a value of one unit, whole in its target, that a remembered
directory names, in a volume of one copy. It finds hits and nothing else. Any other key is left to a reader of
its own (agent/pool/read/get.py), which looks anew, and which alone says why a value is not there.
"""

from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause, Tally
from agent.pool.format.directory import KEY_BYTES
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Pending, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume

PART_BYTES: Final = 1 << 20
"""Of the worker's receive buffer for the reads that leave together. While they are opened, as many are under
way."""
PART_VALUES: Final = 16
"""That leave together. All may go to one enclosure, whose queue has room for 64 commands of a worker."""


class _Asked:
    """One value that a directory names, and the read that brings it."""

    __slots__ = ("at", "found", "number", "pending", "size")

    def __init__(self, number: int, found: Found, at: int, size: int) -> None:
        self.number: Final = number
        """Of its key in the batch."""
        self.found: Final = found
        self.at: Final = at
        """Where in the part's buffer its header begins; the value follows, then room for one proof."""
        self.size: Final = size
        """Bytes of the value on flash, without its header."""
        self.pending: Pending | None = None


def read_together(
    volume: Volume,
    channel: IoChannel,
    keys: Sequence[bytes],
    targets: Sequence[memoryview],
    wait_seconds: float,
) -> Steps[list[int | None]]:
    """For each key the length of its value, which is in its target; None where a reader of its own must look.

    `wait_seconds`: how long each part may take. A target that got no value holds what it held, or zeros.
    """
    served: list[int | None] = [None] * len(keys)
    pseudonyms = volume.placement.pseudonyms(b"".join(keys))
    borrowed = volume.borrow_sets_of_many(pseudonyms)
    buffer = channel.receive_buffer(2 * PART_BYTES)
    halves = (buffer[:PART_BYTES], buffer[PART_BYTES:])
    tally = channel.tally(volume.settings.name)
    under_way: list[_Asked] = []
    ahead: list[_Asked] = []
    try:
        parts = _parts(volume, channel, pseudonyms, borrowed, targets)
        for number in range(len(parts) + 1):
            ahead = parts[number] if number < len(parts) else []
            _send(volume, channel, ahead, halves[number % 2])
            deadline = channel.now() + wait_seconds
            bandwidth = volume.bandwidth if under_way else None
            if bandwidth is not None and not (yield from bandwidth.admit(channel, deadline)):
                break
            half = halves[1 - number % 2]
            while under_way:
                asked = under_way.pop(0)
                assert asked.pending is not None
                if (yield from wait_for(channel, asked.pending, deadline)) is None:
                    into = targets[asked.number]
                    served[asked.number] = _open(
                        volume, channel, keys[asked.number], asked, half, into, tally
                    )
            under_way = ahead
        return served
    finally:
        for asked in (*under_way, *ahead):
            if asked.pending is not None and not asked.pending.done:
                channel.abandon(asked.pending)
        for sets in borrowed:
            volume.give_back_sets(sets)


def _parts(
    volume: Volume,
    channel: IoChannel,
    pseudonyms: bytes,
    borrowed: Sequence[Sequence[CachedSet]],
    targets: Sequence[memoryview],
) -> list[list[_Asked]]:
    """The values that can be had so, in the order of their keys, as many in a part as its buffer takes."""
    codec, wall = volume.codec, channel.wall()
    parts: list[list[_Asked]] = []
    room = 0
    for number, sets in enumerate(borrowed):
        hints = volume.find(sets, pseudonyms[number * KEY_BYTES : (number + 1) * KEY_BYTES])
        if not hints:
            continue
        found = hints[0]
        length, expiry = found.entry.length, found.entry.expiry
        if not 0 < length <= min(codec.unit_bytes, len(targets[number])) or (expiry and expiry <= wall):
            continue
        size = codec.padded(length)
        taken = HEADER_BYTES + size + PROOF_BYTES
        if taken > PART_BYTES:
            continue
        if taken > room or len(parts[-1]) == PART_VALUES:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(_Asked(number, found, PART_BYTES - room, size))
        # Beginnings stay at LBAs, as a medium wants its buffers.
        room -= -(-taken // codec.lba_bytes) * codec.lba_bytes
    return parts


def _send(volume: Volume, channel: IoChannel, part: Sequence[_Asked], buffer: memoryview) -> None:
    for asked in part:
        found = asked.found
        into = buffer[asked.at : asked.at + HEADER_BYTES + asked.size]
        asked.pending = channel.read(
            found.cached.namespace, volume.slot_offset(found.cached, found.slot), into
        )


def _open(
    volume: Volume,
    channel: IoChannel,
    key: bytes,
    asked: _Asked,
    buffer: memoryview,
    into: memoryview,
    tally: Tally,
) -> int | None:
    """Open a value that has arrived into its target; its length, None where it does not prove itself."""
    found, size = asked.found, asked.size
    entry, cached, slot = found.entry, found.cached, found.slot
    data_at = asked.at + HEADER_BYTES
    place = volume.place(cached, slot)
    opened = volume.codec.open(buffer[asked.at : data_at], key, place, entry.generation)
    if isinstance(opened, MissCause) or opened.length != entry.length:
        return None
    if opened.expiry and opened.expiry <= channel.wall():
        return None
    with_room = buffer[data_at : data_at + size + PROOF_BYTES]
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
    with cached.guard:
        directory = cached.directory
        if directory is not None and directory.find(entry.pseudonym) == slot:
            directory.touch(slot, int(channel.wall() * 1e6))
    tally.gets_hit += 1
    tally.bytes_read += length
    if volume.bandwidth is not None:
        volume.bandwidth.charge(channel, length)
    return length
