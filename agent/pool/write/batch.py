"""Puts of many short values by one call: each goes on as soon as what it waits for is there.

A value's directories are read first, and nothing is held meanwhile. Then, without a wait, it takes its key's
lock, reserves a slot and is sealed. The values of one set are committed together: their slots side by side,
and one write of the directory that names them all. So a set that hangs holds its own locks alone. A value
that has been answered holds nothing more, however long others of the call take.

Nothing but a set's writer is ever waited for with a lock in hand, and with each writer only the locks of its
own values. A key that another put has locked is left to a put of its own (`UNTRIED`). So is any other value
that would have to wait for more: where its tenant owes bandwidth or has to evict at its quota, or where a
directory is in doubt. Nothing was done for these, so to try them again repeats no write.

No more values are under way than a queue has room for. Those at a namespace that has not answered for
`SLOW_SECONDS` do not count, and it gets no more of the call until it does. Values leave in volleys, for each
send and each wake-up costs as much as a value: the next are begun when half of those under way have ended.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import IN_DOUBT, BadPut, PutRefused
from agent.pool.format.directory import Directory, Entry
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import miss_cause_of, wait_for
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Wait, in_volleys
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.side_by_side import AnyOf, Part, Parts
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable, prove
from agent.pool.write.name_together import NOT_IN_TIME, UnnamedWriter
from agent.pool.write.put import NO_ANSWER, UNREAD, is_known, may_take
from agent.pool.write.writer_base import PutState

AT_ONCE: Final = 32
"""Values under way, each with two commands; fewer where a queue takes fewer of a worker."""
COMMANDS_OF_VALUE: Final = 2
VOLLEY: Final = 4
"""Values that do not wait for others to leave with."""
SLOW_SECONDS: Final = 0.05
SEND_BYTES: Final = 3 << 20
"""Of the worker's send buffer, for all values of a call."""
_PAGE_BYTES: Final = 4096
_SEALING: Final = threading.Lock()
"""One worker of a process seals at a time. Each seal lets go of the interpreter's lock, and two workers would
hand that to each other at every value, for as long as the cipher takes. Its holder waits for nothing."""


class Untried:
    """Nothing was done for a value: it wants a put of its own."""


UNTRIED: Final = Untried()
Became: TypeAlias = PutRefused | BadPut | Untried | bool
"""Of one value; True: this call brought it to flash; False: the key was stored before."""


class TogetherWriter(UnnamedWriter):
    """One value of a call. It is never seen in the state WAITING."""

    def take_place(
        self,
        channel: IoChannel,
        sets: Sequence[CachedSet],
        trouble: MissCause | None,
        data: memoryview,
        buffer: memoryview,
    ) -> memoryview | None:
        """The slot as it is to be written, in `buffer`, once one is reserved; None as of `take_slot`. Raises
        PutRefused."""
        if not self.take_slot(channel, sets, trouble, len(data)):
            return None
        return self._seal_whole(channel, self.reservation, data, buffer)

    def take_slot(
        self, channel: IoChannel, sets: Sequence[CachedSet], trouble: MissCause | None, length: int
    ) -> bool:
        """Reserve one. False where the key is there (`already_there`) or the value wants a put of its own
        (its state is NEW then).

        The key's lock is held, and `sets` were read just now, or could not be: `trouble`. Raises PutRefused.
        """
        volume = self._volume
        if refusal := volume.refusal:
            self._refuse(channel, PutRefused(refusal, MissCause.WRONG_KEY))
        for found in volume.find(sets, self.pseudonym):
            if found.is_live(channel):
                self._end = length
                self._found_there(channel)
                return False
            found.drop_hint()
        targets = volume.write_targets(self.pseudonym, sets)
        usable = [cached for cached in targets if may_take(cached)]
        if any(cached.in_doubt for cached in targets):
            return False
        if not usable:
            self._refuse(channel, PutRefused(NO_ANSWER, trouble or MissCause.LATE))
        if volume.quota is not None and volume.quota.limits.of_room:
            if not volume.quota.set_aside(volume.settings.slot_bytes):
                return False
            self._room_set_aside = True
        self._reserve(channel, usable, everywhere=len(usable) == len(targets))
        self._end = length
        return True


class _Put:
    """One value, from the call's beginning to its end."""

    __slots__ = ("missing", "number", "sealed", "sets", "slot_write", "trouble", "writing")

    def __init__(self, number: int, writing: TogetherWriter, sets: Sequence[CachedSet]) -> None:
        self.number: Final = number
        self.writing: Final = writing
        self.sets: Final = sets
        self.missing = 0
        """Its directories that are being read."""
        self.trouble: MissCause | None = None
        self.sealed = memoryview(b"")
        self.slot_write: Pending | None = None

    def waits_for(self, namespaces: set[int]) -> bool:
        """Whether one of these may keep it from its end."""
        if self.writing.state is PutState.TAKING:
            return self.writing.reservation.cached.namespace in namespaces
        return any(cached.namespace in namespaces for cached in self.sets)


