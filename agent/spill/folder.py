"""G4 in a folder: a file for each bundle, on whatever file system the operator has mounted there.

A file is written under a name of its own and linked to the bundle's, which fails where that is taken.
Nothing is flushed: a bundle that a crash cuts short does not prove itself. A file system that hangs holds
the threads of this target, and nobody else's.

Others may write into the folder. So no link is followed below it: each name is opened in the folder before
it, and only regular files are read, listed and counted. The folder itself is the operator's to make. Where
another file system shows there than at first, its mount is gone, and nothing is written into what lies
beneath."""

import contextlib
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

from agent.spill.names import PARTIAL
from agent.spill.target import Gone, Stored, Taken, Target, TargetError

THREADS: Final = 4
WAITING_MAX: Final = 256
"""Ranges that wait for a thread; as many as `in_flight` may be."""
_WAY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LEVELS: Final = (
    re.compile(r".+"),
    re.compile(r".+"),
    re.compile(r"[0-9a-f]{32}"),
    re.compile(r"[0-9a-f]{2}"),
    re.compile(rf"[0-9a-f]{{5}}|{re.escape(PARTIAL)}.*"),
)
"""What the parts of a name look like that a listing shows: root, pool, volume, generation, file."""


class _Wanted(NamedTuple):
    answer: "Future[bytes]"
    name: str
    offset: int
    size: int


