"""A front-end that lies in its messages and in its rings, 20,000 times (G35_FUZZ=1000000: a million).

What holds: nothing but the protocol's own refusals comes out of the device, each descriptor is closed once,
no byte outside of the guest's memory is changed or read, and the device goes on serving the next guest.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Iterator

import pytest

from agent.bench.virtio_driver import fuse_wire as wire
from agent.fs.virtiofs.back_end import FEATURES, BackEnd
from agent.virtio.split_ring import DESCRIPTOR_BYTES
from agent.virtio.vhost_user import (
    FDS_MAX,
    U64,
    InflightArea,
    OneRegion,
    Region,
    RegionTable,
    Request,
    VringAddress,
    VringFd,
    VringState,
    encode_message,
)
from tests.support.fs import guest_requests as requests
from tests.support.fs.malicious_front_end import SECRET, Event, InlineDevice, Memory, extreme, scrambled

FUZZ = max(20_000, int(os.environ.get("G35_FUZZ", "0")))
MESSAGES, RINGS = FUZZ // 2, FUZZ - FUZZ // 2

QUEUES = 3
SIZE = 16
MEMORY_BYTES = 1 << 16
GUEST, USER = 0x4000_0000, 0x7F00_0000_0000
TABLE, AVAILABLE, USED = 0, 0x400, 0x800
"""Where a ring lies, from its own page on; ring `i` has page `i`."""
TABLES_AT, REQUESTS_AT, ANSWERS_AT = 0x4000, 0x8000, 0xA000
INFLIGHT_BYTES = 4096


def polite(device: InlineDevice, memory: Memory, area: Memory) -> Iterator[tuple[bytes, list[int]]]:
    """What a well-meant front-end says, each message with new descriptors."""

    def said(request: Request, payload: bytes = b"", *what: Memory | Event) -> tuple[bytes, list[int]]:
        fds = [device.descriptor(one) for one in what]
        return encode_message(request, payload, need_reply=request is not Request.SET_OWNER), fds

    yield said(Request.GET_FEATURES)
    yield said(Request.SET_PROTOCOL_FEATURES, U64(0x9009).encode())
    yield said(Request.GET_QUEUE_NUM)
    yield said(Request.SET_OWNER)
    yield said(Request.SET_FEATURES, U64(int(FEATURES)).encode())
    yield said(Request.GET_INFLIGHT_FD, InflightArea(0, 0, QUEUES, SIZE).encode())
    yield said(Request.SET_INFLIGHT_FD, InflightArea(INFLIGHT_BYTES, 0, QUEUES, SIZE).encode(), area)
    region = OneRegion(GUEST, MEMORY_BYTES, USER, 0)
    yield said(Request.ADD_MEM_REG, region.encode(), memory)
    for index in range(QUEUES):
        page = USER + 4096 * index
        places = VringAddress(index, 0, page + TABLE, page + USED, page + AVAILABLE, 0)
        yield said(Request.SET_VRING_NUM, VringState(index, SIZE).encode())
        yield said(Request.SET_VRING_BASE, VringState(index, 0).encode())
        yield said(Request.SET_VRING_ADDR, places.encode())
        yield said(Request.SET_VRING_CALL, VringFd(index).encode(), Event())
        yield said(Request.SET_VRING_KICK, VringFd(index).encode(), Event())
        yield said(Request.SET_VRING_ENABLE, VringState(index, 1).encode())


class Guest:
    """A guest's memory and the device before it, with its queues running and INIT behind it."""

    def __init__(self, device: InlineDevice) -> None:
        self.device = device
        self.memory, self.area = Memory(MEMORY_BYTES), Memory(INFLIGHT_BYTES)
        self.view = self.memory.view
        self.back_end = BackEnd(QUEUES, device)
        self.next = [0] * QUEUES
        self.unique = 2
        for data, fds in polite(device, self.memory, self.area):
            outcome = device.tell(self.back_end, data, fds)
            assert outcome == "served"
        assert self.back_end.running == [0, 1, 2]
        assert self.ask(wire.Opcode.INIT, 0, wire.encode_init(), 64) == 0

    def lay(self, at: int, rows: list[tuple[int, int, int, int]]) -> None:
        """Write descriptors to memory."""
        for number, row in enumerate(rows):
            struct.pack_into("<QIHH", self.view, at + DESCRIPTOR_BYTES * number, *row)

    def publish(self, index: int, *heads: int) -> None:
        available = 4096 * index + AVAILABLE
        for head in heads:
            struct.pack_into("<H", self.view, available + 4 + 2 * (self.next[index] % SIZE), head)
            self.next[index] = (self.next[index] + 1) & 0xFFFF
        struct.pack_into("<H", self.view, available + 2, self.next[index])

    def ask(self, opcode: int, node: int, body: bytes, room: int) -> int:
        """A well-made request on ring 1, which must be answered now; its errno."""
        self.unique += 2
        message = requests.encode_request(opcode, self.unique, node, body)
        self.view[REQUESTS_AT : REQUESTS_AT + len(message)] = message
        rows = [(GUEST + REQUESTS_AT, len(message), 1, 1), (GUEST + ANSWERS_AT, 16 + room, 2, 0)]
        self.lay(4096 + TABLE, rows)
        self.publish(1, 0)
        assert self.device.serve() == 1
        length, error, unique = wire.OUT_HEADER.unpack_from(self.view, ANSWERS_AT)
        assert unique == self.unique
        assert 16 <= length <= 16 + room
        return -int(error)

    def leave(self) -> None:
        """Hang up."""
        self.back_end.end()
        assert not self.device.queues
        assert not self.device.descriptors_kept
        self.device.end_session()


