"""The values of a drive of the KV command set: in memory, or in a folder that outlives the process.

In memory a value is one bytearray, received into and sent from directly. A replacement is another bytearray,
so that a Retrieve under way still sends the old value whole. In a folder a value is one file, named by its
key in hexadecimal. It is written under another name and then renamed, so a crash leaves the old value or the
new one. Capacities, faults and statuses are in `kv_drive.py`.

`stage`, `read` and `flush` are for any thread, the rest under the drive's lock. All may raise OSError;
`read`, `flip` and `remove` raise KeyError.
"""

import ctypes
import errno
import os
import re
import threading
from pathlib import Path
from typing import Final, TypeAlias

from nvmeof.controller.storage import Scratch

_STAGED: Final = "staged-"
_VALUE: Final = re.compile(r"([0-9a-f]{2}){1,16}")
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.syncfs.restype = ctypes.c_int


class _MemoryStaged:
    """A value that is arriving. `window`: the memory to receive it into, if there is any."""

    def __init__(self, values: dict[bytes, bytearray], length: int) -> None:
        self._values = values
        self._memory = bytearray(length)
        self.window = memoryview(self._memory)

    def put(self, offset: int, data: memoryview) -> None:
        """Store a piece."""
        self.window[offset : offset + len(data)] = data

    def keep(self, key: bytes) -> None:
        self._values[key] = self._memory

    def drop(self) -> None:
        """Forget it."""


class MemoryValues:
    """Values in memory, gone with the process."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytearray] = {}

    def lengths(self) -> dict[bytes, int]:
        return {key: len(value) for key, value in self._values.items()}

    def stage(self, length: int) -> _MemoryStaged:
        """Begin a value of `length` bytes."""
        return _MemoryStaged(self._values, length)

    def read(self, key: bytes, limit: int, scratch: Scratch) -> tuple[memoryview, int]:
        """At most `limit` first bytes of a value (its own memory, or scratch), and its length.

        Both are of one value, also while another replaces it.
        """
        value = self._values[key]
        return memoryview(value)[:limit], len(value)

    def flip(self, key: bytes, offset: int, mask: int) -> None:
        """Damage a byte of a value in its place."""
        self._values[key][offset] ^= mask

    def remove(self, key: bytes) -> None:
        del self._values[key]

    def flush(self) -> None:
        """Push kept values to stable storage, where there is any."""

    def close(self) -> None:
        self._values.clear()


class _FileStaged:
    window = None

    def __init__(self, folder: Path, name: str, length: int) -> None:
        self._folder = folder
        self._path = folder / name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._fd, length)
        except BaseException:
            self.drop()
            raise

    def put(self, offset: int, data: memoryview) -> None:
        while data:
            put = os.pwrite(self._fd, data, offset)
            data, offset = data[put:], offset + put

    def keep(self, key: bytes) -> None:
        os.rename(self._path, self._folder / key.hex())
        self._close()

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FolderValues:
    """Values in files of a folder. Removes the unfinished values of a killed process.

    ValueError for a file that is no value.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in os.listdir(folder):
            if name.startswith(_STAGED):
                os.unlink(folder / name)

    def lengths(self) -> dict[bytes, int]:
        found = {}
        for name in os.listdir(self._folder):
            path = self._folder / name
            if not _VALUE.fullmatch(name):
                raise ValueError(f"{path} is no value of a drive")
            found[bytes.fromhex(name)] = path.stat().st_size
        return found

    def stage(self, length: int) -> _FileStaged:
        with self._lock:
            self._number += 1
            name = f"{_STAGED}{self._number}"
        return _FileStaged(self._folder, name, length)

    def _open(self, key: bytes, flags: int) -> int:
        try:
            return os.open(self._folder / key.hex(), flags | os.O_CLOEXEC)
        except FileNotFoundError:
            raise KeyError(key) from None

    def read(self, key: bytes, limit: int, scratch: Scratch) -> tuple[memoryview, int]:
        # The open file stays the value that it was, whatever is renamed over its name meanwhile.
        fd = self._open(key, os.O_RDONLY)
        try:
            length = os.fstat(fd).st_size
            view = rest = scratch.take(min(length, limit))
            offset = 0
            while rest:
                got = os.preadv(fd, [rest], offset)
                if got == 0:
                    raise OSError(errno.EIO, f"the value {key.hex()} has become shorter")
                rest, offset = rest[got:], offset + got
            return view, length
        finally:
            os.close(fd)

    def flip(self, key: bytes, offset: int, mask: int) -> None:
        fd = self._open(key, os.O_RDWR)
        try:
            os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ mask]), offset)
        finally:
            os.close(fd)

    def remove(self, key: bytes) -> None:
        try:
            os.unlink(self._folder / key.hex())
        except FileNotFoundError:
            raise KeyError(key) from None

    def flush(self) -> None:
        # One call for all files and names, where fsync would take two for each value since the last flush.
        if _libc.syncfs(self._fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


StagedValue: TypeAlias = _MemoryStaged | _FileStaged
Values: TypeAlias = MemoryValues | FolderValues
