"""The driver's side of a split ring, against the standard: layout, notifications, and devices that lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bench.virtio_driver.guest_memory import GUEST_BASE, GuestMemory
from agent.bench.virtio_driver.ring import DeviceFault, DriverRing, RingFull
from tests.support.fs.driver_chains import add, encode_table

SIZE = 8


class Hand:
    """The device's side, done by hand: sees what the driver wrote and writes the used ring."""

    def __init__(self, ring: DriverRing[str]) -> None:
        self.ring = ring
        self.used = ring.used_index

    def available(self) -> tuple[int, int, list[int], int]:
        """flags, idx, the ring, used_event."""
        whole = struct.unpack(f"<HH{SIZE}HH", self.ring.available.view)
        return whole[0], whole[1], list(whole[2:-1]), whole[-1]

    def descriptor(self, index: int) -> tuple[int, ...]:
        return struct.unpack_from("<QIHH", self.ring.table.view, 16 * index)

    def give_back(self, head: int, written: int = 0) -> None:
        struct.pack_into("<II", self.ring.used.view, 4 + 8 * (self.used % SIZE), head, written)
        self.used = (self.used + 1) & 0xFFFF
        struct.pack_into("<H", self.ring.used.view, 2, self.used)

    def want_kick(self, event: int) -> None:
        struct.pack_into("<H", self.ring.used.view, 4 + 8 * SIZE, event & 0xFFFF)

    def no_notify(self, yes: bool) -> None:
        struct.pack_into("<H", self.ring.used.view, 0, yes)


@pytest.fixture
def memory() -> Iterator[GuestMemory]:
    with GuestMemory(1 << 16) as made:
        yield made


