"""The newest value of a key: a get by directories that are read now, for values that change.

A get (get.py) believes a remembered directory for as long as its slot proves itself. Here both directories
are read each time, and the slot that the remembered ones name is asked beside them. So it costs one round
trip, and a second one only where another agent has replaced the value since. A directory that was read within
`directory_fresh` is not read again: with that the operator says that no other agent changes it.

The entry with the greatest generation counts, and no other. An older value may be there while a newer one is
being stored (replace.py), and is never served in place of one that is damaged or away. Where the slot holds
another write by now, the value was replaced between the two reads. Then both are done again, with the writers
of the directories held, so that no write of this agent hides what another agent wrote.
"""

from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.read.replica_choice import DOUBTFUL, doubt
from agent.pool.steps import IoChannel, Pending, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.set_transaction import SetTransaction

ROUNDS: Final = 8
"""Looks at the directories, where the value is replaced again and again meanwhile."""


def newest(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[bytes | MissCause]:
    """The value under a key, whole, or why there is none. Counts as a get."""
    tally, bandwidth = channel.tally(volume.settings.name), volume.bandwidth
    found: bytes | MissCause
    if volume.erased:
        found = MissCause.WRONG_KEY
    elif bandwidth is not None and not (yield from bandwidth.admit(channel, deadline)):
        found = MissCause.LATE
    else:
        found = yield from _find(volume, channel, key, deadline)
    if isinstance(found, MissCause):
        tally.miss(found)
        return found
    tally.gets_hit += 1
    tally.bytes_read += len(found)
    if bandwidth is not None:
        bandwidth.charge(channel, len(found))
    return found


def _find(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[bytes | MissCause]:
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    failed: tuple[Found, MissCause] | None = None
    is_certain = False
    try:
        for _ in range(ROUNDS):
            ahead = SlotAsked(volume, channel, top_of(sets, pseudonym))
            # With one enclosure hung there has to be time left for what the other one names.
            until = deadline if len(sets) == 1 else (channel.now() + deadline) / 2
            stale = [cached for cached in sets if not volume.is_fresh(cached, channel)]
            before = [cached.writes for cached in stale]
            trouble: MissCause | None = None
            if is_certain:
                with SetTransaction(volume, channel, *sets) as change:
                    trouble = yield from change.begin(until)
            elif stale:
                trouble = yield from volume.load(channel, stale, until)
            found = top_of(sets, pseudonym)
            if found is None:
                ahead.abandon()
                crossed = any(each.was_written(at) for each, at in zip(stale, before, strict=True))
                if crossed and not is_certain:
                    is_certain = True
                    continue
                return volume.absence(sets, pseudonym, trouble)
            if is_certain and failed is not None and found.names_the_same(failed[0]):
                ahead.abandon()
                doubt(volume, [failed])
                return failed[1]
            slot = ahead
            if ahead.found is None or not found.names_the_same(ahead.found):
                ahead.abandon()
                slot = SlotAsked(volume, channel, found)
            value = yield from slot.open(key, deadline)
            if not isinstance(value, MissCause):
                _touch(channel, found, pseudonym)
                return value
            if value not in DOUBTFUL:
                return value
            failed, is_certain = (found, value), True
        return MissCause.LATE
    finally:
        volume.give_back_sets(sets)


class SlotAsked:
    """The slot of an entry, asked for whole. Nothing is asked where there is no entry, or a wrong one."""

    def __init__(self, volume: Volume, channel: IoChannel, found: Found | None) -> None:
        self.found: Final = found
        self._volume: Final = volume
        self._channel: Final = channel
        self._pending: Pending | None = None
        self._buffer = memoryview(b"")
        if found is not None and 0 < found.entry.length <= volume.codec.unit_bytes:
            cached, padded = found.cached, volume.codec.padded(found.entry.length)
            buffer = channel.receive_buffer(HEADER_BYTES + padded + PROOF_BYTES)
            self._buffer = buffer[: HEADER_BYTES + padded]
            self._pending = channel.read(
                cached.namespace, volume.slot_offset(cached, found.slot), self._buffer
            )

    def abandon(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done:
            self._channel.abandon(pending)

    def open(self, key: bytes, deadline: float) -> Steps[bytes | MissCause]:
        """The value that the slot proves to hold of this write of the key."""
        found, volume, channel = self.found, self._volume, self._channel
        assert found is not None
        entry, pending = found.entry, self._pending
        if entry.expiry and entry.expiry <= channel.wall():
            self.abandon()
            return MissCause.EXPIRED
        if pending is None:
            return MissCause.CORRUPT
        cause = yield from wait_for(channel, pending, deadline)
        if cause is not None:
            return cause
        place = volume.place(found.cached, found.slot)
        opened = volume.codec.open(self._buffer[:HEADER_BYTES], key, place, entry.generation)
        if isinstance(opened, MissCause):
            return opened
        if opened.length != entry.length:
            return MissCause.CORRUPT
        if opened.expiry and opened.expiry <= channel.wall():
            return MissCause.EXPIRED
        plain = memoryview(bytearray(volume.codec.padded(entry.length)))
        if not opened.open_unit(0, self._buffer[HEADER_BYTES:], plain):
            return MissCause.CORRUPT
        return bytes(plain[: entry.length])


def top_of(sets: Sequence[CachedSet], pseudonym: bytes) -> Found | None:
    """The entry with the greatest generation, of all that name the key."""
    top: Found | None = None
    for cached in sets:
        with cached.guard:
            directory = cached.directory
            slots = directory.find_all(pseudonym) if directory is not None else []
            for slot in slots:
                assert directory is not None
                entry = directory.entry(slot)
                if entry is not None and (top is None or entry.generation > top.entry.generation):
                    top = Found(cached, slot, entry)
    return top


def _touch(channel: IoChannel, found: Found, pseudonym: bytes) -> None:
    with found.cached.guard:
        directory = found.cached.directory
        entry = directory.entry(found.slot) if directory is not None else None
        if directory is not None and entry is not None and entry.generation == found.entry.generation:
            directory.touch(found.slot, int(channel.wall() * 1e6))
    found.cached.bear_out(found.slot)
