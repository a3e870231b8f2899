"""How quickly and how often things are said again, packet by packet."""

from __future__ import annotations

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.memory import Bind, ProtectionFault
from emulator.roce.nic.verbs import Access, Address, Burst, Mtu, MwType, SendOpcode, WcStatus
from emulator.roce.wire.extended import NakCode, nak_syndrome
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.ends import End, Pair
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import decode_packet_untrusted

HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")


def _datagrams(bursts: list[Burst]) -> list[memoryview]:
    return [
        burst.data[at : at + burst.segment_size]
        for burst in bursts
        for at in range(0, len(burst.data), burst.segment_size)
    ]


def _hand(end: End, datagrams: list[memoryview], source: Address) -> None:
    for datagram in datagrams:
        end.nic.receive(datagram, len(datagram), source, 0.0)


def _packets(datagrams: list[memoryview], source: Address, target: Address) -> list[Packet]:
    flow = flow_of(source.ip, target.ip, 4791)
    return [decode_packet_untrusted(datagram, flow, 0) for datagram in datagrams]


def test_each_gap_is_told_and_repeated_from() -> None:
    pair = Pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    a.memory.view[:2560] = bytes(range(256)) * 10
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 2560), to=b)
    for lost in (3, 4):
        sent = _datagrams(output_of(a.nic))
        _hand(b, sent[:lost] + sent[lost + 1 :], HERE)
        answers = _datagrams(output_of(b.nic))
        (nak,) = _packets(answers, THERE, HERE)
        assert nak.aeth is not None
        assert nak.aeth.syndrome == nak_syndrome(NakCode.PSN_SEQUENCE_ERROR)
        assert nak.psn == _packets(sent, HERE, THERE)[lost].psn
        _hand(a, answers, THERE)
    last = _datagrams(output_of(a.nic))
    assert len(last) == 10 - 3 - 4
    _hand(b, last, HERE)
    _hand(a, _datagrams(output_of(b.nic)), THERE)
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS]
    assert b.memory.view[:2560] == a.memory.view[:2560]


def test_an_acknowledgement_past_a_read_says_that_its_answer_is_lost() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.memory.view[:64] = b"r" * 64
    a.post(SendOpcode.RDMA_READ, a.sge(0, 64), to=b)
    a.post(SendOpcode.RDMA_WRITE, a.sge(64, 64), to=b, at=64)
    _hand(b, _datagrams(output_of(a.nic)), HERE)
    answer, acknowledgement = _datagrams(output_of(b.nic))
    _hand(a, [acknowledgement], THERE)
    again = _datagrams(output_of(a.nic))
    assert [packet.opcode for packet in _packets(again, HERE, THERE)] == [
        Opcode.READ_REQUEST,
        Opcode.WRITE_ONLY,
    ]
    _hand(a, [acknowledgement], THERE)
    assert not output_of(a.nic), "it is asked for again once"
    _hand(a, [answer, acknowledgement], THERE)
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS] * 2
    assert a.memory.view[:64] == b"r" * 64


def test_a_read_goes_on_where_its_answer_stopped() -> None:
    pair = Pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    b.memory.view[:2560] = bytes(range(256)) * 10
    a.post(SendOpcode.RDMA_READ, a.sge(0, 2560), to=b)
    _hand(b, _datagrams(output_of(a.nic)), HERE)
    answers = _datagrams(output_of(b.nic))
    _hand(a, answers[:4] + answers[5:], THERE)
    again = _datagrams(output_of(a.nic))
    (request,) = _packets(again, HERE, THERE)
    assert request.reth is not None
    assert request.reth.length == 2560 - 4 * 256
    assert request.reth.address == b.region.address + 4 * 256
    _hand(b, again, HERE)
    answers = _datagrams(output_of(b.nic))
    assert [p.opcode for p in _packets(answers, THERE, HERE)][::5] == [
        Opcode.READ_RESPONSE_FIRST,
        Opcode.READ_RESPONSE_LAST,
    ]
    _hand(a, answers, THERE)
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS]
    assert a.memory.view[:2560] == b.memory.view[:2560]


def test_an_answer_that_is_still_going_out_starts_again_and_is_not_sent_twice() -> None:
    pair = Pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    a.post(SendOpcode.RDMA_READ, a.sge(0, 2560), to=b)
    request = _datagrams(output_of(a.nic))
    _hand(b, request, HERE)
    for _ in range(2):
        assert b.nic.next_burst(0.0) is not None
    _hand(b, request * 3, HERE)
    answers = _datagrams(output_of(b.nic))
    assert len(answers) == 10
    _hand(a, answers, THERE)
    assert [c.status for c in a.polled()] == [WcStatus.SUCCESS]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_strange_packet_inside_a_row_is_no_part_of_it(position: int) -> None:
    pair = Pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    other = b.nic.create_qp(b.pd, b.qp.type, b.cq, b.cq, b.qp.capabilities)
    a.memory.view[:2560] = b"m" * 2560
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 2560), to=b)
    first, row = output_of(a.nic)
    _hand(b, _datagrams([first]), HERE)
    changed = bytearray(row.data)
    at = position * row.segment_size
    changed[at + 5 : at + 8] = other.number.to_bytes(3, "big")
    b.nic.receive(memoryview(changed), row.segment_size, HERE, 0.0)
    taken = 256 * (1 + position)
    assert bytes(b.memory.view[:2560]) == b"m" * taken + bytes(2560 - taken)
    assert b.nic.counters[Count.NOT_READY] == 1


def test_a_window_is_invalidated_by_its_queue_pair_only() -> None:
    pair = Pair()
    b = pair.b
    window = b.nic.alloc_mw(b.pd, MwType.TYPE_2)
    bind = Bind(b.region, b.region.address, 64, Access.REMOTE_WRITE)
    b.nic.keys.bind(window, 5, b.pd, bind, window.rkey)
    with pytest.raises(ProtectionFault):
        b.nic.keys.invalidate(b.pd, 6, window.rkey)
    b.nic.keys.invalidate(b.pd, 5, window.rkey)


def test_losses_are_found_by_what_follows_and_not_by_the_clock() -> None:
    pair = Pair(1 << 20, changes={"timeout": 19})
    a, b = pair.a, pair.b
    a.memory.view[:500_000] = b"q" * 500_000
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 500_000), to=b)
    bursts = output_of(a.nic)
    for burst in bursts[:-1]:
        kept = burst.data[: -burst.segment_size] or burst.data
        b.nic.receive(kept, burst.segment_size, HERE, 0.0)
    pair.run_until(1)
    assert b.memory.view[:500_000] == a.memory.view[:500_000]
    assert pair.network.now < 2e-3
    assert a.nic.counters[Count.PROBES] == a.nic.counters[Count.TIMEOUTS] == 0
