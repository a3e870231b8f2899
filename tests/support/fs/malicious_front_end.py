"""A virtio-fs device without sockets or threads, and what a front-end does that means it harm.

`InlineDevice` is the agent's `Device` with another world around it: descriptors are numbers of a table, so
that each can be seen to be closed, and the guest's memory lies between *guards* that hold a secret. A device
that wrote outside of the table would change a guard, one that read there would bring the secret to light,
in the guest's memory or in a file. Its queues are served when the test says so.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass, field

from agent.fs.virtiofs.back_end import BackEnd, PeerError, QueueSetup
from agent.fs.virtiofs.device import Device
from agent.fs.virtiofs.device_queue import BadRing, DeviceQueue
from agent.fs.virtiofs.queue_worker import Serve
from agent.virtio.memory_table import MemoryTable
from agent.virtio.vhost_user import Header, VhostUserFormatError
from tests.support.fs.memory_filesystem import MemoryFileSystem
from tests.support.pool.inline_runner import inline_runner

SECRET = b"G35-GUARD-SECRET"
GUARD_BYTES = 1 << 14
GUARD = SECRET * (GUARD_BYTES // len(SECRET))
TRANSFER_BYTES = 1 << 16
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
CHAINS_MAX = 64
"""Chains that a queue is served at one time; a ring that claims more goes on at the next."""


@dataclass(slots=True)
class Memory:
    """What a descriptor stands for: a file of `size` bytes in memory, guarded on both sides."""

    size: int
    whole: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.whole = bytearray(GUARD) + bytearray(self.size) + bytearray(GUARD)

    @property
    def view(self) -> memoryview:
        return memoryview(self.whole)[GUARD_BYTES : GUARD_BYTES + self.size]

    @property
    def is_intact(self) -> bool:
        return self.whole.startswith(GUARD) and self.whole.endswith(GUARD)

    @property
    def leaks(self) -> bool:
        return self.whole.find(SECRET, GUARD_BYTES, GUARD_BYTES + self.size) >= 0


class Event:
    """What a kick's or call's descriptor stands for."""


class InlineDevice(Device):
    """The device over a tree in memory, and its world."""

    def __init__(self, queues: int) -> None:
        self.tree = MemoryFileSystem(capacity=4 << 20)
        super().__init__("fuzzed", self.tree, queues - 1, inline_runner, transfer_bytes=TRANSFER_BYTES)
        self.bugs: list[BaseException] = []
        self.complaints.peer = lambda doing, why: None  # type: ignore[method-assign]
        self.complaints.bug = lambda doing, error: self.bugs.append(error)  # type: ignore[method-assign]
        self._numbers = itertools.count(1000)
        self.world: dict[int, Memory | Event] = {}
        self.handed_over: set[int] = set()
        self.queues: dict[int, tuple[DeviceQueue, Serve]] = {}
        self.broken: Counter[str] = Counter()

    def descriptor(self, what: Memory | Event) -> int:
        """A number for something that the front-end may send along."""
        number = next(self._numbers)
        self.world[number] = what
        return number

    @property
    def descriptors_kept(self) -> set[int]:
        """Those that were handed over and not closed."""
        return self.handed_over & set(self.world)

    # Surroundings.

    def map_memory(self, fd: int, offset: int, size: int) -> memoryview:
        found = self.world[fd]
        if not isinstance(found, Memory) or size < 1 or offset + size > found.size:
            raise PeerError("no such memory")
        return found.view[offset : offset + size]

    def make_memory(self, size: int) -> int:
        return self.descriptor(Memory(size))

    def close_fd(self, fd: int) -> None:
        del self.world[fd]  # KeyError: closed twice

    def check_event(self, fd: int) -> None:
        if not isinstance(self.world[fd], Event):
            raise PeerError("no eventfd")

    def use_call(self, index: int, fd: int | None) -> None:
        assert fd is None or isinstance(self.world[fd], Event)

    def memory_changed(self, memory: MemoryTable) -> None:
        for queue, _ in self.queues.values():
            queue.memory = memory

    def start(self, index: int, setup: QueueSetup, memory: MemoryTable) -> None:
        assert index not in self.queues
        assert isinstance(self.world[setup.kick], Event)
        try:
            queue = setup.ring(memory)
        except BadRing as bad:
            raise PeerError(str(bad)) from None
        self.queues[index] = (queue, self._high_priority() if index == 0 else self._requests(index))

    def stop(self, index: int) -> int | None:
        found = self.queues.pop(index, None)
        return None if found is None else found[0].next_available

    # What the front-end does.

    def tell(self, back_end: BackEnd, data: bytes, fds: list[int]) -> str:
        """Hand a message in as the link does; what became of it. Anything but these three is a bug."""
        try:
            header = Header.decode_untrusted(data[:12])
        except VhostUserFormatError:
            for fd in fds:
                self.close_fd(fd)
            return "no message"
        self.handed_over.update(fds)
        try:
            reply = back_end.handle(header, data[12 : 12 + header.size], fds)
        except PeerError:
            return "the connection ends"
        if reply is not None and reply.fd is not None:
            self.close_fd(reply.fd)  # as the link does, once it was sent
        return "served"

    def serve(self) -> int:
        """Serve what is in the queues; how many chains. A broken ring ends its queue, as its worker would."""
        count = 0
        for index, (queue, serve) in list(self.queues.items()):
            try:
                count += _served(queue, serve)
            except BadRing as bad:
                self.broken[_NUMBER.sub("N", str(bad))] += 1
                del self.queues[index]
        return count


def _served(queue: DeviceQueue, serve: Serve) -> int:
    for count in range(CHAINS_MAX):
        chain = queue.pop()
        if chain is None:
            queue.may_sleep()
            return count
        written = serve(chain)
        assert 0 <= written <= sum(map(len, chain.writable))
        queue.push(chain.head, written)
    return CHAINS_MAX


def scrambled(chance: random.Random, data: bytes) -> bytes:
    """`data` with something wrong with it: bits, bytes, numbers of extreme size, or its length."""
    wrong = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(wrong)) if wrong else 0
        match chance.randrange(6):
            case 0 if wrong:
                wrong[at] ^= 1 << chance.randrange(8)
            case 1 if wrong:
                wrong[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                size = chance.choice((2, 4, 8))
                at = at // size * size
                wrong[at : at + size] = extreme(chance, size).to_bytes(size, "little")
            case 3:
                del wrong[at : at + chance.randrange(1, 16)]
            case 4:
                wrong[at:at] = chance.randbytes(chance.randrange(1, 16))
            case _:
                del wrong[at:]
    return bytes(wrong)


def extreme(chance: random.Random, size: int) -> int:
    """A number of `size` bytes at which something may give way."""
    most = (1 << 8 * size) - 1
    near = chance.choice((0, 1, 2, 7, 8, 16, 4095, 4096, 1 << 15, 1 << 16, 1 << 31, 1 << 32, most, most >> 1))
    return (near + chance.choice((-16, -1, 0, 0, 0, 1, 16))) & most
