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
# One idea in one file: the life of one call, whose parts share what it holds.

import itertools
from collections.abc import Sequence
from typing import Final, TypeAlias

from agent.inline.cipher_suites import PROOF_BYTES
from agent.pool.counters import MissCause
from agent.pool.errors import IN_DOUBT, BadPut, PutRefused
from agent.pool.format.directory import Directory, Entry
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import miss_cause_of
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Wait, Write, in_volleys
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


class _Write:
    """One that was sent; `cause` where it failed."""

    __slots__ = ("cause", "is_answered", "pending")

    def __init__(self, pending: Pending) -> None:
        self.pending: Final = pending
        self.is_answered = False
        self.cause: MissCause | None = None


class _Put:
    """One value, from the call's beginning to its end."""

    __slots__ = ("entry", "missing", "number", "sealed", "sets", "slot_write", "trouble", "writing")

    def __init__(self, number: int, writing: TogetherWriter, sets: Sequence[CachedSet]) -> None:
        self.number: Final = number
        self.writing: Final = writing
        self.sets: Final = sets
        self.missing = 0
        """Its directories that are being read."""
        self.trouble: MissCause | None = None
        self.sealed = memoryview(b"")
        self.slot_write: _Write | None = None
        self.entry: Entry | None = None

    def waits_for(self, namespaces: set[int]) -> bool:
        """Whether one of these may keep it from its end."""
        if self.writing.state is PutState.TAKING:
            return self.writing.reservation.cached.namespace in namespaces
        return any(cached.namespace in namespaces for cached in self.sets)


