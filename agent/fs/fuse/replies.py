"""The FUSE kernel protocol, part three: the bodies that follow `fuse_out_header`. Read abi.py first.

Source: `include/uapi/linux/fuse.h`. The kernel checks a reply's length to the byte, except where a
reply is variable (READ, READDIR, READLINK, attributes' values), and turns a wrong one into EIO.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from agent.fs.fuse.abi import Buffer, FuseFormatError, WireRecord

Body: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class AttrOfFile(WireRecord):
    """fuse_attr; seconds are signed, `blocks` count 512 bytes each."""

    LAYOUT = struct.Struct("=QQQqqqIIIIIIIIII")

    ino: int
    size: int
    blocks: int
    atime: int
    mtime: int
    ctime: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    block_size: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class AttrOut(WireRecord):
    """fuse_attr_out: how long the attributes hold, then a fuse_attr."""

    LAYOUT = struct.Struct("=QI4x")

    valid: int
    valid_ns: int
    attributes: AttrOfFile

    def encode(self) -> bytes:
        return self.LAYOUT.pack(self.valid, self.valid_ns) + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        try:
            valid, valid_ns = cls.LAYOUT.unpack_from(buffer, offset)
        except struct.error as error:
            raise FuseFormatError(f"AttrOut is truncated: {error}") from None
        attributes = AttrOfFile.decode_untrusted(buffer, offset + cls.LAYOUT.size)
        return cls(valid, valid_ns, attributes)


@dataclass(frozen=True, slots=True)
class EntryOut(WireRecord):
    """fuse_entry_out: node, generation, how long name and attributes hold, then a fuse_attr."""

    LAYOUT = struct.Struct("=QQQQII")

    nodeid: int
    generation: int
    entry_valid: int
    attr_valid: int
    entry_valid_ns: int
    attr_valid_ns: int
    attributes: AttrOfFile

    def encode(self) -> bytes:
        head = self.LAYOUT.pack(
            self.nodeid,
            self.generation,
            self.entry_valid,
            self.attr_valid,
            self.entry_valid_ns,
            self.attr_valid_ns,
        )
        return head + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        try:
            node, generation, entry, attr, entry_ns, attr_ns = cls.LAYOUT.unpack_from(buffer, offset)
        except struct.error as error:
            raise FuseFormatError(f"EntryOut is truncated: {error}") from None
        attributes = AttrOfFile.decode_untrusted(buffer, offset + cls.LAYOUT.size)
        return cls(node, generation, entry, attr, entry_ns, attr_ns, attributes)


@dataclass(frozen=True, slots=True)
class OpenOut(WireRecord):
    """fuse_open_out; `flags` is of OpenFlag."""

    LAYOUT = struct.Struct("=QI4x")

    handle: int
    flags: int


@dataclass(frozen=True, slots=True)
class WriteOut(WireRecord):
    """fuse_write_out."""

    LAYOUT = struct.Struct("=I4x")

    size: int


@dataclass(frozen=True, slots=True)
class IoctlOut(WireRecord):
    """fuse_ioctl_out: what ioctl(2) returns, and two counts of unrestricted ioctls; data follow."""

    LAYOUT = struct.Struct("=iI8x")

    result: int
    flags: int


@dataclass(frozen=True, slots=True)
class StatfsOut(WireRecord):
    """fuse_statfs_out (fuse_kstatfs and its spare words)."""

    LAYOUT = struct.Struct("=QQQQQIII28x")

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    block_size: int
    name_bytes_max: int
    fragment_size: int


@dataclass(frozen=True, slots=True)
class GetxattrOut(WireRecord):
    """fuse_getxattr_out: the answer to a GETXATTR or LISTXATTR of size 0."""

    LAYOUT = struct.Struct("=I4x")

    size: int


@dataclass(frozen=True, slots=True)
class DirentHead(WireRecord):
    """fuse_dirent without its name, which follows and is padded with zeros to a multiple of 8 bytes."""

    LAYOUT = struct.Struct("=QQII")

    ino: int
    cookie: int
    name_bytes: int
    kind: int


assert IoctlOut.LAYOUT.size == 16
assert AttrOfFile.LAYOUT.size == 88
assert AttrOut.LAYOUT.size + AttrOfFile.LAYOUT.size == 104
assert EntryOut.LAYOUT.size + AttrOfFile.LAYOUT.size == 128
assert OpenOut.LAYOUT.size == 16
assert WriteOut.LAYOUT.size == GetxattrOut.LAYOUT.size == 8
assert StatfsOut.LAYOUT.size == 80
assert DirentHead.LAYOUT.size == 24


def dirent_bytes(name: bytes) -> int:
    """How much room a directory entry of this name takes."""
    return (DirentHead.LAYOUT.size + len(name) + 7) & ~7


def encode_dirent(ino: int, cookie: int, mode: int, name: bytes) -> bytes:
    """One fuse_dirent; its type is the format bits of the mode."""
    head = DirentHead.LAYOUT.pack(ino, cookie, len(name), (mode & 0o170000) >> 12)
    return (head + name).ljust(dirent_bytes(name), b"\0")


NOT_LOOKED_UP = bytes(EntryOut.LAYOUT.size + AttrOfFile.LAYOUT.size)
"""The fuse_entry_out of a fuse_direntplus whose name was not looked up; the fuse_dirent follows it."""


def looked_up_in(listing: Buffer) -> Iterator[int]:
    """The nodes to which a READDIRPLUS that we encoded has given a reference."""
    at = 0
    while at < len(listing):
        node = EntryOut.LAYOUT.unpack_from(listing, at)[0]
        name_bytes = DirentHead.LAYOUT.unpack_from(listing, at + len(NOT_LOOKED_UP))[2]
        at += len(NOT_LOOKED_UP) + ((DirentHead.LAYOUT.size + name_bytes + 7) & ~7)
        if node:
            yield node
