"""A get from sets of slots: from a key to verified bytes in the host's buffer, in one fabric round trip.

A `SlotReader` finds the slot, checks the header once and then serves ranges of it, each from exactly that
write of that slot. Where the directory is remembered, the first range costs one read of header and data
together; where it is not, one round trip for the two directories goes before.

A directory entry says where to look and how much to ask for; the header proves key, length and generation;
each unit proves itself. Where a hint led to something else, the directories are read anew, once, and the miss
is final after that. An entry that is still there then is remembered as disproven, so that a put of the key is
not taken for a second one.
"""

from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES, Place
from agent.pool.counters import MissCause
from agent.pool.format.mark_block import located, may_be_of
from agent.pool.format.sealed_slot import HEADER_BYTES, OpenSlot
from agent.pool.format.spill_mark import sixteenths_of
from agent.pool.late_answers import has_arrived, miss_cause_of, wait_for
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Request, Source, UnitReader
from agent.pool.read.replica_choice import DOUBTFUL, doubt, in_turn, race, the_other_served
from agent.pool.steps import IoChannel, Pending, Steps, Wait
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.spill_copies import FoundMark, LowerTier
from agent.pool.volume.volume import Found, Volume

ASKS: Final = 2
"""Reads of a directory before a mark in it is left alone."""


class _Copy:
    """A slot that should hold the value: what a directory entry says, and where the slot lies."""

    __slots__ = ("entry", "found", "namespace", "offset", "place")

    def __init__(self, volume: Volume, found: Found) -> None:
        self.found: Final = found
        self.entry: Final = found.entry
        self.namespace: Final = found.cached.namespace
        self.offset: Final = volume.slot_offset(found.cached, found.slot)
        self.place: Final = volume.place(found.cached, found.slot)


