"""The device's side of one split virtqueue: chains out of it, completions into it, no I/O.

Read agent/virtio/split_ring.py first. A guest may rewrite a ring while it is read: each descriptor is read
once, into memory of our own, and judged there. A ring that does not hold together raises `BadRing`, and its
queue stops.

A chain is handed over as runs of memory: pages that lie beside each other in the guest's memory are one run,
so a megabyte of a huge page is one call of the cipher. With an inflight piece (agent/virtio/inflight.py) the
queue also notes what it has taken, and begins with what an earlier device had taken and not completed.
"""

from collections import deque
from typing import Final

from agent.virtio import inflight
from agent.virtio.memory_barrier import full_fence, ordering_fence
from agent.virtio.memory_table import AddressError, MemoryTable
from agent.virtio.split_ring import (
    AVAILABLE_NO_INTERRUPT,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    FLAGS_SHIFT,
    FLAGS_WORD,
    IDX_WORD,
    INDEX_MASK,
    LENGTH_MASK,
    NEXT_SHIFT,
    RING_WORD,
    USED_NO_NOTIFY,
    USED_RING_DWORD,
    DescriptorFlag,
    avail_event_word,
    passes_event,
    used_event_word,
)

CHAIN_BYTES_MAX: Final = (1 << 32) - 1
"""What a chain may describe: its length is told back in 32 bits."""

_NEXT: Final[int] = DescriptorFlag.NEXT.value
_WRITE: Final[int] = DescriptorFlag.WRITE.value
_INDIRECT: Final[int] = DescriptorFlag.INDIRECT.value
_NEXT_BIT: Final = _NEXT << FLAGS_SHIFT
_WRITE_BIT: Final = _WRITE << FLAGS_SHIFT
_INDIRECT_BIT: Final = _INDIRECT << FLAGS_SHIFT

Run = tuple[int, int, int]
"""Address and length of memory that lies in one piece, and what is not 0 where the device may write to it."""


class BadRing(Exception):
    """The guest's fault: the ring cannot be followed any further."""


class Chain:
    """One request: what the device reads, then what it writes, each as runs of the guest's memory."""

    __slots__ = ("again", "head", "readable", "writable")

    def __init__(
        self, head: int, readable: list[memoryview], writable: list[memoryview], again: bool = False
    ) -> None:
        self.head: Final = head
        self.readable: Final = readable
        self.writable: Final = writable
        self.again: Final = again
        """An earlier device had taken it: what it asks for may have been done."""


