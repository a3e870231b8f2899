"""The fast path and the path of single packets are two ways of one meaning: this is where they are compared.

`parted` hands every datagram over by itself, so that no row is ever seen; the other network hands over
rows, some of them with gaps and damage. Whatever the requests, both must end in the same memory and the
same completions.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.nic.counters import Count
from emulator.roce.nic.packets_out import VOLLEY_BURSTS, PacketWriter, rows_of
from emulator.roce.nic.path import Path
from emulator.roce.nic.verbs import Address, Mtu, SendFlags, SendOpcode, WorkCompletion
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.ends import Pair
from tests.support.roce.packets import decode_packet_untrusted, encode_packet
from tests.support.roce.weather import CALM, Weather

SIZE = 1 << 16
WRITES = (SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendOpcode.RDMA_READ)

requests = st.lists(
    st.tuples(
        st.sampled_from(WRITES),
        st.integers(0, 1000),
        st.one_of(st.integers(0, 12_000), st.integers(1, 40).map(lambda n: n * 256)),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


def _converse(
    wanted: list[tuple[SendOpcode, int, int, int]], weather: Weather, *, parted: bool, numbered: bool
) -> tuple[Pair, bytes, bytes, list[WorkCompletion], list[WorkCompletion]]:
    pair = Pair(
        SIZE, weather=weather, parted=parted, numbered=numbered, changes={"path_mtu": Mtu.MTU_256}, seed=4
    )
    a, b = pair.a, pair.b
    for position in range(SIZE):
        a.memory.view[position] = position * 7 & 0xFF
        b.memory.view[position] = position * 11 & 0xFF
    for number, (opcode, offset, size, cuts) in enumerate(wanted):
        piece = size // (cuts + 1)
        sizes = [piece] * cuts + [size - piece * cuts]
        local = 30_000 if opcode is SendOpcode.RDMA_READ else 0
        sges = [a.sge(local + offset + sum(sizes[:i]) + 3 * i, length) for i, length in enumerate(sizes)]
        if opcode is SendOpcode.SEND:
            b.receive(b.sge(30_000 + offset, size // 2), b.sge(50_000, size), wr_id=number)
        flags = SendFlags.SIGNALED | SendFlags.FENCE
        a.post(opcode, *sges, wr_id=number, flags=flags, to=b, at=offset)
    sent = pair.run_until(len(wanted))
    received = b.polled()
    assert a.memory.intact
    assert b.memory.intact
    # Queue pair numbers are chance, and no part of the comparison.
    for completion in (*sent, *received):
        completion.qp_num = completion.src_qp = 0
    return pair, bytes(a.memory.view), bytes(b.memory.view), sent, received


@given(requests, st.booleans(), st.sampled_from([CALM, Weather(loss=0.02, corrupt=0.01, duplicate=0.02)]))
def test_both_paths_give_the_same_result(
    wanted: list[tuple[SendOpcode, int, int, int]], numbered: bool, weather: Weather
) -> None:
    single, *expected = _converse(wanted, CALM, parted=True, numbered=False)
    rows, *found = _converse(wanted, weather, parted=False, numbered=numbered)
    assert found == expected
    for end in (single.a, single.b):
        assert end.nic.counters[Count.ROW_PACKETS] == 0
    if weather is CALM and any(size > 2000 and not cuts for _, _, size, cuts in wanted):
        assert rows.a.nic.counters[Count.ROW_PACKETS] + rows.b.nic.counters[Count.ROW_PACKETS] > 0


@given(
    st.sampled_from(list(Mtu)),
    st.integers(2, 256),
    st.integers(0, 0xFFFFFF),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_row_is_the_packets_that_it_stands_for(
    mtu: Mtu, count: int, psn: int, numbered: bool, ends: bool, acknowledge: bool
) -> None:
    size = mtu.bytes
    count = min(count, rows_of(size) * (1 if numbered else VOLLEY_BURSTS))
    path = Path("10.0.0.1", "10.0.0.2", numbered, budget=0)
    source = np.arange(count * size, dtype=np.uint32).astype(np.uint8)
    burst = PacketWriter().rows(
        path,
        size,
        Opcode.SEND_MIDDLE,
        0x123456,
        psn,
        source,
        first=Opcode.SEND_FIRST if ends else None,
        last=Opcode.SEND_LAST if ends else None,
        acknowledge=acknowledge,
    )
    assert burst.destination == Address("10.0.0.2")
    assert len(burst.data) == count * burst.segment_size
    for index in range(count):
        datagram = burst.data[index * burst.segment_size : (index + 1) * burst.segment_size]
        opcode = Opcode.SEND_MIDDLE
        if ends and index in (0, count - 1):
            opcode = Opcode.SEND_LAST if index else Opcode.SEND_FIRST
        packet = Packet(
            opcode,
            0x123456,
            psn + index & 0xFFFFFF,
            bytes(source[index * size : (index + 1) * size]),
            acknowledge and index == count - 1,
            migration=True,
        )
        number = index if numbered else 0
        assert bytes(datagram) == encode_packet(packet, path.flow, number)
        assert decode_packet_untrusted(datagram, path.flow, number).psn == psn + index & 0xFFFFFF