class SlotReader(UnitReader):
    """One value of a volume in sets of slots, being read."""

    __slots__ = ("_copy", "_from_below", "_lender", "_prestage", "_volume")

    def __init__(self, volume: Volume, key: bytes, prestage: PrestageCache | None = None) -> None:
        super().__init__(volume, key)
        self._volume: Final = volume
        self._prestage = prestage
        self._copy: _Copy | None = None
        """The copy that has proven itself, and serves the ranges."""
        self._from_below: memoryview | None = None
        """Instead of a copy: header and value as they came from G4, lent by the volume's lower tier. Given
        back once a range reached the value's end; a later range asks the tier again."""
        self._lender: LowerTier | None = None

    @property
    def namespace(self) -> int | None:
        """Where the value is read; None before its header has proven itself."""
        return self._copy.namespace if self._copy is not None else None

    def close(self) -> None:
        self._lend(None, None)
        super().close()

    def _lend(self, sealed: memoryview | None, lender: LowerTier | None) -> None:
        """Keep a range for the ranges to come, and give back what was kept until now."""
        with self._counting:
            before, owner = self._from_below, self._lender
            self._from_below, self._lender = sealed, lender
        if before is not None and owner is not None:
            owner.release(before)

    def _first(self, request: Request) -> Steps[int | MissCause]:
        below, began = self._volume.below, request.channel.now()
        served = yield from self._first_on_flash(request)
        if below is None or not isinstance(served, MissCause):
            return served
        return (yield from self._first_below(request, served, below, began))

    def _first_below(
        self, request: Request, cause: MissCause, below: LowerTier, began: float
    ) -> Steps[int | MissCause]:
        """Serve the range out of G4, where a mark names the key (`_mark_since`); else `cause`, the flash's,
        stays."""
        volume, is_first = self._volume, self._open is None
        with volume.borrowed(self.pseudonym) as sets:
            for cached, at in volume.marks(sets, self.pseudonym):
                mark = yield from _mark_since(
                    request.channel, request.deadline, volume, cached, at, self.pseudonym, began
                )
                if mark is None:
                    continue
                item, slot = located(mark, at)
                sealed = below.fetch(item)
                if isinstance(sealed, MissCause):
                    cause = sealed
                    continue
                place = volume.place(cached, slot)
                served = yield from self._prove_below(request, cause, sealed, place)
                if not isinstance(served, MissCause):
                    request.tally.gets_from_g4 += is_first
                    request.tally.bytes_from_g4 += len(sealed)
                    if is_first:
                        found = FoundMark(place, (cached.namespace, cached.offset), slot, mark)
                        below.served(self.pseudonym, self.key, sealed, found)
                    self._lend(sealed, below)
                    self._give_back_at_end(request, served)
                    return served
                below.release(sealed)
                cause = served
        return cause

    def _prove_below(
        self, request: Request, cause: MissCause, sealed: memoryview, place: Place
    ) -> Steps[int | MissCause]:
        """As `_prove`, of a range out of G4: by the same seal, and nothing else is believed. A later range
        comes from the same write as the first."""
        if len(sealed) < HEADER_BYTES:
            return MissCause.G4_CORRUPT
        header, codec = sealed[:HEADER_BYTES], self._volume.codec
        begun = self._open
        opened = codec.open(header, self.key, place, begun.generation if begun is not None else None)
        if opened is MissCause.EVICTED:
            # It proves to be another key's: the mark was a foreign one. Zeros are nobody's.
            return cause if any(header) else MissCause.G4_CORRUPT
        if isinstance(opened, MissCause):
            return MissCause.G4_LOST if opened is MissCause.WRONG_KEY else MissCause.G4_CORRUPT
        if opened.expiry and opened.expiry <= request.channel.wall():
            return MissCause.EXPIRED
        if len(sealed) < HEADER_BYTES + codec.padded(opened.length):
            return MissCause.G4_CORRUPT
        served = yield from self._serve(request, opened, Source(header, sealed[HEADER_BYTES:], 0, None))
        if isinstance(served, MissCause):
            return MissCause.G4_CORRUPT
        self._open = opened
        return served

    def _first_on_flash(self, request: Request) -> Steps[int | MissCause]:
        volume, channel = self._volume, request.channel
        sets = volume.borrow_sets(self.pseudonym)
        tried: list[tuple[Found, MissCause]] = []
        try:
            hints, behind = volume.find(sets, self.pseudonym), None
            if volume.cache.follows and any(found.cached.is_overtaken() for found in hints):
                behind = yield from volume.catch_up(
                    channel, [each.cached for each in hints], request.deadline
                )
                hints = [each for each in volume.find(sets, self.pseudonym) if not each.cached.is_overtaken()]
            for found, spare in in_turn(volume, channel, hints):
                served = yield from self._try(request, found, spare)
                if not isinstance(served, MissCause):
                    the_other_served(volume, channel, tried)
                    return served
                if served is MissCause.LATE and (spare is None or channel.now() >= request.deadline):
                    return served
                tried.append((found, served))
                if served is MissCause.EVICTED:
                    request.tally.stale_hints += 1
            if behind is not None:
                return tried[0][1] if tried else behind
            doubtful = any(cause in DOUBTFUL for _, cause in tried)
            stale = [cached for cached in sets if doubtful or not volume.is_fresh(cached, channel)]
            # Of two copies one is enough: a directory that is late leaves time for what the other names.
            half = request.deadline if volume.hedge is None else (channel.now() + request.deadline) / 2
            trouble = (yield from volume.load(channel, stale, half)) if stale else None
            fresh = volume.find(sets, self.pseudonym) if stale else []
            untried = [each for each in fresh if not any(each.names_the_same(before) for before, _ in tried)]
            for found, spare in in_turn(volume, channel, untried):
                served = yield from self._try(request, found, spare)
                if not isinstance(served, MissCause):
                    the_other_served(volume, channel, tried)
                    return served
                # The newer directory's entry says more than an old hint.
                tried.insert(0, (found, served))
            doubt(volume, tried)
            return tried[0][1] if tried else volume.absence(sets, self.pseudonym, trouble)
        finally:
            volume.give_back_sets(sets)

    def _next(self, request: Request, opened: OpenSlot) -> Steps[int | MissCause]:
        copy = self._copy
        if copy is None:
            return (yield from self._next_below(request, opened))
        source = self._ask(request, copy, with_header=False)
        served = yield from self._serve(request, opened, source)
        if not isinstance(served, MissCause):
            return served
        cause = served
        if source.pending is None:
            self._unstage()
            again = yield from self._serve(request, opened, self._ask(request, copy, with_header=False))
            if not isinstance(again, MissCause):
                return again
            cause = again
        if cause is MissCause.CORRUPT:
            cause = yield from self._reused_or_corrupt(request, copy, opened)
        if self._volume.hedge is not None:
            return (yield from self._elsewhere(request, copy, opened, cause))
        return cause

    def _next_below(self, request: Request, opened: OpenSlot) -> Steps[int | MissCause]:
        sealed, below = self._from_below, self._volume.below
        if sealed is None:
            if below is None:
                return MissCause.EVICTED
            began = request.channel.now()
            return (yield from self._first_below(request, MissCause.EVICTED, below, began))
        source = Source(sealed[:HEADER_BYTES], sealed[HEADER_BYTES:], 0, None)
        served = yield from self._serve(request, opened, source)
        if isinstance(served, MissCause):
            return MissCause.G4_CORRUPT
        self._give_back_at_end(request, served)
        return served

    def _give_back_at_end(self, request: Request, served: int) -> None:
        """The memory of a range is bounded for all readers, and a reader may stay open for long."""
        length = self.length
        if length is not None and request.offset + served >= length:
            self._lend(None, None)

    def _elsewhere(
        self, request: Request, failed: _Copy, opened: OpenSlot, cause: MissCause
    ) -> Steps[int | MissCause]:
        """A later range, out of the other copy of the very value that was begun. Where there is none, `cause`
        stays: why the first did not serve it."""
        volume = self._volume
        sets = volume.borrow_sets(self.pseudonym)
        try:
            for found in volume.find(sets, self.pseudonym):
                same = found.entry.generation == opened.generation
                if same and found.cached.namespace != failed.namespace:
                    request.tally.other_copy_reads += 1
                    return (yield from self._try(request, found))
            return cause
        finally:
            volume.give_back_sets(sets)

    def _try(self, request: Request, found: Found, spare: Found | None = None) -> Steps[int | MissCause]:
        """Read the slot that an entry points at, and serve the range if it proves itself.

        `spare` is its other copy, which may be asked beside it.
        """
        entry = found.entry
        if entry.expiry and entry.expiry <= request.channel.wall():
            return MissCause.EXPIRED
        if not 0 < entry.length <= self._volume.settings.value_bytes:
            return MissCause.CORRUPT
        copy = _Copy(self._volume, found)
        source = self._ask(request, copy)
        if spare is not None and source.pending is not None:
            other_copy = _Copy(self._volume, spare)
            other = yield from self._hedged(request, source, other_copy)
            if other is not None:
                served = yield from self._prove(request, other_copy, other)
                if not isinstance(served, MissCause):
                    return served
                if request.channel.now() >= request.deadline:
                    return MissCause.LATE
                source = self._ask(request, copy)
        served = yield from self._prove(request, copy, source)
        if isinstance(served, MissCause) and source.pending is None:
            # What waited in memory may have been read before the write was whole: flash decides.
            self._unstage()
            served = yield from self._prove(request, copy, self._ask(request, copy))
        return served

    def _hedged(self, request: Request, source: Source, other_copy: _Copy) -> Steps[Source | None]:
        """Ask the other copy too, if the first takes long; its source, where that was first."""
        hedge, tally, unit_bytes = self._volume.hedge, request.tally, self._volume.codec.unit_bytes
        assert hedge is not None
        assert source.pending is not None
        asked: list[Source] = []

        def enough_of(read: Source) -> int:
            return read.data_starts_at + min(unit_bytes, len(read.data))

        def ask() -> tuple[Pending, int]:
            other = self._ask(request, other_copy, aside=True)
            tally.hedged_reads += 1
            tally.hedge_bytes += HEADER_BYTES + len(other.data)
            asked.append(other)
            assert other.pending is not None
            return other.pending, enough_of(other)

        won = yield from race(
            request.channel, hedge, source.pending, ask, enough_of(source), request.deadline
        )
        if won:
            tally.hedge_wins += 1
            source.abandon(request.channel)
            return asked[0]
        if asked:
            asked[0].abandon(request.channel)
        return None

    def _prove(self, request: Request, copy: _Copy, source: Source) -> Steps[int | MissCause]:
        """Check header and units of a range against the entry; serve it, or say why not."""
        channel, entry, cached, slot = request.channel, copy.entry, copy.found.cached, copy.found.slot
        assert source.header is not None
        header_from = source.header_pending or source.pending
        if header_from is not None:
            # With the first unit, where both are one read: each look at the socket gives the GIL away,
            # and with several workers getting it back costs more than opening a header early gains.
            first = min(self._volume.codec.unit_bytes, len(source.data)) if source.data_starts_at else 0
            enough = HEADER_BYTES + first
            came = has_arrived(header_from, enough) or (yield Wait(header_from, request.deadline, enough))
            cause = miss_cause_of(channel, header_from, came)
            if cause is not None:
                source.abandon(channel)
                return cause
        opened = self._volume.codec.open(source.header, self.key, copy.place, entry.generation)
        if isinstance(opened, MissCause):
            source.abandon(channel)
            return opened
        if opened.length != entry.length or (opened.expiry and opened.expiry <= channel.wall()):
            source.abandon(channel)
            return MissCause.CORRUPT if opened.length != entry.length else MissCause.EXPIRED
        count = yield from self._serve(request, opened, source)
        if not isinstance(count, MissCause):
            self._copy = copy
            self._open = opened
            cached.bear_out(slot)
            self._volume.touch(cached, slot, entry.pseudonym, entry.generation, int(channel.wall() * 1e6))
        return count

    def _unstage(self) -> None:
        assert self._prestage is not None
        self._prestage.discard(self._volume.settings.volume_id, self.pseudonym)

    def _ask(self, request: Request, copy: _Copy, *, with_header: bool = True, aside: bool = False) -> Source:
        """Ask for the units that a range lies in, and for the header with them or beside them.

        `aside`: into memory of its own, since the worker's is being received into.
        """
        codec, channel, length = self._volume.codec, request.channel, copy.entry.length
        offset, end = request.offset, request.offset + len(request.into)
        first_byte = min(offset, max(length - 1, 0)) // codec.unit_bytes * codec.unit_bytes
        last_unit = -(-min(max(end, 1), length) // codec.unit_bytes)
        last_byte = max(min(last_unit * codec.unit_bytes, codec.padded(length)), first_byte)
        if self._prestage is not None and not aside:
            volume_id = self._volume.settings.volume_id
            staged = self._prestage.find(volume_id, self.pseudonym, copy.entry.generation)
            if staged is not None:
                if with_header:
                    request.tally.prestage_hits += 1
                return Source(staged[:HEADER_BYTES], staged[HEADER_BYTES + first_byte :], first_byte, None)
        span = last_byte - first_byte
        whole_bytes = HEADER_BYTES + span
        with_room = None
        if aside:
            buffer = memoryview(bytearray(whole_bytes))
        elif span <= codec.unit_bytes:
            roomy = channel.receive_buffer(whole_bytes + PROOF_BYTES)
            buffer, with_room = roomy[:whole_bytes], roomy[HEADER_BYTES:]
        else:
            buffer = channel.receive_buffer(whole_bytes)
        header, data = buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]
        if with_header and first_byte == 0:
            whole = channel.read(copy.namespace, copy.offset, buffer)
            return Source(header, data, 0, whole, None, HEADER_BYTES, with_room)
        header_pending = channel.read(copy.namespace, copy.offset, header) if with_header else None
        pending = channel.read(copy.namespace, copy.offset + HEADER_BYTES + first_byte, data)
        return Source(
            header if with_header else None, data, first_byte, pending, header_pending, 0, with_room
        )

    def _reused_or_corrupt(self, request: Request, copy: _Copy, opened: OpenSlot) -> Steps[MissCause]:
        """A unit no longer proves itself: has the slot been given away since the header was read?"""
        channel = request.channel
        header = channel.receive_buffer(HEADER_BYTES)
        pending = channel.read(copy.namespace, copy.offset, header)
        cause = yield from wait_for(channel, pending, request.deadline)
        if cause is not None:
            return cause
        again = self._volume.codec.open(header, self.key, copy.place, opened.generation)
        if isinstance(again, MissCause) or again.bound != opened.bound:
            return MissCause.EVICTED
        return MissCause.CORRUPT


