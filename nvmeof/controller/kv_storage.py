"""What a controller asks of the thing behind a namespace of the KV command set. Read `storage.py` first.

The seam has the same two properties: nothing waits (`admit`), and a value is received straight into the
memory that will keep it, where it is kept in memory (`Staged.window`).

A Store is all or nothing. Its value is *staged* while it arrives, which changes nothing that anybody can
see, and becomes the value of its key in one step, `commit`, or never. Room is set aside when it is staged,
so a host cannot make an enclosure take more than the namespace's capacity by starting and not finishing.
"""

from __future__ import annotations

from typing import Protocol

from nvmeof.controller.storage import Operation, Scratch
from nvmeof.wire.kv import KvFormat, StoreOption


class Staged(Protocol):
    """A value on its way in, of the length that was said. Used by one thread."""

    @property
    def window(self) -> memoryview | None:
        """Where the value may be received directly, or None: receive elsewhere and call `put`."""

    def put(self, offset: int, data: memoryview) -> None:
        """Take a piece that was not received into the window. Raises StorageError."""

    def commit(self, key: bytes, options: StoreOption) -> None:
        """Make it the value of the key. Raises StorageError: KEY_EXISTS, KEY_NOT_FOUND, or the medium's."""

    def discard(self) -> None:
        """Give the room back, if it was not committed. Idempotent."""


class KvStorage(Protocol):
    """The medium of one KV namespace. Called by many connection threads at once; does its own locking.

    Keys have 1 to 16 bytes. Methods raise StorageError, with KEY_NOT_FOUND where there is no such key.
    """

    @property
    def nguid(self) -> bytes:
        """16 bytes, the same for as long as the medium exists."""

    @property
    def capacity_bytes(self) -> int:
        """What all values together may take up (NSZE)."""

    @property
    def format(self) -> KvFormat:
        """Bounds of keys and values."""

    def used_bytes(self) -> int:
        """What they take up at present (NUSE)."""

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        """As `Storage.admit`. `length` is that of the value, `offset` always 0."""

    def held_until(self, now: float) -> float:
        """As `Storage.held_until`."""

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

    def flush(self) -> None:
        """Return when everything stored so far would survive a power cut."""
