"""FUSE requests that tests make of a device beside those of the bench: names, folders, urgent ones."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agent.bench.virtio_driver import fuse_wire as wire
from agent.bench.virtio_driver.fuse_client import BODY_BYTES, Call, FuseClient, handle_in
from agent.bench.virtio_driver.fuse_wire import FuseReplyError, Node, Opcode
from agent.bench.virtio_driver.request_queue import WAIT_SECONDS, Waiter
from tests.support.fs.driver_chains import submit

CREATE_IN: Final = struct.Struct("<IIII")
MKDIR_IN: Final = struct.Struct("<II")
GETATTR_IN: Final = struct.Struct("<IIQ")
FORGET_IN: Final = struct.Struct("<Q")
BATCH_FORGET_IN: Final = struct.Struct("<II")
FORGET_ONE: Final = struct.Struct("<QQ")
INTERRUPT_IN: Final = struct.Struct("<Q")
_ATTR_HEAD: Final = struct.Struct("<QII")
_DIRENT: Final = struct.Struct("<QQII")
ATTR_OUT_BYTES: Final = _ATTR_HEAD.size + wire.ATTRIBUTES.size
assert ATTR_OUT_BYTES == 104


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of a folder; `node` is 0 where the reply names none (READDIR, and `.` and `..`)."""

    name: bytes
    ino: int
    cookie: int
    node: int = 0


def attributes_of(client: FuseClient, node: int) -> Node:
    """GETATTR."""
    body = GETATTR_IN.pack(0, 0, 0)
    return decode_attributes(client.start(Opcode.GETATTR, node, body, ATTR_OUT_BYTES).body())


def make_folder(client: FuseClient, parent: int, name: bytes, mode: int = 0o755) -> Node:
    """MKDIR."""
    body = MKDIR_IN.pack(mode, 0o022) + name + b"\0"
    return wire.decode_entry(client.start(Opcode.MKDIR, parent, body, wire.ENTRY_BYTES).body())


def unlink(client: FuseClient, parent: int, name: bytes) -> None:
    client.start(Opcode.UNLINK, parent, name + b"\0", 0).body()


def create(client: FuseClient, parent: int, name: bytes, flags: int = os.O_RDWR) -> tuple[Node, int]:
    """CREATE: make and open a file; its node and a handle."""
    body = CREATE_IN.pack(flags | os.O_CREAT, 0o100644, 0o022, 0) + name + b"\0"
    room = wire.ENTRY_BYTES + wire.OPEN_OUT.size
    answer = client.start(Opcode.CREATE, parent, body, room).body()
    return wire.decode_entry(answer), handle_in(answer[wire.ENTRY_BYTES :])


def entries(client: FuseClient, node: int, *, plus: bool = False) -> list[Listed]:
    """A whole folder, by READDIR or READDIRPLUS, a page at a time as a guest asks for it."""
    opened = client.start(Opcode.OPENDIR, node, wire.OPEN_IN.pack(0, 0), wire.OPEN_OUT.size)
    handle, found = handle_in(opened.body()), list[Listed]()
    opcode = Opcode.READDIRPLUS if plus else Opcode.READDIR
    while True:
        offset = found[-1].cookie if found else 0
        body = wire.READ_IN.pack(handle, offset, BODY_BYTES, 0, 0, 0, 0)
        part = list(decode_entries(client.start(opcode, node, body, BODY_BYTES).body(), plus))
        if not part:
            break
        found += part
    client.start(Opcode.RELEASEDIR, node, wire.RELEASE_IN.pack(handle, 0, 0, 0), 0).body()
    return found


def forget(client: FuseClient, node: int, lookups: int = 1, timeout: float = WAIT_SECONDS) -> None:
    """FORGET."""
    ask_urgently(client, Opcode.FORGET, node, FORGET_IN.pack(lookups), timeout)


def forget_many(client: FuseClient, nodes: Sequence[tuple[int, int]]) -> None:
    """BATCH_FORGET of (node, lookups)."""
    ones = b"".join(FORGET_ONE.pack(*each) for each in nodes)
    ask_urgently(client, Opcode.BATCH_FORGET, 0, BATCH_FORGET_IN.pack(len(nodes), 0) + ones)


def interrupt(client: FuseClient, call: Call) -> None:
    """INTERRUPT of a request under way."""
    ask_urgently(client, Opcode.INTERRUPT, 0, INTERRUPT_IN.pack(call.unique))


def encode_request(opcode: int, unique: int, node: int, body: bytes) -> bytes:
    """Header and body, as root and process 1."""
    return wire.IN_HEADER.pack(wire.IN_HEADER_BYTES + len(body), opcode, unique, node, 0, 0, 1, 0, 0) + body


def ask_urgently(
    client: FuseClient, opcode: Opcode, node: int, arguments: bytes, timeout: float = WAIT_SECONDS
) -> None:
    """A request on the high-priority queue. It has no answer; this waits until its chain came back."""
    message = encode_request(opcode, next(client._uniques), node, arguments)
    desk, urgent, waiter = client._take_desk(), client.urgent, Waiter()
    desk.laid = None
    desk.view[: len(message)] = message
    submit(urgent, [(desk.address, len(message))], [], waiter)
    written = urgent.wait(waiter, timeout)
    client._desks.append(desk)
    if written:
        raise FuseReplyError(f"{opcode.name}, which has no answer, was answered with {written} bytes")


def decode_attributes(body: bytes) -> Node:
    """fuse_attr_out; the node's number is its inode here."""
    if len(body) < ATTR_OUT_BYTES:
        raise FuseReplyError(f"attributes of {len(body)} bytes")
    attributes = wire.ATTRIBUTES.unpack_from(body, _ATTR_HEAD.size)
    return Node(attributes[0], attributes[1], attributes[9])


def decode_entries(body: bytes, plus: bool) -> Iterator[Listed]:
    """The lines of READDIR or READDIRPLUS; each is padded to 8 bytes, and none is cut in two."""
    at = 0
    while at < len(body):
        node = 0
        if plus:
            node = wire.decode_entry(body, at).number
            at += wire.ENTRY_BYTES
        if len(body) - at < _DIRENT.size:
            raise FuseReplyError("a folder's entry is cut off")
        ino, cookie, length, _kind = _DIRENT.unpack_from(body, at)
        name = body[at + _DIRENT.size : at + _DIRENT.size + length]
        if len(name) != length:
            raise FuseReplyError("a folder's entry is cut off in its name")
        yield Listed(name, ino, cookie, node)
        at += _DIRENT.size + length + 7 & ~7
