"""Names in requests and replies: those that a request carries and whether they are good, and listings.

Compiled, unlike fuse/requests.py: every name that is looked up and every value that is read by one request
(agent/fs/control/face.py) comes by here.
"""

import contextlib
import errno
from collections.abc import Callable, Iterable
from typing import Final

from agent.fs.fuse.abi import Buffer, FuseFormatError
from agent.fs.fuse.replies import GETXATTR_OUT, NOT_LOOKED_UP, Body, dirent_bytes, encode_dirent
from agent.fs.interface import NAME_BYTES_MAX, DirectoryEntry, FsError

_GETXATTR_OUT: Final = GETXATTR_OUT


def decode_names_untrusted(buffer: Buffer, count: int) -> tuple[list[bytes], int]:
    """`count` names that each end in NUL, and the offset behind the last; nothing about what they say."""
    whole = bytes(buffer)
    names: list[bytes] = []
    at = 0
    for _ in range(count):
        end = whole.find(b"\0", at)
        if end < 0:
            raise FuseFormatError("a name does not end within its message")
        names.append(whole[at:end])
        at = end + 1
    return names, at


def name_at(arguments: memoryview, offset: int) -> bytes:
    """The name that begins there and ends in a NUL byte; nothing about what it says."""
    return decode_names_untrusted(arguments[offset:], 1)[0][0]


def checked_name(name: bytes) -> bytes:
    """A name that every face may trust to be one component of a path.

    The kernel sends no other (we don't ask for EXPORT_SUPPORT, which would bring `.` and `..`), but a
    guest on the far side of virtio-fs could.
    """
    if not name or name in (b".", b"..") or b"/" in name:
        raise FsError(errno.EINVAL, "not a name")
    if len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ENAMETOOLONG)
    return name


def checked_xattr_name(name: bytes) -> bytes:
    if not name or len(name) > NAME_BYTES_MAX:
        raise FsError(errno.ERANGE, "the name of an extended attribute has 1 to 255 bytes")
    return name


def sized(value: Body, room: int) -> Body:
    """The answer to GETXATTR and LISTXATTR: how much there is, or all of it, or ERANGE."""
    if room == 0:
        return _GETXATTR_OUT.pack(len(value))
    if len(value) > room:
        raise FsError(errno.ERANGE)
    return value


def pack_names(
    entries: Iterable[DirectoryEntry], room: memoryview, look_up: Callable[[bytes], bytes] | None = None
) -> int:
    """Write a fuse_dirent for each entry; how many bytes were filled.

    With `look_up` a fuse_entry_out, which it gives for a name, comes before each. A name is looked up only
    once it is sure to fit: each entry that is told is a reference that the kernel gives back. `.` and `..`
    are none, and a name that is gone meanwhile is told without one. EINVAL where not even one entry fits,
    because an empty answer would say that the directory ends here.
    """
    filled = 0
    for entry in entries:
        found = b"" if look_up is None else NOT_LOOKED_UP
        end = filled + len(found) + dirent_bytes(entry.name)
        if end > len(room):
            if not filled:
                raise FsError(errno.EINVAL)
            break
        if look_up is not None and entry.name not in (b".", b".."):
            with contextlib.suppress(FsError):
                found = look_up(entry.name)
        room[filled:end] = found + encode_dirent(entry.ino, entry.cookie, entry.mode, entry.name)
        filled = end
    return filled
