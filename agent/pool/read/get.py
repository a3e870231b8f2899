"""Reading values: from a key to verified bytes in the host's buffer, in one fabric round trip.

A `Reading` is one open value: it finds the slot, checks the header once and then serves ranges of it,
each from exactly that write of that slot. Where the directory is remembered, the first range costs one
read of header and data together; where it is not, one round trip for the two directories goes before.

The order in which things are believed: a directory entry says where to look and how much to ask for;
the header proves key, length and generation; each unit proves itself. Where a hint led to something
else, the directories are read anew, once, and the miss is final after that; an entry that still stands
then is remembered as disproven, so that a put of the key is not taken for a second one.
"""

# One idea in one file: the state of one get, and the sources of its bytes.

from __future__ import annotations

import itertools
import threading
from typing import Final

from agent.inline.scatter import Target
from agent.inline.suites import PROOF_BYTES, Place
from agent.pool.counters import MissCause
from agent.pool.format.slot import HEADER_BYTES, OpenSlot
from agent.pool.read.hedging import race
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.replica_choice import DOUBTFUL, doubt, in_turn, the_other_served
from agent.pool.steps import Acquire, Lanes, Pending, Steps, Wait, has_come, wait_for, what_came
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume

_NUMBERS: Final = itertools.count(1)