class DeviceQueue:
    """One ring. Not shared between threads, `memory` excepted: a new table may take its place any time."""

    def __init__(
        self,
        size: int,
        base: int,
        descriptors: memoryview,
        available: memoryview,
        used: memoryview,
        memory: MemoryTable,
        *,
        event_idx: bool,
        indirect: bool,
        inflight_piece: memoryview | None = None,
    ) -> None:
        """`base` is the available idx to go on from; the three areas are as long as split_ring.py says."""
        self.memory = memory
        self._size = size
        self._descriptors = descriptors
        self._available = available.cast("H")
        self._used = used.cast("H")
        self._used_ring = used[: 4 + 8 * size].cast("I")
        self._event_idx = event_idx
        self._indirect = indirect
        self._used_event = used_event_word(size)
        self._avail_event = avail_event_word(size)
        self._next = base & INDEX_MASK
        self._used_idx = self._used[IDX_WORD]
        self._called_at: int | None = None
        self._again: deque[int] = deque()
        self._taken = _Taken(inflight_piece, size) if inflight_piece is not None else None
        if self._taken is not None:
            self._again.extend(self._taken.left_over(self._used_idx))
            if self._taken.was_used:
                self._next = (self._used_idx + len(self._again)) & INDEX_MASK

    @property
    def next_available(self) -> int:
        """Where a successor goes on. A chain that was taken and is to be served again counts as not taken."""
        return (self._next - len(self._again)) & INDEX_MASK

    @property
    def may_owe_call(self) -> bool:
        """A device before this one has served the ring, and may have died between an answer and its call."""
        return self._taken is not None and self._taken.was_used

    def pop(self) -> Chain | None:
        """The next request, None where there is none. Raises BadRing."""
        if self._again:
            return self._chain(self._again.popleft(), again=True)
        ahead = (self._available[IDX_WORD] - self._next) & INDEX_MASK
        if not ahead:
            return None
        if ahead > self._size:
            raise BadRing(f"the available idx is {ahead} ahead in a ring of {self._size}")
        ordering_fence()
        head = self._available[RING_WORD + self._next % self._size]
        if head >= self._size:
            raise BadRing(f"a chain begins at descriptor {head} of {self._size}")
        if self._taken is not None:
            self._taken.begin(head)
        self._next = (self._next + 1) & INDEX_MASK
        return self._chain(head)

    def chain_at(self, head: int, *, again: bool = False) -> Chain:
        """The chain that begins there, which another process has taken out of this ring. Raises BadRing."""
        if head >= self._size:
            raise BadRing(f"a chain begins at descriptor {head} of {self._size}")
        return self._chain(head, again=again)

    def taking(self, head: int) -> int:
        """The number under which a chain was taken, never the same for two; with an inflight piece alone."""
        return 0 if self._taken is None else self._taken.counter_of(head)

    def complete_left_over(self, head: int, taking: int, written: int) -> bool:
        """Complete a chain that was answered before its process died, if it is left over and still the one
        that was taken then; True if it was. The next worker of the ring owes the driver a call."""
        if not taking or head not in self._again or self.taking(head) != taking:
            return False
        self._again.remove(head)
        self.push(head, written)
        return True

    def _chain(self, head: int, *, again: bool = False) -> Chain:
        address, length, flags, _ = DESCRIPTOR.unpack_from(self._descriptors, head * DESCRIPTOR_BYTES)
        if flags & _INDIRECT:
            if flags & _NEXT or not self._indirect:
                raise BadRing("an indirect table that goes on, or that was not negotiated")
            runs = self._runs_of_table(address, length)
        elif flags & _NEXT:
            runs = _walk(_words(bytes(self._descriptors)), head, self._size)
        else:
            runs = [(address, length, flags & _WRITE)]
        readable: list[memoryview] = []
        writable: list[memoryview] = []
        total = 0
        memory = self.memory
        try:
            for address, length, writes in runs:
                total += length
                if not length or total > CHAIN_BYTES_MAX:
                    raise BadRing("a buffer of no bytes, or a chain of 2^32 and more")
                if writes:
                    writable += memory.runs(address, length)
                elif writable:
                    raise BadRing("a buffer to read follows one to write")
                else:
                    readable += memory.runs(address, length)
        except AddressError as outside:
            raise BadRing(str(outside)) from None
        return Chain(head, readable, writable, again)

    def _runs_of_table(self, address: int, length: int) -> list[Run]:
        count, odd = divmod(length, DESCRIPTOR_BYTES)
        if odd or not 0 < count <= self._size:
            raise BadRing(f"an indirect table of {length} bytes in a ring of {self._size}")
        try:
            table = b"".join(self.memory.runs(address, length))
        except AddressError as outside:
            raise BadRing(str(outside)) from None
        return _walk(_words(table), 0, count)

    def push(self, head: int, written: int) -> bool:
        """Complete a chain with `written` bytes in its buffers; True where the driver wants to be called."""
        at = USED_RING_DWORD + 2 * (self._used_idx % self._size)
        self._used_ring[at] = head
        self._used_ring[at + 1] = written
        old = self._used_idx
        new = self._used_idx = (old + 1) & INDEX_MASK
        if self._taken is not None:
            self._taken.completes(head)
        ordering_fence()
        self._used[IDX_WORD] = new
        if self._taken is not None:
            self._taken.completed(head, new)
        full_fence()
        if not self._event_idx:
            return not self._available[FLAGS_WORD] & AVAILABLE_NO_INTERRUPT
        before, self._called_at = self._called_at, new
        return before is None or passes_event(self._available[self._used_event], new, before)

    def may_sleep(self) -> bool:
        """Ask to be kicked for the next request; False where there is one already."""
        if self._again:
            return False
        if self._event_idx:
            self._used[self._avail_event] = self._next
        else:
            self._used[FLAGS_WORD] = 0
        full_fence()
        return self._available[IDX_WORD] == self._next

    def awake(self) -> None:
        """No kicks are needed while the ring is looked at anyway. With event idx that is so by itself."""
        if not self._event_idx:
            self._used[FLAGS_WORD] = USED_NO_NOTIFY


