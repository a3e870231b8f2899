"""A block store in memory, and the faults that a pool can have: full, blocks lost, unavailable.

`before` is called with the name of each step ("put", "stored", "get", "delete", "flush") at the moment it
happens: a test photographs the world there, or dies, or lets another thread in. "stored" is the moment
after a put took effect and before its caller knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from agent.fs.files.block_store import BLOCK_ID_BYTES, StoreFull, StoreUnavailable, StoreUnreached
from agent.pool.steps import Steps


class MemoryBlockStore:
    """`slots` bounds the number of blocks of each capacity; None is no bound worth meeting."""

    def __init__(self, capacities: tuple[int, ...], slots: dict[int, int] | None = None) -> None:
        self._capacities = capacities
        self.slots = dict.fromkeys(capacities, 1 << 20) | (slots or {})
        self.blocks: dict[bytes, tuple[int, bytes]] = {}
        self.unavailable: set[str] = set()
        self.refuse_as_full = False
        self.puts = self.gets = self.deletes = self.flushes = 0
        self.before: Callable[[str], None] = lambda step: None
        self.is_away: Callable[[bytes], bool] = lambda block_id: False
        """Of an identifier: whether it leads to an enclosure that is away."""
        self._lock = threading.Lock()

    @property
    def capacities(self) -> tuple[int, ...]:
        return self._capacities

    def _step(self, name: str) -> None:
        self.before(name)
        if name in self.unavailable:
            raise StoreUnavailable(f"{name}: the test says so")

    def put(self, block_id: bytes, capacity: int, data: memoryview) -> Steps[None]:
        assert len(block_id) == BLOCK_ID_BYTES
        assert 0 < len(data) <= capacity
        assert capacity in self._capacities
        yield from ()
        self._step("put")
        if self.is_away(block_id):
            raise StoreUnreached("put: the test says so")
        self.puts += 1
        with self._lock:
            assert block_id not in self.blocks, "an identifier was used twice"
            if self.refuse_as_full or self._free(capacity) <= 0:
                raise StoreFull(f"no slot of {capacity} bytes is free")
            self.blocks[block_id] = (capacity, bytes(data))
        self._step("stored")

    def places(self, block_id: bytes, capacity: int) -> Collection[int]:
        return {int(self.is_away(block_id))}

    def comes_again(self) -> None: ...

    def examine(self, block_id: bytes, capacity: int) -> Steps[bytes | None]:
        yield from ()
        self._step("get")
        with self._lock:
            return None if block_id in self.blocks else b"the test has lost it"

    def give_up(self, block_id: bytes, capacity: int) -> Steps[None]:
        yield from ()
        assert block_id not in self.blocks

    def get(self, block_id: bytes, capacity: int, offset: int, into: memoryview) -> Steps[bool]:
        yield from ()
        self._step("get")
        self.gets += 1
        with self._lock:
            kept = self.blocks.get(block_id)
        if kept is None:
            return False
        assert kept[0] == capacity
        assert offset + len(into) <= len(kept[1]), "read outside of what was put"
        into[:] = kept[1][offset : offset + len(into)]
        return True

    def delete(self, block_id: bytes, capacity: int) -> Steps[None]:
        yield from ()
        self._step("delete")
        if self.is_away(block_id):
            raise StoreUnavailable("delete: the test says so")
        self.deletes += 1
        with self._lock:
            self.blocks.pop(block_id, None)

    def flush(self, blocks: Iterable[tuple[bytes, int]] | None = None) -> Steps[None]:
        yield from ()
        self._step("flush")
        self.flushes += 1

    def usage(self) -> tuple[int, int]:
        with self._lock:
            total = sum(capacity * self.slots[capacity] for capacity in self._capacities)
            free = sum(capacity * max(0, self._free(capacity)) for capacity in self._capacities)
        return total, free

    def _free(self, capacity: int) -> int:
        return self.slots[capacity] - sum(size == capacity for size, _ in self.blocks.values())