class Reading:
    """One value being read. Not shared between threads at the same time."""

    __slots__ = (
        "_beginning",
        "_counting",
        "_hit",
        "_number",
        "_offset",
        "_open",
        "_place",
        "_prestage",
        "cause",
        "key",
        "namespace",
        "pseudonym",
        "volume",
    )

    def __init__(self, volume: Volume, key: bytes, prestage: PrestageCache | None = None) -> None:
        self.volume = volume
        self.key = key
        self.pseudonym = volume.placement.pseudonym(key)
        self.cause: MissCause | None = None
        """Why it is a miss; None before the first read, and after a hit."""
        self._number = next(_NUMBERS)
        self._beginning = threading.Lock()
        self._counting = threading.Lock()
        self._hit = False
        self.namespace = -1
        self._offset = 0
        self._place: Place | None = None
        self._open: OpenSlot | None = None
        self._prestage = prestage

    def close(self) -> None:
        """Nobody reads on; what is kept for that goes."""
        self.volume.kept_units.drop(self._number)

    @property
    def length(self) -> int | None:
        """The length of the value in bytes, once the header has proven it."""
        return self._open.length if self._open is not None else None

    def read(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; how many bytes were there. 0 with `cause` set is a miss.

        A get is counted once: as a miss, or as a hit when its first range was served.
        """
        if self.cause is not None or not len(into):
            return 0
        if self.volume.erased:
            return self._lost(lanes, MissCause.WRONG_KEY)
        if self._open is None:
            # Several threads may read one file at once; one of them finds the slot for all.
            if not self._beginning.acquire(blocking=False) and not (yield Acquire(self._beginning, deadline)):
                return self._lost(lanes, MissCause.LATE)
            try:
                if self._found() is None:
                    return (yield from self._begin(lanes, offset, into, deadline))
            finally:
                self._beginning.release()
        return (yield from self._continue(lanes, offset, into, deadline))

    def _found(self) -> OpenSlot | None:
        """What another thread may have found by now (a method: tests/rules/test_compiled_narrowing.py)."""
        return self._open

    def _is_lost(self) -> bool:
        return self.cause is not None

    def _begin(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        if self._is_lost():
            return 0
        bandwidth = self.volume.bandwidth
        if bandwidth is not None and not (yield from bandwidth.admit(lanes, deadline)):
            return self._lost(lanes, MissCause.LATE)
        served = yield from self._first(lanes, offset, into, deadline)
        if isinstance(served, MissCause):
            return self._lost(lanes, served)
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self._is_lost():
                return 0
            self._hit = True
            tally.gets_hit += 1
        return self._moved(lanes, served)

    def _moved(self, lanes: Lanes, count: int) -> int:
        lanes.tally(self.volume.settings.name).bytes_read += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, count)
        return count

    def _lost(self, lanes: Lanes, cause: MissCause) -> int:
        """The value as a whole is a miss: counted once, and no longer as a hit if its first range was."""
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self.cause is None:
                self.cause = cause
                tally.gets_hit -= self._hit
                tally.miss(cause)
        return 0

    def give_up(self, lanes: Lanes, cause: MissCause) -> None:
        """It does not serve its reader after all: a miss, and no hit."""
        self._lost(lanes, cause)

    def _continue(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        opened = self._open
        if opened is None or offset >= opened.length:
            return 0
        generation, length = opened.generation, opened.length
        unit_bytes = self.volume.codec.unit_bytes
        number, within = divmod(offset, unit_bytes)
        wanted = min(len(into), length - offset)
        if within and within + wanted <= unit_bytes:
            kept = self.volume.kept_units.take(self._number, number)
            if kept is not None:
                into[:wanted] = kept[within : within + wanted]
                tally = lanes.tally(self.volume.settings.name)
                tally.bytes_copied += wanted
                self._moved(lanes, wanted)
                if offset + wanted < length and within + wanted < unit_bytes:
                    self.volume.kept_units.keep(self._number, number, kept)
                else:
                    self.volume.unit_buffers.give_back(kept)
                return wanted
        source = self._request(lanes, generation, length, offset, len(into), with_header=False)
        served = yield from self._serve(lanes, opened, source, offset, into, deadline)
        if isinstance(served, MissCause) and source.pending is None:
            self._unstage()
            source = self._request(lanes, generation, length, offset, len(into), with_header=False)
            served = yield from self._serve(lanes, opened, source, offset, into, deadline)
        if isinstance(served, MissCause):
            if served is MissCause.CORRUPT:
                served = yield from self._reused_or_corrupt(lanes, opened, deadline)
            if self.volume.hedge is not None:
                served = yield from self._elsewhere(lanes, opened, offset, into, deadline, served)
        if isinstance(served, MissCause):
            return self._lost(lanes, served)
        return self._moved(lanes, served)

    def _first(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int | MissCause]:
        volume = self.volume
        sets = volume.borrow_sets(self.pseudonym)
        tried: list[tuple[Found, MissCause]] = []
        try:
            for found, spare in in_turn(volume, lanes, volume.find(sets, self.pseudonym)):
                served = yield from self._try(lanes, found, offset, into, deadline, spare)
                if not isinstance(served, MissCause):
                    the_other_served(volume, lanes, tried)
                    return served
                if served is MissCause.LATE and (spare is None or lanes.now() >= deadline):
                    return served
                tried.append((found, served))
                if served is MissCause.EVICTED:
                    lanes.tally(volume.settings.name).stale_hints += 1
            doubtful = any(cause in DOUBTFUL for _, cause in tried)
            stale = [cached for cached in sets if doubtful or not volume.is_fresh(cached, lanes)]
            # Of two copies one is enough: a directory that is late leaves time for what the other names.
            half = deadline if volume.hedge is None else (lanes.now() + deadline) / 2
            trouble = (yield from volume.load(lanes, stale, half)) if stale else None
            fresh = volume.find(sets, self.pseudonym) if stale else []
            untried = [each for each in fresh if not any(_same(each, earlier) for earlier, _ in tried)]
            for found, spare in in_turn(volume, lanes, untried):
                served = yield from self._try(lanes, found, offset, into, deadline, spare)
                if not isinstance(served, MissCause):
                    the_other_served(volume, lanes, tried)
                    return served
                # What the newer directory led to says more than what an old hint led to.
                tried.insert(0, (found, served))
            doubt(volume, tried)
            return tried[0][1] if tried else volume.absence(sets, self.pseudonym, trouble)
        finally:
            volume.give_back_sets(sets)

    def _elsewhere(
        self,
        lanes: Lanes,
        opened: OpenSlot,
        offset: int,
        into: Target,
        deadline: float,
        failed: MissCause,
    ) -> Steps[int | MissCause]:
        """A later range, out of the other copy of the very value that was begun. Where there is none,
        `failed` stays: why the first did not serve it."""
        volume, failed_at = self.volume, self.namespace
        sets = volume.borrow_sets(self.pseudonym)
        try:
            for found in volume.find(sets, self.pseudonym):
                same = found.entry.generation == opened.generation
                if same and found.cached.namespace != failed_at:
                    lanes.tally(volume.settings.name).other_copy_reads += 1
                    return (yield from self._try(lanes, found, offset, into, deadline))
            return failed
        finally:
            volume.give_back_sets(sets)

    def _aim(self, found: Found) -> Place:
        cached = found.cached
        self.namespace = cached.namespace
        self._offset = self.volume.slot_offset(cached, found.slot)
        self._place = self.volume.place(cached, found.slot)
        return self._place

    def _hedged(
        self,
        lanes: Lanes,
        found: Found,
        spare: Found,
        source: Source,
        offset: int,
        size: int,
        deadline: float,
    ) -> Steps[Source | None]:
        """Ask the other copy too, if the first takes long; what came of it, where that was first."""
        volume, tally = self.volume, lanes.tally(self.volume.settings.name)
        assert volume.hedge is not None
        assert source.pending is not None
        asked: list[Source] = []

        def enough_of(read: Source) -> int:
            return read.data_starts_at + min(volume.codec.unit_bytes, len(read.data))

        def ask() -> tuple[Pending, int]:
            self._aim(spare)
            other = self._request(
                lanes, spare.entry.generation, spare.entry.length, offset, size, with_header=True, aside=True
            )
            tally.hedged_reads += 1
            tally.hedge_bytes += HEADER_BYTES + len(other.data)
            asked.append(other)
            assert other.pending is not None
            return other.pending, enough_of(other)

        won = yield from race(lanes, volume.hedge, source.pending, ask, enough_of(source), deadline)
        if won:
            tally.hedge_wins += 1
            self._give_up(lanes, source)
            return asked[0]
        if asked:
            self._aim(found)
            self._give_up(lanes, asked[0])
        return None

    def _try(
        self,
        lanes: Lanes,
        found: Found,
        offset: int,
        into: Target,
        deadline: float,
        spare: Found | None = None,
    ) -> Steps[int | MissCause]:
        """Read the slot that an entry points at, and serve the range if it proves itself.

        `spare` is its other copy, which may be asked beside it.
        """
        volume, entry = self.volume, found.entry
        if entry.expiry and entry.expiry <= lanes.wall():
            return MissCause.EXPIRED
        if not 0 < entry.length <= volume.settings.value_bytes:
            return MissCause.CORRUPT
        place = self._aim(found)
        source = self._request(lanes, entry.generation, entry.length, offset, len(into), with_header=True)
        if spare is not None and source.pending is not None:
            other = yield from self._hedged(lanes, found, spare, source, offset, len(into), deadline)
            if other is not None:
                place = volume.place(spare.cached, spare.slot)
                served = yield from self._prove(lanes, spare, place, other, offset, into, deadline)
                if not isinstance(served, MissCause):
                    return served
                if lanes.now() >= deadline:
                    return MissCause.LATE
                place = self._aim(found)
                source = self._request(
                    lanes, entry.generation, entry.length, offset, len(into), with_header=True
                )
        served = yield from self._prove(lanes, found, place, source, offset, into, deadline)
        if isinstance(served, MissCause) and source.pending is None:
            # What waited in memory may have been read before the write was whole: flash decides.
            self._unstage()
            source = self._request(lanes, entry.generation, entry.length, offset, len(into), with_header=True)
            served = yield from self._prove(lanes, found, place, source, offset, into, deadline)
        return served

    def _prove(
        self,
        lanes: Lanes,
        found: Found,
        place: Place,
        source: Source,
        offset: int,
        into: Target,
        deadline: float,
    ) -> Steps[int | MissCause]:
        """Check header and units of a range against the entry; serve it, or say why not."""
        entry, cached = found.entry, found.cached
        assert source.header is not None
        header_from = source.header_pending or source.pending
        if header_from is not None:
            # With the first unit, where both are one read: each look at the socket gives the GIL away,
            # and with several workers getting it back costs more than opening a header early gains.
            first = min(self.volume.codec.unit_bytes, len(source.data)) if source.data_starts_at else 0
            enough = HEADER_BYTES + first
            came = has_come(header_from, enough) or (yield Wait(header_from, deadline, enough))
            cause = what_came(lanes, header_from, came)
            if cause is not None:
                self._give_up(lanes, source)
                return cause
        opened = self.volume.codec.open(source.header, self.key, place, entry.generation)
        if isinstance(opened, MissCause):
            self._give_up(lanes, source)
            return opened
        if opened.length != entry.length or (opened.expiry and opened.expiry <= lanes.wall()):
            self._give_up(lanes, source)
            return MissCause.CORRUPT if opened.length != entry.length else MissCause.EXPIRED
        if offset >= opened.length:
            self._give_up(lanes, source)
            count: int | MissCause = 0
        else:
            count = yield from self._serve(lanes, opened, source, offset, into, deadline)
        if not isinstance(count, MissCause):
            self._open = opened
            cached.bear_out(found.slot)
            with cached.guard:
                directory = cached.directory
                if directory is not None and directory.find(self.pseudonym) == found.slot:
                    directory.touch(found.slot, int(lanes.wall() * 1e6))
        return count

    def _unstage(self) -> None:
        assert self._prestage is not None
        self._prestage.discard(self.volume.settings.volume_id, self.pseudonym)

    def _request(
        self,
        lanes: Lanes,
        generation: int,
        length: int,
        offset: int,
        size: int,
        *,
        with_header: bool,
        aside: bool = False,
    ) -> Source:
        """Ask for the units that a range lies in, and for the header with them or beside them.

        `aside`: into memory of its own, since the worker's is being received into.
        """
        codec = self.volume.codec
        first_byte = min(offset, max(length - 1, 0)) // codec.unit_bytes * codec.unit_bytes
        last_unit = -(-min(max(offset + size, 1), length) // codec.unit_bytes)
        last_byte = max(min(last_unit * codec.unit_bytes, codec.padded(length)), first_byte)
        if self._prestage is not None and not aside:
            staged = self._prestage.find(self.volume.settings.volume_id, self.pseudonym, generation)
            if staged is not None:
                if with_header:
                    lanes.tally(self.volume.settings.name).prestage_hits += 1
                return Source(staged[:HEADER_BYTES], staged[HEADER_BYTES + first_byte :], None)
        span = last_byte - first_byte
        whole_bytes = HEADER_BYTES + span
        with_room = None
        if aside:
            buffer = memoryview(bytearray(whole_bytes))
        elif span <= codec.unit_bytes:
            roomy = lanes.receive_buffer(whole_bytes + PROOF_BYTES)
            buffer, with_room = roomy[:whole_bytes], roomy[HEADER_BYTES:]
        else:
            buffer = lanes.receive_buffer(whole_bytes)
        header, data = buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]
        if with_header and first_byte == 0:
            whole = lanes.read(self.namespace, self._offset, buffer)
            return Source(header, data, whole, None, HEADER_BYTES, with_room)
        header_pending = lanes.read(self.namespace, self._offset, header) if with_header else None
        pending = lanes.read(self.namespace, self._offset + HEADER_BYTES + first_byte, data)
        return Source(header if with_header else None, data, pending, header_pending, 0, with_room)

    def _reused_or_corrupt(self, lanes: Lanes, opened: OpenSlot, deadline: float) -> Steps[MissCause]:
        """A unit no longer proves itself: has the slot been given away since the header was read?"""
        assert self._place is not None
        header = lanes.receive_buffer(HEADER_BYTES)
        cause = yield from wait_for(lanes, lanes.read(self.namespace, self._offset, header), deadline)
        if cause is not None:
            return cause
        again = self.volume.codec.open(header, self.key, self._place, opened.generation)
        if isinstance(again, MissCause) or again.bound != opened.bound:
            return MissCause.EVICTED
        return MissCause.CORRUPT

    def _give_up(self, lanes: Lanes, source: Source) -> None:
        for pending in (source.header_pending, source.pending):
            if pending is not None and not pending.done:
                lanes.abandon(pending)

    def _serve(
        self,
        lanes: Lanes,
        opened: OpenSlot,
        source: Source,
        offset: int,
        into: Target,
        deadline: float,
    ) -> Steps[int | MissCause]:
        """Open the units of a range as they arrive, straight into `into` wherever a whole unit fits."""
        unit_bytes = self.volume.codec.unit_bytes
        first, last, from_byte, to_byte = opened.unit_span(offset, len(into))
        wanted = min(len(into), opened.length - offset)
        for number in range(first, last):
            start = number * unit_bytes
            size = min(unit_bytes, to_byte - start)
            at = start - from_byte
            pending = source.pending
            if pending is not None:
                enough = source.data_starts_at + at + size
                came = has_come(pending, enough) or (yield Wait(pending, deadline, enough))
                cause = what_came(lanes, pending, came)
                if cause is not None:
                    self._give_up(lanes, source)
                    return cause
            target = start - offset
            piece = into[target : target + size] if target >= 0 and target + size <= len(into) else None
            if source.with_room is not None and isinstance(piece, memoryview):
                opened_whole = opened.open_with_room(number, source.with_room, piece)
            elif piece is not None and (isinstance(piece, memoryview) or opened.cipher.scatters):
                opened_whole = opened.open_unit(number, source.data[at : at + size], piece)
            else:
                # The range ends inside this unit, its padding does not fit, or it lies in several places
                # and the cipher cannot: open it aside.
                buffer = self.volume.unit_buffers.borrow()
                aside = buffer[:size]
                opened_whole = opened.open_unit(number, source.data[at : at + size], aside)
                if opened_whole:
                    begin, end = max(0, -target), min(size, wanted - target)
                    into[target + begin : target + end] = aside[begin:end]
                    lanes.tally(self.volume.settings.name).bytes_copied += end - begin
                if opened_whole and offset + wanted < min(start + size, opened.length):
                    self.volume.kept_units.keep(self._number, number, buffer)
                else:
                    self.volume.unit_buffers.give_back(buffer)
            if not opened_whole:
                into[:] = bytes(len(into))  # it may be the host's own memory: nothing unproven stays in it
                self._give_up(lanes, source)
                return MissCause.CORRUPT
        return wanted


def _same(one: Found, other: Found) -> bool:
    return (one.cached is other.cached) and (one.slot, one.entry.generation) == (
        other.slot,
        other.entry.generation,
    )


def remembered_length(volume: Volume, pseudonym: bytes, sets: tuple[CachedSet, ...]) -> int | None:
    """The length that a directory hints at, for a stat that must not move the value."""
    found = volume.find(sets, pseudonym)
    return found[0].entry.length if found else None


class Source:
    """Where the sealed bytes of a range come from: a buffer, and the read that fills it, if any.

    What was prestaged needs no read: `pending` is None.
    """

    __slots__ = ("data", "data_starts_at", "header", "header_pending", "pending", "with_room")

    def __init__(
        self,
        header: memoryview | None,
        data: memoryview,
        pending: Pending | None,
        header_pending: Pending | None = None,
        data_starts_at: int = 0,
        with_room: memoryview | None = None,
    ) -> None:
        self.header = header
        self.data = data
        self.pending = pending
        self.header_pending = header_pending
        self.data_starts_at = data_starts_at
        """How many bytes of `pending` come before `data`: the header, where both are one read."""
        self.with_room = with_room
        """`data`, of one unit, and behind it the room that opening it by one call takes."""
