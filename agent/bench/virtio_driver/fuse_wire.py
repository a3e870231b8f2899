"""The FUSE messages that the test driver sends and reads: requests as a guest's kernel makes them.

Source: `include/uapi/linux/fuse.h` of Linux, protocol 7.38. agent/fs has these layouts as well, for the
other end. They are written a second time on purpose, from the header and not from there: the two ends
judge each other, and this package may be used without the agent's.

Every request begins with `fuse_in_header` (40 bytes: length, opcode, unique, nodeid, uid, gid, pid, length
of extensions, padding), every reply with `fuse_out_header` (16 bytes: length, error, unique).
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAJOR: Final = 7
MINOR: Final = 38
ROOT_NODE: Final = 1

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
OUT_HEADER: Final = struct.Struct("<IiQ")
INIT_IN: Final = struct.Struct("<IIIII44x")
INIT_OUT: Final = struct.Struct("<IIIIHHIIHHI28x")
OPEN_IN: Final = struct.Struct("<II")
CREATE_IN: Final = struct.Struct("<IIII")
MKDIR_IN: Final = struct.Struct("<II")
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_IN: Final = struct.Struct("<QQIIQII")
RELEASE_IN: Final = struct.Struct("<QIIQ")
GETATTR_IN: Final = struct.Struct("<IIQ")
FORGET_IN: Final = struct.Struct("<Q")
BATCH_FORGET_IN: Final = struct.Struct("<II")
FORGET_ONE: Final = struct.Struct("<QQ")
INTERRUPT_IN: Final = struct.Struct("<Q")
OPEN_OUT: Final = struct.Struct("<QII")
WRITE_OUT: Final = struct.Struct("<II")
_ATTRIBUTES: Final = struct.Struct("<QQQqqqIIIIIIIIII")
_ENTRY_HEAD: Final = struct.Struct("<QQQQII")
_ATTR_HEAD: Final = struct.Struct("<QII")
_DIRENT: Final = struct.Struct("<QQII")

IN_HEADER_BYTES: Final[int] = IN_HEADER.size
OUT_HEADER_BYTES: Final[int] = OUT_HEADER.size
ENTRY_BYTES: Final = _ENTRY_HEAD.size + _ATTRIBUTES.size
ATTR_OUT_BYTES: Final = _ATTR_HEAD.size + _ATTRIBUTES.size

assert (IN_HEADER_BYTES, OUT_HEADER_BYTES) == (40, 16)
assert (INIT_IN.size, INIT_OUT.size) == (64, 64)
assert (READ_IN.size, WRITE_IN.size, RELEASE_IN.size) == (40, 40, 24)
assert (ENTRY_BYTES, ATTR_OUT_BYTES) == (128, 104)

INIT_FLAGS: Final = 0x73FF_FFFB
"""What a guest's kernel of 7.38 offers, INIT_EXT (bit 30) and MAX_PAGES (bit 22) among it."""
INIT_FLAGS2: Final = 0x0000_000D


class Opcode(enum.IntEnum):
    """enum fuse_opcode, as far as the driver asks for it."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    MKDIR = 9
    UNLINK = 10
    OPEN = 14
    READ = 15
    WRITE = 16
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44


class FuseReplyError(Exception):
    """The device's fault: the reply is not one to what was asked."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the device said to INIT."""

    major: int
    minor: int
    flags: int
    max_write: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class Node:
    """A file that was looked up; the device counts one lookup for each."""

    number: int
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of a folder; `node` is 0 where the reply names none (READDIR, and `.` and `..`)."""

    name: bytes
    ino: int
    cookie: int
    node: int = 0


def encode_request(opcode: int, unique: int, node: int, body: bytes, behind: int = 0) -> bytes:
    """Header and body; `behind`: bytes of data that follow in other buffers. As root and process 1."""
    return IN_HEADER.pack(IN_HEADER_BYTES + len(body) + behind, opcode, unique, node, 0, 0, 1, 0, 0) + body


def encode_init() -> bytes:
    return INIT_IN.pack(MAJOR, MINOR, 128 << 10, INIT_FLAGS, INIT_FLAGS2)


def decode_init(body: bytes) -> Agreed:
    """INIT's answer; FuseReplyError where it is cut off."""
    if len(body) < INIT_OUT.size:
        raise FuseReplyError(f"an answer to INIT of {len(body)} bytes")
    major, minor, _, flags, _, _, max_write, _, max_pages, _, flags2 = INIT_OUT.unpack_from(body)
    return Agreed(major, minor, flags | flags2 << 32, max_write, max_pages)


def decode_entry(body: bytes, at: int = 0) -> Node:
    """fuse_entry_out: of LOOKUP, CREATE, MKDIR and each entry of READDIRPLUS."""
    if len(body) - at < ENTRY_BYTES:
        raise FuseReplyError(f"an entry of {len(body) - at} bytes")
    number = _ENTRY_HEAD.unpack_from(body, at)[0]
    attributes = _ATTRIBUTES.unpack_from(body, at + _ENTRY_HEAD.size)
    return Node(number, attributes[1], attributes[9])


def decode_attributes(body: bytes) -> Node:
    """fuse_attr_out; the node's number is its inode here."""
    if len(body) < ATTR_OUT_BYTES:
        raise FuseReplyError(f"attributes of {len(body)} bytes")
    attributes = _ATTRIBUTES.unpack_from(body, _ATTR_HEAD.size)
    return Node(attributes[0], attributes[1], attributes[9])


def decode_entries(body: bytes, plus: bool) -> Iterator[Listed]:
    """The lines of READDIR or READDIRPLUS; each is padded to 8 bytes, and none is cut in two."""
    at = 0
    while at < len(body):
        node = 0
        if plus:
            node = decode_entry(body, at).number
            at += ENTRY_BYTES
        if len(body) - at < _DIRENT.size:
            raise FuseReplyError("a folder's entry is cut off")
        ino, cookie, length, _kind = _DIRENT.unpack_from(body, at)
        name = body[at + _DIRENT.size : at + _DIRENT.size + length]
        if len(name) != length:
            raise FuseReplyError("a folder's entry is cut off in its name")
        yield Listed(name, ino, cookie, node)
        at += _DIRENT.size + length + 7 & ~7


def check_reply(header: tuple[int, int, int], unique: int, written: int, asked: Opcode) -> int:
    """The length of a reply's body; OSError with the device's errno, FuseReplyError where it lies.

    `header` is (length, error, unique), `written` what the used ring says was written.
    """
    length, error, answered = header
    if answered != unique or length != written or written < OUT_HEADER_BYTES:
        raise FuseReplyError(
            f"{asked.name} {unique}: a reply to {answered} of {length} bytes, of which {written} were written"
        )
    if error:
        if not -512 < error < 0 or length != OUT_HEADER_BYTES:
            raise FuseReplyError(f"{asked.name}: error {error} with {length} bytes")
        raise OSError(-error, f"{asked.name}: {os.strerror(-error)}")
    return length - OUT_HEADER_BYTES