class _Taken:
    """A queue's inflight piece: what this device has taken, and what an earlier one had."""

    def __init__(self, piece: memoryview, size: int) -> None:
        self._bytes = piece
        self._words = piece.cast("H")
        self._qwords = piece.cast("Q")
        self._size = size
        self._counter = 0
        words = self._words
        self.was_used = words[inflight.VERSION_WORD] == inflight.VERSION
        """An earlier device has worked with it: where it stopped is known better than from the front-end."""
        if not self.was_used:
            piece[:] = bytes(len(piece))
            words[inflight.SIZE_WORD] = size
            words[inflight.VERSION_WORD] = inflight.VERSION
        elif words[inflight.SIZE_WORD] != size:
            raise BadRing("the inflight area is of a ring of another size")

    def left_over(self, used_idx: int) -> list[int]:
        """Heads that are in flight, oldest first; settles what the earlier device was about to complete."""
        words, size = self._words, self._size
        if not self.was_used:
            words[inflight.USED_IDX_WORD] = used_idx
            return []
        if words[inflight.USED_IDX_WORD] != used_idx:
            # It died after the used idx had moved: the last chain (our batches are of one) is completed.
            head = words[inflight.LAST_BATCH_HEAD_WORD]
            if head < size:
                self._bytes[inflight.in_flight_byte(head)] = 0
            words[inflight.USED_IDX_WORD] = used_idx
        heads = [
            (self._qwords[inflight.counter_qword(head)], head)
            for head in range(size)
            if self._bytes[inflight.in_flight_byte(head)]
        ]
        heads.sort()
        if heads:
            self._counter = heads[-1][0]
        return [head for _, head in heads]

    def counter_of(self, head: int) -> int:
        return self._qwords[inflight.counter_qword(head)]

    def begin(self, head: int) -> None:
        self._counter = (self._counter + 1) & 0x7FFF_FFFF_FFFF_FFFF
        self._qwords[inflight.counter_qword(head)] = self._counter
        self._bytes[inflight.in_flight_byte(head)] = 1

    def completes(self, head: int) -> None:
        self._words[inflight.LAST_BATCH_HEAD_WORD] = head

    def completed(self, head: int, used_idx: int) -> None:
        self._bytes[inflight.in_flight_byte(head)] = 0
        self._words[inflight.USED_IDX_WORD] = used_idx


def _walk(words: list[int], head: int, count: int) -> list[Run]:
    """Follow a chain through a copy of its table of `count` descriptors, as 64-bit words. Raises BadRing.

    The loop over the 256 pages of a READ: as words, because a descriptor taken apart by `struct` costs four
    times this in compiled code, and numpy, whose machinery a request finds cold, more than half of its AES.
    """
    # As locals: compiled, too, a name of the module is looked up every time.
    goes_on, writes, indirect, length_mask = _NEXT_BIT, _WRITE_BIT, _INDIRECT_BIT, LENGTH_MASK
    next_shift = NEXT_SHIFT
    runs: list[Run] = []
    at = head
    start = end = 0
    kind = -1
    for _ in range(count):
        address, rest = words[2 * at], words[2 * at + 1]
        length = rest & length_mask
        if rest & indirect:
            raise BadRing("an indirect table inside a chain")
        if not length:
            raise BadRing("a buffer of no bytes")
        if address != end or rest & writes != kind:
            if kind >= 0:
                runs.append((start, end - start, kind))
            start, kind = address, rest & writes
        end = address + length
        if not rest & goes_on:
            runs.append((start, end - start, kind))
            return runs
        at = rest >> next_shift
        if at >= count:
            raise BadRing(f"descriptor {at} of {count} follows")
    raise BadRing("a chain that bites its tail")


def _words(table: bytes) -> list[int]:
    return memoryview(table).cast("Q").tolist()
