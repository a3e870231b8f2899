"""The FUSE kernel protocol, part three: the bodies that follow `fuse_out_header`. Read abi.py first.

Source: `include/uapi/linux/fuse.h`. The kernel checks a reply's length to the byte, except where a
reply is variable (READ, READDIR, READLINK, attributes' values), and turns a wrong one into EIO.
"""

import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

from agent.fs.fuse.abi import Buffer

Body: TypeAlias = bytes | memoryview


ATTRIBUTES: Final = struct.Struct("=QQQqqqIIIIIIIIII")
"""fuse_attr: inode, size, blocks of 512 bytes; seconds of atime, mtime, ctime (signed); nanoseconds of the
three; mode, nlink, uid, gid, rdev, block size, flags."""
ATTR_OUT: Final = struct.Struct("=QI4x")
"""fuse_attr_out without the fuse_attr that follows: for how many seconds and nanoseconds it holds."""
ENTRY_OUT: Final = struct.Struct("=QQQQII")
"""fuse_entry_out without the fuse_attr that follows: node, generation; for how many seconds the name and
the attributes hold; for how many nanoseconds."""
OPEN_OUT: Final = struct.Struct("=QI4x")
"""fuse_open_out: handle, flags of OpenFlag."""
WRITE_OUT: Final = struct.Struct("=I4x")
"""fuse_write_out: size."""
IOCTL_OUT: Final = struct.Struct("=iI8x")
"""fuse_ioctl_out: what ioctl(2) returns, flags, and two counts of unrestricted ioctls; data follow."""
STATFS_OUT: Final = struct.Struct("=QQQQQIII28x")
"""fuse_statfs_out: blocks, those free, those available, files, those free, block size, length of a name,
fragment size."""
GETXATTR_OUT: Final = struct.Struct("=I4x")
"""fuse_getxattr_out, the answer to a GETXATTR or LISTXATTR of size 0: size."""
DIRENT: Final = struct.Struct("=QQII")
"""fuse_dirent without its name, which follows and is padded with zeros to a multiple of 8 bytes: inode,
cookie, bytes of the name, type."""


def dirent_bytes(name: bytes) -> int:
    """How much room a directory entry of this name takes."""
    return (DIRENT.size + len(name) + 7) & ~7


def encode_dirent(ino: int, cookie: int, mode: int, name: bytes) -> bytes:
    """One fuse_dirent; its type is the format bits of the mode."""
    head = DIRENT.pack(ino, cookie, len(name), (mode & 0o170000) >> 12)
    return (head + name).ljust(dirent_bytes(name), b"\0")


NOT_LOOKED_UP = bytes(ENTRY_OUT.size + ATTRIBUTES.size)
"""The fuse_entry_out of a fuse_direntplus whose name was not looked up; the fuse_dirent follows it."""


def looked_up_in(listing: Buffer) -> Iterator[int]:
    """The nodes to which a READDIRPLUS that we encoded has given a reference."""
    at = 0
    while at < len(listing):
        node = ENTRY_OUT.unpack_from(listing, at)[0]
        name_bytes = DIRENT.unpack_from(listing, at + len(NOT_LOOKED_UP))[2]
        at += len(NOT_LOOKED_UP) + ((DIRENT.size + name_bytes + 7) & ~7)
        if node:
            yield node
