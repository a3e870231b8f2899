"""vhost-user messages, as far as a relay has to read them (vhost-user protocol, QEMU's docs/interop).

    0..3    request      `Request`
    4..7    flags        bits 0-1 version (1), bit 2 reply, bit 3 need_reply
    8..11   size         bytes of payload that follow
    12..    payload      little-endian on the machines that QEMU and we run on

File descriptors travel beside the first byte of a message (SCM_RIGHTS). Messages of 4 KiB at most, with up to
`DESCRIPTORS_MAX` descriptors (SET_MEM_TABLE has eight).
"""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

HEADER = struct.Struct("<III")
U64 = struct.Struct("<Q")
VRING_STATE = struct.Struct("<II")
"""Ring, and a number: entries (NUM), where to go on (BASE), whether it is on (ENABLE)."""
VRING_ADDRESSES = struct.Struct("<IIQQQQ")
"""Ring, flags, then in the front-end's own addresses: descriptors, used, available; log."""
REGION = struct.Struct("<QQQQ")
"""Of memory: guest address, bytes, the front-end's own address, offset in the descriptor's file."""
INFLIGHT = struct.Struct("<QQHH4x")
"""Bytes of the area, offset in the descriptor's file, rings, entries of each."""
assert (HEADER.size, VRING_ADDRESSES.size, REGION.size, INFLIGHT.size) == (12, 40, 32, 24)

VERSION = 1
FLAG_REPLY = 1 << 2
FLAG_NEED_REPLY = 1 << 3
PAYLOAD_MAX = 4096 - HEADER.size
DESCRIPTORS_MAX = 32

RING_MASK = 0xFF
NO_DESCRIPTOR = 1 << 8
"""In the u64 of KICK, CALL and ERR: bits 0-7 the ring, bit 8 that no descriptor comes with it."""

PROTOCOL_REPLY_ACK = 1 << 3
PROTOCOL_INFLIGHT = 1 << 12


class Request(IntEnum):
    """Messages of the front-end."""

    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    RESET_OWNER = 4
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    SET_VRING_ERR = 14
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18
    SET_BACKEND_REQ_FD = 21
    GET_INFLIGHT_FD = 31
    SET_INFLIGHT_FD = 32
    GET_MAX_MEM_SLOTS = 36
    ADD_MEM_REG = 37
    REM_MEM_REG = 38


ANSWERED = frozenset(request for request in Request if request.name.startswith("GET_"))
"""These have an answer of their own, with or without need_reply."""


class MalformedMessage(Exception):
    """Received bytes are no vhost-user message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; its holder owns `descriptors`."""

    request: int
    payload: bytes = b""
    descriptors: tuple[int, ...] = ()
    flags: int = VERSION

    @property
    def wants_answer(self) -> bool:
        return self.request in ANSWERED or bool(self.flags & FLAG_NEED_REPLY)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def receive_message(connection: socket.socket) -> Message | None:
    """The next message; None at the end of the stream. Raises MalformedMessage, and OSError of the socket."""
    first, descriptors, _flags, _address = socket.recv_fds(connection, HEADER.size, DESCRIPTORS_MAX)
    try:
        if not first and not descriptors:
            return None
        request, flags, size = HEADER.unpack(first + _exactly(connection, HEADER.size - len(first)))
        if flags & 3 != VERSION or size > PAYLOAD_MAX:
            raise MalformedMessage(f"request {request}, flags {flags:#x}, {size} bytes")
        return Message(request, _exactly(connection, size), tuple(descriptors), flags)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def send_message(connection: socket.socket, message: Message) -> None:
    """Send it all; the descriptors stay ours, the receiver gets duplicates."""
    content = HEADER.pack(message.request, message.flags, len(message.payload)) + message.payload
    sent = socket.send_fds(connection, [content], list(message.descriptors))
    connection.sendall(content[sent:])


def answer_to(message: Message, payload: bytes, descriptors: Sequence[int] = ()) -> Message:
    return Message(message.request, payload, tuple(descriptors), VERSION | FLAG_REPLY)


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise MalformedMessage("the stream ends within a message")
        content += part
    return bytes(content)