def check_world(device: InlineDevice, *memories: Memory) -> None:
    assert all(memory.is_intact for memory in memories)
    assert not any(memory.leaks for memory in memories)
    assert not device.bugs, repr(device.bugs[0])
    for node in device.tree.nodes.values():
        assert not any(SECRET in page for page in node.pages.values())


# Messages.


def wrong_descriptors(chance: random.Random, device: InlineDevice, fds: list[int]) -> list[int]:
    """Too few, too many, or of the wrong kind."""
    count = chance.choice((0, 0, 1, 2, 8))
    kinds: list[Memory | Event] = [Event(), Memory(64), Memory(MEMORY_BYTES)]
    more = [device.descriptor(chance.choice(kinds)) for _ in range(count - len(fds))]
    return fds[:count] + more


def hostile(
    chance: random.Random, device: InlineDevice, memory: Memory, area: Memory
) -> Iterator[tuple[bytes, list[int]]]:
    """A front-end's conversation in which about every third message is not what it should be."""
    script = list(polite(device, memory, area))
    if chance.random() < 0.3:
        chance.shuffle(script)
    for data, fds in script:
        match chance.randrange(16):
            case 0:
                yield scrambled(chance, data), fds
            case 1:
                yield data[:12] + scrambled(chance, data[12:]), fds
            case 2:
                yield data, wrong_descriptors(chance, device, fds)
            case 3:
                payload = chance.randbytes(chance.choice((0, 4, 8, 24, 32, 40, 264)))
                yield encode_message(chance.randrange(45), payload, need_reply=chance.random() < 0.5), fds
            case 4:
                yield encode_message(chance.choice(list(FDS_MAX)), data[12:]), fds
            case 5:
                values = [extreme(chance, 8) for _ in range(5)]
                yield data[:12] + struct.pack("<5Q", *values)[: len(data) - 12], fds
            case 6:
                regions = tuple(
                    Region(*(extreme(chance, 8) if chance.random() < 0.2 else one for one in usual))
                    for usual in ((GUEST, 8192, USER, 0), (GUEST + 8192, 8192, USER + 8192, 8192))
                )
                both = [device.descriptor(memory), device.descriptor(memory)]
                yield encode_message(Request.SET_MEM_TABLE, RegionTable(regions).encode()), both
            case 7:
                request = chance.choice((Request.GET_VRING_BASE, Request.SET_VRING_ENABLE))
                state = VringState(chance.choice((0, 1, 2, 3, 255)), chance.choice((0, 0, 1, 2)))
                yield encode_message(request, state.encode()), []
                yield data, fds
            case 8:
                request = chance.choice((Request.RESET_DEVICE, Request.SET_FEATURES, Request.REM_MEM_REG))
                yield encode_message(request, data[12:]), []
                yield data, fds
            case _:
                yield data, fds