def remembered_length(volume: Volume, pseudonym: bytes, sets: tuple[CachedSet, ...]) -> int | None:
    """The length that a directory hints at, for a stat that must not move the value."""
    found = volume.find(sets, pseudonym)
    return found[0].entry.length if found else None


def length_below(volume: Volume, channel: IoChannel, key: bytes, deadline: float) -> Steps[int | None]:
    """The length that the header of a value in G4 proves; None where no mark leads to one in time."""
    below, pseudonym, began = volume.below, volume.placement.pseudonym(key), channel.now()
    if below is None:
        return None
    wanted = sixteenths_of(HEADER_BYTES, volume.settings.slot_bytes)
    with volume.borrowed(pseudonym) as sets:
        for cached, at in volume.marks(sets, pseudonym):
            mark = yield from _mark_since(channel, deadline, volume, cached, at, pseudonym, began)
            if mark is None:
                continue
            item, slot = located(mark, at)
            sealed = below.fetch(item._replace(sixteenths=min(item.sixteenths, wanted)))
            if isinstance(sealed, MissCause):
                continue
            header = memoryview(bytes(sealed[:HEADER_BYTES]))
            below.release(sealed)
            opened = volume.codec.open(header, key, volume.place(cached, slot), None)
            if not isinstance(opened, MissCause) and not 0 < opened.expiry <= channel.wall():
                return opened.length
    return None


def _mark_since(
    channel: IoChannel,
    deadline: float,
    volume: Volume,
    cached: CachedSet,
    at: int,
    pseudonym: bytes,
    began: float,
) -> Steps[bytes | None]:
    """The mark of a key at a place, by a directory whose read went out since the get `began`. None: it may
    not be followed.

    An object in G4 is not zeroed by a delete, as a slot is. A delete that was over before the get has left no
    mark in such a directory. A read that a write of ours crosses says nothing, so there are two."""
    asks = 0
    while not (cached.asked_at > began or (asks and cached.asked_at == began)):
        if asks == ASKS or (yield from volume.load(channel, [cached], deadline)) is not None:
            return None
        asks += 1
    directory = cached.directory
    if directory is None:
        return None
    mark, removed = directory.mark(at), volume.removed_marks
    if not may_be_of(mark, pseudonym) or removed.is_removed(pseudonym, mark, channel.now()):
        return None
    return mark
