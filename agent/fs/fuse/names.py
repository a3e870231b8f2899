"""Names and values of extended attributes in the arguments of a request, and whether they are good.

Out of the way of fuse/requests.py, because every name that is looked up and every value that is read by one
request (agent/fs/control/face.py) comes by here.
"""

from __future__ import annotations

import errno
from typing import Final

from agent.fs.fuse.abi import Buffer, FuseFormatError
from agent.fs.fuse.replies import Body, GetxattrOut
from agent.fs.interface import NAME_BYTES_MAX, FsError

_GETXATTR_OUT: Final = GetxattrOut.LAYOUT


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
