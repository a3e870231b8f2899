"""The kernel's side of a `FuseSession` in memory: builds requests, hands them in, takes replies apart."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from agent.fs.fuse.abi import Opcode
from agent.fs.fuse.requests import WRITE_HEAD_BYTES
from agent.fs.fuse.session import FuseSession
from tests.support.fs.fuse_records import CreateIn, EntryOut, InHeader, InitIn, OpenOut, OutHeader
from tests.support.pool.inline_runner import InlineRunner

KERNEL_MINOR = 45
ALL_FLAGS = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Answer:
    """errno (0 is success) and body of a reply."""

    errno: int
    body: bytes


class FusePeer:
    """A kernel that sends what a test says, true or not."""

    def __init__(self, session: FuseSession, room_bytes: int = 1 << 20) -> None:
        self.session = session
        self.runner = InlineRunner()
        self._memory = memoryview(bytearray(WRITE_HEAD_BYTES + room_bytes))
        self.room = memoryview(bytearray(room_bytes))
        self.unique = 1 << 40

    def raw(self, message: bytes, received: int | None = None) -> Answer | None:
        """Hand in these bytes; checks that a reply is a whole and well-formed one."""
        count = len(message) if received is None else received
        self._memory[: len(message)] = message
        self._memory[len(message) : len(message) + 64] = b"\xa5" * 64  # what an earlier request left
        data = self._memory[WRITE_HEAD_BYTES:]
        reply = self.session.answer(self._memory, count, data, self.room, self.runner)
        if reply is None:
            return None
        whole = b"".join(reply)
        header = OutHeader.decode_untrusted(whole)
        assert header.length == len(whole) == sum(len(part) for part in reply)
        assert -512 < header.error <= 0
        assert not header.error or len(whole) == 16
        if len(message) >= 16:
            assert header.unique == int.from_bytes(message[8:16], "little")
        return Answer(-header.error, whole[16:])

    def request(self, opcode: int, body: bytes = b"", node: int = 1) -> bytes:
        self.unique += 2
        return InHeader(40 + len(body), opcode, self.unique, node, 1000, 1001, 4242).encode() + body

    def ask(self, opcode: int, body: bytes = b"", node: int = 1) -> Answer:
        answer = self.raw(self.request(opcode, body, node))
        assert answer is not None
        return answer

    def init(self, minor: int = KERNEL_MINOR, flags: int = ALL_FLAGS, flags2: int = ALL_FLAGS) -> Answer:
        extended = flags2.to_bytes(4, "little") + bytes(44) if minor >= 36 else b""
        return self.ask(Opcode.INIT, InitIn(7, minor, 131072, flags).encode() + extended)

    def create(self, name: bytes, mode: int = 0o644) -> tuple[EntryOut, OpenOut]:
        """Make a file in the root folder, open for reading and writing."""
        body = CreateIn(os.O_RDWR, stat.S_IFREG | mode, 0o22, 0).encode() + name + b"\0"
        answer = self.ask(Opcode.CREATE, body)
        assert answer.errno == 0
        assert len(answer.body) == 144
        return EntryOut.decode_untrusted(answer.body), OpenOut.decode_untrusted(answer.body, 128)
