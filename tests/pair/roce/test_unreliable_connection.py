"""Unreliable connections: whole messages or none, no acknowledgement, and nobody is told of a loss."""

from __future__ import annotations

import random

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import (
    Access,
    Address,
    Burst,
    Mtu,
    QpAttr,
    QpAttributes,
    QpState,
    QpType,
    SendOpcode,
    Sge,
    VerbsError,
    WcFlags,
    WcOpcode,
    WcStatus,
)
from tests.support.roce.ends import Pair
from tests.support.roce.memory_network import output_of
from tests.support.roce.weather import Weather

HERE = Address("10.0.0.1")
SIZES = (0, 1, 255, 1024, 1025, 4096, 70_001, 500_000)


def _pair(size: int = 1 << 16, **rest: object) -> Pair:
    return Pair(size, kind=QpType.UC, **rest)  # type: ignore[arg-type]


def _packets(bursts: list[Burst]) -> list[memoryview]:
    return [
        burst.data[at : at + burst.segment_size]
        for burst in bursts
        for at in range(0, len(burst.data), burst.segment_size)
    ]


def _hand(pair: Pair, datagrams: list[memoryview]) -> None:
    for datagram in datagrams:
        pair.b.nic.receive(datagram, len(datagram), HERE, 0.0)


@pytest.mark.parametrize("opcode", [SendOpcode.SEND, SendOpcode.SEND_WITH_IMM])
def test_messages_of_every_size_arrive_whole(opcode: SendOpcode) -> None:
    pair = _pair(1 << 19)
    a, b = pair.a, pair.b
    for size in SIZES:
        a.memory.view[:size] = random.Random(size).randbytes(size)
        b.receive(b.sge(), wr_id=size)
        a.post(opcode, *([a.sge(0, size)] if size else []), wr_id=size, imm=0xCAFE)
        pair.run()
        (sent,), (got,) = a.polled(), b.polled()
        assert (sent.wr_id, sent.status, sent.opcode) == (size, WcStatus.SUCCESS, WcOpcode.SEND)
        assert (got.status, got.opcode, got.byte_len) == (WcStatus.SUCCESS, WcOpcode.RECV, size)
        with_immediate = opcode is SendOpcode.SEND_WITH_IMM
        assert (got.flags, got.imm) == ((WcFlags.WITH_IMM, 0xCAFE) if with_immediate else (WcFlags(0), 0))
        assert b.memory.view[:size] == a.memory.view[:size]
    assert not pair.b.nic.counters[Count.MESSAGE_LOST]


@pytest.mark.parametrize("size", SIZES)
def test_writes_and_the_word_that_comes_with_them(size: int) -> None:
    pair = _pair(1 << 19)
    a, b = pair.a, pair.b
    a.memory.view[:size] = random.Random(size).randbytes(size)
    memory = [a.sge(0, size)] if size else []
    a.post(SendOpcode.RDMA_WRITE, *memory, to=b, at=7)
    b.receive()
    a.post(SendOpcode.RDMA_WRITE_WITH_IMM, *memory, to=b, at=7, imm=9)
    pair.run()
    assert [done.opcode for done in a.polled()] == [WcOpcode.RDMA_WRITE] * 2
    (got,) = b.polled()
    assert (got.opcode, got.byte_len, got.imm) == (WcOpcode.RECV_RDMA_WITH_IMM, size, 9)
    assert b.memory.view[7 : 7 + size] == a.memory.view[:size]
    assert b.memory.intact


def test_nothing_is_answered_and_no_clock_runs() -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    b.receive(b.sge())
    a.post(SendOpcode.SEND, a.sge(0, 5000))
    sent = output_of(a.nic)
    assert [done.status for done in a.polled()] == [WcStatus.SUCCESS], "complete when it has been sent"
    assert a.nic.deadline() is None
    for burst in sent:
        # As rxe does, with the request for an acknowledgement in the last packet.
        b.nic.receive(burst.data, burst.segment_size, HERE, 0.0)
    assert [done.status for done in b.polled()] == [WcStatus.SUCCESS]
    assert not output_of(b.nic)


@pytest.mark.parametrize("lost", range(5))
def test_a_message_that_lost_a_packet_is_lost_and_its_receive_serves_the_next(lost: int) -> None:
    pair = _pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    b.receive(b.sge(0, 4096), wr_id=1)
    b.receive(b.sge(4096, 4096), wr_id=2)
    a.memory.view[:1280] = b"m" * 1280
    for _ in range(2):
        a.post(SendOpcode.SEND, a.sge(0, 1280))
    a.post(SendOpcode.SEND, a.sge(0, 10))
    datagrams = _packets(output_of(a.nic))
    assert len(datagrams) == 11
    _hand(pair, datagrams[:lost] + datagrams[lost + 1 :])
    got = b.polled()
    assert [(done.wr_id, done.byte_len) for done in got] == [(1, 1280), (2, 10)]
    assert b.nic.counters[Count.MESSAGE_LOST]
    assert b.qp.state is QpState.RTS


