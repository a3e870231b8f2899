"""A get by RDMA of one piece: the memory it is read into, and that the device lets go of it first."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from agent.http.patience import OF_A_CLIENT_SECONDS, REST_FACTOR, WAIT_SECONDS, Patience
from agent.s3.answers import Answer
from agent.s3.rdma.engine import BUFFER_BYTES, Connection, Staging, Transfer, TransferEngine, TransferFailed
from agent.s3.rdma.one_piece import OnePiece
from agent.s3.rdma.token import Memory
from nvmeof.transport.rdma_direct import DirectPair

MEMORY = Memory(session="0" * 32, address=0x1000, length=BUFFER_BYTES, key=7)


class Engine:
    """One piece of memory, and a device that does nothing. `did` is what was asked of it, in order."""

    def __init__(self) -> None:
        self.staging = Staging(memoryview(bytearray(BUFFER_BYTES)), 0, 1)
        self.free = [self.staging]
        self.did: list[Any] = []
        self.ended = threading.Event()
        self.ended.set()

    def transfer(self, connection: Connection) -> Transfer:
        return cast(Transfer, SimpleNamespace(ended=self.ended))

    def take(self) -> Staging | None:
        return self.free.pop() if self.free else None

    def give_back(self, staging: Staging) -> None:
        self.did.append("given back")
        self.free.append(staging)

    def begin_write(self, transfer: Transfer, staging: Staging, length: int, address: int, key: int) -> None:
        self.did.append((length, address, key))

    async def abandon(self, transfer: Transfer) -> None:
        self.did.append("abandoned")


def is_there() -> None: ...


def is_gone() -> None:
    raise TransferFailed("the client closed its HTTP connection")


def piece_of(engine: Engine, memory: Memory = MEMORY, need: Any = is_there) -> OnePiece:
    return OnePiece(
        cast(TransferEngine, engine), Connection(cast(DirectPair, None)), memory, need, Patience()
    )


def test_the_memory_is_the_same_with_every_look_for_the_object() -> None:
    engine = Engine()
    piece = piece_of(engine)
    first, again = piece.room(100), piece.room(200)
    assert first is not None
    assert again is not None
    assert (first.obj, len(first), len(again)) == (again.obj, 100, 200)
    assert not engine.free


@pytest.mark.parametrize("size", [0, BUFFER_BYTES + 1, 101])
def test_what_is_not_one_piece_that_fits_goes_the_other_way(size: int) -> None:
    engine = Engine()
    assert piece_of(engine, replace(MEMORY, length=100)).room(size) is None
    assert engine.free


def test_bytes_that_lie_elsewhere_are_left_to_the_other_way() -> None:
    engine = Engine()
    piece = piece_of(engine)
    assert piece.room(100) is not None
    piece.send(Answer(), memoryview(bytes(100)))
    assert not piece.has_begun
    assert not engine.did


def test_where_all_memory_is_in_use_there_is_the_other_way() -> None:
    engine = Engine()
    engine.free.clear()
    piece = piece_of(engine)
    assert piece.room(100) is None
    trio.run(piece.close)
    assert not engine.did


def test_the_memory_is_given_back_after_the_device_let_go_of_it() -> None:
    """Also where nobody waited for the end: the door stops."""
    engine = Engine()
    piece = piece_of(engine)
    room = piece.room(100)
    assert room is not None
    piece.send(Answer(), room)
    assert piece.has_begun
    trio.run(piece.close)
    trio.run(piece.close)
    assert engine.did == [(100, MEMORY.address, MEMORY.key), "abandoned", "given back"]


def test_nothing_moves_for_a_client_that_has_gone() -> None:
    engine = Engine()
    piece = piece_of(engine, need=is_gone)
    room = piece.room(100)
    assert room is not None
    piece.send(Answer(), room)
    with pytest.raises(TransferFailed, match="closed its HTTP connection"):
        trio.run(piece.sent)
    assert not engine.did


class Slow(threading.Event):
    """A transfer that does not end in time; the clock is a test's."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.waited = 100.0, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        self.now += timeout or 0.0
        return False


def test_a_thread_waits_for_a_slow_client_as_little_as_over_http() -> None:
    engine, slow = Engine(), Slow()
    engine.ended = slow
    patience, connection = Patience(lambda: slow.now), Connection(cast(DirectPair, None))

    def get() -> None:
        piece = OnePiece(cast(TransferEngine, engine), connection, MEMORY, is_there, patience)
        room = piece.room(100)
        assert room is not None
        piece.send(Answer(), room)
        trio.run(piece.close)

    get()
    assert slow.waited == [pytest.approx(WAIT_SECONDS)]
    get()
    slow.now += REST_FACTOR * WAIT_SECONDS
    get()
    assert len(slow.waited) == 1, "not for this client again"
    slow.now += OF_A_CLIENT_SECONDS
    get()
    assert len(slow.waited) == 2
