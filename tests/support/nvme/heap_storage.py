"""A drive of plain memory behind a controller, which a test can slow down, hold and make fail."""

from __future__ import annotations

from nvmeof.controller.storage import HELD, Operation, Scratch, StorageError


class HeapStorage:
    """A drive of plain memory. `direct` False makes it behave as a file does: no windows.

    `due` and `failure` are what it answers to the next commands: a delay in seconds (HELD: for ever), and
    the status to fail with.
    """

    def __init__(
        self, blocks: int = 64, *, lba_bytes: int = 4096, nguid: int = 1, direct: bool = True
    ) -> None:
        self.lba_bytes = lba_bytes
        self.block_count = blocks
        self.nguid = nguid.to_bytes(16, "big")
        self.memory = bytearray(blocks * lba_bytes)
        self.direct = direct
        self.delay = 0.0
        self.held = False
        self.failure: StorageError | None = None
        self.admitted: list[tuple[Operation, int, int]] = []
        self.flushes = 0

    def used_blocks(self) -> int:
        return self.block_count

    def admit(self, operation: Operation, offset: int, length: int, now: float) -> float:
        self.admitted.append((operation, offset, length))
        if self.failure is not None:
            raise self.failure
        return HELD if self.held else now + self.delay

    def held_until(self, now: float) -> float:
        return HELD if self.held else now

    def read(self, offset: int, length: int, scratch: Scratch) -> memoryview:
        view = memoryview(self.memory)[offset : offset + length]
        if self.direct:
            return view
        copy = scratch.take(length)
        copy[:] = view
        return copy

    def write_window(self, offset: int, length: int) -> memoryview | None:
        return memoryview(self.memory)[offset : offset + length] if self.direct else None

    def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
        assert placed == self.direct
        self.memory[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.flushes += 1

    def write_zeroes(self, offset: int, length: int, *, deallocate: bool) -> None:
        self.memory[offset : offset + length] = bytes(length)

    def deallocate(self, offset: int, length: int) -> None:
        self.memory[offset : offset + length] = bytes(length)