@pytest.mark.timeout(1800)
def test_messages(seed: int) -> None:
    """Conversations that go wrong in every way; between messages whatever queues run are served."""
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    device = InlineDevice(QUEUES)
    while outcomes.total() < MESSAGES:
        memory, area = Memory(MEMORY_BYTES), Memory(INFLIGHT_BYTES)
        for _ in range(10):
            back_end = BackEnd(QUEUES, device)
            for at in (0, 4096, 8192):  # requests that wait for a queue that may come to run
                memory.view[at + AVAILABLE + 2] = chance.choice((0, 0, 1, 255))
                memory.view[at : at + 64] = chance.randbytes(64)
            for data, fds in hostile(chance, device, memory, area):
                outcome = device.tell(back_end, data, fds)
                outcomes[outcome] += 1
                device.serve()
                if outcome != "served" and chance.random() < 0.3:
                    break
            back_end.end()
            assert not device.queues
            assert not device.descriptors_kept
            device.world.clear()  # what the front-end has not sent
        check_world(device, memory, area)
        guest = Guest(device)
        assert guest.ask(wire.Opcode.GETATTR, 1, requests.GETATTR_IN.pack(0, 0, 0), 104) == 0
        guest.leave()
    device.close()
    print(f"seed {seed}: {dict(outcomes)}; {dict(device.broken)}")
    assert min(outcomes[each] for each in ("served", "no message", "the connection ends")) > MESSAGES // 200


# Rings.

OPCODES = [*range(1, 54), *[wire.Opcode.READ, wire.Opcode.WRITE, wire.Opcode.CREATE, wire.Opcode.READDIR] * 4]
BODIES = (
    wire.READ_IN.pack(1, 0, 4096, 0, 0, 0, 0),
    wire.WRITE_IN.pack(1, 0, 512, 0, 0, 0, 0) + b"w" * 512,
    requests.CREATE_IN.pack(2, 0o100644, 0, 0) + b"a file\0",
    wire.OPEN_IN.pack(2, 0),
    b"a file\0another\0",
    requests.GETATTR_IN.pack(0, 0, 0),
    requests.BATCH_FORGET_IN.pack(2, 0) + requests.FORGET_ONE.pack(2, 1) * 2,
    b"",
)


def a_request(chance: random.Random, guest: Guest) -> bytes:
    """One that the file system would take, or nearly."""
    guest.unique += 2
    node = chance.choice((1, 1, 2, 3, 4, extreme(chance, 8)))
    message = requests.encode_request(chance.choice(OPCODES), guest.unique, node, chance.choice(BODIES))
    return scrambled(chance, message) if chance.random() < 0.4 else message


def a_chain(chance: random.Random, guest: Guest, index: int, message: bytes) -> int:
    """Lay a request out in one of the ways that a driver may, then spoil it perhaps; its head."""
    at = REQUESTS_AT + 1024 * index
    message = message[:1024]
    guest.view[at : at + len(message)] = message
    cut = chance.randrange(1, len(message)) if len(message) > 1 and chance.random() < 0.5 else len(message)
    spans = [(GUEST + at, cut, 0), (GUEST + at + cut, len(message) - cut, 0)]
    room = chance.choice((0, 8, 16, 24, 144, 4112))
    answers = GUEST + ANSWERS_AT + 0x1800 * index
    spans += [(answers, min(16, room), 2), (answers + 256, max(0, room - 16), 2)]
    spans = [span for span in spans if span[1]] or [(GUEST, 1, 0)]
    first = chance.randrange(SIZE)
    where = [(first + step) % SIZE for step in range(len(spans))]
    indirect = chance.random() < 0.4
    if indirect:
        where = list(range(len(spans)))
    rows = {}
    for step, (address, length, flags) in enumerate(spans):
        last = step + 1 == len(spans)
        rows[where[step]] = [address, length, flags | (0 if last else 1), 0 if last else where[step + 1]]
    if chance.random() < 0.7:
        spoil(chance, rows, index)
    table = TABLES_AT + 1024 * index if indirect else 4096 * index + TABLE
    for place, (address, length, flags, following) in rows.items():
        guest.lay(table + DESCRIPTOR_BYTES * place, [(address, length, flags, following)])
    if not indirect:
        return first
    head = [GUEST + table, DESCRIPTOR_BYTES * len(rows), 4, 0]
    if chance.random() < 0.2:
        head[chance.randrange(2)] = extreme(chance, 4)
        head[2] |= chance.choice((0, 0, 1, 2))
    guest.lay(4096 * index + TABLE + DESCRIPTOR_BYTES * first, [(head[0], head[1], head[2], head[3])])
    return first


