"""What is wrong with a state folder or its disk, in words: Linux says only that it refuses."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from agent.errors import G35Error, UserError
from nvmeof.authentication.private_files import user_name

ROOM_LEAST = 64 << 10
"""Bytes: on a disk with less room, a process fails that writes nothing but its log and its process id."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
_ANOTHER = "--state takes another folder"


class DiskFull(G35Error):
    """No room in the state folder."""


@contextlib.contextmanager
def told_of_owner(state: Path) -> Iterator[None]:
    """An error of the block that is about the state folder says whose it is, or why it cannot be made."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED or not _is_about(error.filename, state):
            raise
        raise _told(error, state) from error


@contextlib.contextmanager
def told_of_full_disk(state: Path) -> Iterator[None]:
    """An error of the block that a full disk may have caused names that disk."""
    try:
        yield
    except (OSError, G35Error) as error:
        if isinstance(error, DiskFull | UserError) or " is full" in str(error):
            raise
        if not (isinstance(error, OSError) and error.errno in _FULL) and _has_room(state):
            raise
        why = "" if isinstance(error, OSError) else f": {error}"
        raise DiskFull(
            f"the disk that has {state} is full{why}", f"make some room on it; {_ANOTHER}"
        ) from error


def _has_room(folder: Path) -> bool:
    """Whether the disk of a folder has room for a log and a few small files, as far as it can be asked."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return True
    return found.f_bavail * found.f_frsize >= ROOM_LEAST


def _is_about(filename: object, state: Path) -> bool:
    if not isinstance(filename, str | os.PathLike):
        return False
    path = Path(filename)
    return path in (state, *state.parents) or state in path.parents


def _told(error: OSError, state: Path) -> UserError:
    nearest = state
    while True:
        try:
            owner = nearest.stat().st_uid
            break
        except FileNotFoundError:
            words = f"cannot make the state folder {state}: {error.filename}: {error.strerror}"
            return UserError(words, _ANOTHER)
        except OSError:
            nearest = nearest.parent
    if error.errno == errno.EROFS or owner == os.geteuid():
        return UserError(f"cannot use the state folder {state}: {error.filename}: {error.strerror}", _ANOTHER)
    return UserError(
        f"{nearest} is a folder of user {user_name(owner)}", f"run this as that user; {_ANOTHER}"
    )
