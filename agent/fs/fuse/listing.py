"""READDIR and READDIRPLUS: as many entries of a directory as fit into the room that the kernel gives."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from agent.fs.fuse.replies import NOT_LOOKED_UP, dirent_bytes, encode_dirent
from agent.fs.interface import DirectoryEntry, FsError


def pack_names(entries: Iterable[DirectoryEntry], room: memoryview) -> int:
    """Write a fuse_dirent for each entry; how many bytes were filled. EINVAL where not even one fits,
    because an empty answer would say that the directory ends here."""
    filled = 0
    for entry in entries:
        end = filled + dirent_bytes(entry.name)
        if end > len(room):
            if not filled:
                raise FsError(errno.EINVAL)
            break
        room[filled:end] = encode_dirent(entry.ino, entry.cookie, entry.mode, entry.name)
        filled = end
    return filled


def pack_names_looked_up(
    entries: Iterable[DirectoryEntry], room: memoryview, look_up: Callable[[bytes], bytes]
) -> int:
    """The same with what `look_up` finds under each name (a fuse_entry_out) before it.

    A name is looked up only once it is sure to fit, for each entry that is told is a reference that the
    kernel gives back. `.` and `..` are none, and a name that is gone meanwhile is told without one.
    """
    filled = 0
    for entry in entries:
        end = filled + len(NOT_LOOKED_UP) + dirent_bytes(entry.name)
        if end > len(room):
            if not filled:
                raise FsError(errno.EINVAL)
            break
        known = NOT_LOOKED_UP
        if entry.name not in (b".", b".."):
            try:
                known = look_up(entry.name)
            except FsError:
                known = NOT_LOOKED_UP
        room[filled:end] = known + encode_dirent(entry.ino, entry.cookie, entry.mode, entry.name)
        filled = end
    return filled