def spoil(chance: random.Random, rows: dict[int, list[int]], index: int) -> None:
    """Make one thing of a chain wrong, or two."""
    end = GUEST + MEMORY_BYTES
    for _ in range(chance.choice((1, 1, 2))):
        row = rows[chance.choice(list(rows))]
        match chance.randrange(8):
            case 0:
                row[0] = chance.choice((0, GUEST - 1, GUEST - 16, end, end - 1, end - 8, extreme(chance, 8)))
            case 1:
                row[1] = chance.choice(
                    (0, 1, MEMORY_BYTES, MEMORY_BYTES + 1, 0xFFFF_FFFF, extreme(chance, 4))
                )
            case 2:
                row[2] ^= chance.choice((1, 2, 4, 8, 0x8000))
            case 3:
                row[2], row[3] = row[2] | 1, chance.choice((*rows, 0, SIZE - 1, SIZE, 0xFFFF))
            case 4:
                row[0], row[1] = end - 16, 17
            case 5:
                row[0], row[1] = (1 << 64) - 8, 16
            case 6:
                row[0] = GUEST + 4096 * index + chance.choice((TABLE, AVAILABLE, USED))  # the ring itself
            case _:
                row[:] = [extreme(chance, 8), extreme(chance, 4), extreme(chance, 2), extreme(chance, 2)]


@pytest.mark.timeout(1800)
def test_rings(seed: int) -> None:
    """Chains and indices that are wrong, of requests that may be wrong too, on running queues."""
    chance = random.Random(seed)
    device = InlineDevice(QUEUES)
    guest = Guest(device)
    served = done = 0
    while done < RINGS:
        for index in range(QUEUES):
            heads = [a_chain(chance, guest, index, a_request(chance, guest))]
            done += 1
            if chance.random() < 0.02:
                heads.append(chance.choice((SIZE, SIZE + 1, 0xFFFF)))
            if chance.random() < 0.02:
                guest.next[index] = extreme(chance, 2)
            if chance.random() < 0.05:
                struct.pack_into("<H", guest.view, 4096 * index + AVAILABLE, extreme(chance, 2))
                struct.pack_into(
                    "<H", guest.view, 4096 * index + AVAILABLE + 4 + 2 * SIZE, extreme(chance, 2)
                )
            if chance.random() < 0.05:
                struct.pack_into("<I", guest.view, 4096 * index + USED + 2, extreme(chance, 4))
            if chance.random() < 0.02:
                at = chance.randrange(INFLIGHT_BYTES - 8)
                guest.area.view[at : at + 8] = extreme(chance, 8).to_bytes(8, "little")
            guest.publish(index, *heads)
        served += device.serve()
        if len(device.queues) < QUEUES:
            guest.leave()
            check_world(device, guest.memory, guest.area)
            guest = Guest(device)
    guest.leave()
    check_world(device, guest.memory, guest.area)
    device.close()
    print(f"seed {seed}: {served} chains served; rings broken: {dict(device.broken)}")
    assert served > RINGS // 4
    assert device.broken.total() > RINGS // 20
    assert len(device.broken) >= 8


def test_one_broken_ring_leaves_the_others(seed: int) -> None:
    device = InlineDevice(QUEUES)
    guest = Guest(device)
    guest.publish(2, SIZE)
    assert device.serve() == 0
    assert list(device.queues) == [0, 1]
    assert guest.ask(wire.Opcode.GETATTR, 1, requests.GETATTR_IN.pack(0, 0, 0), 104) == 0
    guest.leave()
    device.close()
