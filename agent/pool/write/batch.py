"""Puts of many short values by one call, side by side: while one waits for its enclosure, the next is sealed.

Each is a put of its own, by the same writer and with the same ends. They share a worker's queues, and each
has a part of its send buffer. Two of them may want one lock (a set's writer, or the same key twice): the
second goes on once the first has let go.
"""

from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES
from agent.inline.scatter import Buffer
from agent.pool.counters import Tally
from agent.pool.errors import BadPut, PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Wait
from agent.pool.write.writer_base import Writer

AT_ONCE: Final = 16
"""Each has two writes under way, or two reads of directories: a worker's queue takes 64 commands."""
SEND_BYTES: Final = 3 << 20
"""Of the worker's send buffer, for all of them."""
VALUE_BYTES_MAX: Final = 1 << 20
"""Of a value that is put so."""
PAGE_BYTES: Final = 4096
"""The room of each begins at one; and a value is padded to LBAs, which are no longer."""


class OwnBuffer:
    """A worker's channel with a part of its send buffer, for one of several operations side by side."""

    def __init__(self, channel: IoChannel, send: memoryview) -> None:
        self._channel: Final = channel
        self._send: Final = send

    def read(self, namespace: int, offset: int, into: memoryview) -> Pending:
        return self._channel.read(namespace, offset, into)

    def write(self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False) -> Pending:
        return self._channel.write(namespace, offset, parts, more=more)

    def flush(self, namespace: int) -> Pending:
        return self._channel.flush(namespace)

    def unflushed(self, namespace: int) -> int | None:
        return self._channel.unflushed(namespace)

    def flushed(self, namespace: int, mark: int, flush: Pending) -> None:
        self._channel.flushed(namespace, mark, flush)

    def written(self) -> int:
        return self._channel.written()

    def is_unflushed(self, namespace: int, first: int, last: int) -> bool:
        return self._channel.is_unflushed(namespace, first, last)

    def doubtful(self, namespace: int) -> int:
        return self._channel.doubtful(namespace)

    def abandon(self, pending: Pending) -> None:
        self._channel.abandon(pending)

    def receive_buffer(self, size: int) -> memoryview:
        raise AssertionError("the receive buffer is one, and these are several")

    def send_buffer(self, size: int) -> memoryview:
        assert size <= len(self._send)
        return self._send[:size]

    def trusts(self, namespace: int) -> bool:
        return self._channel.trusts(namespace)

    def is_local(self, namespace: int) -> bool:
        return self._channel.is_local(namespace)

    def tally(self, volume: str) -> Tally:
        return self._channel.tally(volume)

    def now(self) -> float:
        return self._channel.now()

    def wall(self) -> float:
        return self._channel.wall()


class _Put:
    """One that was begun."""

    __slots__ = ("number", "room", "steps", "wanted")

    def __init__(self, number: int, room: memoryview, steps: Steps[bool]) -> None:
        self.number: Final = number
        self.room: Final = room
        self.steps: Final = steps
        self.wanted: Wait | Acquire | None = None

    def advance(self, answer: bool | None) -> bool:
        """Whether it goes on, with what it waits for in `wanted`. Raises what the put raises."""
        try:
            self.wanted = self.steps.send(answer)  # type: ignore[arg-type]  # a generator begins with None
        except StopIteration:
            return False
        return True


def _room_of(size: int) -> int:
    """What a put of so many bytes takes of the send buffer: header, value, a proof, to whole pages."""
    return -(-(HEADER_BYTES + size + PAGE_BYTES + PROOF_BYTES) // PAGE_BYTES) * PAGE_BYTES


def write_together(
    channel: IoChannel, writers: Sequence[Writer], values: Sequence[memoryview], wait_seconds: float
) -> Steps[list[PutRefused | BadPut | None]]:
    """Store each value, whole, by its writer; None for those that were taken, else why not.

    `wait_seconds`: how long each may take. No value is longer than `VALUE_BYTES_MAX`.
    """
    outcomes: list[PutRefused | BadPut | None] = [None] * len(writers)
    room = _room_of(max(map(len, values)))
    buffer = channel.send_buffer(SEND_BYTES)
    rooms = [buffer[at : at + room] for at in range(0, min(SEND_BYTES, AT_ONCE * room) - room + 1, room)]
    running: list[_Put] = []
    begun = 0
    try:
        while running or begun < len(writers):
            while rooms and begun < len(writers):
                own = rooms.pop()
                deadline = channel.now() + wait_seconds
                steps = writers[begun].write(OwnBuffer(channel, own), 0, values[begun], deadline)
                put = _Put(begun, own, steps)
                begun += 1
                running.append(put)
                _go_on(put, None, running, rooms, outcomes)
            if running:
                put, answer = yield from _next(running)
                _go_on(put, answer, running, rooms, outcomes)
        return outcomes
    finally:
        for put in running:
            put.steps.close()
        for writing in writers:
            if not writing.finished:
                writing.drop()


def _go_on(
    put: _Put,
    answer: bool | None,
    running: list[_Put],
    rooms: list[memoryview],
    outcomes: list[PutRefused | BadPut | None],
) -> None:
    try:
        if put.advance(answer):
            return
    except (PutRefused, BadPut) as refused:
        outcomes[put.number] = refused
    running.remove(put)
    rooms.append(put.room)


def _next(running: Sequence[_Put]) -> Steps[tuple[_Put, bool]]:
    """The one to go on with, and the answer to what it waited for: the oldest that waits for no lock which
    is held."""
    for put in running:
        wanted = put.wanted
        if isinstance(wanted, Acquire):
            if wanted.lock.acquire(blocking=False):
                return put, True
        else:
            assert wanted is not None
            return put, (yield wanted)
    # All wait for locks, and none of the locks is held by one of these.
    put = running[0]
    assert put.wanted is not None
    return put, (yield put.wanted)
