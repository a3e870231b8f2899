"""Writing values: choose a slot, seal, write, and only then name it in the directory.

A `Writing` is one value on its way. Its units are sealed and sent as they come, in any order as long
as they are whole units, so that a value of any size needs at most one unit of memory here; partial_puts.py
bounds what all need together. The header goes last, and where the value came in one piece it goes with it in
a single write.

What a crash leaves, at whatever moment: a slot whose header does not open, or one that opens as a value that
no directory names. Both are free slots to everybody else. The entry goes out beside the slot's own write when
nobody else is writing that directory, because an entry without its slot is only a hint that turns out wrong;
the put is acknowledged when both are on flash.

Of several puts of one key through one agent the first to be named stays. A value that comes in one piece
keeps its key's turn (agent/pool/volume/key_locks.py) from the look to the end, so that a second put waits and
then finds it stored. One that comes in pieces cannot, for its next piece may never come: it takes the turn
when it begins and again when it ends, and looks once more then.
"""

from __future__ import annotations

from typing import Final

from agent.inline.suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import IN_DOUBT, BadPut, PutRefused, TooLong
from agent.pool.format.directory import TIME_MAX, Choice, Directory, Entry, flags_of
from agent.pool.format.slot import HEADER_BYTES, new_generation
from agent.pool.steps import Acquire, Lanes, Pending, Steps, wait_for
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.directory_cache import ANSWER_SECONDS, CachedSet
from agent.pool.volume.key_transition import words_for
from agent.pool.volume.partial_puts import GIVEN_UP, TOO_MANY, PartialPut
from agent.pool.volume.unit_buffers import Tail
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import prove
from agent.pool.write.eviction import Room, room_for
from agent.pool.write.slot_allocation import Reservation, best_choice

PUT_FRESH_SECONDS: Final = 0.02
"""A put right after the lookup that missed does not read the directories again. What another agent wrote
into the same set in between may be lost to it: a hit, in the worst case."""
RESERVE_TRIES: Final = 4
"""Between choosing a slot and taking it another worker may take it; then the choice is made anew."""


