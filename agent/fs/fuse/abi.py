"""The FUSE kernel protocol, part one: headers, numbers, flags and INIT. Read this before its neighbours.

Source: `include/uapi/linux/fuse.h` of Linux (protocol 7.28 of Linux 4.20 up to 7.45 of Linux 6.18). A request
is `fuse_in_header`, the arguments of its opcode (requests.py), then names, values or data. A reply is
`fuse_out_header` and its body (replies.py). Fields are in the byte order of the machine, padded to 64 bits.
Padding (`x` in a layout) is zero when sent and ignored when received: newer kernels give it a meaning.
The words behind a layout name its fields, in their order.
"""

import enum
import struct
from typing import Any, Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

MAJOR = 7
MINOR = 39
"""What we speak. Features are switched by INIT flags, so newer kernels lose nothing by it."""
MINOR_LEAST = 28
"""Linux 4.20, the first with FUSE_MAX_PAGES: without it a request carries 128 KiB at most."""

PAGE_BYTES = 4096


class FuseFormatError(ValueError):
    """The peer's fault: these bytes are not the message that they should be."""


def decode_untrusted(layout: struct.Struct, buffer: Buffer, offset: int = 0) -> tuple[Any, ...]:
    """The fields of a structure at `offset`; `FuseFormatError` where the buffer ends before they do."""
    try:
        return layout.unpack_from(buffer, offset)
    except struct.error as error:
        raise FuseFormatError(f"its header or arguments are truncated: {error}") from None


class Opcode(enum.IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52


class InitFlag(enum.IntFlag):
    """Flags of INIT that matter here. Bits 32 and up travel in `flags2`, which counts only with INIT_EXT
    set."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36


class OpenFlag(enum.IntFlag):
    """FOPEN_*: what a reply to OPEN, CREATE or OPENDIR tells the kernel."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NOFLUSH = 1 << 5
    PARALLEL_DIRECT_WRITES = 1 << 6


class SetattrValid(enum.IntFlag):
    """FATTR_*: which fields of `fuse_setattr_in` count."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCKOWNER = 1 << 9
    CTIME = 1 << 10
    KILL_SUIDGID = 1 << 11


GETATTR_FH = 1 << 0
FSYNC_DATA_ONLY = 1 << 0
WRITE_CACHE = 1 << 0
WRITE_LOCKOWNER = 1 << 1
WRITE_KILL_SUIDGID = 1 << 2
OPEN_KILL_SUIDGID = 1 << 0


IN_HEADER: Final = struct.Struct("=IIQQIIIH2x")
"""fuse_in_header: length, opcode, unique, node, uid, gid, pid, length of extensions (in units of 8 bytes)."""
OUT_HEADER: Final = struct.Struct("=IiQ")
"""fuse_out_header: length (header included), error (0 or a negative errno above -512), unique."""
INIT_IN: Final = struct.Struct("=IIII")
"""fuse_init_in as far as every kernel sends it: major, minor, max_readahead, flags. Since 7.36 `flags2` and
44 spare bytes follow."""
INIT_FLAGS2: Final = struct.Struct("=I")
"""fuse_init_in.flags2, at offset 16 of the arguments."""
INIT_OUT: Final = struct.Struct("=IIIIHHIIHHI28x")
"""fuse_init_out: major, minor, max_readahead, flags, max_background, congestion_threshold, max_write,
time_granularity, max_pages, map_alignment, flags2."""

IN_HEADER_BYTES: Final[int] = IN_HEADER.size
OUT_HEADER_BYTES: Final[int] = OUT_HEADER.size


def encode_answer(error: int, unique: int) -> bytes:
    """A reply without a body: success, or an errno (positive)."""
    return OUT_HEADER.pack(OUT_HEADER_BYTES, -error, unique)
