"""Atomic write (IBTA annex A19): eight aligned bytes at once, carried out once."""

from __future__ import annotations

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import (
    Access,
    Address,
    EventType,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcOpcode,
    WcStatus,
)
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.opcodes import Opcode
from tests.support.roce.ends import ALL_ACCESS, Pair
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import decode_packet_untrusted, encode_packet
from tests.support.roce.weather import Weather

HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")
WORD = bytes.fromhex("0102030405060708")


def _write(pair: Pair, at: int = 0, **rest: object) -> None:
    pair.a.memory.view[:8] = WORD
    pair.a.post(SendOpcode.ATOMIC_WRITE, pair.a.sge(0, 8), to=pair.b, at=at, **rest)


def test_eight_bytes_arrive_and_one_completion_says_so() -> None:
    pair = Pair()
    _write(pair, at=64, wr_id=7)
    (done,) = pair.run_until(1)
    assert (done.wr_id, done.status, done.opcode) == (7, WcStatus.SUCCESS, WcOpcode.ATOMIC_WRITE)
    assert bytes(pair.b.memory.view[56:80]) == bytes(8) + WORD + bytes(8)
    assert not pair.b.polled(), "the peer's program is not told"
    assert bytes(pair.a.memory.view[:8]) == WORD, "the answer brings nothing"


def test_the_packets_are_those_of_the_annex() -> None:
    pair = Pair()
    _write(pair, at=8)
    (request,) = output_of(pair.a.nic)
    sent = decode_packet_untrusted(request.data, flow_of(HERE.ip, THERE.ip, 4791), 0)
    assert (sent.opcode, bytes(sent.payload), sent.acknowledge) == (Opcode.ATOMIC_WRITE, WORD, True)
    assert sent.reth is not None
    assert (sent.reth.address, sent.reth.length) == (pair.b.region.address + 8, 8)
    pair.b.nic.receive(request.data, request.segment_size, HERE, 0.0)
    (answer,) = output_of(pair.b.nic)
    back = decode_packet_untrusted(answer.data, flow_of(THERE.ip, HERE.ip, 4791), 0)
    assert (back.opcode, back.psn, bytes(back.payload)) == (Opcode.READ_RESPONSE_ONLY, sent.psn, b"")


def test_asked_again_it_is_answered_again_and_not_carried_out_again() -> None:
    pair = Pair()
    _write(pair)
    (request,) = output_of(pair.a.nic)
    pair.b.nic.receive(request.data, request.segment_size, HERE, 0.0)
    (first,) = output_of(pair.b.nic)
    pair.b.memory.view[:8] = b"changed!"
    pair.b.nic.receive(request.data, request.segment_size, HERE, 0.0)
    (again,) = output_of(pair.b.nic)
    assert bytes(again.data) == bytes(first.data)
    assert bytes(pair.b.memory.view[:8]) == b"changed!"
    pair.a.nic.receive(again.data, again.segment_size, THERE, 0.0)
    assert [done.status for done in pair.a.polled()] == [WcStatus.SUCCESS]


def test_its_bytes_may_be_inline_and_nothing_else_long() -> None:
    pair = Pair()
    request = {"remote_address": pair.b.region.address, "rkey": pair.b.region.rkey}
    pair.a.post(SendOpcode.ATOMIC_WRITE, inline=WORD, **request)
    pair.a.post(
        SendOpcode.ATOMIC_WRITE, inline=WORD, flags=SendFlags.SIGNALED | SendFlags.INLINE,
        **(request | {"remote_address": pair.b.region.address + 8}),
    )  # fmt: skip
    assert [done.status for done in pair.run_until(2)] == [WcStatus.SUCCESS] * 2
    assert bytes(pair.b.memory.view[:16]) == WORD * 2
    for length, at in ((4, 0), (16, 0), (8, 4)):
        with pytest.raises(VerbsError, match="8 bytes at a multiple of 8"):
            pair.a.post(SendOpcode.ATOMIC_WRITE, pair.a.sge(0, length), to=pair.b, at=at)


def test_writes_reads_and_atomics_in_a_row_in_bad_weather() -> None:
    pair = Pair(weather=Weather(loss=0.2, duplicate=0.2), seed=11)
    a, b = pair.a, pair.b
    for number in range(40):
        a.memory.view[8 * number : 8 * number + 8] = number.to_bytes(8, "little")
        a.post(SendOpcode.ATOMIC_WRITE, a.sge(8 * number, 8), to=b, at=8 * number, wr_id=number)
        if number % 4 == 0:
            a.post(SendOpcode.ATOMIC_FETCH_AND_ADD, a.sge(4096, 8), to=b, at=4096, compare_add=1)
            a.post(SendOpcode.RDMA_READ, a.sge(8192, 8), to=b, at=8 * number)
            pair.run()
            assert {done.status for done in a.polled()} == {WcStatus.SUCCESS}
            assert bytes(a.memory.view[8192:8200]) == number.to_bytes(8, "little")
    pair.run()
    assert {done.status for done in a.polled()} <= {WcStatus.SUCCESS}
    assert b.memory.view[:320] == a.memory.view[:320]
    assert int.from_bytes(b.memory.view[4096:4104], "little") == 10
    assert b.nic.counters[Count.DUPLICATE]


@pytest.mark.parametrize("what", ["key", "beyond", "right"])
def test_what_is_not_allowed_is_refused(what: str) -> None:
    access = ALL_ACCESS & ~Access.REMOTE_WRITE if what == "right" else ALL_ACCESS
    pair = Pair(1 << 12, changes={"access": access})
    a, b = pair.a, pair.b
    rkey = b.region.rkey ^ (0x5500 if what == "key" else 0)
    at = b.region.address + ((1 << 12) if what == "beyond" else 0)
    a.memory.view[:8] = WORD
    a.post(SendOpcode.ATOMIC_WRITE, a.sge(0, 8), rkey=rkey, remote_address=at)
    (done,) = pair.run_until(1)
    refused = WcStatus.REM_INV_REQ_ERR if what == "right" else WcStatus.REM_ACCESS_ERR
    assert done.status is refused
    assert bytes(b.memory.view) == bytes(1 << 12)
    assert b.memory.intact
    assert b.qp.state is QpState.ERR


@pytest.mark.parametrize(("address", "length", "payload"), [(4, 8, WORD), (0, 4, WORD), (0, 8, WORD[:4])])
def test_a_request_that_is_not_eight_aligned_bytes_is_invalid(
    address: int, length: int, payload: bytes
) -> None:
    pair = Pair()
    _write(pair)
    (request,) = output_of(pair.a.nic)
    flow = flow_of(HERE.ip, THERE.ip, 4791)
    packet = decode_packet_untrusted(bytes(request.data), flow, 0)
    assert packet.reth is not None
    reth = packet.reth._replace(address=packet.reth.address + address, length=length)
    raw = encode_packet(packet._replace(reth=reth, payload=payload), flow)
    pair.b.nic.receive(memoryview(raw), len(raw), HERE, 0.0)
    assert bytes(pair.b.memory.view[:16]) == bytes(16)
    assert pair.b.qp.state is QpState.ERR
    assert [event.type for event in pair.b.nic.async_events] == [EventType.QP_REQ_ERR]