class Writing(PartialPut):
    """One value being written. `length` where it is known from the start, None where close decides."""

    def __init__(
        self,
        volume: Volume,
        key: bytes,
        *,
        length: int | None = None,
        ttl_seconds: int = 0,
        may_evict: bool = True,
    ) -> None:
        if length is not None and not 0 < length <= volume.settings.value_bytes:
            raise TooLong(f"{length} bytes; {volume.settings.name} takes 1 to {volume.settings.value_bytes}")
        self.volume = volume
        self.key = key
        self.pseudonym = volume.placement.pseudonym(key)
        self.already_there = False
        """The key was stored before: values are immutable, the first write wins, nothing was sent."""
        self.finished = False
        self._length = length
        self._ttl_seconds = ttl_seconds or volume.settings.ttl_seconds
        self._may_evict = may_evict
        self._room_set_aside = False
        self._reservation: Reservation | None = None
        self._units_sealed = 0
        """A bit for each."""
        self._tail = Tail(volume.unit_buffers)
        self._end = 0
        self._stored = False
        self._refusal: PutRefused | BadPut | None = None

    @property
    def stored(self) -> bool:
        """This put brought the value to flash, all of it."""
        return self._stored

    @property
    def received(self) -> int:
        """One past the last byte that came so far."""
        return self._end

    # -- the three calls of a put ---------------------------------------------------------------

    def write(self, lanes: Lanes, offset: int, data: memoryview, deadline: float) -> Steps[bool]:
        """Take bytes of the value. True when that completed a value of known length: it is on flash.

        Raises BadPut for bytes that do not fit, PutRefused where the value cannot be stored.
        """
        end = offset + len(data)
        limit = self._length if self._length is not None else self.volume.settings.value_bytes
        if end > limit:
            raise TooLong(f"bytes up to {end} of a value that ends at {limit}")
        if self.finished:
            self._refuse_after_failure()
            return True
        if not len(data):
            return False
        if self._waits:
            self._want_kept()
        if refusal := self.volume.refusal:
            self._end = end
            yield from self._give_up(lanes, PutRefused(refusal, MissCause.WRONG_KEY))
        if self._reservation is None and not self.already_there:
            if self.volume.bandwidth is not None:
                yield from self._wait_for_bandwidth(self.volume.bandwidth, lanes, deadline)
            if not self.volume.turns.take_at_once(self.pseudonym):
                yield from self._take_turn(lanes, deadline)
            try:
                yield from self._begin(lanes, deadline)
                self._end = end
                if len(data) == self._length and not self.already_there:
                    yield from self._write_whole(lanes, data, deadline)
                    return True
            finally:
                self.volume.turns.end(self.pseudonym)
        self._end = max(self._end, end)
        if self.already_there:
            self.finished = self._length is not None and self._end == self._length
            return self.finished
        yield from self._write_units(lanes, offset, data, deadline)
        if self._length is not None and self._complete(self._length):
            yield from self.finish(lanes, deadline)
            return True
        held = self.volume.codec.unit_bytes if self._tail else 0
        if not self._wait_for_more(self.volume.begun, self.volume.settings.volume_id, held, lanes):
            yield from self._give_up(lanes, PutRefused(TOO_MANY, MissCause.LATE))
        return False

    def finish(self, lanes: Lanes, deadline: float) -> Steps[None]:
        """The value is complete as it is: seal what is left, write the header, name it.

        Raises again what an earlier call raised when it gave up: a put that failed must not end well.
        """
        if self.finished:
            self._refuse_after_failure()
            return
        if self.already_there or not self._end:
            self.finished = True
            return
        if self._waits:
            self._want_kept()
        if self.volume.erased:
            yield from self._give_up(lanes, PutRefused("the volume was erased", MissCause.WRONG_KEY))
        reservation = self._reservation
        assert reservation is not None
        length = self._end
        if not self._complete(length) or (self._length or length) != length:
            wanted = self._length or length
            yield from self._give_up(lanes, BadPut(f"a value of {wanted} bytes with a hole in it"))
        whole = len(self._tail) == length
        if self._tail and not whole:
            yield from self._send_tail(lanes, deadline)
        yield from self._take_turn(lanes, deadline)
        try:
            if self._stored_meanwhile(lanes):
                lanes.tally(self.volume.settings.name).puts_already_there += 1
                self.already_there = True
                yield from self.drop(lanes)
            elif whole:
                yield from self._write_whole(lanes, self._tail.text(), deadline)
                self._tail.clear()
            else:
                header = self._header(lanes, reservation, length)
                yield from self._commit(lanes, reservation, [header], length, deadline)
        finally:
            self.volume.turns.end(self.pseudonym)

    def drop(self, lanes: Lanes) -> Steps[None]:
        """Give up: the reservation goes back; what was written is a slot that nobody names."""
        yield from ()  # steps, of which there are none
        self.finished = True
        if not self._was_given_up(self.volume.begun, self.volume.settings.volume_id):
            self._tail.clear()
            self._release()

    def abandon(self, lanes: Lanes) -> None:
        lanes.tally(self.volume.settings.name).puts_refused += 1
        self._tail.clear()
        self._release()

    def _want_kept(self) -> None:
        """Raises PutRefused where it was given up while it waited for its next piece."""
        if self._was_given_up(self.volume.begun, self.volume.settings.volume_id):
            self.finished, self._refusal = True, PutRefused(GIVEN_UP, MissCause.LATE)
            raise self._refusal

    def _give_up(self, lanes: Lanes, why: PutRefused | BadPut) -> Steps[None]:
        lanes.tally(self.volume.settings.name).puts_refused += isinstance(why, PutRefused)
        self._refusal = why
        yield from self.drop(lanes)
        raise why

    def _refuse_after_failure(self) -> None:
        if not self._stored and not self.already_there and self._end:
            raise self._refusal or BadPut("the put was given up")

    # -- how it is done -------------------------------------------------------------------------

    def _complete(self, length: int) -> bool:
        unit = self.volume.codec.unit_bytes
        units = -(-length // unit)
        sealed = self._units_sealed.bit_count() + (1 if self._tail else 0)
        tail_fits = not self._tail or self._tail.at + len(self._tail) == length
        return sealed == units and tail_fits

    def _wait_for_bandwidth(self, bandwidth: Bandwidth, lanes: Lanes, deadline: float) -> Steps[None]:
        if not (yield from bandwidth.admit(lanes, deadline)):
            lanes.tally(self.volume.settings.name).puts_refused += 1
            raise PutRefused("the tenant's bandwidth is used up", MissCause.LATE)

    def _take_turn(self, lanes: Lanes, deadline: float) -> Steps[None]:
        if (yield from self.volume.turns.take(self.pseudonym, deadline)):
            return
        refused = PutRefused("another put of the key does not come to its end", MissCause.LATE)
        if self._reservation is not None:
            yield from self._give_up(lanes, refused)
        lanes.tally(self.volume.settings.name).puts_refused += 1
        raise refused

    def _stored_meanwhile(self, lanes: Lanes) -> bool:
        """Whether another put has stored the key since this one began, as far as is known without asking."""
        sets = self.volume.borrow_sets(self.pseudonym)
        try:
            return any(found.stands(lanes) for found in self.volume.find(sets, self.pseudonym))
        finally:
            self.volume.give_back_sets(sets)

    def _begin(self, lanes: Lanes, deadline: float) -> Steps[None]:
        volume = self.volume
        sets = volume.borrow_sets(self.pseudonym)
        try:
            unread = [
                each for each in sets if each.fault or not volume.is_fresh(each, lanes, PUT_FRESH_SECONDS)
            ]
            trouble = None
            if unread:
                # Half of the time at most: with one enclosure hung, the other has to take the value in time.
                half = lanes.now() + max(0.0, deadline - lanes.now()) / 2
                trouble = yield from volume.load(lanes, unread, half)
            for found in volume.find(sets, self.pseudonym):
                if found.stands(lanes):
                    self.already_there = True
                    lanes.tally(self.volume.settings.name).puts_already_there += 1
                    return
                found.forget()
            takers = volume.takers(self.pseudonym, sets)
            usable = [cached for cached in takers if _may_take(cached)]
            if not usable and any(cached.in_doubt for cached in takers):
                # Each alone would do, and with one enclosure hung the other has to take the value in time.
                trouble = yield from prove(volume, lanes, takers, lanes.now() + (deadline - lanes.now()) / 2)
                usable = [cached for cached in takers if _may_take(cached)]
            if not usable:
                lanes.tally(self.volume.settings.name).puts_refused += 1
                raise PutRefused("no enclosure that this key belongs to answers", trouble or MissCause.LATE)
            everywhere, room = len(usable) == len(takers), Room.SET_ASIDE
            if volume.quota is not None and volume.quota.limits.of_room:
                may_evict = everywhere and self._may_evict
                room = yield from room_for(volume, lanes, usable, may_evict=may_evict, deadline=deadline)
                if room is Room.NONE:
                    lanes.tally(volume.settings.name).puts_refused += 1
                    used_up = f"the tenant of volume {volume.settings.name} has used up its quota"
                    raise PutRefused(used_up, passes=not everywhere)
                self._room_set_aside = True
            self._reserve(lanes, usable, everywhere=everywhere, exchange=room is Room.EXCHANGE)
        finally:
            volume.give_back_sets(sets)

    def _reserve(
        self, lanes: Lanes, sets: list[CachedSet], *, everywhere: bool, exchange: bool = False
    ) -> None:
        """Choose and reserve a slot; evict only where both sets are full, or for `exchange`, and no put that
        has long waited for its next piece has a slot to give.

        With one of two enclosures away nothing is evicted: the volume as a whole may have plenty of
        room, and what must hold is that live data then stays.
        """
        volume = self.volume
        for _ in range(RESERVE_TRIES):
            best = best_choice(sets, lanes, self.pseudonym, exchange=exchange)
            evicts = best is None or (best[1].victim is not None and best[1].cost != float("inf"))
            if evicts and volume.begun.make_way(volume.settings.volume_id, lanes):
                continue
            if best is None or (evicts and not (everywhere and self._may_evict)):
                break
            cached, choice = best
            if self._take(lanes, cached, choice):
                return
        self._release()
        lanes.tally(self.volume.settings.name).puts_refused += 1
        since = "" if everywhere else " while an enclosure is away"
        why = f"volume {volume.settings.name} has no slot for this key that may be used{since}"
        raise PutRefused(why, passes=not everywhere)

    def _take(self, lanes: Lanes, cached: CachedSet, choice: Choice) -> bool:
        volume, slot = self.volume, choice.slot
        with cached.guard:
            directory = cached.directory
            if directory is None or slot in cached.reserved:
                return False
            present = directory.entry(slot)
            if (present and present.generation) != (choice.victim and choice.victim.generation):
                return False
            if present is not None:
                expired = bool(present.expiry) and present.expiry <= lanes.wall()
                if expired:
                    lanes.tally(self.volume.settings.name).evictions_expired += 1
                else:
                    lanes.tally(self.volume.settings.name).evictions += 1
                directory.clear(slot, ghost=None if expired else present.pseudonym)
            cached.reserved.add(slot)
        # The set stays borrowed while it holds a reservation, so that the cache cannot drop it.
        volume.cache.borrow(cached.namespace, cached.offset)
        codec = volume.sealing_codec(lanes.now())
        sealer = codec.seal(self.key, new_generation(lanes.wall()), volume.place(cached, slot))
        self._reservation = Reservation(cached, slot, sealer, volume.slot_offset(cached, slot))
        return True

    def _release(self) -> None:
        reservation, self._reservation = self._reservation, None
        if self._room_set_aside and self.volume.quota is not None:
            self._room_set_aside = False
            self.volume.quota.give_back(self.volume.settings.slot_bytes)
        if self.held:
            held, self.held = self.held, 0
            self.volume.begun.give_back(held)
        if reservation is not None:
            with reservation.cached.guard:
                reservation.cached.reserved.discard(reservation.slot)
            self.volume.cache.give_back(reservation.cached)

    def _write_whole(self, lanes: Lanes, data: memoryview, deadline: float) -> Steps[None]:
        reservation = self._reservation
        assert reservation is not None
        size = HEADER_BYTES + self.volume.codec.padded(len(data))
        buffer = lanes.send_buffer(size + PROOF_BYTES)
        reservation.sealer.seal(0, data, buffer[HEADER_BYTES:])
        wall = lanes.wall()
        reservation.sealer.header_into(buffer, len(data), self._expiry(wall), int(wall * 1e6))
        yield from self._commit(lanes, reservation, [buffer[:size]], len(data), deadline)

    def _write_units(self, lanes: Lanes, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """Seal and send the whole units of `data`; what is left of the last one waits in the tail."""
        unit = self.volume.codec.unit_bytes
        if self._tail and offset == self._tail.at + len(self._tail):
            taken = min(unit - len(self._tail), len(data))
            self._tail.append(data[:taken])
            lanes.tally(self.volume.settings.name).bytes_copied += taken
            offset, data = offset + taken, data[taken:]
            # A value that ends with its first unit is sent with its header, by `finish`.
            if len(self._tail) == unit and (self._length is None or self._length > unit):
                yield from self._send_tail(lanes, deadline)
        if not len(data):
            return
        if offset % unit or (self._tail and len(data) % unit):
            yield from self._give_up(lanes, BadPut("a value is written from its start on, or in whole units"))
        # The last unit, too, is whole as it is.
        whole = len(data) if offset + len(data) == self._length else len(data) // unit * unit
        if whole:
            yield from self._send_units(lanes, offset, data[:whole], deadline)
        if whole < len(data):
            self._tail.begin(offset + whole, data[whole:])
            lanes.tally(self.volume.settings.name).bytes_copied += len(self._tail)

    def _send_tail(self, lanes: Lanes, deadline: float) -> Steps[None]:
        yield from self._send_units(lanes, self._tail.at, self._tail.text(), deadline)
        self._tail.clear()

    def _send_units(self, lanes: Lanes, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        reservation = self._reservation
        assert reservation is not None
        first = offset // self.volume.codec.unit_bytes
        units = ((1 << -(-len(data) // self.volume.codec.unit_bytes)) - 1) << first
        if self._units_sealed & units:
            yield from self._give_up(lanes, BadPut("bytes of a value are written once"))
        buffer = lanes.send_buffer(self.volume.codec.padded(len(data)) + PROOF_BYTES)
        taken = reservation.sealer.seal(first, data, buffer)
        self._units_sealed |= units
        pending = lanes.write(
            reservation.cached.namespace, reservation.offset + HEADER_BYTES + offset, [buffer[:taken]]
        )
        cause = yield from wait_for(lanes, pending, deadline)
        if cause is not None:
            yield from self._fail(lanes, pending, cause)

    def _header(self, lanes: Lanes, reservation: Reservation, length: int) -> bytes:
        wall = lanes.wall()
        return reservation.sealer.header(length, expiry=self._expiry(wall), stored_us=int(wall * 1e6))

    def _expiry(self, wall: float) -> int:
        return min(int(wall) + self._ttl_seconds, TIME_MAX) if self._ttl_seconds else 0

    def _commit(
        self,
        lanes: Lanes,
        reservation: Reservation,
        parts: list[memoryview] | list[bytes],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        """Write the last of the slot and its entry; both on flash is what acknowledges the put."""
        cached, codec, settings = reservation.cached, reservation.sealer.codec, self.volume.settings
        doubt = yield from self.volume.vouches(lanes, cached.namespace, codec, deadline)
        if doubt is not None:
            yield from self._give_up(lanes, PutRefused(words_for(doubt), doubt))
        alone = cached.writer.acquire(blocking=False)
        try:
            if alone:
                yield from self._prove(lanes, cached, deadline)
            slot_write = lanes.write(cached.namespace, reservation.offset, parts, more=alone)
            if not alone:
                cause = yield from wait_for(lanes, slot_write, deadline)
                if cause is not None:
                    yield from self._fail(lanes, slot_write, cause)
                alone = yield Acquire(cached.writer, deadline)
                if not alone:
                    yield from self._fail(lanes, slot_write, MissCause.LATE)
                yield from self._prove(lanes, cached, deadline)
            image, entry = self._image(lanes, reservation, length)
            directory_write = lanes.write(cached.namespace, cached.offset, [image.image()])
            for pending in (slot_write, directory_write):
                cause = yield from wait_for(lanes, pending, deadline)
                if cause is not None:
                    yield from wait_for(lanes, directory_write, min(deadline, lanes.now() + ANSWER_SECONDS))
                    self.volume.unsettled.write_failed(cached, reservation.slot, entry, lanes.now())
                    yield from self._fail(lanes, pending, cause)
            doubt = yield from self.volume.vouches(lanes, cached.namespace, codec, deadline)
            if doubt is not None:
                cached.disprove(reservation.slot, entry.generation)
                yield from self._give_up(lanes, PutRefused(words_for(doubt), doubt))
            with cached.guard:
                if cached.directory is not None:
                    self._forget_others(cached.directory)
                    cached.directory.take_over(reservation.slot, image)
                    cached.loaded_at = max(cached.loaded_at, lanes.now())
                cached.disproven.pop(reservation.slot, None)
        finally:
            if alone:
                cached.end_write()
        self._release()
        self.finished = self._stored = True
        tally = lanes.tally(settings.name)
        tally.puts += 1
        tally.bytes_written += length
        if settings.copies > 1:
            self.volume.owed.note(self.pseudonym)
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, length)

    def _prove(self, lanes: Lanes, cached: CachedSet, deadline: float) -> Steps[None]:
        """The set, whose writer is held, may be written; else the put is given up."""
        if not cached.in_doubt:
            return
        doubt = yield from prove(self.volume, lanes, [cached], deadline, holds_writers=True)
        if doubt is not None:
            yield from self._give_up(lanes, PutRefused(IN_DOUBT, doubt))

    def _image(self, lanes: Lanes, reservation: Reservation, length: int) -> tuple[Directory, Entry]:
        """The directory as it is to be on flash: with the value's entry, the slot's ghost in it, instead of
        any older entry of the key."""
        cached, slot, sealer, wall = reservation.cached, reservation.slot, reservation.sealer, lanes.wall()
        with cached.guard:
            assert cached.directory is not None
            image = cached.directory.copy()
        self._forget_others(image)
        used, expiry, flags = int(wall * 1e6), self._expiry(wall), flags_of(sealer.codec.epoch)
        ghost, tag = image.ghost(slot), sealer.tag()
        # A named tuple's own way to be made is interpreted.
        entry = tuple.__new__(
            Entry, (self.pseudonym, sealer.generation, used, length, expiry, 0, 0, flags, ghost, tag)
        )
        image.install(slot, entry)
        return image, entry

    def _forget_others(self, directory: Directory) -> None:
        for older in directory.find_all(self.pseudonym):
            directory.clear(older)

    def _fail(self, lanes: Lanes, pending: Pending, cause: MissCause) -> Steps[None]:
        why = pending.fault or "no answer in time"
        reservation = self._reservation
        if reservation is not None and cause is not MissCause.ENCLOSURE_DOWN:
            reservation.cached.shun(reservation.slot, lanes.now())
            if cause is MissCause.CORRUPT:
                self.volume.damage.refused_a_write(reservation.cached, reservation.slot)
        yield from self._give_up(lanes, PutRefused(f"the enclosure did not take it: {why}", cause))


def _may_take(cached: CachedSet) -> bool:
    """Whether a set's directory was read, and says truly which slots are free."""
    return cached.directory is not None and cached.fault is None and not cached.in_doubt