def test_a_write_that_lost_its_end_completes_nothing() -> None:
    pair = _pair(changes={"path_mtu": Mtu.MTU_256})
    a, b = pair.a, pair.b
    b.receive(b.sge(), wr_id=1)
    a.post(SendOpcode.RDMA_WRITE_WITH_IMM, a.sge(0, 1000), to=b, imm=1)
    a.post(SendOpcode.RDMA_WRITE_WITH_IMM, a.sge(0, 1000), to=b, imm=2)
    datagrams = _packets(output_of(a.nic))
    _hand(pair, datagrams[:3] + datagrams[4:])
    assert [(done.wr_id, done.imm) for done in b.polled()] == [(1, 2)]


def test_what_a_reliable_connection_would_refuse_is_dropped_and_the_pair_goes_on() -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    a.post(SendOpcode.SEND, a.sge(0, 16))  # no receive
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), remote_address=b.region.address, rkey=b.region.rkey ^ 0x5500)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), to=b, at=(1 << 16) - 8)  # beyond the region
    pair.run()
    b.receive(b.sge(0, 8), wr_id=1)
    a.post(SendOpcode.SEND, a.sge(0, 16))  # longer than the receive
    a.post(SendOpcode.SEND, a.sge(0, 8))
    pair.run()
    assert [(done.wr_id, done.status) for done in b.polled()] == [(1, WcStatus.SUCCESS)]
    assert [done.status for done in a.polled()] == [WcStatus.SUCCESS] * 5
    assert b.nic.counters[Count.NO_RECEIVE] == 1
    assert b.nic.counters[Count.MESSAGE_LOST] == 4
    assert bytes(b.memory.view[8:]) == bytes((1 << 16) - 8)
    assert b.memory.intact
    assert (a.qp.state, b.qp.state) == (QpState.RTS, QpState.RTS)


def test_without_the_right_to_write_nothing_is_written() -> None:
    pair = _pair(changes={"access": Access(0)})
    a, b = pair.a, pair.b
    a.memory.view[:16] = b"x" * 16
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), to=b)
    pair.run()
    assert bytes(b.memory.view[:16]) == bytes(16)


def test_messages_in_a_storm_arrive_whole_and_in_order_or_not_at_all() -> None:
    pair = _pair(1 << 16, weather=Weather(loss=0.1), seed=5)
    a, b = pair.a, pair.b
    for number in range(60):
        b.receive(b.sge(0, 8000), wr_id=number)
    arrived: list[int] = []
    for number in range(60):
        a.memory.view[:6000] = bytes([number]) * 6000
        a.post(SendOpcode.SEND, a.sge(0, 6000))
        pair.run()
        for done in b.polled():
            assert (done.status, done.byte_len) == (WcStatus.SUCCESS, 6000)
            content = bytes(b.memory.view[:6000])
            assert content == content[:1] * 6000
            arrived.append(content[0])
    assert arrived == sorted(set(arrived))
    assert 5 < len(arrived) < 60
    assert a.qp.state is b.qp.state is QpState.RTS


def test_a_request_without_its_memory_ends_the_sends_alone() -> None:
    """SQE, from where the program may go on (IBTA 10.3.1.6)."""
    pair = _pair()
    a, b = pair.a, pair.b
    a.post(SendOpcode.SEND, Sge(a.region.address, 16, a.region.lkey ^ 0x5500), wr_id=1)
    a.post(SendOpcode.SEND, a.sge(0, 16), wr_id=2)
    pair.run()
    assert [(done.wr_id, done.status) for done in a.polled()] == [
        (1, WcStatus.LOC_PROT_ERR),
        (2, WcStatus.WR_FLUSH_ERR),
    ]
    assert a.qp.state is QpState.SQE
    a.qp.modify(QpAttributes(state=QpState.RTS), QpAttr.STATE)
    b.receive(b.sge())
    a.post(SendOpcode.SEND, a.sge(0, 16))
    pair.run()
    assert [done.status for done in b.polled()] == [WcStatus.SUCCESS]


@pytest.mark.parametrize(
    "opcode",
    [
        SendOpcode.RDMA_READ,
        SendOpcode.ATOMIC_CMP_AND_SWP,
        SendOpcode.ATOMIC_FETCH_AND_ADD,
        SendOpcode.SEND_WITH_INV,
    ],
)
def test_what_needs_an_answer_is_no_request_of_it(opcode: SendOpcode) -> None:
    pair = _pair()
    with pytest.raises(VerbsError, match="UC does not do"):
        pair.a.post(opcode, pair.a.sge(0, 8), to=pair.b)


def test_packets_of_another_service_are_not_taken() -> None:
    """An RC packet for a UC pair, and the other way round."""
    for kind in (QpType.RC, QpType.UC):
        other = QpType.UC if kind is QpType.RC else QpType.RC
        sender, receiver = Pair(kind=kind), Pair(kind=other)
        receiver.b.receive(receiver.b.sge())
        sender.a.post(SendOpcode.SEND, sender.a.sge(0, 5000))
        for burst in output_of(sender.a.nic):
            receiver.b.nic.receive(burst.data, burst.segment_size, HERE, 0.0)
        assert not receiver.b.polled()
        assert receiver.b.nic.counters[Count.WRONG_SERVICE] + receiver.b.nic.counters[Count.NO_QUEUE_PAIR]