def test_a_direct_chain_lies_as_the_standard_says(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
    device = Hand(ring)
    head = add(ring, [(0x1000, 40), (0x2000, 7)], [(0x3000, 16)], "a")
    assert device.available()[1] == 0  # not before it is published
    assert ring.publish()
    flags, idx, entries, _ = device.available()
    assert (flags, idx, entries[0]) == (0, 1, head)
    first = device.descriptor(head)
    assert first[:3] == (0x1000, 40, 1)
    second = device.descriptor(first[3])
    assert second[:3] == (0x2000, 7, 1)
    assert device.descriptor(second[3]) == (0x3000, 16, 2, 0)
    assert ring.free == SIZE - 3
    device.give_back(head, 16)
    assert ring.take_used() == [("a", 16)]
    assert ring.free == SIZE
    assert not ring.outstanding


def test_an_indirect_chain_takes_one_descriptor(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
    head = add(ring, [(0x1000, 40)], [(0x3000, 16), (0x4000, 4096)], "a", indirect=True)
    address, length, flags, _ = Hand(ring).descriptor(head)
    assert (length, flags) == (48, 4)
    table = bytes(memory.at(address, length))
    assert table == encode_table([(0x1000, 40)], [(0x3000, 16), (0x4000, 4096)])
    assert struct.unpack("<QIHHQIHHQIHH", table) == (
        0x1000, 40, 1, 1, 0x3000, 16, 3, 2, 0x4000, 4096, 2, 0,
    )  # fmt: skip


def test_a_table_on_a_ring_without_indirect_ones_is_copied_into_it(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False, indirect=False)
    device = Hand(ring)
    kept = memory.room(48, 16)
    kept.view[:] = encode_table([(0x1000, 40)], [(0x3000, 16), (0x4000, 4096)])
    first = device.descriptor(ring.add_table(kept.address, 3, 4112, "a"))
    second = device.descriptor(first[3])
    assert (first[:3], second[:3]) == ((0x1000, 40, 1), (0x3000, 16, 3))
    assert device.descriptor(second[3]) == (0x4000, 4096, 2, 0)
    assert ring.free == SIZE - 3


@pytest.mark.parametrize("start", [0, 0xFFFE, 0xFFFF])
def test_kicks_by_event_index_around_the_end_of_the_numbers(memory: GuestMemory, start: int) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=True, index=start)
    device = Hand(ring)
    add(ring, [(0x1000, 1)], [], "a")
    assert ring.publish()  # the event is where the ring began
    assert not ring.publish()  # nothing new
    add(ring, [(0x1000, 1)], [], "b")
    assert not ring.publish()  # it asked for the first and was told
    device.want_kick(start + 3)
    add(ring, [(0x1000, 1)], [], "c")
    assert not ring.publish()
    add(ring, [(0x1000, 1)], [], "d")
    add(ring, [(0x1000, 1)], [], "e")
    assert ring.publish()  # passed among several


def test_kicks_by_the_flag(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
    device = Hand(ring)
    device.no_notify(True)
    add(ring, [(0x1000, 1)], [], "a")
    assert not ring.publish()
    device.no_notify(False)
    add(ring, [(0x1000, 1)], [], "b")
    assert ring.publish()


def test_interrupts_are_asked_for(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=True, index=0xFFFF)
    device = Hand(ring)
    head = add(ring, [(0x1000, 1)], [], "a")
    ring.publish()
    assert not ring.want_interrupts()
    assert device.available()[3] == 0xFFFF
    device.give_back(head)
    assert ring.want_interrupts()  # it came before we slept
    ring.take_used()
    assert not ring.want_interrupts(after=2)
    assert device.available()[3] == 2

    by_flag: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
    by_flag.want_interrupts()
    assert Hand(by_flag).available()[0] == 0


def test_devices_that_lie(memory: GuestMemory) -> None:
    def given_two() -> tuple[DriverRing[str], Hand, int]:
        ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
        head = add(ring, [(0x1000, 1)], [(0x2000, 16)], "a")
        add(ring, [(0x1000, 1)], [(0x2000, 16)], "b")
        ring.publish()
        return ring, Hand(ring), head

    ring, device, head = given_two()
    device.give_back(head, 17)
    with pytest.raises(DeviceFault, match="17 bytes"):
        ring.take_used()
    ring, device, head = given_two()
    device.give_back(head)
    device.give_back(head)
    with pytest.raises(DeviceFault, match="did not have"):
        ring.take_used()
    ring, device, head = given_two()
    for _ in range(3):
        device.give_back(head)
    with pytest.raises(DeviceFault, match="3 chains"):
        ring.take_used()


def test_our_own_mistakes(memory: GuestMemory) -> None:
    ring: DriverRing[str] = DriverRing(memory, SIZE, event_index=False)
    for _ in range(SIZE):
        add(ring, [(0x1000, 1)], [], "a", indirect=True)
    for indirect in (False, True):
        with pytest.raises(RingFull):
            add(ring, [(0x1000, 1)], [], "b", indirect=indirect)
    with pytest.raises(ValueError, match="power of two"):
        DriverRing(memory, 12, event_index=False)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(0, 7)), max_size=40)
)
def test_every_descriptor_comes_home(steps: list[tuple[int, int, bool, int]]) -> None:
    """Chains of all kinds, given back in any order: the ring ends as empty as it began."""
    with GuestMemory(1 << 16) as memory:
        ring: DriverRing[int] = DriverRing(memory, SIZE, event_index=True, index=0xFFF0)
        device = Hand(ring)  # type: ignore[arg-type]
        held: list[tuple[int, int]] = []
        for number, (readable, writable, indirect, which) in enumerate(steps):
            if ring.free >= readable + writable:
                spans = [(0x1000, 8)] * readable
                held.append((add(ring, spans, [(0x2000, 8)] * writable, number, indirect=indirect), number))
                ring.publish()
            elif held:
                head, mark = held.pop(which % len(held))
                device.give_back(head)
                assert ring.take_used() == [(mark, 0)]
        for head, mark in held:
            device.give_back(head)
            assert ring.take_used() == [(mark, 0)]
        assert ring.free == SIZE
        del ring, device


def test_addresses_of_guest_memory() -> None:
    with GuestMemory(1 << 16, 1 << 16, file_offset=8192) as memory:
        room = memory.room(1 << 16)
        other = memory.room(4096)
        assert room.address == GUEST_BASE
        assert memory.address_of(other.view[16:]) == other.address + 16
        assert memory.address_of(memoryview(bytearray(16))) is None
        assert memory.address_of(room.view.toreadonly()) is None
        with pytest.raises(ValueError, match="not guest memory"):
            memory.at(room.address + (1 << 16) - 1, 2)
        with pytest.raises(ValueError):
            memory.user_address(room.address + (1 << 16))
        assert memory.user_address(other.address) != other.address
        other.view[0] = 7
        assert memory.at(other.address, 1)[0] == 7
        with pytest.raises(MemoryError):
            memory.room(1 << 16)
        del room, other