def write_together(
    volume: Volume,
    channel: IoChannel,
    keys: Sequence[bytes],
    values: Sequence[memoryview],
    wait_seconds: float,
    ttl_seconds: int = 0,
) -> Steps[list[Became]]:
    """Store these values, and say what became of each. All of them have `wait_seconds` together.

    For a volume without G4 below, none of whose values waits in memory. Raises TooLong.
    """
    lengths = list(map(len, values))
    writers = [
        TogetherWriter(volume, key, length=length, ttl_seconds=ttl_seconds, pseudonym=pseudonym)
        for key, pseudonym, length in zip(keys, volume.pseudonyms(keys), lengths, strict=True)
    ]
    batch = _Batch(volume, channel, writers, values, channel.now() + wait_seconds)
    try:
        yield from batch.run()
    finally:
        batch.close()
    return batch.became


class _Batch:
    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        writers: Sequence[TogetherWriter],
        values: Sequence[memoryview],
        until: float,
    ) -> None:
        self._volume: Final = volume
        self._channel: Final = channel
        self._values: Final = values
        self._until: Final = until
        self._begins_until: Final = channel.now() + (until - channel.now()) / 2
        """A value that is begun later would be given too little time."""
        self.became: Final[list[Became]] = [UNTRIED] * len(writers)
        self._rooms: Final = rooms_for(volume, channel, values)
        self._parts: Final = Parts(channel)
        pseudonyms = b"".join([writing.pseudonym for writing in writers])
        self._borrowed: Final = volume.borrow_sets_of_many(pseudonyms)
        self._new: list[_Put] = [
            _Put(number, writing, self._borrowed[number]) for number, writing in enumerate(writers)
        ]
        """Those that were not begun."""
        self._under_way: Final[dict[_Put, None]] = {}
        self._left_keys: Final[set[bytes]] = set()
        """Keys of values that want a put of their own: a later value of the key may not come before it."""
        self._locked: Final[set[_Put]] = set()
        """Those whose key's lock is held."""
        self._reading: Final[dict[int, list[_Put]]] = {}
        """By the identity of a directory that is being read: who waits for it."""
        self._unread: Final[dict[int, MissCause]] = {}
        """Directories that could not be read, and why: they are not asked for again."""
        self._sealed: Final[dict[int, list[_Put]]] = {}
        """By the identity of its set: those that wait to be committed."""
        self._committing: Final[set[int]] = set()
        """Sets whose directory is being written."""
        self._in_flight = 0
        """Commands of this call that no enclosure has answered, those that were given up included."""

    def run(self) -> Steps[None]:
        while True:
            self._begin()
            # Others that are there by now leave with them.
            few = 0 < sum(map(len, self._sealed.values())) < VOLLEY
            if few and self._reading and (yield from self._parts.look()):
                continue
            self._commit_sealed()
            if not len(self._parts):
                if self._is_through() and not self._sealed:
                    return
                continue  # those of this round ended without a wait
            yield from self._parts.go_on(may_grow=bool(self._new))

    def close(self) -> None:
        """Let go of everything; after the end there is nothing."""
        self._parts.close()
        for put in [*self._under_way, *self._new]:
            self._let_go(put)
        for sets in self._borrowed:
            self._volume.give_back_sets(sets)

    def _is_through(self) -> bool:
        return not self._new or self._channel.now() >= self._begins_until

    # -- a value's beginning ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Read the directories of as many values as there is room for."""
        now = self._channel.now()
        if self._is_through():
            return
        # A queue that is connected with the first values of the call says only then what it takes.
        depth = self._channel.queue_depth()
        at_once = max(1, min(AT_ONCE, depth // COMMANDS_OF_VALUE))
        slow = self._parts.namespaces(begun_before=now - SLOW_SECONDS)
        going = sum(not put.waits_for(slow) for put in self._under_way) if slow else len(self._under_way)
        room = at_once - going
        if room < min(len(self._new), (at_once + 1) // 2):
            return
        # What hangs has its place in the queue still.
        room = min(room, max(1, (depth - self._in_flight) // COMMANDS_OF_VALUE))
        left: list[_Put] = []
        begun: list[_Put] = []
        for put in self._new:
            if room <= 0 or (slow and put.waits_for(slow)):
                left.append(put)
            elif not self._is_admitted():
                self._leave(put)
            else:
                room -= 1
                self._under_way[put] = None
                begun.append(put)
        self._new = left
        self._read(begun)

    def _is_admitted(self) -> bool:
        """A call takes no seat among those that wait for bandwidth."""
        bandwidth = self._volume.bandwidth
        return bandwidth is None or bandwidth.is_ready(self._channel)

    def _read(self, begun: list[_Put]) -> None:
        """Read the directories of these, all that go to one namespace by one send."""
        volume, channel = self._volume, self._channel
        wanted: list[CachedSet] = []
        for put in begun:
            put.missing = 1  # until all reads have left: one may fail at once
            for cached in put.sets:
                at = id(cached)
                if at in self._unread:
                    put.trouble = self._unread[at]
                elif at in self._reading:
                    self._reading[at].append(put)
                    put.missing += 1
                elif cached.fault or not is_known(volume, cached, channel):
                    self._reading[at] = [put]
                    put.missing += 1
                    wanted.append(cached)
        for cached, more in _in_volleys(wanted):
            self._parts.start(cached.namespace, self._load(cached, more=more))
        with _SEALING:
            for put in begun:
                self._is_read(put)

    def _load(self, cached: CachedSet, *, more: bool) -> Part:
        channel, at = self._channel, id(cached)
        # Half of the time at most, as of a put: another enclosure has to take the value in time.
        half = channel.now() + max(0.0, self._until - channel.now()) / 2
        self._in_flight += 1
        trouble = yield from self._volume.load(channel, (cached,), half, more=more)
        self._answered(trouble)
        if trouble is not None:
            self._unread[at] = trouble
        for put in self._reading.pop(at):
            put.trouble = trouble or put.trouble
            self._is_read(put)

    def _is_read(self, put: _Put) -> None:
        """One of its directories came, or did not."""
        put.missing -= 1
        if not put.missing:
            self._seal(put)

    def _seal(self, put: _Put) -> None:
        """Its directories are there: take the key's lock and a slot, without a wait, and seal it."""
        writing = put.writing
        buffer = self._rooms[put.number]
        may_go_on = len(buffer) > 0 and writing.pseudonym not in self._left_keys
        if not may_go_on or not self._volume.key_locks.take_at_once(writing.pseudonym):
            self._leave(put)
            return
        self._locked.add(put)
        value = self._values[put.number]
        try:
            sealed = writing.take_place(self._channel, put.sets, put.trouble, value, buffer)
        except (PutRefused, BadPut) as refused:
            self._end(put, refused)
            return
        if sealed is not None:
            put.sealed = sealed
            self._sealed.setdefault(id(writing.reservation.cached), []).append(put)
        elif writing.already_there:
            self._end(put, False)
        else:
            self._leave(put)

    def _leave(self, put: _Put) -> None:
        """It wants a put of its own, and so do later values of its key."""
        self._left_keys.add(put.writing.pseudonym)
        self._let_go(put)

    def _end(self, put: _Put, became: Became) -> None:
        self.became[put.number] = became
        self._let_go(put)

    def _let_go(self, put: _Put) -> None:
        """It holds nothing of the call any more."""
        self._under_way.pop(put, None)  # one that was not begun is not among them
        if not put.writing.finished:
            put.writing.drop()
        if put in self._locked:
            self._locked.remove(put)
            self._volume.key_locks.end(put.writing.pseudonym)

    # -- a set's commit ---------------------------------------------------------------------------------

    def _commit_sealed(self) -> None:
        """Write the values that are sealed, of each set whose directory this call does not write just now."""
        sets: list[CachedSet] = []
        now, room = self._channel.now(), self._channel.queue_depth() - self._in_flight
        for at, puts in self._sealed.items():
            if at in self._committing:
                continue
            room -= len(puts) + 1
            if room < 0 and (sets or self._parts.has_begun_since(now - SLOW_SECONDS)):
                break  # The others go when some of the queue's commands have been answered.
            sets.append(puts[0].writing.reservation.cached)
        for cached, more in _in_volleys(sets):
            at = id(cached)
            self._committing.add(at)
            puts = self._sealed.pop(at)
            self._parts.start(cached.namespace, self._commit(cached, puts, more=more))

    def _commit(self, cached: CachedSet, puts: list[_Put], *, more: bool) -> Part:
        """Write slots of one set and the directory that names them."""
        try:
            until = self._until
            if not cached.writer.acquire(blocking=False) and not (
                yield Acquire(cached.writer, until, gives_way=True)
            ):
                self._refuse(puts, NOT_IN_TIME)
                return
            try:
                yield from self._write(cached, puts, more=more)
            finally:
                cached.end_write()
        finally:
            self._committing.discard(id(cached))

    def _write(self, cached: CachedSet, puts: list[_Put], *, more: bool) -> Part:
        """With the set's writer held. As `_name` of put.py, for several values."""
        volume, channel, until = self._volume, self._channel, self._until
        if not volume.may_write(cached, channel):
            if (yield from load_writable(volume, channel, [cached], until)) is not None:
                self._refuse(puts, IN_DOUBT if cached.in_doubt else UNREAD)
                return
        elif cached.in_doubt:
            yield from prove(volume, channel, [cached], until, holds_writers=True)
            if cached.in_doubt:
                self._refuse(puts, IN_DOUBT)
                return
        if channel.now() >= until:
            self._refuse(puts, NOT_IN_TIME)
            return
        left = list(puts)
        if not self._may_be_named(left):
            for put in puts:
                try:
                    yield from put.writing.vouch(channel, until)
                except PutRefused as refused:
                    left.remove(put)
                    self._end(put, refused)
            if not left:
                return
        with cached.guard:
            assert cached.directory is not None
            image = cached.directory.copy()
        entries = {put.number: put.writing.enter_into(channel, image) for put in left}
        for put in left:
            at = put.writing.reservation.offset
            put.slot_write = channel.write(cached.namespace, at, [put.sealed], more=True)
        naming = channel.write(cached.namespace, cached.offset, [image.image()], more=more)
        self._in_flight += len(left) + 1
        unnamed: MissCause | None = MissCause.LATE
        try:
            unnamed = yield from wait_for(channel, naming, until)
            self._answered(unnamed)
            while left:
                ended = [put for put in left if _slot_write(put).done]
                if not ended:
                    yield AnyOf([_slot_write(put) for put in left], until)
                    # Where none is done the time is up, for all of them.
                    ended = [put for put in left if _slot_write(put).done] or list(left)
                may_be_named = self._may_be_named(ended)
                for put in ended:
                    pending = _slot_write(put)
                    unwritten = miss_cause_of(channel, pending, (yield Wait(pending, until)))
                    self._answered(unwritten)
                    left.remove(put)
                    cause = unwritten or unnamed
                    if cause is None:
                        if may_be_named:
                            put.writing.show_stored(channel, image)
                            self._end(put, True)
                        else:
                            yield from self._name(put, image, entries[put.number])
                        continue
                    is_answered = all(each in (None, MissCause.CORRUPT) for each in (unwritten, unnamed))
                    failed = pending if unwritten is not None else naming
                    self._fail(put, failed, cause, entries[put.number], is_answered=is_answered)
        finally:
            # Some are left only where the call breaks off: what was sent may land, as after a late answer.
            for put in left:
                for pending in (_slot_write(put), naming):
                    if not pending.done:
                        channel.abandon(pending)
                self._fail(put, naming, MissCause.LATE, entries[put.number], is_answered=False)

    def _answered(self, cause: MissCause | None) -> None:
        """A command has ended. One that is late is in its queue still."""
        if cause is not MissCause.LATE:
            self._in_flight -= 1

    def _may_be_named(self, puts: Sequence[_Put]) -> bool:
        """Whether the keys that they are sealed by are known to be good, without a question. Mostly it is one
        key."""
        codecs = {put.writing.reservation.sealer.codec for put in puts}
        return all(self._volume.vouches_at_once(self._channel, codec) for codec in codecs)

    def _name(self, put: _Put, image: Directory, entry: Entry) -> Steps[None]:
        """Its slot and its entry are on flash."""
        try:
            yield from put.writing.named(self._channel, image, entry, self._until)
        except PutRefused as refused:
            self._end(put, refused)
        else:
            self._end(put, True)

    def _fail(
        self, put: _Put, pending: Pending, cause: MissCause, entry: Entry, *, is_answered: bool
    ) -> None:
        failed = put.writing.failed(self._channel, pending, cause, entry, is_answered=is_answered)
        self._end(put, failed)

    def _refuse(self, puts: list[_Put], why: str) -> None:
        """Nothing of them was written."""
        for put in puts:
            self._end(put, put.writing.refuse(self._channel, PutRefused(why, MissCause.LATE)))


def _in_volleys(sets: Sequence[CachedSet]) -> list[tuple[CachedSet, bool]]:
    """The sets by their places, and whether the next one lies on the same namespace."""
    places = [(each.namespace, each.offset) for each in sets]
    return [(sets[number], more) for number, more in in_volleys(places)]


def _slot_write(put: _Put) -> Pending:
    assert put.slot_write is not None
    return put.slot_write


def rooms_for(volume: Volume, channel: IoChannel, values: Sequence[memoryview]) -> list[memoryview]:
    """Each value's part of the worker's send buffer; none where that is used up. They begin at pages."""
    sizes = [
        -(-(HEADER_BYTES + volume.codec.padded(len(value)) + PROOF_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        for value in values
    ]
    buffer = channel.send_buffer(min(sum(sizes), SEND_BYTES))
    ends = list(itertools.accumulate(sizes))
    return [
        buffer[end - size : end] if end <= len(buffer) else buffer[:0]
        for size, end in zip(sizes, ends, strict=True)
    ]
