"""A temporary folder that may have mounts in it, and that the next one cleans up after a `kill -9`.

Its owner locks a file in it. A folder whose lock is free is left over: only files and dead mounts remain of
it. A mount that is alive, or does not answer, is left alone with its folder.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.errors import G35Error
from agent.fs.doors.mounting import MountError, clear_dead_mount

log = logging.getLogger(__name__)

_OWNER = "owner"
LEFT_BEHIND_MAX = 64
"""Folders that one start clears away."""


class KeptFolder(G35Error):
    """An error that the logs in the temporary folder explain: the folder stays until the next start."""


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder of mode 0700, gone at the end; folders of killed owners with this prefix go first."""
    _sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    is_kept = False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    except KeptFolder:
        is_kept = True
        raise
    finally:
        if not is_kept:
            _remove(folder)
        os.close(lock)


def _sweep(prefix: str) -> None:
    swept = 0
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix) or swept == LEFT_BEHIND_MAX:
                continue
            # /tmp belongs to everybody: only a folder of ours, and no link to one, is ours to remove.
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                    swept += _sweep_one(Path(entry.path))


def _sweep_one(folder: Path) -> bool:
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(lock)
    return True


def _remove(folder: Path) -> None:
    for mountpoint in _mounts_below(folder):
        try:
            clear_dead_mount(mountpoint)
        except MountError as alive:
            log.warning("%s stays: %s", folder, alive)
            return
    shutil.rmtree(folder, ignore_errors=True)


def _mounts_below(folder: Path) -> list[Path]:
    """Mount points inside, deepest first; from the kernel's table, as a hung mount would hold us up."""
    inside = f"{os.path.realpath(folder)}/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        found = {line.split()[4] for line in table}
    return sorted(
        (Path(each) for each in found if each.startswith(inside)), key=lambda each: -len(each.parts)
    )
