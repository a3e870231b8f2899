"""The FUSE kernel protocol, part two: the arguments that follow `fuse_in_header`. Read abi.py first.

One record for each structure of `include/uapi/linux/fuse.h` that has a file system's operation behind it.
Behind the arguments come, as the opcode has it, one or two names that each end in a NUL byte, the value of
an extended attribute, or the data of a WRITE. Fields that we don't need (lock owner and open flags of
a READ) are skipped as padding where they stand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from agent.fs.fuse.abi import IN_HEADER_BYTES, Buffer, FuseFormatError, WireRecord


@dataclass(frozen=True, slots=True)
class ForgetIn(WireRecord):
    """fuse_forget_in."""

    LAYOUT = struct.Struct("=Q")

    lookups: int


@dataclass(frozen=True, slots=True)
class BatchForgetIn(WireRecord):
    """fuse_batch_forget_in: a count, then as many `ForgetOne`."""

    LAYOUT = struct.Struct("=I4x")

    count: int


@dataclass(frozen=True, slots=True)
class ForgetOne(WireRecord):
    """fuse_forget_one."""

    LAYOUT = struct.Struct("=QQ")

    nodeid: int
    lookups: int


@dataclass(frozen=True, slots=True)
class GetattrIn(WireRecord):
    """fuse_getattr_in: `handle` counts with GETATTR_FH in `flags`."""

    LAYOUT = struct.Struct("=I4xQ")

    flags: int
    handle: int


@dataclass(frozen=True, slots=True)
class SetattrIn(WireRecord):
    """fuse_setattr_in; `valid` is of SetattrValid. Seconds are signed: a time may lie before 1970."""

    LAYOUT = struct.Struct("=I4xQQ8xqqqIIII4xII4x")

    valid: int
    handle: int
    size: int
    atime: int
    mtime: int
    ctime: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class MknodIn(WireRecord):
    """fuse_mknod_in."""

    LAYOUT = struct.Struct("=III4x")

    mode: int
    rdev: int
    umask: int


@dataclass(frozen=True, slots=True)
class MkdirIn(WireRecord):
    """fuse_mkdir_in."""

    LAYOUT = struct.Struct("=II")

    mode: int
    umask: int


@dataclass(frozen=True, slots=True)
class RenameIn(WireRecord):
    """fuse_rename_in."""

    LAYOUT = struct.Struct("=Q")

    new_parent: int


@dataclass(frozen=True, slots=True)
class Rename2In(WireRecord):
    """fuse_rename2_in; `flags` are those of renameat2(2)."""

    LAYOUT = struct.Struct("=QI4x")

    new_parent: int
    flags: int


@dataclass(frozen=True, slots=True)
class LinkIn(WireRecord):
    """fuse_link_in; the header's nodeid is the new parent."""

    LAYOUT = struct.Struct("=Q")

    old_nodeid: int


@dataclass(frozen=True, slots=True)
class OpenIn(WireRecord):
    """fuse_open_in: the flags of open(2), and OPEN_KILL_SUIDGID in `open_flags`."""

    LAYOUT = struct.Struct("=II")

    flags: int
    open_flags: int


@dataclass(frozen=True, slots=True)
class CreateIn(WireRecord):
    """fuse_create_in."""

    LAYOUT = struct.Struct("=IIII")

    flags: int
    mode: int
    umask: int
    open_flags: int


@dataclass(frozen=True, slots=True)
class ReadIn(WireRecord):
    """fuse_read_in, for READ and READDIR."""

    LAYOUT = struct.Struct("=QQI20x")

    handle: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WriteIn(WireRecord):
    """fuse_write_in; `size` bytes of data follow. `flags` has WRITE_KILL_SUIDGID, and WRITE_LOCKOWNER where
    `owner` counts."""

    LAYOUT = struct.Struct("=QQIIQ8x")

    handle: int
    offset: int
    size: int
    flags: int
    owner: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseIn(WireRecord):
    """fuse_release_in, for RELEASE and RELEASEDIR."""

    LAYOUT = struct.Struct("=QII8x")

    handle: int
    flags: int
    release_flags: int


@dataclass(frozen=True, slots=True)
class FlushIn(WireRecord):
    """fuse_flush_in; `owner` is the lock owner: one number for each table of open files."""

    LAYOUT = struct.Struct("=Q8xQ")

    handle: int
    owner: int = 0


@dataclass(frozen=True, slots=True)
class FsyncIn(WireRecord):
    """fuse_fsync_in, for FSYNC and FSYNCDIR; `flags` has FSYNC_DATA_ONLY."""

    LAYOUT = struct.Struct("=QI4x")

    handle: int
    flags: int


@dataclass(frozen=True, slots=True)
class FallocateIn(WireRecord):
    """fuse_fallocate_in."""

    LAYOUT = struct.Struct("=QQQI4x")

    handle: int
    offset: int
    length: int
    mode: int


@dataclass(frozen=True, slots=True)
class SetxattrIn(WireRecord):
    """fuse_setxattr_in without SETXATTR_EXT, which we don't ask for: name and value follow."""

    LAYOUT = struct.Struct("=II")

    size: int
    flags: int


@dataclass(frozen=True, slots=True)
class IoctlIn(WireRecord):
    """fuse_ioctl_in; `in_size` bytes of data follow. `flags` has IOCTL_DIR, IOCTL_COMPAT and the like."""

    LAYOUT = struct.Struct("=QIIQII")

    handle: int
    flags: int
    command: int
    argument: int
    in_size: int
    out_size: int


XATTR_BYTES_MAX = 1 << 16
"""XATTR_SIZE_MAX: how long the value of an extended attribute may be."""


@dataclass(frozen=True, slots=True)
class GetxattrIn(WireRecord):
    """fuse_getxattr_in, for GETXATTR (a name follows) and LISTXATTR; a size of 0 asks how much there is."""

    LAYOUT = struct.Struct("=I4x")

    size: int


assert ForgetIn.LAYOUT.size == RenameIn.LAYOUT.size == LinkIn.LAYOUT.size == 8
assert MkdirIn.LAYOUT.size == OpenIn.LAYOUT.size == BatchForgetIn.LAYOUT.size == 8
assert SetxattrIn.LAYOUT.size == GetxattrIn.LAYOUT.size == 8
assert GetattrIn.LAYOUT.size == MknodIn.LAYOUT.size == Rename2In.LAYOUT.size == ForgetOne.LAYOUT.size == 16
assert CreateIn.LAYOUT.size == FsyncIn.LAYOUT.size == 16
assert ReleaseIn.LAYOUT.size == FlushIn.LAYOUT.size == 24
assert FallocateIn.LAYOUT.size == IoctlIn.LAYOUT.size == 32
assert ReadIn.LAYOUT.size == WriteIn.LAYOUT.size == 40
assert SetattrIn.LAYOUT.size == 88

WRITE_HEAD_BYTES = IN_HEADER_BYTES + WriteIn.LAYOUT.size
"""80: where the data of a WRITE begins. A door that reads into `page - 80` finds them on the page."""


def decode_forgets_untrusted(body: Buffer) -> Iterator[ForgetOne]:
    """The entries of a BATCH_FORGET, refused as a whole where the count promises more than there is."""
    count = BatchForgetIn.decode_untrusted(body).count
    first, each = BatchForgetIn.LAYOUT.size, ForgetOne.LAYOUT.size
    if len(body) < first + count * each:
        raise FuseFormatError("a BATCH_FORGET is shorter than its count")
    return (ForgetOne.decode_untrusted(body, first + index * each) for index in range(count))
