"""Chains that tests give a device one by one: the driver itself lays out a table once and keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from agent.bench.virtio_driver.request_queue import RequestQueue, Waiter
from agent.bench.virtio_driver.ring import DriverRing, Mark
from agent.virtio.split_ring import DESCRIPTOR, DESCRIPTOR_BYTES, DescriptorFlag

Span: TypeAlias = "tuple[int, int]"
"""A buffer: its guest-physical address and its length."""


def encode_table(readable: Sequence[Span], writable: Sequence[Span]) -> bytes:
    """The descriptors of a chain, one behind the other in a table that begins with them."""
    last = len(readable) + len(writable) - 1
    made = bytearray((last + 1) * DESCRIPTOR_BYTES)
    for index, (address, length) in enumerate((*readable, *writable)):
        flags = DescriptorFlag.NEXT if index < last else DescriptorFlag(0)
        if index >= len(readable):
            flags |= DescriptorFlag.WRITE
        following = index + 1 if index < last else 0
        DESCRIPTOR.pack_into(made, index * DESCRIPTOR_BYTES, address, length, flags, following)
    return bytes(made)


def add(
    ring: DriverRing[Mark],
    readable: Sequence[Span],
    writable: Sequence[Span],
    mark: Mark,
    *,
    indirect: bool = False,
) -> int:
    """Give the device a chain; it sees it with the next `publish`. The head of the chain. Raises RingFull."""
    count, room = len(readable) + len(writable), sum(length for _, length in writable)
    encoded = encode_table(readable, writable)
    if not indirect:
        return ring._add_direct(encoded, count, room, mark)
    table = ring._memory.room(len(encoded), DESCRIPTOR_BYTES)
    table.view[:] = encoded
    return ring.add_table(table.address, count, room, mark)


def submit(queue: RequestQueue, readable: Sequence[Span], writable: Sequence[Span], waiter: Waiter) -> None:
    """Give the device a chain of descriptors of the ring, and kick it if it wants that."""
    with queue._lock:
        add(queue.ring, readable, writable, waiter)
        kick = queue.ring.publish()
    if kick:
        queue.kick_now()
