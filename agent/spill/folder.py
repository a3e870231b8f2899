"""G4 in a folder: a file for each bundle, on whatever file system the operator has mounted there.

A file is written under a name of its own and linked to the bundle's, which fails where that is taken.
Nothing is flushed: a bundle that a crash cuts short does not prove itself. A file system that hangs holds
the threads of this target, and nobody else's."""

import contextlib
import errno
import os
import queue
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ConfigError
from agent.spill.target import Gone, Stored, Taken, Target, TargetError

THREADS: Final = 4
_PARTIAL: Final = ".part-"
"""What the name of a file begins with that is being written."""


class _Wanted(NamedTuple):
    answer: "Future[bytes]"
    name: str
    offset: int
    size: int


class FolderTarget(Target):
    """See `Target`."""

    def __init__(self, folder: Path, room_wanted: int = 0) -> None:
        """`room_wanted`: bytes that must be free. Raises ConfigError where the folder cannot be used."""
        self._folder: Final = folder
        try:
            room = os.statvfs(folder)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            raise ConfigError(
                f"spill: the folder {folder} cannot be used: {error.strerror}", "make it, or mount it first"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"spill: nothing can be written into the folder {folder}", "let the agent's user write there"
            )
        if room.f_bavail * room.f_frsize < room_wanted:
            raise ConfigError(
                f"spill: the folder {folder} has {room.f_bavail * room.f_frsize >> 20} MiB free, and one "
                f"bundle takes {room_wanted >> 20} MiB",
                "give it room, or take the table [[spill]] out",
            )
        # Daemons: a file system that hangs must not keep the agent from its end.
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=self._serve, name=f"spill-read-{number}", daemon=True).start()

    def put(self, name: str, data: memoryview) -> None:
        path = self._folder / name
        partial = path.parent / f"{_PARTIAL}{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0) as file:
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            os.link(partial, path)
        except FileExistsError:
            raise Taken(name) from None
        except OSError as error:
            raise TargetError(f"cannot write into {self._folder}: {error.strerror}") from None
        finally:
            # It was not made, or the file system is gone; `g35 spill scrub` removes what is left.
            with contextlib.suppress(OSError):
                os.unlink(partial)

    def fetch(self, name: str, offset: int, size: int) -> "Future[bytes]":
        wanted = _Wanted(Future(), name, offset, size)
        self._wanted.put(wanted)
        return wanted.answer

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            answer, name, offset, size = wanted
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._read(name, offset, size))
            except TargetError as error:
                answer.set_exception(error)

    def _read(self, name: str, offset: int, size: int) -> bytes:
        try:
            opened = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(opened, size, offset)
            finally:
                os.close(opened)
        except FileNotFoundError:
            raise Gone(name) from None
        except OSError as error:
            raise TargetError(f"cannot read from {self._folder}: {error.strerror}") from None

    def delete(self, name: str) -> None:
        try:
            os.unlink(self._folder / name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise TargetError(f"cannot delete in {self._folder}: {error.strerror}") from None

    def names(self, prefix: str) -> Iterator[Stored]:
        """Files that are being written, or that a crash left so, are among them."""

        def give_up(error: OSError) -> None:
            if error.errno != errno.ENOENT:
                raise TargetError(f"cannot list {self._folder}: {error.strerror}") from None

        for folder, _, files in os.walk(self._folder / prefix, onerror=give_up):
            for file in files:
                path = Path(folder, file)
                try:
                    size = path.stat().st_size
                except OSError:
                    continue  # Removed meanwhile, by another agent.
                yield Stored(str(path.relative_to(self._folder)), size)

    def close(self) -> None:
        for _ in range(THREADS):
            self._wanted.put(None)
