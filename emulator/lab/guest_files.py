"""Reads on this machine of files that a guest writes.

The guest is root in its exchange folder, and through QEMU's 9p server its links, pipes and device nodes are
real ones here. So a file is opened without following a link, its type is checked first, and it is read up to
a bound. The disk space that a guest may take here has a bound as well.
"""

import codecs
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from emulator.lab.errors import ExchangeMisusedError, GuestTookTooMuchError

MIB = 1 << 20
PIECE_BYTES = 64 << 10
STATUS_BYTES_MAX = 16
PRINTED_BYTES_MAX = 64 * MIB
"""Of a command's output, and of a guest's console: a file here for each."""
EXCHANGE_BYTES_MAX = 1024 * MIB
"""All files of the exchange folder together, with open files that have no name any more."""
EXCHANGE_ENTRIES_MAX = 10_000
PATH_CHARACTERS_MAX = 3000
"""The kernel takes 4096 bytes; files below a longer path cannot be counted."""


@contextmanager
def plain_file(path: Path) -> Iterator[int]:
    """A descriptor to read the plain file `path`. Never waits, and has no effect on other kinds of files.

    Raises FileNotFoundError, OSError, and ExchangeMisusedError for a link, a pipe, a device or a folder.
    """
    # O_PATH opens nothing yet: a device node would notice an open.
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise ExchangeMisusedError(path.name)
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tail_of(path: Path, limit: int) -> str:
    """The last `limit` bytes of a text file; nothing where there is no plain file. For messages."""
    with suppress(OSError, ExchangeMisusedError), plain_file(path) as descriptor:
        start = max(0, os.fstat(descriptor).st_size - limit)
        return os.pread(descriptor, limit, start).decode(errors="replace")
    return ""


def status_in(path: Path) -> int:
    """The exit status that a guest has left. Raises OSError, ValueError, ExchangeMisusedError."""
    with plain_file(path) as descriptor:
        status = int(os.pread(descriptor, STATUS_BYTES_MAX, 0))
    if not 0 <= status <= 0xFF:
        raise ValueError(f"{status} is no exit status")
    return status


def copy_plain_files(source: Path, destination: Path) -> None:
    """Copy the plain files of a folder of the guest's, EXCHANGE_BYTES_MAX of them at most.

    Links and all else are left out. Raises GuestTookTooMuchError, ExchangeMisusedError (`source` is no
    folder), OSError.
    """
    destination.mkdir(parents=True, exist_ok=True)
    try:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, FileNotFoundError):
        raise ExchangeMisusedError(source.name) from None
    left = EXCHANGE_BYTES_MAX
    try:
        for name in os.listdir(folder):
            place = Path(f"/proc/self/fd/{folder}", name)
            with suppress(FileNotFoundError, ExchangeMisusedError), plain_file(place) as file:
                left -= _copy(file, destination / name, left)
    finally:
        os.close(folder)


def _copy(descriptor: int, destination: Path, limit: int) -> int:
    """Copy at most `limit` bytes. A hole counts as its zeros."""
    if os.fstat(descriptor).st_size > limit:
        raise GuestTookTooMuchError("the results", EXCHANGE_BYTES_MAX // MIB)
    copied = 0
    with destination.open("wb") as file:
        while piece := os.pread(descriptor, min(PIECE_BYTES, limit - copied), copied):
            file.write(piece)
            copied += len(piece)
    return copied


class Follower:
    """Passes on what was appended to a growing text file, in whole characters, up to PRINTED_BYTES_MAX."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pass_on(self, receive: Callable[[str], None]) -> None:
        """Pass on the new text. Raises ExchangeMisusedError where the file was replaced."""
        try:
            with plain_file(self._path) as descriptor:
                # Not to its end: a guest that writes as fast as we read would keep us here.
                until = min(os.fstat(descriptor).st_size, PRINTED_BYTES_MAX)
                while self._offset < until:
                    piece = os.pread(descriptor, min(PIECE_BYTES, until - self._offset), self._offset)
                    if not piece:
                        return
                    self._offset += len(piece)
                    if text := self._decoder.decode(piece):
                        receive(text)
        except FileNotFoundError:
            return


class Allowance:
    """The bounds of a guest's files here: the folder `exchange`, and files `printed` with its output."""

    def __init__(self, exchange: Path, *printed: Path) -> None:
        self._exchange = exchange
        self._printed = printed

    def check_printed(self) -> None:
        """Quick. Raises GuestTookTooMuchError."""
        for path in self._printed:
            with suppress(FileNotFoundError):
                if path.lstat().st_size > PRINTED_BYTES_MAX:
                    raise GuestTookTooMuchError(f"its {path.name}", PRINTED_BYTES_MAX // MIB)

    def check_exchange(self, server: int) -> None:
        """Walk through the folder. `server` is the process that serves it. Raises GuestTookTooMuchError."""
        taken = unnamed_bytes(server, self._exchange.stat().st_dev)
        for entries, size in enumerate(_sizes_below(self._exchange)):
            taken += size
            if taken > EXCHANGE_BYTES_MAX:
                raise GuestTookTooMuchError("/run/g35", EXCHANGE_BYTES_MAX // MIB)
            if entries >= EXCHANGE_ENTRIES_MAX:
                raise GuestTookTooMuchError("/run/g35", EXCHANGE_ENTRIES_MAX, "files")


def unnamed_bytes(process: int, device: int) -> int:
    """Bytes on the file system `device` of a process's open files that have no name any more."""
    taken = 0
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{process}/fd/{name}")
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev == device:
                    taken += found.st_blocks * 512
    return taken


def _sizes_below(folder: Path) -> Iterator[int]:
    """Bytes of every entry below it; no link is followed. Raises GuestTookTooMuchError where paths get so
    long that this machine cannot name them, ExchangeMisusedError for a folder that cannot be looked into."""
    waiting = [str(folder)]
    while waiting:
        place = waiting.pop()
        try:
            entries = os.scandir(place)
        except PermissionError:
            raise ExchangeMisusedError(os.path.relpath(place, folder)) from None
        except OSError:
            continue  # it has just been removed
        with entries:
            for entry in entries:
                with suppress(OSError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                if len(entry.path) > PATH_CHARACTERS_MAX:
                    raise GuestTookTooMuchError("a path in /run/g35", PATH_CHARACTERS_MAX, "characters")


def remove_folder(folder: Path) -> None:
    """Remove a folder that a guest has written to, whatever its contents."""
    with suppress(RecursionError):  # thousands of folders in one another
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for words in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            subprocess.run([*words, "--", folder], stderr=subprocess.DEVNULL, check=False)
