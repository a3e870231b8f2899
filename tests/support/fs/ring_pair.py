"""A driver's ring and a device's queue over the same guest memory, without eventfds, sockets or threads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import TracebackType

from agent.bench.virtio_driver.guest_memory import GuestMemory
from agent.bench.virtio_driver.ring import DriverRing
from agent.fs.virtiofs.device_queue import Chain, DeviceQueue
from agent.virtio.inflight import queue_bytes
from agent.virtio.memory_table import MappedRegion, MemoryTable
from agent.virtio.vhost_user import Region
from tests.support.fs.driver_chains import Span, add


def table_of(memory: GuestMemory) -> MemoryTable:
    """The device's table of all of a machine's memory."""
    return MemoryTable(
        MappedRegion(Region(one.guest_address, one.size, one.user_address, one.offset), one.view)
        for one in memory.regions
    )


@dataclass(slots=True)
class Sent:
    """A chain as the driver gave it: what the device must see, and where its answer must come to."""

    number: int
    message: bytes
    writable: list[Span] = field(default_factory=list)


class RingPair:
    """One ring of `size`; both ends begin at number `first`. With `inflight` the device may die."""

    def __init__(
        self, size: int, *, event_index: bool, indirect: bool = True, first: int = 0, inflight: bool = False
    ) -> None:
        self.memory = GuestMemory(1 << 20, 1 << 20)
        self.driver: DriverRing[Sent] = DriverRing(
            self.memory, size, event_index=event_index, indirect=indirect, index=first
        )
        # Buffers on both sides of the gap between the regions, which an answer must not run across.
        self._buffers = [self.memory.room(1 << 19), self.memory.room(1 << 19)]
        self._place = [itertools.cycle(range(0, (1 << 19) - 8192, 8192)) for _ in self._buffers]
        self._numbers = itertools.count()
        self._table = table_of(self.memory)
        self.inflight_piece = memoryview(bytearray(queue_bytes(size))) if inflight else None
        self.answered: dict[int, bytes] = {}
        self.kicks = self.calls = 0
        self.device = self._new_device(first)

    def _new_device(self, base: int) -> DeviceQueue:
        ring, memory = self.driver, self.memory
        areas = [
            self._table.user_view(memory.user_address(room.address), room.size)
            for room in (ring.table, ring.available, ring.used)
        ]
        return DeviceQueue(
            ring.size, base, *areas, self._table,
            event_idx=ring.event_index, indirect=ring.indirect, inflight_piece=self.inflight_piece,
        )  # fmt: skip

    def device_dies(self) -> None:
        """Another device takes over, from what lies in shared memory alone."""
        self.device = self._new_device(self.driver.used_index)

    def send(self, readable: list[int], writable: list[int], *, indirect: bool, where: int = 0) -> Sent:
        """Give the device a chain of buffers of these sizes."""
        number = next(self._numbers)
        spans = []
        message = b""
        for size in readable:
            piece = (number * 251 + len(message)).to_bytes(8, "little") * (size // 8 + 1)
            address, view = self._room(where + len(spans), size)
            view[:] = piece[:size]
            message += piece[:size]
            spans.append((address, size))
        sent = Sent(number, message)
        for size in writable:
            address, view = self._room(where + len(spans) + len(sent.writable), size)
            view[:] = b"\xee" * size
            sent.writable.append((address, size))
        add(self.driver, spans, sent.writable, sent, indirect=indirect)
        if self.driver.publish():
            self.kicks += 1
        return sent

    def serve(self, limit: int | None = None) -> int:
        """The device takes up to `limit` chains and answers each; how many there were."""
        count = 0
        while limit is None or count < limit:
            chain = self.device.pop()
            if chain is None:
                break
            self.answer(chain)
            count += 1
        return count

    def answer(self, chain: Chain) -> None:
        """Put what was read, turned around, into the chain's buffers as far as they reach."""
        left = b"".join(chain.readable)[::-1]
        written = 0
        for run in chain.writable:
            part, left = left[: len(run)], left[len(run) :]
            run[: len(part)] = part
            written += len(part)
        if self.device.push(chain.head, written):
            self.calls += 1

    def collect(self) -> int:
        """The driver takes what came back and checks it: in the right buffers, and nothing behind it."""
        found = self.driver.take_used()
        for sent, written in found:
            room = b"".join(self.memory.at(address, size) for address, size in sent.writable)
            expected = sent.message[::-1][: len(room)]
            assert written == len(expected)
            assert room[:written] == expected
            assert room[written:] == b"\xee" * (len(room) - written)
            assert sent.number not in self.answered, "a chain was completed twice"
            self.answered[sent.number] = expected
        return len(found)

    def _room(self, turn: int, size: int) -> tuple[int, memoryview]:
        which = turn % 2
        part = self._buffers[which].part(next(self._place[which]), size)
        return part.address, part.view

    def __enter__(self) -> RingPair:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.memory.close()
