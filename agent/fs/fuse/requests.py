"""The FUSE kernel protocol, part two: the arguments that follow `fuse_in_header`. Read abi.py first.

One layout for each structure of `include/uapi/linux/fuse.h` that has a file system's operation behind it.
Behind the arguments come, as the opcode has it, one or two names that each end in a NUL byte, the value of
an extended attribute, or the data of a WRITE. Fields that we don't need (lock owner and open flags of
a READ) are skipped as padding where they stand.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final

from agent.fs.fuse.abi import IN_HEADER_BYTES, Buffer, FuseFormatError, decode_untrusted

FORGET_IN: Final = struct.Struct("=Q")
"""fuse_forget_in: lookups."""
BATCH_FORGET_IN: Final = struct.Struct("=I4x")
"""fuse_batch_forget_in: how many FORGET_ONE follow."""
FORGET_ONE: Final = struct.Struct("=QQ")
"""fuse_forget_one: node, lookups."""
GETATTR_IN: Final = struct.Struct("=I4xQ")
"""fuse_getattr_in: flags, handle, which counts with GETATTR_FH in the flags."""
SETATTR_IN: Final = struct.Struct("=I4xQQ8xqqqIIII4xII4x")
"""fuse_setattr_in: valid (of SetattrValid), handle, size; seconds of atime, mtime, ctime (signed: a time may
lie before 1970); nanoseconds of the three; mode, uid, gid."""
MKNOD_IN: Final = struct.Struct("=III4x")
"""fuse_mknod_in: mode, rdev, umask."""
MKDIR_IN: Final = struct.Struct("=II")
"""fuse_mkdir_in: mode, umask."""
RENAME_IN: Final = struct.Struct("=Q")
"""fuse_rename_in: new parent."""
RENAME2_IN: Final = struct.Struct("=QI4x")
"""fuse_rename2_in: new parent, flags of renameat2(2)."""
LINK_IN: Final = struct.Struct("=Q")
"""fuse_link_in: old node; the header's node is the new parent."""
OPEN_IN: Final = struct.Struct("=II")
"""fuse_open_in: flags of open(2), and flags with OPEN_KILL_SUIDGID."""
CREATE_IN: Final = struct.Struct("=IIII")
"""fuse_create_in: flags of open(2), mode, umask, open flags."""
READ_IN: Final = struct.Struct("=QQI20x")
"""fuse_read_in, for READ and READDIR: handle, offset, size."""
WRITE_IN: Final = struct.Struct("=QQIIQ8x")
"""fuse_write_in: handle, offset, size (of the data that follow), flags, owner. The flags have
WRITE_KILL_SUIDGID, WRITE_LOCKOWNER where `owner` counts, and WRITE_CACHE where the kernel writes pages."""
RELEASE_IN: Final = struct.Struct("=QII8x")
"""fuse_release_in, for RELEASE and RELEASEDIR: handle, flags of open(2), release flags."""
FLUSH_IN: Final = struct.Struct("=Q8xQ")
"""fuse_flush_in: handle, lock owner: one number for each table of open files."""
FSYNC_IN: Final = struct.Struct("=QI4x")
"""fuse_fsync_in, for FSYNC and FSYNCDIR: handle, flags with FSYNC_DATA_ONLY."""
FALLOCATE_IN: Final = struct.Struct("=QQQI4x")
"""fuse_fallocate_in: handle, offset, length, mode."""
SETXATTR_IN: Final = struct.Struct("=II")
"""fuse_setxattr_in without SETXATTR_EXT, which we don't ask for: size, flags; name and value follow."""
GETXATTR_IN: Final = struct.Struct("=I4x")
"""fuse_getxattr_in, for GETXATTR (a name follows) and LISTXATTR: size; 0 asks how much there is."""
IOCTL_IN: Final = struct.Struct("=QIIQII")
"""fuse_ioctl_in: handle, flags (IOCTL_DIR, IOCTL_COMPAT and the like), command, argument, size of the data
that follow, size of the room for an answer."""

XATTR_BYTES_MAX: Final = 1 << 16
"""XATTR_SIZE_MAX: how long the value of an extended attribute may be."""
WRITE_HEAD_BYTES: Final[int] = IN_HEADER_BYTES + WRITE_IN.size
"""80: where the data of a WRITE begins. A door that reads into `page - 80` finds them on the page."""


def decode_forgets_untrusted(body: Buffer) -> Iterator[tuple[Any, ...]]:
    """Node and lookups of a BATCH_FORGET's entries, refused where the count promises more than there is."""
    (count,) = decode_untrusted(BATCH_FORGET_IN, body)
    first = BATCH_FORGET_IN.size
    end = first + count * FORGET_ONE.size
    if len(body) < end:
        raise FuseFormatError("a BATCH_FORGET is shorter than its count")
    return FORGET_ONE.iter_unpack(body[first:end])
