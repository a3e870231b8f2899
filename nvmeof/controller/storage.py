"""The medium behind a namespace, as a controller uses it; an enclosure's drive is the implementation.

Read this first in nvmeof/controller/. Everything above it speaks NVMe; everything below it knows bytes at
offsets (`Storage`), or values under keys (`KvStorage`). The data path depends on two properties:

* **No copy.** `read` may return a view of the medium itself, which is then sent as it is. `write_window` and
  `Staged.window` may name the very memory into which the transport should receive the payload.
* **No waiting.** A slow or hung drive does not block the caller: `admit` answers with the time at which
  the command may end, and the queue goes on with other commands until then.

A Store is all or nothing. Its value is *staged* while it arrives, unseen by anybody, and becomes the value of
its key in one step, `commit`, or never. Staging sets the room aside, so a host cannot make an enclosure take
more than the namespace's capacity by starting and not finishing.
"""

import enum
import math
import mmap
from typing import Final, Protocol

from nvmeof.wire.kv import KvFormat, StoreOption

HELD: Final = math.inf
"""The answer of `Storage.admit` for a command that ends only when somebody says so."""


class StorageError(Exception):
    """The medium could not do it (the world's fault). `status` is the 15-bit NVMe status, SCT << 8 | SC."""

    def __init__(self, status: int, reason: str, *, do_not_retry: bool = False) -> None:
        super().__init__(f"{reason} (status {status:#05x})")
        self.status = status
        self.do_not_retry = do_not_retry


class Operation(enum.Enum):
    """The kinds of I/O command that reach a drive."""

    # Each command is looked for in some sets of them, and an Enum's own hash is Python's.
    __hash__ = object.__hash__

    READ = "read"
    WRITE = "write"
    FLUSH = "flush"
    WRITE_ZEROES = "write_zeroes"
    COMPARE = "compare"
    DEALLOCATE = "deallocate"
    # Of the Key Value command set.
    STORE = "store"
    RETRIEVE = "retrieve"
    LIST = "list"
    DELETE = "delete"
    EXIST = "exist"


class Scratch:
    """One buffer that a queue lends to its drive for payload that has no place of its own in memory.

    It begins at a page, as direct I/O wants it (open(2), O_DIRECT).
    It grows to the largest command seen and never beyond `limit` bytes; the commands themselves are
    bounded by MDTS, so a request above the limit is a bug.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory: bytearray | mmap.mmap = bytearray()

    def take(self, length: int) -> memoryview:
        """A writable view of `length` bytes; what an earlier call returned must not be in use any more."""
        if length > self._limit:
            raise ValueError(f"{length} bytes of scratch asked for, the limit is {self._limit}")
        if len(self._memory) < length:
            # A new one, not resize: a view of the old one may still be held by somebody who ignores it.
            self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._memory)[:length]

    def holds(self, view: memoryview) -> bool:
        """Whether `view` is of this buffer as it now is."""
        return view.obj is self._memory


class Medium(Protocol):
    """The medium of one namespace. Called by many connection threads at once; does its own locking."""

    nguid: bytes
    """16 bytes, the same for as long as the medium exists."""

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        """Take note of a command whose payload is here, and say when it may end.

        `HELD`: not before `held_until` says so. Raises StorageError if it is to fail. Of a command on a key
        `length` is that of the value, `offset` always 0.
        """

    def held_until(self, now: float) -> float:
        """Asked again for commands that were answered `HELD`, whenever something may have changed."""

    def flush(self) -> None:
        """Return when everything written so far would survive a power cut. Raises StorageError."""


class Storage(Medium, Protocol):
    """The medium of a namespace of logical blocks."""

    lba_bytes: int
    """Bytes in a logical block: 512 or 4096."""
    block_count: int
    """Logical blocks in the namespace."""

    def used_blocks(self) -> int:
        """Logical blocks that take up room at present (NUSE)."""

    def read(self, offset: int, length: int, scratch: Scratch) -> memoryview:
        """The bytes at `offset`: a view of the medium, or `scratch` filled. Raises StorageError."""

    def write_window(self, offset: int, length: int) -> memoryview | None:
        """Where a payload may be received directly, or None: receive elsewhere and call `write`."""

    def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
        """Store `data`. `placed`: it was received into `write_window` already. Raises StorageError."""

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        """Make the range read as zeros, giving its room back if asked to. Raises StorageError."""

    def deallocate(self, offset: int, length: int) -> None:
        """Give the room of the range back; it reads as zeros from now on. Raises StorageError."""


class Staged(Protocol):
    """A value on its way in, of the length that was said. Used by one thread."""

    window: memoryview | None
    """Where the value may be received directly, or None: receive elsewhere and call `put`."""

    def put(self, offset: int, data: memoryview) -> None:
        """Take a piece that was not received into the window. Raises StorageError."""

    def commit(self, key: bytes, options: StoreOption) -> None:
        """Make it the value of the key. Raises StorageError: KEY_EXISTS, KEY_NOT_FOUND, or the medium's."""

    def discard(self) -> None:
        """Give the room back, if it was not committed. Idempotent."""


class KvStorage(Medium, Protocol):
    """The medium of a KV namespace.

    Keys have 1 to 16 bytes. Methods raise StorageError, with KEY_NOT_FOUND where there is no such key.
    """

    capacity_bytes: int
    """The most that all values together may take up (NSZE)."""
    format: KvFormat
    """Bounds of keys and values."""

    def used_bytes(self) -> int:
        """The size of all values at present (NUSE)."""

    def stage(self, length: int) -> Staged:
        """Begin a Store of `length` bytes. Raises StorageError: CAPACITY_EXCEEDED."""

    def value_bytes(self, key: bytes) -> int:
        """The length of a value; 0 where there is no such key."""

    def retrieve(self, key: bytes, limit: int, scratch: Scratch) -> tuple[memoryview, int]:
        """The first `limit` bytes of a value at most (its own memory, or scratch), and its whole length."""

    def exists(self, key: bytes) -> bool:
        """Whether the key has a value."""

    def delete(self, key: bytes) -> None:
        """Take the key and its value away."""

    def keys_from(self, first: bytes, count: int) -> list[bytes]:
        """Up to `count` keys in ascending order, from `first` on, itself included if it exists."""
