"""What a reader serves of a guest's requests, and what it has carried; which of these bind keys."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, cast

import pytest

from agent.bench.virtio_driver import fuse_wire as wire
from agent.fs.fuse.abi import OUT_HEADER, Opcode, encode_answer
from agent.fs.fuse.session import FuseSession
from agent.fs.guest_sessions import Binding, Bound, GuestWords, shared_words
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.reader_service import ReaderService, session_bound_by
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.pool.steps import NoRunner
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Request, data_offset

NODE, OTHER, HANDLE, CARRIED = 7, 8, 0x1234_0000_0005, 99
BOUND = Bound(3, [Binding(0, 1, "kv", bytes(16))])


def header(opcode: int, node: int, size: int) -> bytes:
    return wire.IN_HEADER.pack(wire.IN_HEADER_BYTES + size, opcode, 2, node, 0, 0, 1, 0, 0)


def write_of(data: bytes, offset: int = 0, node: int = NODE) -> bytes:
    arguments = wire.WRITE_IN.pack(HANDLE, offset, len(data), 0, 0, 0, 0)
    return header(Opcode.WRITE, node, len(arguments) + len(data)) + arguments + data


def request(operation: Operation) -> bytes:
    lengths = (4096,) if operation is Operation.PUT else ()
    return Request(operation, 1, "kv", (bytes(16),), flags=FLAG_NO_ANSWER, lengths=lengths).encode()


def chain_of(message: bytes, cuts: tuple[int, ...] = (40, 80), room: int = 128) -> Chain:
    ends = [*(cut for cut in cuts if cut < len(message)), len(message)]
    parts, at = [], 0
    for end in ends:
        parts.append(memoryview(bytearray(message[at:end])))
        at = end
    return Chain(5, parts, [memoryview(bytearray(wire.OUT_HEADER_BYTES)), memoryview(bytearray(room))])


@pytest.mark.parametrize("cuts", [(), (40,), (40, 80), (1, 41, 42, 83, 100, 111), tuple(range(1, 140))])
def test_the_session_in_which_keys_are_bound(cuts: tuple[int, ...]) -> None:
    assert session_bound_by(chain_of(write_of(request(Operation.GET)), cuts)) == HANDLE
    for operation in Operation:
        if operation is not Operation.GET:
            assert session_bound_by(chain_of(write_of(request(operation)), cuts)) == 0
    assert session_bound_by(chain_of(write_of(request(Operation.GET), data_offset(0)), cuts)) == 0
    for short in (b"", b"g35q", bytes(31)):
        assert session_bound_by(chain_of(write_of(short), cuts)) == 0


class FirstProcess:
    """Stands for the carrier; and for the session of what is served here."""

    def __init__(self) -> None:
        self.carried: list[tuple[Chain, int]] = []
        self.asked = 0
        self.reply = 0
        self.body = b"value"

    def carry(self, chain: Chain, handle: int = 0) -> tuple[int, Bound | None]:
        self.carried.append((chain, handle))
        return CARRIED, BOUND if handle else None

    def answer(self, *_request: Any) -> Any:
        self.asked += 1
        if self.reply:
            return [encode_answer(self.reply, 2)]
        return [OUT_HEADER.pack(16 + len(self.body), 0, 2), self.body]


@pytest.fixture
def words() -> Iterator[GuestWords]:
    descriptor = shared_words()
    try:
        yield GuestWords(descriptor)
    finally:
        os.close(descriptor)


def service(first: FirstProcess, words: GuestWords, learned: dict[int, Bound]) -> ReaderService:
    buffers = RequestBuffers(1 << 16, lambda node: False)
    return ReaderService(
        cast(FuseSession, first), NODE, learned.__setitem__, buffers, NoRunner(), words, cast(Carrier, first)
    )


@pytest.mark.interpreted
def test_gets_of_the_node_are_served_and_all_else_is_carried(words: GuestWords) -> None:
    first, learned = FirstProcess(), dict[int, Bound]()
    serving = service(first, words, learned)
    get = chain_of(header(Opcode.READ, NODE, 40) + bytes(40))
    assert serving.serve(get) == CARRIED, "no INIT yet"
    words.say_live(True)
    assert serving.serve(get) == 16 + 5
    assert bytes(get.writable[1][:5]) == b"value"
    assert serving.serve(chain_of(header(Opcode.GETXATTR, NODE, 40) + bytes(40))) == 21
    assert first.asked == 2
    for other in (header(Opcode.READ, OTHER, 40), header(Opcode.GETATTR, NODE, 40), b"", b"short"):
        assert serving.serve(chain_of(other + bytes(40) if len(other) > 5 else other)) == CARRIED
    assert first.asked == 2
    assert not learned


@pytest.mark.interpreted
def test_an_answer_that_is_the_first_process_is_not_given_here(words: GuestWords) -> None:
    first = FirstProcess()
    serving = service(first, words, {})
    words.say_live(True)
    message = header(Opcode.READ, NODE, 40) + bytes(40)
    for code, final in (
        (errno.ENODATA, True),
        (errno.ERANGE, True),
        (errno.EREMOTE, False),
        (errno.EIO, False),
    ):
        first.reply = code
        assert serving.serve(chain_of(message)) == (16 if final else CARRIED)
    first.reply = 0
    assert serving.serve(chain_of(message, room=4)) == CARRIED, "no room for it"


@pytest.mark.interpreted
def test_what_a_request_binds_is_learned(words: GuestWords) -> None:
    first, learned = FirstProcess(), dict[int, Bound]()
    serving = service(first, words, learned)
    assert serving.serve(chain_of(write_of(request(Operation.GET)))) == CARRIED
    assert learned == {HANDLE: BOUND}
    learned.clear()
    for carried in (write_of(request(Operation.EXISTS)), write_of(request(Operation.GET), node=OTHER)):
        assert serving.serve(chain_of(carried)) == CARRIED
    assert not learned
    assert [handle for _, handle in first.carried] == [HANDLE, 0, 0]
