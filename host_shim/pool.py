"""The pool from the GPU host: values by key, through the mount, with the standard library alone.

    pool = Pool("/mnt/g35")
    blocks = pool.volume("kv")
    blocks.put(key_of("block 17"), data)
    length = blocks.get_into(key_of("block 17"), buffer)      # None: a miss

Nothing about the state of the pool or of this machine is an exception. A block that is not there, an
enclosure that is down, an agent that restarts, a mount that is gone and a process without memory are misses.
A put that did not happen is False. A volume whose tenant was erased gives Outcome.WRONG_KEY.
Wrong use raises: a key that is no key, a volume that the pool did not have when this process first asked, a
value that no slot can hold, a buffer that does not hold the value.

A batch with one value that cannot be served serves the others. What is wrong with the call itself (a key or a
buffer that is none, lists of different lengths) raises before anything has moved. What depends on the values
is that value's own answer, and said once in the log: False for one that no slot can hold, None for one that
its buffer does not hold.

What a handler of a signal raises amid a call (Ctrl-C, a time-out) reaches the caller, an OSError as well. Of
a put it is not known then whether it happened. The call waits for its helpers first and keeps nothing.

Any thread may call anything here. Each call borrows one of at most `sessions` control sessions; further calls
wait. After a fork the child opens its own. An event loop calls from threads:

    length = await asyncio.to_thread(blocks.get_into, key, buffer)
"""
# One idea in one file: what a program calls, `Pool` and `Volume`, and what these calls return and raise.

import contextlib
import errno
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from host_shim.agent_processes import AgentProcesses, AskTheFirst
from host_shim.arguments import (
    Buffer,
    BufferTooSmall,
    UnknownVolume,
    ValueTooLong,
    bytes_of,
    no_length,
    same_count,
    unknown_volume,
    whole_seconds,
    writable,
)
from host_shim.block_key import checked_key
from host_shim.connector_jobs import JobRunner, share
from host_shim.control_session import (
    ONE_REQUEST_BYTES,
    TOO_LONG,
    Session,
    SessionDead,
    SessionLender,
)
from host_shim.control_wire import (
    KEY_BYTES,
    KEYS_MAX,
    REPORTS_MAX,
    SESSION_PATH,
    TICKETS_MAX,
    VALUE_BYTES_MAX,
    VOLUME_NAME_BYTES_MAX,
    Operation,
    Outcome,
    PrefixReport,
)
from host_shim.many_values import IS_LONGER, LONGER, Became, Fetched, judged, move_in_groups
from host_shim.registered_memory import RegisteredMemory
from host_shim.session_files import Files, Refusal
from host_shim.transfer_wire import Ioctl
from host_shim.unlocked_memory import joined, new_memory

