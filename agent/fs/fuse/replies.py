"""The FUSE kernel protocol, part three: the bodies that follow `fuse_out_header`. Read abi.py first.

Source: `include/uapi/linux/fuse.h`. The kernel checks a reply's length to the byte, except where a
reply is variable (READ, READDIR, READLINK, attributes' values), and turns a wrong one into EIO.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from agent.fs.fuse.abi import Buffer, WireRecord, laid_out

Body: TypeAlias = bytes | memoryview


@laid_out("=QQQqqqIIIIIIIIII")
class AttrOfFile(WireRecord):
    """fuse_attr; seconds are signed, `blocks` count 512 bytes each."""

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


@laid_out("=QI4x")
class AttrOut(WireRecord):
    """fuse_attr_out without the fuse_attr that follows: how long it holds."""

    valid: int
    valid_ns: int


@laid_out("=QQQQII")
class EntryOut(WireRecord):
    """fuse_entry_out without the fuse_attr that follows; how long the name and that hold."""

    nodeid: int
    generation: int
    entry_valid: int
    attr_valid: int
    entry_valid_ns: int
    attr_valid_ns: int


@laid_out("=QI4x")
class OpenOut(WireRecord):
    """fuse_open_out; `flags` is of OpenFlag."""

    handle: int
    flags: int


@laid_out("=I4x")
class WriteOut(WireRecord):
    """fuse_write_out."""

    size: int


@laid_out("=iI8x")
class IoctlOut(WireRecord):
    """fuse_ioctl_out: what ioctl(2) returns, and two counts of unrestricted ioctls; data follow."""

    result: int
    flags: int


@laid_out("=QQQQQIII28x")
class StatfsOut(WireRecord):
    """fuse_statfs_out (fuse_kstatfs and its spare words)."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    block_size: int
    name_bytes_max: int
    fragment_size: int


@laid_out("=I4x")
class GetxattrOut(WireRecord):
    """fuse_getxattr_out: the answer to a GETXATTR or LISTXATTR of size 0."""

    size: int


@laid_out("=QQII")
class DirentHead(WireRecord):
    """fuse_dirent without its name, which follows and is padded with zeros to a multiple of 8 bytes."""

    ino: int
    cookie: int
    name_bytes: int
    kind: int


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
