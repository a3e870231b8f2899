"""A put to sets of slots: choose a slot, seal, write, and only then name it in the directory.

A `SlotWriter` seals and sends the units of one value as they come, in any order as long as they are whole
units. So a value of any size needs at most one unit of memory here; puts_in_pieces.py bounds their sum.
The header goes last; where the value came in one piece, both go in a single write.

A crash leaves, at whatever moment: a slot whose header does not open, or one that opens as a value that no
directory names. Both are free slots to every other agent. The entry goes out beside the slot's own write when
nobody else is writing that directory, because an entry without its slot is only a hint that turns out wrong;
the put is acknowledged when both are on flash.

Of several puts of one key through one agent the first to be named stays. A value that comes in one piece
holds its key's lock (agent/pool/volume/key_locks.py) from the look to the end, so that a second put waits and
then finds it stored. A value in pieces takes the lock when it begins and again when it ends, and looks again.
"""

# One idea in one file: the life of one put, from its slot to its entry, which is one class.

from typing import Final, NoReturn

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import IN_DOUBT, BadPut, PutRefused
from agent.pool.format.directory import Directory, Entry, flags_of
from agent.pool.format.eviction_choice import Choice
from agent.pool.format.sealed_slot import HEADER_BYTES, new_generation
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, IoChannel, Pending, Steps
from agent.pool.volume.directory_cache import ANSWER_SECONDS, CachedSet
from agent.pool.volume.key_transition import words_for
from agent.pool.volume.unit_buffers import Tail
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable, prove
from agent.pool.write.quota_eviction import Room, room_for
from agent.pool.write.slot_allocation import Reservation, best_choice, is_eviction, release, reserve
from agent.pool.write.unmark import PUT_FRESH_SECONDS as PUT_FRESH_SECONDS
from agent.pool.write.unmark import unmark
from agent.pool.write.writer_base import PutState, Writer

MARK_STAYS: Final = "an older value of the key may lie in G4, and an enclosure did not take its mark away"
NO_ANSWER: Final = "no enclosure that this key belongs to answers"
UNREAD: Final = "the enclosure does not say what its directory holds by now"
OVERTAKEN: Final = "another agent has stored a value in its slot"
RESERVE_TRIES: Final = 4
"""Between choosing a slot and taking it another worker may take it; then the choice is made anew."""


