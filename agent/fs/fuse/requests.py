"""The FUSE kernel protocol, part two: the arguments that follow `fuse_in_header`. Read abi.py first.

One record for each structure of `include/uapi/linux/fuse.h` that has a file system's operation behind it.
Behind the arguments come, as the opcode has it, one or two names that each end in a NUL byte, the value of
an extended attribute, or the data of a WRITE. Fields that we don't need (lock owner and open flags of
a READ) are skipped as padding where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.fs.fuse.abi import IN_HEADER_BYTES, Buffer, FuseFormatError, WireRecord, laid_out


@laid_out("=Q")
class ForgetIn(WireRecord):
    """fuse_forget_in."""

    lookups: int


@laid_out("=I4x")
class BatchForgetIn(WireRecord):
    """fuse_batch_forget_in: a count, then as many `ForgetOne`."""

    count: int


@laid_out("=QQ")
class ForgetOne(WireRecord):
    """fuse_forget_one."""

    nodeid: int
    lookups: int


@laid_out("=I4xQ")
class GetattrIn(WireRecord):
    """fuse_getattr_in: `handle` counts with GETATTR_FH in `flags`."""

    flags: int
    handle: int


@laid_out("=I4xQQ8xqqqIIII4xII4x")
class SetattrIn(WireRecord):
    """fuse_setattr_in; `valid` is of SetattrValid. Seconds are signed: a time may lie before 1970."""

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


@laid_out("=III4x")
class MknodIn(WireRecord):
    """fuse_mknod_in."""

    mode: int
    rdev: int
    umask: int


@laid_out("=II")
class MkdirIn(WireRecord):
    """fuse_mkdir_in."""

    mode: int
    umask: int


@laid_out("=Q")
class RenameIn(WireRecord):
    """fuse_rename_in."""

    new_parent: int


@laid_out("=QI4x")
class Rename2In(WireRecord):
    """fuse_rename2_in; `flags` are those of renameat2(2)."""

    new_parent: int
    flags: int


@laid_out("=Q")
class LinkIn(WireRecord):
    """fuse_link_in; the header's nodeid is the new parent."""

    old_nodeid: int


@laid_out("=II")
class OpenIn(WireRecord):
    """fuse_open_in: the flags of open(2), and OPEN_KILL_SUIDGID in `open_flags`."""

    flags: int
    open_flags: int


@laid_out("=IIII")
class CreateIn(WireRecord):
    """fuse_create_in."""

    flags: int
    mode: int
    umask: int
    open_flags: int


@laid_out("=QQI20x")
class ReadIn(WireRecord):
    """fuse_read_in, for READ and READDIR."""

    handle: int
    offset: int
    size: int


@laid_out("=QQIIQ8x")
class WriteIn(WireRecord):
    """fuse_write_in; `size` bytes of data follow. `flags` has WRITE_KILL_SUIDGID, and WRITE_LOCKOWNER where
    `owner` counts."""

    handle: int
    offset: int
    size: int
    flags: int
    owner: int = 0


@laid_out("=QII8x")
class ReleaseIn(WireRecord):
    """fuse_release_in, for RELEASE and RELEASEDIR."""

    handle: int
    flags: int
    release_flags: int


@laid_out("=Q8xQ")
class FlushIn(WireRecord):
    """fuse_flush_in; `owner` is the lock owner: one number for each table of open files."""

    handle: int
    owner: int = 0


@laid_out("=QI4x")
class FsyncIn(WireRecord):
    """fuse_fsync_in, for FSYNC and FSYNCDIR; `flags` has FSYNC_DATA_ONLY."""

    handle: int
    flags: int


@laid_out("=QQQI4x")
class FallocateIn(WireRecord):
    """fuse_fallocate_in."""

    handle: int
    offset: int
    length: int
    mode: int


@laid_out("=II")
class SetxattrIn(WireRecord):
    """fuse_setxattr_in without SETXATTR_EXT, which we don't ask for: name and value follow."""

    size: int
    flags: int


@laid_out("=QIIQII")
class IoctlIn(WireRecord):
    """fuse_ioctl_in; `in_size` bytes of data follow. `flags` has IOCTL_DIR, IOCTL_COMPAT and the like."""

    handle: int
    flags: int
    command: int
    argument: int
    in_size: int
    out_size: int


XATTR_BYTES_MAX = 1 << 16
"""XATTR_SIZE_MAX: how long the value of an extended attribute may be."""


@laid_out("=I4x")
class GetxattrIn(WireRecord):
    """fuse_getxattr_in, for GETXATTR (a name follows) and LISTXATTR; a size of 0 asks how much there is."""

    size: int


WRITE_HEAD_BYTES = IN_HEADER_BYTES + WriteIn.LAYOUT.size
"""80: where the data of a WRITE begins. A door that reads into `page - 80` finds them on the page."""


def decode_forgets_untrusted(body: Buffer) -> Iterator[ForgetOne]:
    """The entries of a BATCH_FORGET, refused as a whole where the count promises more than there is."""
    count = BatchForgetIn.decode_untrusted(body).count
    first, each = BatchForgetIn.LAYOUT.size, ForgetOne.LAYOUT.size
    if len(body) < first + count * each:
        raise FuseFormatError("a BATCH_FORGET is shorter than its count")
    return (ForgetOne.decode_untrusted(body, first + index * each) for index in range(count))
