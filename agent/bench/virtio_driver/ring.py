"""The driver's side of a split virtqueue (virtio 1.2, 2.7): chains in, used buffers out. No I/O.

    ring.add_table(address, count, room, mark)     # a chain whose descriptors lie there, laid out before
    if ring.publish(): kick()
    for mark, written in ring.take_used(): ...

A chain takes a single descriptor of the ring, which names its table (an *indirect* one), or, where that was
not agreed on, as many as it has.

The ring checks the device: a chain that it was never given, that comes back twice, or with more bytes than
its buffers have, is a `DeviceFault`. Not thread-safe (request_queue.py has a lock).
"""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.virtio.memory_barrier import full_fence
from agent.virtio.split_ring import (
    AVAILABLE_ALIGNMENT,
    DESCRIPTOR,
    DESCRIPTOR_ALIGNMENT,
    DESCRIPTOR_BYTES,
    FLAGS_WORD,
    IDX_WORD,
    INDEX_MASK,
    QUEUE_SIZE_MAX,
    RING_WORD,
    USED_ALIGNMENT,
    USED_ELEMENT,
    USED_ELEMENT_BYTES,
    USED_NO_NOTIFY,
    DescriptorFlag,
    avail_event_word,
    available_bytes,
    descriptors_bytes,
    is_queue_size,
    passes_event,
    used_bytes,
    used_event_word,
)

Mark = TypeVar("Mark")

INDIRECT: Final[int] = DescriptorFlag.INDIRECT.value
_DESCRIPTOR: Final = DESCRIPTOR
_USED_HEAD: Final = 4
"""Flags and index of the used ring, before its entries."""


class DeviceFault(Exception):
    """The device's fault: what it wrote into the used ring is not what a driver may be told."""


class RingFull(Exception):
    """Our own fault: more was added than there are free descriptors (`free` says how many)."""


class DriverRing(Generic[Mark]):
    """One split ring of `size` entries (a power of two), laid out in `memory`; all of it is empty."""

    def __init__(
        self, memory: GuestMemory, size: int, *, event_index: bool, indirect: bool = True, index: int = 0
    ) -> None:
        """`index`: the number that both rings begin at (16 bits), to see them wrap around.

        `event_index` and `indirect` are what was agreed on, and may be set anew before the ring is used.
        """
        if not is_queue_size(size):
            raise ValueError(f"a queue has a power of two of entries, at most {QUEUE_SIZE_MAX}")
        self.size = size
        self.event_index = event_index
        self.indirect = indirect
        self.table = memory.room(descriptors_bytes(size), DESCRIPTOR_ALIGNMENT)
        self.available = memory.room(available_bytes(size), AVAILABLE_ALIGNMENT)
        self.used = memory.room(used_bytes(size), USED_ALIGNMENT)
        self._memory = memory
        self._mask = size - 1
        # Each of these stores or loads a 16-bit word at once, as an index has to be.
        self._available = self.available.view.cast("H")
        self._used = self.used.view.cast("H")
        self._used_entries = self.used.view[_USED_HEAD:-2]
        self._used_event = used_event_word(size)
        self._avail_event = avail_event_word(size)
        self._free = list(range(size - 1, -1, -1))
        self._chains: dict[int, tuple[Mark, Sequence[int], int]] = {}
        self._next = self._told = self._seen = index
        self._available[IDX_WORD] = self._used[IDX_WORD] = index
        self._available[self._used_event] = self._used[self._avail_event] = index

    @property
    def free(self) -> int:
        """How many descriptors a chain may still take."""
        return len(self._free)

    @property
    def outstanding(self) -> int:
        """Chains that the device has and has not given back."""
        return len(self._chains)

    @property
    def used_index(self) -> int:
        """How far the device says that it is: where a ring starts again after the device was gone."""
        return self._used[IDX_WORD]

    def _add_direct(self, encoded: bytes | memoryview, count: int, room: int, mark: Mark) -> int:
        """The descriptors of a table of its own, put into free places of the ring's."""
        if len(self._free) < count:
            raise RingFull(f"{count} descriptors are wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for position, at in enumerate(taken):
            address, length, flags, _ = _DESCRIPTOR.unpack_from(encoded, position * DESCRIPTOR_BYTES)
            following = taken[position + 1] if position + 1 < count else 0
            _DESCRIPTOR.pack_into(self.table.view, at * DESCRIPTOR_BYTES, address, length, flags, following)
        self._offer(taken[0], mark, taken, room)
        return taken[0]

    def add_table(self, address: int, count: int, room: int, mark: Mark) -> int:
        """Give the device a chain whose `count` descriptors lie at `address`; `room`: its writable bytes.

        On a ring without indirect descriptors they are copied into the ring's table, one by one.
        """
        if not self.indirect:
            table = self._memory.at(address, count * DESCRIPTOR_BYTES)
            return self._add_direct(table, count, room, mark)
        if not self._free:
            raise RingFull("no descriptor is free")
        head = self._free.pop()
        _DESCRIPTOR.pack_into(
            self.table.view, head * DESCRIPTOR_BYTES, address, count * DESCRIPTOR_BYTES, INDIRECT, 0
        )
        self._offer(head, mark, (head,), room)
        return head

    def publish(self) -> bool:
        """Let the device see what was added; True where it wants to be kicked for it."""
        old, new = self._told, self._next
        if old == new:
            return False
        self._available[IDX_WORD] = new
        self._told = new
        full_fence()
        if self.event_index:
            return passes_event(self._used[self._avail_event], new, old)
        return not self._used[FLAGS_WORD] & USED_NO_NOTIFY

    def take_used(self) -> list[tuple[Mark, int]]:
        """What the device gave back since the last call, with how many bytes it wrote; in its order."""
        index = self._used[IDX_WORD]
        ahead = (index - self._seen) & INDEX_MASK
        if ahead > len(self._chains):
            raise DeviceFault(f"{ahead} chains came back, {len(self._chains)} were given")
        found: list[tuple[Mark, int]] = []
        for _ in range(ahead):
            head, written = USED_ELEMENT.unpack_from(
                self._used_entries, (self._seen & self._mask) * USED_ELEMENT_BYTES
            )
            self._seen = (self._seen + 1) & INDEX_MASK
            try:
                mark, taken, room = self._chains.pop(head)
            except KeyError:
                raise DeviceFault(f"chain {head} came back, which the device did not have") from None
            if written > room:
                raise DeviceFault(f"{written} bytes in a chain with room for {room}")
            self._free.extend(taken)
            found.append((mark, written))
        return found

    def want_interrupts(self, after: int = 0) -> bool:
        """Ask for an interrupt once `after` more chains than the next came back; whether some already are.

        Where they are, no interrupt may come for them: `take_used` before waiting.
        """
        self._available[FLAGS_WORD] = 0
        if self.event_index:
            self._available[self._used_event] = (self._seen + after) & INDEX_MASK
        full_fence()
        return (self._used[IDX_WORD] - self._seen) & INDEX_MASK > after

    def _offer(self, head: int, mark: Mark, taken: Sequence[int], room: int) -> None:
        self._chains[head] = (mark, taken, room)
        self._available[RING_WORD + (self._next & self._mask)] = head
        self._next = (self._next + 1) & INDEX_MASK