class SlotWriter(Writer):
    """One value for a volume in sets of slots, being written."""

    def __init__(
        self,
        volume: Volume,
        key: bytes,
        *,
        length: int | None = None,
        ttl_seconds: int = 0,
        may_evict: bool = True,
        pseudonym: bytes | None = None,
    ) -> None:
        super().__init__(volume, key, length=length, ttl_seconds=ttl_seconds, pseudonym=pseudonym)
        self._volume: Final = volume
        self._may_evict = may_evict
        self._room_set_aside = False
        self._reservation: Reservation | None = None
        self._units_sealed = 0
        """A bit for each."""
        self._tail = Tail(volume.unit_buffers)
        self._last: tuple[int, memoryview] | None = None
        """Sealed units that go out with the header, and where in the value they begin."""
        self._marks: list[bytes] = []
        """Those of an older value that the entry's write takes out."""

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        volume, end = self._volume, offset + len(data)
        if self._state is PutState.NEW:
            if volume.bandwidth is not None and not (yield from volume.bandwidth.admit(channel, deadline)):
                self._turn_away(channel, PutRefused("the tenant's bandwidth is used up", MissCause.LATE))
            if not volume.key_locks.take_at_once(self.pseudonym):
                yield from self._lock_key(channel, deadline)
            try:
                yield from self._begin(channel, deadline)
                self._end = end
                if self.already_there:
                    return
                if len(data) == self._length:
                    yield from self._write_whole(channel, data, deadline)
                    return
            finally:
                volume.key_locks.end(self.pseudonym)
        self._end = max(self._end, end)
        yield from self._write_units(channel, offset, data, deadline)
        if self._length is not None and self._has_all(self._length):
            yield from self._complete(channel, deadline)
        else:
            self._wait_for_more(channel, volume.codec.unit_bytes if self._tail else 0)

    def finish_with(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """As `finish`. Where whole units are the last of a value in pieces, header and entry go out with
        them, in one round trip."""
        unit = self._volume.codec.unit_bytes
        units = ((1 << len(data) // unit) - 1) << offset // unit
        is_whole = not (offset % unit or len(data) % unit or self._tail or self._units_sealed & units)
        fits = self._length is None and offset + len(data) <= self._volume.settings.value_bytes
        if self._state is not PutState.WAITING or self._volume.refusal or not (is_whole and fits):
            yield from super().finish_with(channel, offset, data, deadline)
            return
        self._go_on()
        self._units_sealed |= units
        self._end = max(self._end, offset + len(data))
        self._last = offset, self._seal(channel, offset, data)
        yield from self._complete(channel, deadline)
        self.finished = True

    def _wait_for_more(self, channel: IoChannel, held: int) -> None:
        """From its first piece on it is noticed where another agent names a value in its slot."""
        reservation = self._reservation
        assert reservation is not None
        with reservation.cached.guard:
            reservation.cached.unnamed.setdefault(reservation.slot, False)
        super()._wait_for_more(channel, held)

    def _is_its_own(self, channel: IoChannel, reservation: Reservation) -> None:
        """Its entry is about to be written. Raises PutRefused where another agent has named its slot."""
        cached = reservation.cached
        with cached.guard:
            is_overtaken = cached.unnamed.pop(reservation.slot, False)
        if is_overtaken:
            self._refuse(channel, PutRefused(OVERTAKEN, MissCause.EVICTED))

    def _wait_for_all(self, channel: IoChannel, writes: list[Pending], deadline: float) -> Steps[None]:
        """Wait for writes of the slot; where one fails, the others are answered or given up as well."""
        failed: tuple[Pending, MissCause] | None = None
        for pending in writes:
            until = deadline if failed is None else min(deadline, channel.now() + ANSWER_SECONDS)
            cause = yield from wait_for(channel, pending, until)
            if cause is not None and failed is None:
                failed = pending, cause
        if failed is not None:
            self._fail(channel, *failed)

    def _complete(self, channel: IoChannel, deadline: float) -> Steps[None]:
        """Seal what is left, write the header, name the slot."""
        reservation = self._reservation
        assert reservation is not None
        length = self._end
        if not self._has_all(length) or (self._length or length) != length:
            self._refuse(channel, BadPut(f"a value of {self._length or length} bytes with a hole in it"))
        whole = len(self._tail) == length
        if self._tail and not whole:
            yield from self._send_tail(channel, deadline)
        yield from self._lock_key(channel, deadline)
        try:
            if self._stored_meanwhile(channel):
                self._found_there(channel)
            elif whole:
                yield from self._write_whole(channel, self._tail.text(), deadline)
            else:
                header = self._header(channel, reservation, length)
                yield from self._commit(channel, reservation, [header], length, deadline)
        finally:
            self._volume.key_locks.end(self.pseudonym)

    def _release(self) -> None:
        reservation, self._reservation = self._reservation, None
        self._last = None
        self._tail.clear()
        if self._room_set_aside and self._volume.quota is not None:
            self._room_set_aside = False
            self._volume.quota.give_back(self._volume.settings.slot_bytes)
        if reservation is not None:
            release(self._volume, reservation.cached, reservation.slot)
        super()._release()

    def _turn_away(self, channel: IoChannel, why: PutRefused) -> NoReturn:
        """Refuse bytes of a put that has taken none yet; it may be tried again."""
        self._release()
        channel.tally(self._volume.settings.name).puts_refused += 1
        raise why

    def _has_all(self, length: int) -> bool:
        unit = self._volume.codec.unit_bytes
        units = -(-length // unit)
        sealed = self._units_sealed.bit_count() + (1 if self._tail else 0)
        tail_fits = not self._tail or self._tail.at + len(self._tail) == length
        return sealed == units and tail_fits

    def _lock_key(self, channel: IoChannel, deadline: float) -> Steps[None]:
        if (yield from self._volume.key_locks.take(self.pseudonym, deadline)):
            return
        refused = PutRefused("another put of the key does not come to its end", MissCause.LATE)
        if self._state is PutState.NEW:
            self._turn_away(channel, refused)
        self._refuse(channel, refused)

    def _stored_meanwhile(self, channel: IoChannel) -> bool:
        """Whether another put has stored the key since this one began, as far as is known without asking."""
        sets = self._volume.borrow_sets(self.pseudonym)
        try:
            return any(found.is_live(channel) for found in self._volume.find(sets, self.pseudonym))
        finally:
            self._volume.give_back_sets(sets)

    def _begin(self, channel: IoChannel, deadline: float) -> Steps[None]:
        volume = self._volume
        sets = volume.borrow_sets(self.pseudonym)
        try:
            unread = [each for each in sets if each.fault or not is_known(volume, each, channel)]
            trouble = None
            if unread:
                # Half of the time at most: with one enclosure hung, the other has to take the value in time.
                half = channel.now() + max(0.0, deadline - channel.now()) / 2
                trouble = yield from volume.load(channel, unread, half)
                if not (volume.settings.may_lose or any(map(_is_read, sets)) or channel.now() >= half):
                    # A program hears of an error: one of the two is waited for.
                    channel.waits_for_slow()
                    trouble = yield from volume.load(channel, unread, half)
            for found in volume.find(sets, self.pseudonym):
                if found.is_live(channel):
                    self._found_there(channel)
                    return
                found.drop_hint()
            if volume.below is not None and any(not _is_read(each) for each in sets):
                # The mark of an older value may stand there. Nothing was written yet.
                self._turn_away(channel, PutRefused(MARK_STAYS, trouble or MissCause.LATE))
            targets = volume.write_targets(self.pseudonym, sets)
            usable = [cached for cached in targets if may_take(cached)]
            if not usable and any(cached.in_doubt for cached in targets):
                # Each alone would do, and with one enclosure hung the other has to take the value in time.
                trouble = yield from prove(
                    volume, channel, targets, channel.now() + (deadline - channel.now()) / 2
                )
                usable = [cached for cached in targets if may_take(cached)]
            if not usable:
                self._turn_away(channel, PutRefused(NO_ANSWER, trouble or MissCause.LATE))
            everywhere, room = len(usable) == len(targets), Room.SET_ASIDE
            if volume.quota is not None and volume.quota.limits.of_room:
                may_evict = everywhere and self._may_evict
                room = yield from room_for(volume, channel, usable, may_evict=may_evict, deadline=deadline)
                if room is Room.NONE:
                    used_up = f"the tenant of volume {volume.settings.name} has used up its quota"
                    self._turn_away(channel, PutRefused(used_up, passes=not everywhere))
                self._room_set_aside = True
            self._reserve(channel, usable, everywhere=everywhere, exchange=room is Room.EXCHANGE)
            if not volume.settings.may_lose:
                channel.waits_for_slow()  # from here on no other set will do
        finally:
            volume.give_back_sets(sets)

    def _reserve(
        self, channel: IoChannel, sets: list[CachedSet], *, everywhere: bool, exchange: bool = False
    ) -> None:
        """Choose and reserve a slot; evict only where both sets are full, or for `exchange`, and no put that
        has long waited for its next piece has a slot to give.

        With one of two enclosures away nothing is evicted: the volume as a whole may have plenty of
        room, and what must hold is that live data then stays.
        """
        volume = self._volume
        for _ in range(RESERVE_TRIES):
            best = self._best(channel, sets, exchange)
            evicts = best is None or is_eviction(best[1])
            if evicts and volume.puts_in_pieces.make_way(volume.settings.volume_id, channel):
                continue
            if best is None or (evicts and not (everywhere and self._may_evict)):
                break
            cached, choice = best
            if self._reserve_slot(channel, cached, choice):
                return
        since = "" if everywhere else " while an enclosure is away"
        why = f"volume {volume.settings.name} has no slot for this key that may be used{since}"
        self._turn_away(channel, PutRefused(why, passes=not everywhere))

    def _best(
        self, channel: IoChannel, sets: list[CachedSet], exchange: bool
    ) -> tuple[CachedSet, Choice] | None:
        volume = self._volume
        if volume.settings.local_first:
            # The first copy on this machine, where that evicts nothing.
            near = (each for each in sets if channel.is_local(each.namespace))
            here = [each for each in near if channel.trusts(each.namespace)]
            best = best_choice(here, channel, self.pseudonym, volume.holds.held, exchange=exchange)
            if best is not None and not is_eviction(best[1]):
                return best
        return best_choice(sets, channel, self.pseudonym, volume.holds.held, exchange=exchange)

    def _new_generation(self, wall: float) -> int:
        return new_generation(wall)

    def _reserve_slot(self, channel: IoChannel, cached: CachedSet, choice: Choice) -> bool:
        volume, slot = self._volume, choice.slot
        if not reserve(volume, channel, cached, choice):
            return False
        codec = volume.sealing_codec(channel.now())
        sealer = codec.seal(self.key, self._new_generation(channel.wall()), volume.place(cached, slot))
        self._reservation = Reservation(cached, slot, sealer, volume.slot_offset(cached, slot))
        self._enter(PutState.TAKING)
        return True

    def _write_whole(self, channel: IoChannel, data: memoryview, deadline: float) -> Steps[None]:
        reservation = self._reservation
        assert reservation is not None
        buffer = channel.send_buffer(HEADER_BYTES + self._volume.codec.padded(len(data)) + PROOF_BYTES)
        sealed = self._seal_whole(channel, reservation, data, buffer)
        return self._commit(channel, reservation, [sealed], len(data), deadline)

    def _seal_whole(
        self, channel: IoChannel, reservation: Reservation, data: memoryview, buffer: memoryview
    ) -> memoryview:
        """Header and value as the slot has them, in `buffer`, which has room for a proof behind them."""
        size = HEADER_BYTES + self._volume.codec.padded(len(data))
        reservation.sealer.seal(0, data, buffer[HEADER_BYTES:])
        wall = channel.wall()
        reservation.sealer.header_into(buffer, len(data), self._expiry(wall), int(wall * 1e6))
        return buffer[:size]

    def _write_units(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """Seal and send the whole units of `data`; what is left of the last one waits in the tail."""
        unit = self._volume.codec.unit_bytes
        if self._tail and offset == self._tail.at + len(self._tail):
            taken = min(unit - len(self._tail), len(data))
            self._tail.append(data[:taken])
            channel.tally(self._volume.settings.name).bytes_copied += taken
            offset, data = offset + taken, data[taken:]
            # A value that ends with its first unit is sent with its header, by `finish`.
            if len(self._tail) == unit and (self._length is None or self._length > unit):
                yield from self._send_tail(channel, deadline)
        if not len(data):
            return
        if offset % unit or (self._tail and len(data) % unit):
            self._refuse(channel, BadPut("a value is written from its start on, or in whole units"))
        # The last unit, too, is whole as it is.
        whole = len(data) if offset + len(data) == self._length else len(data) // unit * unit
        if whole:
            yield from self._send_units(channel, offset, data[:whole], deadline)
        if whole < len(data):
            self._tail.begin(offset + whole, data[whole:])
            channel.tally(self._volume.settings.name).bytes_copied += len(self._tail)

    def _send_tail(self, channel: IoChannel, deadline: float) -> Steps[None]:
        yield from self._send_units(channel, self._tail.at, self._tail.text(), deadline)
        self._tail.clear()

    def _send_units(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        first = offset // self._volume.codec.unit_bytes
        units = ((1 << -(-len(data) // self._volume.codec.unit_bytes)) - 1) << first
        if self._units_sealed & units:
            self._refuse(channel, BadPut("bytes of a value are written once"))
        self._units_sealed |= units
        # Now, for the rest of the value may never come.
        self._charge(channel, len(data))
        pending = self._send_sealed(channel, offset, self._seal(channel, offset, data))
        cause = yield from wait_for(channel, pending, deadline)
        if cause is not None:
            self._fail(channel, pending, cause)

    def _seal(self, channel: IoChannel, offset: int, data: memoryview) -> memoryview:
        """Units that nothing has sealed yet, in the channel's buffer."""
        reservation = self._reservation
        assert reservation is not None
        buffer = channel.send_buffer(self._volume.codec.padded(len(data)) + PROOF_BYTES)
        taken = reservation.sealer.seal(offset // self._volume.codec.unit_bytes, data, buffer)
        return buffer[:taken]

    def _send_sealed(
        self, channel: IoChannel, offset: int, sealed: memoryview, *, more: bool = False
    ) -> Pending:
        reservation = self._reservation
        assert reservation is not None
        at = reservation.offset + HEADER_BYTES + offset
        return channel.write(reservation.cached.namespace, at, [sealed], more=more)

    def _send_last(self, channel: IoChannel) -> list[Pending]:
        """The units that go out with the header, if any. Who asks sends that next, and waits for both."""
        if self._last is None:
            return []
        (offset, sealed), self._last = self._last, None
        return [self._send_sealed(channel, offset, sealed, more=True)]

    def _header(self, channel: IoChannel, reservation: Reservation, length: int) -> bytes:
        wall = channel.wall()
        return reservation.sealer.header(length, expiry=self._expiry(wall), stored_us=int(wall * 1e6))

    def _commit(
        self,
        channel: IoChannel,
        reservation: Reservation,
        parts: list[memoryview] | list[bytes],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        """Write the last of the slot and its entry; both on flash is what acknowledges the put."""
        cached = reservation.cached
        if self._volume.below is not None:
            yield from self._unmark(channel, deadline, target=cached)
        yield from self._vouched_for(channel, reservation, deadline)
        alone = cached.writer.acquire(blocking=False)
        try:
            if alone:
                yield from self._prove(channel, cached, deadline)
                self._is_its_own(channel, reservation)
            writes = self._send_last(channel)
            writes.append(channel.write(cached.namespace, reservation.offset, parts, more=alone))
            if not alone:
                yield from self._wait_for_all(channel, writes, deadline)
                alone = yield Acquire(cached.writer, deadline, gives_way=True)
                if not alone:
                    self._fail(channel, writes[-1], MissCause.LATE)
                yield from self._prove(channel, cached, deadline)
                self._is_its_own(channel, reservation)
            yield from self._name(channel, reservation, writes, length, deadline)
        finally:
            if alone:
                cached.end_write()
        self._count_stored(channel, length)

    def _unmark(self, channel: IoChannel, deadline: float, target: CachedSet | None = None) -> Steps[None]:
        """An older value of the key that was evicted to G4 must not come up once this one is acknowledged.
        Its mark in `target`, the value's own set, goes with the entry's write."""
        doubt = yield from unmark(self._volume, channel, self.pseudonym, deadline, but=target)
        if doubt is not None:
            self._refuse(channel, PutRefused(MARK_STAYS, doubt))

    def _count_stored(self, channel: IoChannel, length: int) -> None:
        super()._count_stored(channel, length)
        if self._volume.settings.copies > 1:
            self._volume.replication_backlog.note(self.pseudonym)

    def _vouched_for(
        self, channel: IoChannel, reservation: Reservation, deadline: float, named: Entry | None = None
    ) -> Steps[None]:
        """What its key seals may be acknowledged; else the put is given up. `named`: its entry on flash."""
        cached, codec = reservation.cached, reservation.sealer.codec
        if self._volume.vouches_at_once(channel, codec):
            return
        doubt = yield from self._volume.vouches(channel, cached.namespace, codec, deadline)
        if doubt is not None:
            if named is not None:
                cached.disprove(reservation.slot, named.generation)
            self._refuse(channel, PutRefused(words_for(doubt), doubt))

    def _name(
        self,
        channel: IoChannel,
        reservation: Reservation,
        slot_writes: list[Pending],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        """Write the entry, whose set's writer is held, and wait for it and for the slot."""
        cached = reservation.cached
        image, entry = self._image(channel, reservation, length)
        directory_write = channel.write(cached.namespace, cached.offset, [image.image()])
        for pending in (*slot_writes, directory_write):
            cause = yield from wait_for(channel, pending, deadline)
            if cause is not None:
                causes: list[MissCause | None] = [cause]
                until = min(deadline, channel.now() + ANSWER_SECONDS)
                for other in (*slot_writes, directory_write):
                    if other is not pending:
                        causes.append((yield from wait_for(channel, other, until)))
                if cause is MissCause.CORRUPT and all(each in (None, MissCause.CORRUPT) for each in causes):
                    # The enclosure answered all, as one that is full does: none lands any more. Flash may
                    # name a value that is not there, and the next writer of the directory reads it.
                    cached.disprove(reservation.slot, entry.generation)
                else:
                    in_doubt = self._volume.in_doubt_writes
                    in_doubt.write_failed(cached, reservation.slot, entry, channel.now())
                self._fail(channel, pending, cause)
        yield from self._vouched_for(channel, reservation, deadline, entry)
        self._show(channel, reservation, image)

    def _show(self, channel: IoChannel, reservation: Reservation, image: Directory) -> None:
        """The entry is on flash: readers here find it from now on."""
        cached = reservation.cached
        with cached.guard:
            if cached.directory is not None:
                self._forget_others(cached.directory)
                cached.directory.take_over(reservation.slot, image)
                cached.loaded_at = max(cached.loaded_at, channel.now())
            cached.disproven.pop(reservation.slot, None)
        if self._marks and self._volume.below is not None:
            self._note_removed(channel, self._marks)

    def _note_removed(self, channel: IoChannel, marks: list[bytes]) -> None:
        self._volume.removed_marks.note(self.pseudonym, marks, channel.now())

    def _prove(self, channel: IoChannel, cached: CachedSet, deadline: float) -> Steps[None]:
        """The set, whose writer is held, may be written; else the put is given up.

        A value in pieces began long ago, and a write of this agent may have crossed the read of the put. With
        G4 below, an image that is not of just now could bring a mark back that another agent's delete
        took out."""
        volume = self._volume
        is_old = volume.below is not None and not volume.is_recent(cached, channel)
        if is_old or not volume.may_write(cached, channel):
            doubt = yield from load_writable(volume, channel, [cached], deadline)
        elif cached.in_doubt:
            doubt = yield from prove(volume, channel, [cached], deadline, holds_writers=True)
        else:
            return
        if doubt is not None:
            self._refuse(channel, PutRefused(IN_DOUBT if cached.in_doubt else UNREAD, doubt))

    def _image(self, channel: IoChannel, reservation: Reservation, length: int) -> tuple[Directory, Entry]:
        """The directory as it is to be on flash, with the value's entry."""
        cached = reservation.cached
        with cached.guard:
            assert cached.directory is not None
            image = cached.directory.copy()
        self._marks = [image.mark(place) for place in image.marks(self.pseudonym)]
        return image, self._install(channel, reservation, image, length)

    def _install(self, channel: IoChannel, reservation: Reservation, image: Directory, length: int) -> Entry:
        """Put the value's entry into an image, the slot's ghost in it, instead of any older entry of the
        key."""
        slot, sealer, wall = reservation.slot, reservation.sealer, channel.wall()
        self._forget_others(image)
        used, expiry, flags = int(wall * 1e6), self._expiry(wall), flags_of(sealer.codec.epoch)
        ghost, tag = image.ghost(slot), sealer.tag()
        # A named tuple's own way to be made is interpreted.
        entry = tuple.__new__(
            Entry, (self.pseudonym, sealer.generation, used, length, expiry, 0, 0, flags, ghost, tag)
        )
        image.install(slot, entry)
        return entry

    def _forget_others(self, directory: Directory) -> None:
        for older in directory.find_all(self.pseudonym):
            directory.clear(older)
        directory.unmark(self.pseudonym)

    def _fail(self, channel: IoChannel, pending: Pending, cause: MissCause) -> NoReturn:
        why = pending.fault or "no answer in time"
        reservation = self._reservation
        if reservation is not None and cause is not MissCause.ENCLOSURE_DOWN:
            reservation.cached.cool_down(reservation.slot, channel.now())
            if cause is MissCause.CORRUPT:
                self._volume.media_errors.refused_a_write(reservation.cached, reservation.slot)
        self._refuse(channel, PutRefused(f"the enclosure did not take it: {why}", cause))


def is_known(volume: Volume, cached: CachedSet, channel: IoChannel) -> bool:
    """Whether a put reads no directory of a set before it chooses a slot."""
    return volume.is_fresh(cached, channel, PUT_FRESH_SECONDS) and volume.may_write(cached, channel)


def _is_read(cached: CachedSet) -> bool:
    """Whether a set's directory was read, and its enclosure answered the last time."""
    return cached.directory is not None and cached.fault is None


def may_take(cached: CachedSet) -> bool:
    """Whether a set's directory was read, and says truly which slots are free."""
    return _is_read(cached) and not cached.in_doubt
