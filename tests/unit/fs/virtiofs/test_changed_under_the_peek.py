"""A guest's request in a reader: what a peek has seen may be another request by the time it is served."""

from __future__ import annotations

import os
import struct
from typing import cast

import pytest

from agent.bench.virtio_driver.fuse_wire import READ_IN
from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, MINOR, InitFlag, Opcode
from agent.fs.fuse.session import TRANSFER_BYTES, FuseSession, Negotiated, SessionState
from agent.fs.guest_sessions import GuestWords, shared_words
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.processes.reader_service import ReaderService
from agent.fs.virtiofs.request_buffers import GuestRequest, RequestBuffers
from tests.support.fs.reader_process import Reads, pattern
from tests.support.pool.inline_runner import inline_runner

pytestmark = pytest.mark.interpreted
NODE = 2
CARRIED = 12345
_OPCODE_AT = 4


class _Carrier:
    def carry(self, chain: Chain, handle: int = 0) -> tuple[int, None]:
        return CARRIED, None


class _Flipping(RequestBuffers):
    """The guest writes another opcode over the request when it was peeked at."""

    opcode: Opcode | None = None

    def take(self, readable: list[memoryview], writable: list[memoryview]) -> GuestRequest:
        if self.opcode is not None:
            struct.pack_into("<I", readable[0], _OPCODE_AT, self.opcode)
        return super().take(readable, writable)


@pytest.fixture
def words() -> GuestWords:
    descriptor = shared_words()
    found = GuestWords(descriptor)
    os.close(descriptor)
    found.say_live(True)
    return found


class Served:
    def __init__(self, words: GuestWords) -> None:
        self.session = FuseSession(Reads())
        self.session.resume(Negotiated(MINOR, InitFlag(0), TRANSFER_BYTES))
        self.buffers = _Flipping(1 << 16, lambda node: True)
        carrier = cast(Carrier, _Carrier())
        self.service = ReaderService(
            self.session, NODE, {}.__setitem__, self.buffers, inline_runner(0), words, carrier
        )
        self.answer = memoryview(bytearray(16 + 4096))

    def serve(self, opcode: Opcode, node: int = NODE, becomes: Opcode | None = None) -> int:
        arguments = READ_IN.pack(1, 0, 4096, 0, 0, 0, 0)
        length = IN_HEADER_BYTES + len(arguments)
        message = bytearray(IN_HEADER.pack(length, opcode, 1, node, 0, 0, 1, 0) + arguments)
        self.buffers.opcode = becomes
        return self.service.serve(Chain(0, [memoryview(message)], [self.answer]))


def test_a_get_is_served_and_all_else_is_carried(words: GuestWords) -> None:
    served = Served(words)
    assert served.serve(Opcode.READ) == 16 + 4096
    assert served.answer[16:] == pattern(0, 4096)
    assert served.serve(Opcode.READ, 3) == CARRIED
    assert served.serve(Opcode.WRITE) == CARRIED
    assert served.service.serve(Chain(0, [], [served.answer])) == CARRIED
    assert served.service.serve(Chain(0, [memoryview(bytearray(39))], [served.answer])) == CARRIED
    words.say_live(False)
    assert served.serve(Opcode.READ) == CARRIED


@pytest.mark.parametrize("becomes", [Opcode.INIT, Opcode.DESTROY, Opcode.FORGET, Opcode.LOOKUP, Opcode.WRITE])
def test_a_request_that_changes_under_the_peek_is_carried(words: GuestWords, becomes: Opcode) -> None:
    """The reader's session is its gets' alone; the guest's own is in the first process."""
    served = Served(words)
    assert served.serve(Opcode.READ, becomes=becomes) == CARRIED
    assert served.session.state is SessionState.LIVE
    assert served.serve(Opcode.READ) == 16 + 4096
