"""The FUSE messages that the driver sends and reads, as a guest's kernel makes them.

Source: `include/uapi/linux/fuse.h` of Linux, protocol 7.38. agent/fs has these layouts as well. They are
written twice on purpose: the two ends judge each other.

A request begins with `fuse_in_header` (40 bytes), a reply with `fuse_out_header` (length, error, unique).
"""

import enum
import os
import struct
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
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_IN: Final = struct.Struct("<QQIIQII")
RELEASE_IN: Final = struct.Struct("<QIIQ")
GETXATTR_IN: Final = struct.Struct("<II")
OPEN_OUT: Final = struct.Struct("<QII")
WRITE_OUT: Final = struct.Struct("<II")
ATTRIBUTES: Final = struct.Struct("<QQQqqqIIIIIIIIII")
_ENTRY_HEAD: Final = struct.Struct("<QQQQII")

IN_HEADER_BYTES: Final[int] = IN_HEADER.size
OUT_HEADER_BYTES: Final[int] = OUT_HEADER.size
ENTRY_BYTES: Final = _ENTRY_HEAD.size + ATTRIBUTES.size

assert (IN_HEADER_BYTES, OUT_HEADER_BYTES) == (40, 16)
assert (INIT_IN.size, INIT_OUT.size) == (64, 64)
assert (READ_IN.size, WRITE_IN.size, RELEASE_IN.size) == (40, 40, 24)
assert ENTRY_BYTES == 128

INIT_FLAGS: Final = 0x73FF_FFFB
"""What a guest's kernel of 7.38 offers, INIT_EXT (bit 30) and MAX_PAGES (bit 22) among it."""
INIT_FLAGS2: Final = 0x0000_000D


class Opcode(enum.IntEnum):
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
    GETXATTR = 22
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


def encode_init() -> bytes:
    return INIT_IN.pack(MAJOR, MINOR, 128 << 10, INIT_FLAGS, INIT_FLAGS2)


def decode_init(body: bytes) -> Agreed:
    """INIT's answer; FuseReplyError where it is cut off."""
    if len(body) < INIT_OUT.size:
        raise FuseReplyError(f"an answer to INIT of {len(body)} bytes")
    major, minor, _, flags, _, _, max_write, _, max_pages, _, flags2 = INIT_OUT.unpack_from(body)
    return Agreed(major, minor, flags | flags2 << 32, max_write, max_pages)


def decode_entry(body: bytes, at: int = 0) -> Node:
    """fuse_entry_out, the answer to LOOKUP among others."""
    if len(body) - at < ENTRY_BYTES:
        raise FuseReplyError(f"an entry of {len(body) - at} bytes")
    number = _ENTRY_HEAD.unpack_from(body, at)[0]
    attributes = ATTRIBUTES.unpack_from(body, at + _ENTRY_HEAD.size)
    return Node(number, attributes[1], attributes[9])


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