class FolderTarget(Target):
    def __init__(self, folder: Path, room_wanted: int = 0) -> None:
        """`room_wanted`: bytes that `check` wants free."""
        self._folder: Final = folder
        self._room_wanted: Final = room_wanted
        self._device: int | None = None
        """Of the file system that was there at first."""
        # Daemons: a file system that hangs must not keep the agent from its end.
        self._wanted: deque[_Wanted] = deque()
        self._is_closed = False
        self._changed: Final = threading.Condition()
        for number in range(THREADS):
            threading.Thread(target=self._serve, name=f"spill-read-{number}", daemon=True).start()

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """The folder, open. Raises TargetError and OSError; without the folder nothing is known of its files,
        so they are not gone.

        It is opened anew for each call: a folder that stays open could not be unmounted."""
        try:
            opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise TargetError(
                f"the folder {self._folder} cannot be used: it is not there; make it, or mount it"
            ) from None
        try:
            device = os.fstat(opened).st_dev
            if self._device is None:
                self._device = device
            if device != self._device:
                raise TargetError(
                    f"another file system is at {self._folder} than at first; mount the former one, or start "
                    "the agent anew"
                )
            yield opened
        finally:
            os.close(opened)

    @contextlib.contextmanager
    def _opened(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """The folder at these parts below the target's, by no link. Raises Gone, TargetError and OSError."""
        with contextlib.ExitStack() as way:
            at = way.enter_context(self._root())
            for part in parts:
                if part in ("", ".", ".."):
                    raise TargetError("a name of an object has an empty part, or dots")
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=at)
                try:
                    at = os.open(part, _WAY | os.O_PATH, dir_fd=at)
                except FileNotFoundError:
                    raise Gone("/".join(parts)) from None
                way.callback(os.close, at)
            yield at

    def check(self) -> None:
        try:
            with self._root() as root:
                room = os.statvfs(root)
                is_writable = os.access(".", os.W_OK | os.X_OK, dir_fd=root)
        except OSError as error:
            raise TargetError(f"the folder {self._folder} cannot be used: {error.strerror}") from None
        if not is_writable:
            raise TargetError(f"the agent's user may not write into the folder {self._folder}")
        free = room.f_bavail * room.f_frsize
        if free < self._room_wanted:
            raise TargetError(
                f"the folder {self._folder} has {free >> 20} MiB free, and one bundle takes "
                f"{self._room_wanted >> 20} MiB; give it room, or take the table [[spill]] out"
            )

    def put(self, name: str, data: memoryview) -> None:
        *way, last = name.split("/")
        partial = f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            with self._opened(way, make=True) as parent:
                try:
                    with open(os.open(partial, _WRITE, 0o600, dir_fd=parent), "wb", 0) as file:
                        written = 0
                        while written < len(data):
                            written += file.write(data[written:])
                    os.link(partial, last, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
                finally:
                    # It was not made, or the file system is gone; `g35 spill scrub` removes what is left.
                    with contextlib.suppress(OSError):
                        os.unlink(partial, dir_fd=parent)
        except FileExistsError:
            raise Taken(name) from None
        except OSError as error:
            raise TargetError(f"cannot write into {self._folder}: {error.strerror}") from None

    def fetch(self, name: str, offset: int, size: int) -> "Future[bytes]":
        wanted = _Wanted(Future(), name, offset, size)
        with self._changed:
            if self._is_closed or len(self._wanted) >= WAITING_MAX:
                wanted.answer.set_exception(TargetError(f"no more can be asked of {self._folder} now"))
            else:
                self._wanted.append(wanted)
                self._changed.notify()
        return wanted.answer

    def give_up(self, asked: "Future[bytes]") -> None:
        # Where all threads hang, nobody else takes it out.
        if asked.cancel():
            with self._changed:
                self._wanted = deque(each for each in self._wanted if each.answer is not asked)

    def _next_wanted(self) -> _Wanted | None:
        with self._changed:
            while not self._wanted:
                if self._is_closed:
                    return None
                self._changed.wait()
            return self._wanted.popleft()

    def _serve(self) -> None:
        while (wanted := self._next_wanted()) is not None:
            answer, name, offset, size = wanted
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._read(name, offset, size))
            except TargetError as error:
                answer.set_exception(error)
            except Exception as error:
                # Such as a lack of memory. The thread is for all who ask after this one.
                words = f"cannot read from {self._folder}: {type(error).__name__} {error}"
                answer.set_exception(TargetError(words))

    def _read(self, name: str, offset: int, size: int) -> bytes:
        *way, last = name.split("/")
        try:
            with self._opened(way) as parent:
                # A bundle is a regular file; where a link, a pipe or a device has its name there is none.
                if not stat.S_ISREG(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise Gone(name)
                opened = os.open(last, _READ, dir_fd=parent)
                try:
                    if not stat.S_ISREG(os.fstat(opened).st_mode):
                        raise Gone(name)
                    return os.pread(opened, size, offset)
                finally:
                    os.close(opened)
        except FileNotFoundError:
            raise Gone(name) from None
        except OSError as error:
            raise TargetError(f"cannot read from {self._folder}: {error.strerror}") from None

    def delete(self, name: str) -> None:
        *way, last = name.split("/")
        try:
            with self._opened(way) as parent:
                os.unlink(last, dir_fd=parent)
        except (Gone, FileNotFoundError):
            return
        except OSError as error:
            raise TargetError(f"cannot delete in {self._folder}: {error.strerror}") from None

    def names(self, prefix: str) -> Iterator[Stored]:
        """Bundles, and files that are being written or that a crash left so. What else lies there is not
        g35's and is not shown."""
        way = prefix.rstrip("/").split("/")
        return self._names_in(way)

    def _names_in(self, way: list[str]) -> Iterator[Stored]:
        folders, files = [], []
        try:
            with self._opened(way) as path_only:
                # A generation's files are collected first: who lists may delete them meanwhile.
                opened = os.open(".", os.O_RDONLY | _WAY, dir_fd=path_only)
                try:
                    with os.scandir(opened) as entries:
                        for entry in entries:
                            if _LEVELS[len(way)].fullmatch(entry.name) is None:
                                continue
                            if len(way) + 1 < len(_LEVELS):
                                if entry.is_dir(follow_symlinks=False):
                                    folders.append(entry.name)
                            elif entry.is_file(follow_symlinks=False):
                                # Another agent may have removed it meanwhile.
                                with contextlib.suppress(FileNotFoundError):
                                    seen = entry.stat(follow_symlinks=False)
                                    written = seen.st_mtime if entry.name.startswith(PARTIAL) else None
                                    files.append(Stored("/".join((*way, entry.name)), seen.st_size, written))
                finally:
                    os.close(opened)
        except Gone:
            return
        except OSError as error:
            raise TargetError(f"cannot list {self._folder}: {error.strerror}") from None
        yield from files
        for each in folders:
            yield from self._names_in([*way, each])

    def close(self) -> None:
        """What was asked for is answered; then the threads end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