class _Commit:
    """Values of one set, which one write of its directory names."""

    __slots__ = ("cached", "has_writer", "image", "naming", "puts", "waiting")

    def __init__(self, cached: CachedSet, puts: list[_Put]) -> None:
        self.cached: Final = cached
        self.puts = puts
        """Those that have not ended."""
        self.has_writer = False
        self.image: Directory
        self.naming: _Write | None = None
        """The directory's, once that and those of the slots were sent."""
        self.waiting: list[_Write] = []
        """Without an answer, in the order in which they were sent."""


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
        self._commits: Final[dict[int, _Commit]] = {}
        """By the identity of its set: what is being written."""
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
        for commit in list(self._commits.values()):
            self._close_commit(commit)
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
        """Write the values that are sealed, of each set whose directory this call does not write just now.
        What need not wait goes to each namespace by one send."""
        commits: list[_Commit] = []
        now, room = self._channel.now(), self._channel.queue_depth() - self._in_flight
        for at, puts in self._sealed.items():
            if at in self._commits:
                continue
            room -= len(puts) + 1
            if room < 0 and (commits or self._parts.has_begun_since(now - SLOW_SECONDS)):
                break  # The others go when some of the queue's commands have been answered.
            commits.append(_Commit(puts[0].writing.reservation.cached, puts))
        commits.sort(key=_place)
        ready: list[_Commit] = []
        for commit in commits:
            at = id(commit.cached)
            self._commits[at] = commit
            del self._sealed[at]
            if self._is_ready(commit, now):
                ready.append(commit)
        self._send(ready)
        for commit in commits:
            self._parts.start(commit.cached.namespace, self._commit(commit))

    def _is_ready(self, commit: _Commit, now: float) -> bool:
        """Take the set's writer where it is free; whether its directory may be written with what is known."""
        cached = commit.cached
        commit.has_writer = cached.writer.acquire(blocking=False)
        if not commit.has_writer or now >= self._until:
            return False
        may_write = self._volume.may_write(cached, self._channel) and not cached.in_doubt
        return may_write and self._may_be_named(commit.puts)

    def _commit(self, commit: _Commit) -> Part:
        """Write slots of one set and the directory that names them, unless that was done; and see what comes
        of it."""
        channel, until = self._channel, self._until
        try:
            if commit.naming is None:
                yield from self._make_ready(commit)
                if not commit.puts:
                    return
                self._send([commit])
            while commit.puts:
                # Mostly the directory's write is the last to be answered.
                naming = _sent(commit.naming)
                waited = commit.waiting if naming.is_answered else [naming]
                in_time = yield AnyOf([write.pending for write in waited], until)
                if not in_time:
                    for write in commit.waiting:
                        yield Wait(write.pending, until)  # so each counts as late
                stored = self._ended(commit, in_time=in_time)
                may_be_named = not stored or self._may_be_named(stored)
                for put in stored:
                    if may_be_named:
                        commit.puts.remove(put)
                        put.writing.show_stored(channel, commit.image)
                        self._end(put, True)
                    else:
                        yield from self._name(put, commit)
                        commit.puts.remove(put)
        finally:
            self._close_commit(commit)

    def _make_ready(self, commit: _Commit) -> Part:
        """Wait for the set's writer, and for what else it takes to write its directory. As `_name` of put.py,
        for several values. Those that cannot be written are taken out."""
        volume, channel, until, cached = self._volume, self._channel, self._until, commit.cached
        if not commit.has_writer:
            commit.has_writer = yield Acquire(cached.writer, until, gives_way=True)
            if not commit.has_writer:
                self._refuse(commit, NOT_IN_TIME)
                return
        if not volume.may_write(cached, channel):
            if (yield from load_writable(volume, channel, [cached], until)) is not None:
                self._refuse(commit, IN_DOUBT if cached.in_doubt else UNREAD)
                return
        elif cached.in_doubt:
            yield from prove(volume, channel, [cached], until, holds_writers=True)
            if cached.in_doubt:
                self._refuse(commit, IN_DOUBT)
                return
        if channel.now() >= until:
            self._refuse(commit, NOT_IN_TIME)
            return
        if not self._may_be_named(commit.puts):
            for put in list(commit.puts):
                try:
                    yield from put.writing.vouch(channel, until)
                except PutRefused as refused:
                    commit.puts.remove(put)
                    self._end(put, refused)

    def _send(self, commits: Sequence[_Commit]) -> None:
        """With the writers of their sets held."""
        channel = self._channel
        writes: list[Write] = []
        for commit in commits:
            cached = commit.cached
            with cached.guard:
                assert cached.directory is not None
                image = commit.image = cached.directory.copy()
            for put in commit.puts:
                put.entry = put.writing.enter_into(channel, image)
                writes.append((cached.namespace, put.writing.reservation.offset, [put.sealed]))
            writes.append((cached.namespace, cached.offset, [image.image()]))
        if not writes:
            return
        pendings = channel.write_many(writes)
        self._in_flight += len(pendings)
        at = 0
        for commit in commits:
            for put in commit.puts:
                put.slot_write = _Write(pendings[at])
                commit.waiting.append(put.slot_write)
                at += 1
            commit.naming = _Write(pendings[at])
            commit.waiting.append(commit.naming)
            at += 1

    def _ended(self, commit: _Commit, *, in_time: bool) -> list[_Put]:
        """The values whose slot and entry are on flash since the last look. Those that one of the two writes
        has failed are ended here. Without `in_time` what is not answered is late."""
        channel, waiting = self._channel, commit.waiting
        first = channel.arrived([write.pending for write in waiting], 0)
        self._in_flight -= first
        left: list[_Write] = []
        for at, write in enumerate(waiting):
            if at >= first:
                pending = write.pending
                is_done = pending.done
                if is_done:
                    channel.took(pending)
                elif in_time:
                    left.append(write)
                    continue
                write.cause = miss_cause_of(channel, pending, is_done)
                self._answered(write.cause)
            write.is_answered = True
        commit.waiting = left
        naming = _sent(commit.naming)
        if not naming.is_answered:
            return []
        stored: list[_Put] = []
        for put in list(commit.puts):
            slot_write = _sent(put.slot_write)
            if not slot_write.is_answered:
                continue
            if slot_write.cause is None and naming.cause is None:
                stored.append(put)
            else:
                commit.puts.remove(put)
                failed = slot_write if slot_write.cause is not None else naming
                is_answered = all(each.cause in (None, MissCause.CORRUPT) for each in (slot_write, naming))
                self._fail(put, failed, is_answered=is_answered)
        return stored

    def _close_commit(self, commit: _Commit) -> None:
        """Let go of the set. Some values are left only where the call breaks off: what was sent of them may
        land, as after a late answer."""
        for write in commit.waiting:
            if not write.pending.done:
                self._channel.abandon(write.pending)
        if commit.naming is not None:
            for put in commit.puts:
                commit.naming.cause = MissCause.LATE
                self._fail(put, commit.naming, is_answered=False)
        if self._commits.pop(id(commit.cached), None) is not None and commit.has_writer:
            commit.cached.end_write()

    def _answered(self, cause: MissCause | None) -> None:
        """A command has ended. One that is late is in its queue still."""
        if cause is not MissCause.LATE:
            self._in_flight -= 1

    def _may_be_named(self, puts: Sequence[_Put]) -> bool:
        """Whether the keys that they are sealed by are known to be good, without a question. Mostly it is one
        key."""
        codecs = {put.writing.reservation.sealer.codec for put in puts}
        return all(self._volume.vouches_at_once(self._channel, codec) for codec in codecs)

    def _name(self, put: _Put, commit: _Commit) -> Steps[None]:
        """Its slot and its entry are on flash."""
        entry = put.entry
        assert entry is not None
        try:
            yield from put.writing.named(self._channel, commit.image, entry, self._until)
        except PutRefused as refused:
            self._end(put, refused)
        else:
            self._end(put, True)

    def _fail(self, put: _Put, write: _Write, *, is_answered: bool) -> None:
        entry, cause = put.entry, write.cause
        assert entry is not None
        assert cause is not None
        failed = put.writing.failed(self._channel, write.pending, cause, entry, is_answered=is_answered)
        self._end(put, failed)

    def _refuse(self, commit: _Commit, why: str) -> None:
        """Nothing of it was written."""
        for put in commit.puts:
            self._end(put, put.writing.refuse(self._channel, PutRefused(why, MissCause.LATE)))
        commit.puts = []


def _in_volleys(sets: Sequence[CachedSet]) -> list[tuple[CachedSet, bool]]:
    """The sets by their places, and whether the next one lies on the same namespace."""
    places = [(each.namespace, each.offset) for each in sets]
    return [(sets[number], more) for number, more in in_volleys(places)]


def _place(commit: _Commit) -> tuple[int, int]:
    return commit.cached.namespace, commit.cached.offset


def _sent(write: _Write | None) -> _Write:
    assert write is not None
    return write


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