__all__ = ["BufferTooSmall", "Fetched", "Pool", "UnknownVolume", "ValueTooLong", "Volume", "whole_seconds"]

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""What `Pool.close` waits for calls under way; on a pool that answers they take milliseconds."""
GET_BYTES_FIRST = 1 << 20
DEADLINE_MAX = ((1 << 32) - 1) / 1e3
"""Seconds; the control session counts milliseconds in 32 bits."""
_REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM, errno.EIO}
)
_REFUSALS_OF_ONE = _REFUSALS | TOO_LONG | {errno.EINVAL}
"""What concerns one value of a batch, and not the others."""
_BATCH_MAX = min(KEYS_MAX, TICKETS_MAX)


class Pool:
    """A mounted pool. `sessions` bounds the calls under way, `parallel` the transfers of one batch."""

    def __init__(
        self,
        mount: str | os.PathLike[str],
        *,
        sessions: int = 16,
        parallel: int = 4,
        files: Files | None = None,
    ) -> None:
        if sessions < 1 or parallel < 1:
            raise ValueError("a pool needs at least one session, and one transfer at a time")
        self.mount = os.fspath(mount)
        self._memory = RegisteredMemory()
        own = files or Files()

        def lender(path: str) -> SessionLender:
            return SessionLender(path, own, sessions, self._memory)

        self._lender = lender(os.path.join(self.mount, SESSION_PATH))
        self._processes = AgentProcesses(self.mount, own, self._lender, lender)
        self._parallel = parallel
        self._known: set[str] = set()
        """Volumes that the agent has served to this process; no more than there are."""
        self._said: set[tuple[str, type]] = set()
        """Of which of them the log has said that a value is too long for a slot, or for its buffer."""
        self._lock = threading.Lock()
        self._runner: JobRunner | None = None
        _pools.add(self)

    def volume(self, name: str) -> "Volume":
        """A volume by name. Whether the pool has it turns out with the first call."""
        if not 0 < len(name.encode()) <= VOLUME_NAME_BYTES_MAX:
            raise ValueError(f"a volume's name has 1 to {VOLUME_NAME_BYTES_MAX} bytes: {name!r}")
        return Volume(self, name)

    def memory(self, size: int) -> memoryview:
        """A buffer of `size` bytes for gets and puts, into which an agent on this machine puts values itself.

        It begins at a page, is there in full, and is shared with children of a fork. It stays registered
        until the pool is closed: take large ones and cut them. For any other agent it is ordinary memory.
        """
        return self._memory.new(size)

    def stats(self) -> dict[str, Any]:
        """The agent's counters of the whole pool; empty while there is no agent."""
        with (loan := self._lender.lend()), loan as session:
            if session is not None:
                return session.stats()
        return {}

    def alive(self) -> bool:
        """Whether an agent answers behind the mount, asked now."""
        self._lender.ask_at_once()
        with (loan := self._lender.lend()), loan as session, contextlib.suppress(Refusal):
            if session is not None:
                session.ask(Operation.STATS, "")
                return True
        return False

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Close all sessions; later calls raise RuntimeError.

        It waits for calls under way, `seconds` at most: True once none touches a caller's memory any more.
        Where the mount holds one (False), its session is closed when it lets go.
        """
        self._lender.close()
        lenders, until = [self._lender, *self._processes.close()], time.monotonic() + seconds
        waits = [each.wait_until_all_are_back(max(0.0, until - time.monotonic())) for each in lenders]
        ended = all(waits)
        with self._lock:
            runner = self._runner
        if runner is not None:
            runner.close(seconds if ended else 0)
        self._memory.close()
        return ended

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _share(self, work: Callable[[int], None], count: int) -> None:
        """Run `work(0)` … `work(count - 1)` on this thread and a few helpers."""
        helping = min(self._parallel, count) - 1
        if helping <= 0:
            for index in range(count):
                work(index)
            return
        share(self._helpers(), helping, work, count)

    def _helpers(self) -> JobRunner:
        with self._lock:
            if self._runner is None:
                self._runner = JobRunner("g35-shim", self._parallel * 2)
                if self._lender.closed:  # a call that was under way then ends on its own thread
                    self._runner.close(0)
            return self._runner

    def _say_once(self, volume: str, why: ValueTooLong | BufferTooSmall) -> None:
        about = volume, type(why)
        if volume in self._known and about not in self._said:
            self._said.add(about)
            fate = "stored" if isinstance(why, ValueTooLong) else "read"
            _log.warning("a value of a batch is not %s: %s", fate, why)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._runner = None
        self._memory.after_fork_in_child()
        self._lender.abandon()
        self._processes.after_fork_in_child()


class Volume:
    """One volume of a pool. Keys are 16 bytes (`key_of` makes one of any name)."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool = pool
        self.name = name

    def put(self, key: bytes, data: bytes | Buffer, ttl: float | None = None) -> bool:
        """Store a value; True once it is on flash. `ttl` in seconds, None for the volume's own. Raises
        ValueTooLong, also for an empty one."""
        checked_key(key)
        view = bytes_of(data)
        if not 0 < len(view) <= VALUE_BYTES_MAX:
            raise no_length(len(view))
        return self._put_batch([key], [view], whole_seconds(ttl))[0]

    def get_into(self, key: bytes, buffer: Buffer) -> int | None:
        """Read a value into `buffer`; its length, or None for a miss. BufferTooSmall where the value is
        longer.

        One request fills a buffer of up to 64 KiB. A longer one that comes back full costs one more read,
        unless it is as long as the volume's slots.
        """
        try:
            view = writable(buffer)
            checked_key(key)
            lender = self._pool._processes.next(self.name, (key,))
            if lender is not self._pool._lender:
                try:
                    return self._get_from(lender, key, view)
                except (AskTheFirst, SessionDead):
                    lender = self._pool._lender
            return self._get_from(lender, key, view)
        except (SessionDead, MemoryError):
            return None

    def _get_from(self, lender: SessionLender, key: bytes, view: memoryview) -> int | None:
        """`get_into` by one process of the agent. Raises SessionDead; AskTheFirst where that may serve it."""
        # As `with lend()`, whose object and two calls would be a tenth of what a get takes here.
        session = lender.take()
        if session is None:
            self._want_first(lender)
            return None
        try:
            length = session.read_at_once(self.name, key, view)
            if length is not None:
                self._pool._known.add(self.name)
                return length or None
            session.bind_reads(self.name, (key,))
            self._pool._known.add(self.name)
            length = session.read(0, view)
            if ONE_REQUEST_BYTES < length < len(view) and session.outcomes(1) != [Outcome.HIT]:
                return None  # it broke off in the middle
            if length == len(view) and (goes_on := self._goes_on(session, 0, length)) is not None:
                if goes_on:
                    raise self._too_small(session, key, length)
                if session.outcomes(1) != [Outcome.HIT]:
                    return None  # it is longer, and its rest is damaged or late
            return length or None
        except Refusal as refused:
            if refused.errno == errno.ERANGE:
                raise self._too_small(session, key, len(view)) from None
            self._want_first(lender)
            self._raise_wrong_use(refused, session)
            return None
        except MemoryError:
            session.dead = True  # see `Loan`
            raise
        finally:
            lender.free.append(session)  # and nothing before it, see `SessionLender.free`
            lender.tend(session)

    def _want_first(self, lender: SessionLender) -> None:
        """Raises AskTheFirst where a process has refused that is not the first; it is left alone then."""
        if lender is not self._pool._lender:
            self._pool._processes.set_aside(lender, self.name)
            raise AskTheFirst

    def _goes_on(self, session: Session, ticket: int, room: int) -> bool | None:
        """Whether a byte of a ticket's value comes from behind a full buffer of `room` bytes; None where the
        buffer holds any value of the volume. False may also be a value that broke off there."""
        if room >= session.value_bytes_max(self.name):
            return None
        return session.read(ticket, memoryview(bytearray(1)), room) > 0

    def _too_small(self, session: Session, key: bytes, room: int) -> BufferTooSmall:
        return BufferTooSmall(
            f"the value of key {key.hex()} is longer than the buffer of {room} bytes; "
            f"a value of volume {self.name!r} has up to {session.value_bytes_max(self.name)}"
        )

    def get(self, key: bytes) -> bytes | None:
        """A value, or None for a miss. Copies once more than `get_into`."""
        checked_key(key)
        with (loan := self._pool._lender.lend()), loan as session:
            if session is None:
                return None
            try:
                session.bind_reads(self.name, [key])
                self._pool._known.add(self.name)
                first = new_memory(GET_BYTES_FIRST)
                length = session.read(0, first)
                parts = [first[:length]]
                if length == GET_BYTES_FIRST:
                    rest = new_memory(VALUE_BYTES_MAX - GET_BYTES_FIRST)
                    length += session.read(0, rest, length)
                    parts.append(rest[: length - GET_BYTES_FIRST])
                if length > ONE_REQUEST_BYTES and session.outcomes(1) != [Outcome.HIT]:
                    return None  # it broke off in the middle
                return joined(parts) if length else None
            except Refusal as refused:
                self._raise_wrong_use(refused, session)
        return None

    def get_many(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        """Read values into the buffers of the same index; their lengths, None for a miss and for a value that
        is longer than its buffer. Values of up to 128 KiB move together, longer ones by a request each."""
        return [one.length for one in self.fetch(keys, buffers, causes=False)]

    def fetch(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, causes: bool = True
    ) -> list[Fetched]:
        """`get_many` that also says why there are holes; with holes that is one round trip more."""
        same_count(keys, buffers)
        views = [writable(buffer) for buffer in buffers]
        result: list[Fetched] = []
        for start in range(0, len(keys), _BATCH_MAX):
            end = start + _BATCH_MAX
            result += self._fetch_batch(keys[start:end], views[start:end], causes)
        return result

    def _fetch_batch(self, keys: Sequence[bytes], views: Sequence[memoryview], causes: bool) -> list[Fetched]:
        parts = self._pool._processes.parts_of(len(keys), self._pool._parallel)
        if len(parts) < 2:
            return self._fetch_part(keys, views, causes)
        found: list[list[Fetched]] = [[] for _ in parts]

        def fetch(number: int) -> None:
            part = parts[number]
            found[number] = self._fetch_part(keys[part], views[part], causes)

        self._pool._share(fetch, len(parts))
        return [one for part in found for one in part]

    def _fetch_part(self, keys: Sequence[bytes], views: Sequence[memoryview], causes: bool) -> list[Fetched]:
        lender = self._pool._processes.next(self.name, keys)
        if lender is not self._pool._lender:
            try:
                return self._fetch_from(lender, keys, views, causes)
            except AskTheFirst:
                lender = self._pool._lender
        return self._fetch_from(lender, keys, views, causes)

    def _fetch_from(
        self, lender: SessionLender, keys: Sequence[bytes], views: Sequence[memoryview], causes: bool
    ) -> list[Fetched]:
        """By one process of the agent. Raises AskTheFirst where that may serve it."""
        found: list[Fetched | None] = [None] * len(keys)
        with (loan := lender.lend()), loan as session:
            if session is None:
                self._want_first(lender)
                return [Fetched(None, None)] * len(keys)
            try:
                self._fetch_together(session, keys, views, found)
            except Refusal as refused:
                self._want_first(lender)
                cause = Fetched(None, self._raise_wrong_use(refused, session))
                return [cause if one is None else one for one in found]
        if session is None or session.dead:
            self._want_first(lender)
        del session, loan  # what is asked for below may lose it to an interrupt, and it is not to last here
        result = [one for one in found if one is not None]
        if len(result) == len(keys):
            return result
        if not result:
            return self._fetch_each(lender, keys, views, causes)
        left = [at for at, one in enumerate(found) if one is None]
        each = iter(self._fetch_each(lender, [keys[at] for at in left], [views[at] for at in left], causes))
        return [next(each) if one is None else one for one in found]

    def _fetch_each(
        self, lender: SessionLender, keys: Sequence[bytes], views: Sequence[memoryview], causes: bool
    ) -> list[Fetched]:
        """Each value by a read of its own, several at a time."""
        lengths: list[int] = [0] * len(keys)
        seen: Sequence[Outcome | None] = [None] * len(keys)
        unsure: set[int] = set()
        ended = False
        with (loan := lender.lend()), loan as session:
            if session is None:
                self._want_first(lender)
                return [Fetched(None, None)] * len(keys)
            lent = session

            def read(index: int) -> None:
                if lent.dead:
                    return
                try:
                    lengths[index] = lent.read(index, views[index])
                except Refusal as refused:
                    if refused.errno not in _REFUSALS or lender is not self._pool._lender:
                        raise

            try:
                session.bind_reads(self.name, keys)
                self._pool._known.add(self.name)
                self._pool._share(read, len(keys))
                for index, view in enumerate(views):
                    if lengths[index] != len(view):
                        # A long one is either a short value or broke off in the middle.
                        if lengths[index] > ONE_REQUEST_BYTES:
                            unsure.add(index)
                    elif (goes_on := self._goes_on(session, index, len(view))) is not None:
                        unsure.add(index)
                        if goes_on:
                            lengths[index] = IS_LONGER
                            self._pool._say_once(self.name, self._too_small(session, keys[index], len(view)))
            except Refusal as refused:
                self._want_first(lender)
                return [Fetched(None, self._raise_wrong_use(refused, session))] * len(keys)
            ended = True
            if unsure or (causes and 0 in lengths):
                with contextlib.suppress(Refusal):
                    seen = session.outcomes(len(keys))
        if session is None or session.dead or not ended:
            self._want_first(lender)
        if session is not None and not ended:
            # Nobody is there to say whether a full buffer has all of its value. (A dead session asks nobody.)
            room = session.value_bytes_max(self.name)
            for index, view in enumerate(views):
                if lengths[index] == len(view) < room:
                    lengths[index] = 0
        return [
            judged(length, outcome, is_sure=number not in unsure)
            for number, (length, outcome) in enumerate(zip(lengths, seen, strict=True))
        ]

    def _fetch_together(
        self,
        session: Session,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        found: list[Fetched | None],
    ) -> None:
        """Many short values, by a request for each `groups_of` them, into `found`."""
        if not session.moves_many(Ioctl.LOAD_MANY):
            return
        longer: list[int] = []

        def load(some: Sequence[bytes], into: Sequence[memoryview]) -> Became | None:
            try:
                return session.move_many(Ioctl.LOAD_MANY, self.name, some, into)
            except Refusal as refused:
                if refused.errno not in _REFUSALS:
                    raise
                return None

        def take(numbers: Sequence[int], loaded: Became) -> None:
            self._pool._known.add(self.name)
            for number, (outcome, length) in zip(numbers, loaded, strict=True):
                if outcome is not Outcome.HIT:
                    found[number] = Fetched(None, outcome)
                elif 0 < length <= len(views[number]):
                    found[number] = Fetched(length, outcome)
                else:
                    found[number] = LONGER
                    longer.append(number)

        move_in_groups(keys, views, load, take, self._pool._share)
        for number in longer[:1]:
            self._pool._say_once(self.name, self._too_small(session, keys[number], len(views[number])))

    def put_many(
        self, keys: Sequence[bytes], values: Sequence[bytes | Buffer], ttl: float | None = None
    ) -> list[bool]:
        """Store values; which of them are on flash now. Those of up to 128 KiB move together, longer ones by
        a request each. One that is empty or too long for the volume is False. Of a key that stands twice the
        first value is stored, and the others only where that was not."""
        same_count(keys, values)
        views = [bytes_of(value) for value in values]
        seconds = whole_seconds(ttl)
        wanted = [at for at, view in enumerate(views) if 0 < len(view) <= VALUE_BYTES_MAX]
        if len(wanted) == len(keys) == len(set(keys)):
            return self._put_all(keys, views, seconds)
        stored = [False] * len(keys)

        def put(numbers: Sequence[int]) -> None:
            became = self._put_all([keys[at] for at in numbers], [views[at] for at in numbers], seconds)
            for at, is_stored in zip(numbers, became, strict=True):
                stored[at] = is_stored

        first: dict[bytes, int] = {}
        for at in wanted:
            first.setdefault(keys[at], at)
        put(list(first.values()))
        if len(wanted) < len(keys):
            self._pool._say_once(self.name, no_length(max(map(len, views))))
        again = [at for at in wanted if first[keys[at]] != at]
        for at in again:
            stored[at] = stored[first[keys[at]]]
        put([at for at in again if not stored[at]])
        return stored

    def _put_all(self, keys: Sequence[bytes], views: Sequence[memoryview], seconds: int) -> list[bool]:
        result: list[bool] = []
        for start in range(0, len(keys), _BATCH_MAX):
            end = start + _BATCH_MAX
            try:
                result += self._put_batch(keys[start:end], views[start:end], seconds)
            except ValueTooLong as refused:  # the only one of its batch
                self._pool._say_once(self.name, refused)
                result.append(False)
        return result

    def _put_batch(self, keys: Sequence[bytes], views: Sequence[memoryview], seconds: int) -> list[bool]:
        """Raises ValueTooLong of one value alone."""
        lender = self._pool._processes.begin_put(self.name, len(keys))
        try:
            return self._put_by(lender, keys, views, seconds)
        finally:
            self._pool._processes.end_put(lender)

    def _put_by(
        self, lender: SessionLender, keys: Sequence[bytes], views: Sequence[memoryview], seconds: int
    ) -> list[bool]:
        """By this process, as far as it takes them, and else by the first."""
        stored = [False] * len(keys)
        left = self._put_by_other(lender, keys, views, seconds, stored)
        if not left:
            return stored
        if len(left) < len(keys):
            try:
                rest = self._put_by_first([keys[at] for at in left], [views[at] for at in left], seconds)
            except ValueTooLong as refused:  # the only one that was left
                self._pool._say_once(self.name, refused)
                return stored
            for index, is_stored in zip(left, rest, strict=True):
                stored[index] = is_stored
            return stored
        return self._put_by_first(keys, views, seconds)

    def _put_by_other(
        self,
        lender: SessionLender,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        seconds: int,
        stored: list[bool],
    ) -> Sequence[int]:
        """By a process that is not the first, into `stored`; which the first is to be asked for.

        It is asked as well where the other one died or failed amid it: the first decides for both where a
        value goes, so it finds the value stored, or gives it another slot.
        """
        left: Sequence[int] = range(len(keys))
        if lender is self._pool._lender:
            return left

        def note(failure: Exception) -> None:
            if isinstance(failure, SessionDead) or getattr(failure, "errno", 0) == errno.EREMOTE:
                self._pool._processes.set_aside_with_puts(lender, self.name, len(keys))

        with (loan := lender.lend()), loan as session:
            if session is None:
                note(SessionDead())
                return left
            try:
                if len(keys) > 1:
                    left = self._put_together(session, keys, views, seconds, stored, note)
                elif session.write_at_once(self.name, keys[0], views[0], seconds):
                    stored[0], left = True, []
            except (Refusal, SessionDead) as refused:
                note(refused)
        return left

    def _put_by_first(self, keys: Sequence[bytes], views: Sequence[memoryview], seconds: int) -> list[bool]:
        stored = [False] * len(keys)
        bound: list[int] = []
        with (loan := self._pool._lender.lend()), loan as session:
            if session is None:
                return stored

            def write(ticket: int) -> None:
                if session.dead:
                    return
                try:
                    session.write(ticket, views[bound[ticket]])
                except Refusal as refused:
                    own = _REFUSALS if len(keys) == 1 else _REFUSALS_OF_ONE
                    if refused.errno not in own:
                        raise
                    return
                stored[bound[ticket]] = True

            try:
                if len(keys) == 1 and session.write_at_once(self.name, keys[0], views[0], seconds):
                    self._pool._known.add(self.name)
                    return [True]
                left = self._put_together(session, keys, views, seconds, stored)
                if left:
                    alone, lengths = [keys[at] for at in left], [len(views[at]) for at in left]
                    fitting = session.bind_writes_that_fit(self.name, alone, lengths, seconds)
                    self._pool._known.add(self.name)
                    bound = [left[number] for number in fitting]
                    self._pool._share(write, len(bound))
                    if len(bound) < len(left):
                        if len(keys) == 1:
                            raise self._too_long()
                        self._pool._say_once(self.name, self._too_long())
            except Refusal as refused:
                self._raise_wrong_use(refused, session)
        return stored

    def _put_together(
        self,
        session: Session,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        seconds: int,
        stored: list[bool],
        on_failure: Callable[[Exception], None] | None = None,
    ) -> Sequence[int]:
        """Many short values, by a request for each `groups_of` them, into `stored`. Which of them nothing was
        done for: those are put one by one. Of no other is it known that to put it again repeats no write.

        `on_failure`: hears of a request that failed. The first process is asked for its values then.
        """
        if not session.moves_many(Ioctl.STORE_MANY):
            return range(len(keys))
        untried: list[int] = []

        def store(some: Sequence[bytes], values: Sequence[memoryview]) -> Became | None:
            try:
                return session.move_many(Ioctl.STORE_MANY, self.name, some, values, seconds)
            except (Refusal, SessionDead) as refused:
                if on_failure is not None:
                    on_failure(refused)
                    return None
                if isinstance(refused, SessionDead) or refused.errno not in _REFUSALS | TOO_LONG:
                    raise
                # An agent of before says of one that is too long that nothing was done for any.
                return None if refused.errno in TOO_LONG else [(Outcome.REFUSED, 0)] * len(some)

        def take(numbers: Sequence[int], became: Became) -> None:
            self._pool._known.add(self.name)
            for number, (outcome, most) in zip(numbers, became, strict=True):
                stored[number] = outcome is Outcome.HIT
                if outcome is Outcome.UNKNOWN:
                    untried.append(number)
                elif most:
                    self._pool._say_once(self.name, self._too_long())

        left = move_in_groups(keys, views, store, take, self._pool._share)
        return sorted([*left, *untried])

    def _too_long(self) -> ValueTooLong:
        return ValueTooLong(f"a value is longer than the slots of volume {self.name!r}")

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there, in one round trip (per 4,096 keys)."""
        return [one is Outcome.HIT for one in self.lookup(keys)]

    def lookup(self, keys: Sequence[bytes]) -> list[Outcome | None]:
        """`exists` that also says why a key is not there; None where no agent was there to say."""
        return self._ask_each(Operation.EXISTS, keys)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are there without a hole, in one round trip (per 4,096 keys)."""
        for start in range(0, len(keys), KEYS_MAX):
            there = self.exists(keys[start : start + KEYS_MAX])
            if not all(there):
                return start + there.index(False)
        return len(keys)

    def prestage(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Ask the agent to bring values into its memory; which it has there or has set out for.

        `deadline`: seconds from now after which that is of no use; at 0 or below nothing is asked. Raises
        ValueError for more than DEADLINE_MAX (49 days), and for what is no number.
        """
        if deadline is not None and not deadline <= DEADLINE_MAX:
            raise ValueError(f"a deadline in {deadline} seconds; {DEADLINE_MAX} at the most, None for none")
        if deadline is not None and deadline <= 0:
            return [False] * len(keys)
        milliseconds = 0 if deadline is None else math.ceil(deadline * 1e3)
        self._pool._processes.note_prestaged(self.name, keys)
        answers = self._ask_each(Operation.PRESTAGE, keys, milliseconds)
        return [one in (Outcome.HIT, Outcome.STARTED) for one in answers]

    def pin(self, keys: Sequence[bytes], ttl: float | None = None) -> list[bool]:
        """Keep values from eviction for `ttl` seconds from now; which are pinned now.

        None: for the volume's own time to live, or else until they are deleted. A later pin replaces an
        earlier.
        """
        answers = self._ask_each(Operation.PIN, keys, whole_seconds(ttl))
        return [one is Outcome.HIT for one in answers]

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget values; which of them were there."""
        return [one is Outcome.HIT for one in self._ask_each(Operation.DELETE, keys)]

    def report(self, reports: Sequence[PrefixReport]) -> bool:
        """Tell the agent what became of requests; False where it does not take that."""
        for start in range(0, len(reports), REPORTS_MAX):
            whole = b"".join(each.encode() for each in reports[start : start + REPORTS_MAX])
            keys = [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]
            with (loan := self._pool._lender.lend()), loan as session:
                if session is None:
                    return False
                try:
                    session.tell(Operation.REPORT, self.name, keys)
                except Refusal:
                    return False  # an agent that does not know the operation, or no volume
        return True

    def stats(self) -> dict[str, Any]:
        """The agent's counters of this volume; empty while there is no agent, and where it was erased."""
        found = self._pool.stats()
        for one in found.get("volumes", ()):
            if one["name"] == self.name:
                return dict(one)
        if found and self.name not in self._pool._known:
            raise unknown_volume(self.name, found)
        return {}

    def _ask_each(
        self, operation: Operation, keys: Sequence[bytes], ttl_seconds: int = 0
    ) -> list[Outcome | None]:
        same_count(keys, keys)
        result: list[Outcome | None] = []
        for start in range(0, len(keys), KEYS_MAX):
            result += self._ask_some(operation, keys[start : start + KEYS_MAX], ttl_seconds)
        return result

    def _ask_some(
        self, operation: Operation, keys: Sequence[bytes], ttl_seconds: int
    ) -> Sequence[Outcome | None]:
        if operation is Operation.EXISTS:
            lender = self._pool._processes.next(self.name, ())
            if lender is not self._pool._lender:
                with contextlib.suppress(AskTheFirst):
                    return self._ask_of(lender, operation, keys, ttl_seconds)
        return self._ask_of(self._pool._lender, operation, keys, ttl_seconds)

    def _ask_of(
        self, lender: SessionLender, operation: Operation, keys: Sequence[bytes], ttl_seconds: int
    ) -> Sequence[Outcome | None]:
        """By one process of the agent. Raises AskTheFirst where that may serve it."""
        with (loan := lender.lend()), loan as session:
            if session is not None:
                try:
                    body = session.ask(operation, self.name, keys, ttl_seconds)
                    self._pool._known.add(self.name)
                    return session.outcomes_in(body, len(keys))
                except Refusal as refused:
                    self._want_first(lender)
                    return [self._raise_wrong_use(refused, session)] * len(keys)
        self._want_first(lender)
        return [None] * len(keys)

    def _raise_wrong_use(self, refused: Refusal, session: Session) -> Outcome | None:
        """What of the pool's state an errno of the agent tells; raises where it tells of the caller's use."""
        if refused.errno == errno.ENOENT:
            if self.name in self._pool._known:
                return Outcome.WRONG_KEY  # as the agent counts it: the tenant's keys are gone
            raise unknown_volume(self.name, session.stats()) from None
        if refused.errno in _REFUSALS:
            return None
        if refused.errno in TOO_LONG:
            raise self._too_long() from None
        raise refused from None


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
