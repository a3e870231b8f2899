"""Memory in which blocks are put together before they are sealed, and the bound on it.

A staged block holds all of a block's valid bytes from its start to `length`. It is dirty until it is sealed.
After an fsync it may stay, clean, so that a program that appends and syncs does not fetch the same tail
again; clean blocks go first when memory is wanted.

Buffers come in a few sizes, so that a small file does not take the room of a large block. They are anonymous
mappings, which go back to the kernel at once. Some are kept for reuse, because 4 MiB of fresh pages cost as
much as copying 4 MiB. `OpenFiles.state` guards all of it (see face.py).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from agent.host_os.payload_memory import payload_memory

_ZEROS: Final = memoryview(bytes(1 << 20))

_COPY_BYTES: Final = 64 << 10
"""From so many bytes on a copy gives the interpreter's lock to other workers. It costs some microseconds."""


def copy(data: memoryview, into: memoryview) -> None:
    """Copy bytes to a place of the same length."""
    if len(data) < _COPY_BYTES:
        into[:] = data
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def fill_zero(into: memoryview) -> None:
    """Set every byte to zero without building another buffer of that size."""
    done = 0
    while done < len(into):
        count = min(len(into) - done, len(_ZEROS))
        into[done : done + count] = _ZEROS[:count]
        done += count


class StagedBlock:
    """One block of one file in memory: its first `length` bytes are valid, what follows is zero.

    `spare`: where `memory` is the buffer of a request, which another one overwrites once this block was
    sealed, the buffer of its own that the block moves to if it cannot be sealed.
    """

    __slots__ = ("dirty", "ino", "length", "memory", "position", "reserved", "spare")

    def __init__(
        self,
        ino: int,
        position: int,
        memory: memoryview,
        length: int = 0,
        spare: memoryview | None = None,
    ) -> None:
        self.ino = ino
        self.position = position
        self.memory = memory
        self.length = length
        self.dirty = False
        self.reserved = 0
        self.spare = spare

    def write(self, start: int, data: memoryview) -> None:
        """Put `data` at `start`; a gap behind the valid bytes becomes zeros."""
        if start > self.length:
            fill_zero(self.memory[self.length : start])
        end = start + len(data)
        copy(data, self.memory[start:end])
        self.length = max(self.length, end)

    def read(self, start: int, into: memoryview) -> None:
        count = max(0, min(len(into), self.length - start))
        into[:count] = self.memory[start : start + count]
        fill_zero(into[count:])

    def move_home(self) -> None:
        """Out of a request's buffer, where the block is in one."""
        home = self.spare
        if home is not None:
            home[: self.length] = self.memory[: self.length]
            self.memory, self.spare = home, None


class StagingMemory:
    """Buffers within `limit` bytes, and an overdraft for writers that must not wait for each other.

    `overdraft` bytes more are lent only to a writer that has nothing of its own to seal while every other
    file is busy; it gives them back before its request ends. So nobody ever waits for memory, and the
    bound is `limit + overdraft`.
    """

    def __init__(self, limit: int, overdraft: int, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sorted(sizes))
        if limit < 2 * self.sizes[-1]:
            raise ValueError(
                f"staging needs room for two blocks of {self.sizes[-1]} bytes, not {limit} bytes"
            )
        self.limit = limit
        self.overdraft = overdraft
        self.lent = 0
        self._idle: dict[int, list[memoryview]] = {size: [] for size in self.sizes}
        self._idle_bytes = 0

    @property
    def overdrawn(self) -> bool:
        return self.lent > self.limit

    def size_for(self, length: int) -> int:
        """The smallest buffer that holds `length` bytes."""
        return next(size for size in self.sizes if size >= length)

    def take(self, size: int, *, overdraw: bool = False) -> memoryview | None:
        """A buffer with whatever bytes in it, or None when the limit is reached."""
        allowed = self.limit + (self.overdraft if overdraw else 0)
        if self.lent + size > allowed:
            return None
        self.lent += size
        idle = self._idle[size]
        if idle:
            self._idle_bytes -= size
            return idle.pop()
        self._trim()
        return payload_memory(size)

    def give(self, buffer: memoryview) -> None:
        size = len(buffer)
        self.lent -= size
        self._idle[size].append(buffer)
        self._idle_bytes += size
        self._trim()

    def _trim(self) -> None:
        """Lent and idle buffers together stay under the limit; large idle ones go first."""
        for size in reversed(self.sizes):
            idle = self._idle[size]
            while idle and self.lent + self._idle_bytes > self.limit:
                idle.pop()
                self._idle_bytes -= size


class Staging:
    """All staged blocks in the order of their last writes, and what they will take when sealed."""

    def __init__(self, memory: StagingMemory) -> None:
        self.memory = memory
        self.reserved = 0
        self._order: OrderedDict[tuple[int, int], StagedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, block: StagedBlock) -> None:
        """Add the block, or make it the newest."""
        key = (block.ino, block.position)
        self._order[key] = block
        self._order.move_to_end(key)

    def reserve(self, block: StagedBlock, capacity: int) -> None:
        """Sealing it will take `capacity` bytes of the store; 0 when it is clean."""
        self.reserved += capacity - block.reserved
        block.reserved = capacity

    def remove(self, block: StagedBlock) -> None:
        del self._order[block.ino, block.position]
        self.reserve(block, 0)
        self.memory.give(block.memory if block.spare is None else block.spare)
        block.memory, block.spare = memoryview(b""), None

    def oldest(self) -> Iterator[StagedBlock]:
        return iter(self._order.values())
