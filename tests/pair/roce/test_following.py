"""A small message right behind a long one travels in its last burst: a completion behind its data."""

from __future__ import annotations

import pytest

from emulator.roce.nic.packets_out import rows_of
from emulator.roce.nic.verbs import Address, Burst, Mtu, SendFlags, SendOpcode, Sge, WcFlags, WcStatus
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.ends import Pair
from tests.support.roce.memory_network import output_of
from tests.support.roce.packets import decode_packet_untrusted

HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")
MTU = 256
QUIET = SendFlags(0)


def _pair(**more: object) -> Pair:
    pair = Pair(changes={"path_mtu": Mtu.MTU_256}, **more)  # type: ignore[arg-type]
    pair.a.memory.view[:] = bytes(range(256)) * 256
    pair.b.receive(pair.b.sge(60_000, 64), wr_id=7)
    return pair


def _packets(burst: Burst) -> list[Packet]:
    flow, size = flow_of(HERE.ip, THERE.ip, 4791), burst.segment_size
    return [
        decode_packet_untrusted(burst.data[at : at + size], flow, 0) for at in range(0, len(burst.data), size)
    ]


def _write_then(
    pair: Pair, length: int, *small: Sge, opcode: SendOpcode = SendOpcode.SEND, **more: object
) -> None:
    """Both are in the queue before anything is sent, as after one row of requests."""
    a, b = pair.a, pair.b
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, length), to=b, flags=QUIET)
    a.post(opcode, *(small or (a.sge(0, 16),)), wr_id=2, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [2 * MTU + 1, 10 * MTU, 10 * MTU - 1, (rows_of(MTU) + 3) * MTU])
def test_the_last_burst_has_both(length: int) -> None:
    pair = _pair()
    _write_then(pair, length)
    *_, last = output_of(pair.a.nic)
    packets = _packets(last)
    full = length % MTU == 0
    # A last packet that is not full goes by itself, and so does what follows it.
    assert [packet.opcode for packet in packets[-2:]] == (
        [Opcode.WRITE_LAST, Opcode.SEND_ONLY] if full else [Opcode.SEND_ONLY]
    )
    assert packets[-1].acknowledge
    assert not any(packet.acknowledge for packet in packets[:-1])


@pytest.mark.parametrize(
    ("length", "more"),
    [((rows_of(MTU) + 1) * MTU, {}), (10 * MTU, {"numbered": True})],
    ids=["a full burst", "segments that are numbered"],
)
def test_where_there_is_no_room_it_goes_by_itself(length: int, more: dict[str, object]) -> None:
    pair = _pair(**more)
    _write_then(pair, length)
    *_, before, last = output_of(pair.a.nic)
    assert len(last.data) <= last.segment_size
    assert len(before.data) == (length // MTU - 1) * before.segment_size


@pytest.mark.parametrize(
    "length", [2 * MTU, 3 * MTU, 10 * MTU, 10 * MTU + 5, (rows_of(MTU) + 1) * MTU, 60_000]
)
def test_all_of_it_arrives_in_order(length: int) -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    _write_then(pair, length)
    assert [(c.wr_id, c.status) for c in pair.run_until(1)] == [(2, WcStatus.SUCCESS)]
    (received,) = b.polled()
    assert (received.wr_id, received.byte_len) == (7, 16)
    assert b.memory.view[:length] == a.memory.view[:length]
    assert b.memory.view[60_000:60_016] == a.memory.view[:16]
    # What is made next in the same buffer has nothing of it.
    a.post(SendOpcode.RDMA_WRITE, a.sge(100, 12 * MTU), to=b, at=512)
    assert [c.status for c in pair.run_until(1)] == [WcStatus.SUCCESS]
    assert b.memory.view[512 : 512 + 12 * MTU] == a.memory.view[100 : 100 + 12 * MTU]
    assert a.memory.intact
    assert b.memory.intact


def test_a_key_is_invalidated_behind_the_data_that_it_let_in() -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    _write_then(pair, 10 * MTU, opcode=SendOpcode.SEND_WITH_INV, invalidate_rkey=b.region.rkey + 256)
    pair.run()
    (received,) = b.polled()
    # There is no window of that key, so it is refused; the data were let in before.
    assert received.status is WcStatus.REM_INV_REQ_ERR
    assert b.memory.view[: 10 * MTU] == a.memory.view[: 10 * MTU]
    assert received.flags == WcFlags(0)


@pytest.mark.parametrize("length", [200, 1000])
def test_a_larger_message_goes_by_itself(length: int) -> None:
    pair = _pair()
    _write_then(pair, 10 * MTU, pair.a.sge(0, length))
    bursts = output_of(pair.a.nic)
    assert _packets(bursts[1])[-1].opcode is Opcode.WRITE_LAST


def test_a_message_without_its_memory_fails_and_the_one_before_does_not() -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    _write_then(pair, 10 * MTU, Sge(a.region.address, 16, a.region.lkey + 1))
    pair.run()
    assert [(c.wr_id, c.status) for c in a.polled()] == [(2, WcStatus.LOC_PROT_ERR)]
    assert b.memory.view[: 10 * MTU] == a.memory.view[: 10 * MTU]


def test_a_lost_burst_is_sent_again_with_both() -> None:
    pair = _pair()
    a, b = pair.a, pair.b
    _write_then(pair, 10 * MTU)
    first, _ = output_of(a.nic)
    b.nic.receive(first.data, first.segment_size, HERE, 0.0)
    assert [c.status for c in pair.run_until(1)] == [WcStatus.SUCCESS]
    assert len(b.polled()) == 1
    assert b.memory.view[: 10 * MTU] == a.memory.view[: 10 * MTU]
