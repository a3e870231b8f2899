"""What the reliable connection does, verb by verb, between two devices on a network that behaves."""

from __future__ import annotations

import random

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import (
    Address,
    EventType,
    Mtu,
    QpAttr,
    QpAttributes,
    QpState,
    SendFlags,
    SendOpcode,
    SrqAttr,
    WcFlags,
    WcOpcode,
    WcStatus,
)
from emulator.roce.nic.work_requests import ReceiveRequest
from tests.support.roce.ends import Pair, attributes_for, make_end, move_up
from tests.support.roce.memory_network import output_of

SIZES = (0, 1, 3, 4, 255, 256, 257, 4095, 4096, 4097, 70_000, 300_001)


@pytest.mark.parametrize("mtu", list(Mtu))
def test_data_of_any_size_arrive_by_every_verb(mtu: Mtu) -> None:
    chance = random.Random(int(mtu))
    pair = Pair(1 << 20, changes={"path_mtu": mtu})
    a, b = pair.a, pair.b
    for size in SIZES:
        data = chance.randbytes(size)
        a.memory.view[:size] = data
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, size), to=b, at=3)
        a.post(
            SendOpcode.RDMA_READ, a.sge(400_000, size), to=b, at=3, flags=SendFlags.FENCE | SendFlags.SIGNALED
        )
        b.receive(b.sge(400_000, 100_000), b.sge(600_001, 300_000))
        a.post(SendOpcode.SEND, a.sge(0, size // 3), a.sge(size // 3, size - size // 3))
        assert [c.status for c in pair.run_until(3)] == [WcStatus.SUCCESS] * 3
        assert b.memory.view[3 : 3 + size] == data
        assert a.memory.view[400_000 : 400_000 + size] == data
        (received,) = b.polled()
        assert received.byte_len == size
        first = min(size, 100_000)
        assert b.memory.view[400_000 : 400_000 + first] == data[:first]
        assert b.memory.view[600_001 : 600_001 + size - first] == data[first:]
    assert a.memory.intact
    assert b.memory.intact


def test_immediate_data_and_what_the_completions_say() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.receive(b.sge(0, 100), wr_id=1)
    b.receive(wr_id=2)
    a.post(SendOpcode.SEND_WITH_IMM, a.sge(0, 50), wr_id=7, imm=0xDEADBEEF)
    a.post(SendOpcode.RDMA_WRITE_WITH_IMM, a.sge(0, 60), wr_id=8, to=b, imm=0x01020304)
    sent = pair.run_until(2)
    assert [(c.wr_id, c.opcode, c.qp_num) for c in sent] == [
        (7, WcOpcode.SEND, a.qp.number),
        (8, WcOpcode.RDMA_WRITE, a.qp.number),
    ]
    first, second = b.polled()
    assert (first.wr_id, first.opcode, first.byte_len, first.imm) == (1, WcOpcode.RECV, 50, 0xDEADBEEF)
    assert (second.wr_id, second.opcode) == (2, WcOpcode.RECV_RDMA_WITH_IMM)
    assert (second.byte_len, second.imm, second.src_qp) == (60, 0x01020304, a.qp.number)
    assert first.flags == second.flags == WcFlags.WITH_IMM


def test_atomics_answer_with_what_was_there() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.memory.view[8:16] = (10).to_bytes(8, "little")
    a.post(SendOpcode.ATOMIC_FETCH_AND_ADD, a.sge(0, 8), to=b, at=8, compare_add=(1 << 64) - 3)
    a.post(SendOpcode.ATOMIC_CMP_AND_SWP, a.sge(8, 8), to=b, at=8, compare_add=7, swap=99)
    a.post(SendOpcode.ATOMIC_CMP_AND_SWP, a.sge(16, 8), to=b, at=8, compare_add=7, swap=1)
    completions = pair.run_until(3)
    assert [c.opcode for c in completions] == [WcOpcode.FETCH_ADD, WcOpcode.COMP_SWAP, WcOpcode.COMP_SWAP]
    assert [int.from_bytes(a.memory.view[i : i + 8], "little") for i in (0, 8, 16)] == [10, 7, 99]
    assert int.from_bytes(b.memory.view[8:16], "little") == 99


def test_inline_data_are_taken_when_the_request_is_posted() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    a.memory.view[:5] = b"first"
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 5), to=b, flags=SendFlags.INLINE | SendFlags.SIGNALED)
    a.memory.view[:5] = b"later"
    a.post(SendOpcode.RDMA_WRITE, to=b, at=5, flags=SendFlags.INLINE | SendFlags.SIGNALED, inline=b"given")
    pair.run_until(2)
    assert b.memory.view[:10] == b"firstgiven"


def test_only_what_was_asked_for_completes_and_errors_always_do() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    for number in range(3):
        flags = SendFlags.SIGNALED if number == 2 else SendFlags(0)
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=number, to=b, flags=flags)
    assert [c.wr_id for c in pair.run_until(1)] == [2]
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=3, to=b, at=1 << 20, flags=SendFlags(0))
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=4, to=b, flags=SendFlags(0))
    assert [(c.wr_id, c.status) for c in pair.run_until(2)] == [
        (3, WcStatus.REM_ACCESS_ERR),
        (4, WcStatus.WR_FLUSH_ERR),
    ]


def test_signal_all_signals_all() -> None:
    pair = Pair(signal_all=True)
    pair.a.post(SendOpcode.RDMA_WRITE, pair.a.sge(0, 16), to=pair.b, flags=SendFlags(0))
    assert len(pair.run_until(1)) == 1


def test_one_acknowledgement_for_many_messages() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    for _ in range(60):
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), to=b)
    for burst in output_of(a.nic):
        b.nic.receive(burst.data, burst.segment_size, Address(a.nic.address), 0.0)
    (answer,) = output_of(b.nic)
    a.nic.receive(answer.data, answer.segment_size, Address(b.nic.address), 0.0)
    assert len(a.polled()) == 60


def test_the_window_bounds_what_is_under_way() -> None:
    pair = Pair(1 << 20, window_bytes=16 << 10)
    a, b = pair.a, pair.b
    most = [0]

    def watch() -> bool:
        under_way = sum(len(flight.data) for flight in pair.network._flights)
        most[0] = max(most[0], under_way)
        return len(a.cq) == 2

    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 500_000), to=b)
    a.post(SendOpcode.RDMA_READ, a.sge(500_000, 500_000), to=b)
    assert pair.network.run(watch)
    assert 8 << 10 < most[0] <= (16 << 10) * 1.1


@pytest.mark.parametrize("most", [1, 2, 16])
def test_no_more_reads_and_atomics_than_agreed_are_under_way(most: int) -> None:
    pair = Pair(1 << 16, changes={"max_rd_atomic": most, "max_dest_rd_atomic": most})
    a, b = pair.a, pair.b
    b.memory.view[:] = bytes(range(256)) * 256
    for number in range(20):
        a.post(SendOpcode.RDMA_READ, a.sge(number * 100, 100), to=b, at=number * 100)
    assert [c.status for c in pair.run_until(20)] == [WcStatus.SUCCESS] * 20
    assert a.memory.view[:2000] == b.memory.view[:2000]
    # All of a round arrive together, so the time says how many were asked for at once.
    rounds = -(-20 // most)
    assert pair.network.now == pytest.approx(rounds * 40e-6)


def test_a_fence_waits_for_reads() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.memory.view[:4] = b"abcd"
    a.post(SendOpcode.RDMA_READ, a.sge(0, 4), to=b)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 4), to=b, at=100, flags=SendFlags.FENCE | SendFlags.SIGNALED)
    pair.run_until(2)
    assert b.memory.view[100:104] == b"abcd"


def test_solicited_events_wake_those_who_wait_for_them_only() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    fired: list[int] = []
    b.cq.on_completion = lambda cq: fired.append(len(cq))
    b.cq.arm(solicited_only=True)
    for number in range(3):
        b.receive(b.sge(0, 16))
        flags = SendFlags.SIGNALED | (SendFlags.SOLICITED if number == 1 else SendFlags(0))
        a.post(SendOpcode.SEND, a.sge(0, 16), flags=flags)
    pair.run_until(3)
    assert fired == [2]
    b.cq.arm()
    b.receive(b.sge(0, 16))
    a.post(SendOpcode.SEND, a.sge(0, 16))
    pair.run_until(1)
    assert fired == [2, 4]


def test_a_shared_queue_feeds_its_queue_pair_and_tells_when_it_runs_low() -> None:
    pair = Pair(srq=True)
    a, b = pair.a, pair.b
    srq = b.qp.srq
    assert srq is not None
    for number in range(4):
        srq.post_recv(ReceiveRequest(number, (b.sge(number * 16, 16),)))
    srq.modify(SrqAttr.LIMIT, limit=2)
    for _ in range(3):
        a.post(SendOpcode.SEND, a.sge(0, 16))
    pair.run_until(3)
    assert [c.wr_id for c in b.polled()] == [0, 1, 2]
    assert [event.type for event in b.nic.async_events] == [EventType.SRQ_LIMIT_REACHED]
    b.nic.async_events.clear()
    b.qp.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
    assert [event.type for event in b.nic.async_events] == [EventType.QP_LAST_WQE_REACHED]
    assert len(srq) == 1


def test_communication_established_is_told_before_rts() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.qp.modify(QpAttributes(state=QpState.RESET), QpAttr.STATE)
    move_up(b, attributes_for(b, a), QpState.RTR)
    for _ in range(2):
        b.receive(b.sge(0, 16))
        a.post(SendOpcode.SEND, a.sge(0, 16))
    pair.run_until(2)
    assert [event.type for event in b.nic.async_events] == [EventType.COMM_EST]


def test_a_full_completion_queue_is_the_end_of_those_who_use_it() -> None:
    pair = Pair(cqe=2)
    a, b = pair.a, pair.b
    for _ in range(3):
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), to=b)
    pair.run()
    assert [event.type for event in a.nic.async_events] == [EventType.CQ_ERR, EventType.QP_FATAL]
    assert a.qp.state is QpState.ERR
    assert len(a.polled()) == 2


def test_sqd_finishes_what_has_begun_and_holds_the_rest_back() -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 100_000), wr_id=1, to=b)
    pair.network.collect()
    drain = QpAttributes(state=QpState.SQD, enable_sqd_notify=True)
    a.qp.modify(drain, QpAttr.STATE | QpAttr.EN_SQD_ASYNC_NOTIFY)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=2, to=b)
    assert a.qp.query().sq_draining
    pair.run()
    assert [c.wr_id for c in a.polled()] == [1]
    assert [event.type for event in a.nic.async_events] == [EventType.SQ_DRAINED]
    a.qp.modify(QpAttributes(state=QpState.RTS), QpAttr.STATE)
    assert [c.wr_id for c in pair.run_until(1)] == [2]


def test_error_state_flushes_everything_once_and_at_once() -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    for number in range(3):
        a.receive(a.sge(0, 16), wr_id=10 + number)
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 300_000), wr_id=number, to=b, flags=SendFlags(0))
    pair.network.collect()
    a.qp.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
    flushed = [c.wr_id for c in a.polled()]
    assert flushed == [0, 1, 2, 10, 11, 12]
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=3, to=b)
    a.receive(a.sge(0, 16), wr_id=13)
    assert [(c.wr_id, c.status) for c in a.polled()] == [
        (3, WcStatus.WR_FLUSH_ERR),
        (13, WcStatus.WR_FLUSH_ERR),
    ]
    pair.run()
    assert not a.polled()


def test_a_reset_queue_pair_forgets_and_can_be_used_again() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), to=b)
    for end, peer in ((a, b), (b, a)):
        end.qp.modify(QpAttributes(state=QpState.RESET), QpAttr.STATE)
        move_up(end, attributes_for(end, peer, sq_psn=5 if end is a else 9, rq_psn=9 if end is a else 5))
    pair.run()
    assert not a.polled()
    a.memory.view[:4] = b"anew"
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 4), to=b)
    assert pair.run_until(1)[0].status is WcStatus.SUCCESS
    assert b.memory.view[:4] == b"anew"
    assert a.qp.query().sq_psn == 6
    assert b.qp.query().rq_psn == 6


def test_duplicates_are_answered_and_not_carried_out_again() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.receive(b.sge(0, 16))
    a.post(SendOpcode.SEND, a.sge(0, 16))
    a.post(SendOpcode.ATOMIC_FETCH_AND_ADD, a.sge(8, 8), to=b, at=64, compare_add=1)
    a.post(SendOpcode.RDMA_READ, a.sge(32, 3000), to=b)
    bursts = output_of(a.nic)
    for _ in range(3):
        for burst in bursts:
            b.nic.receive(burst.data, burst.segment_size, Address(a.nic.address), 0.0)
    assert b.memory.view[64] == 1
    assert len(b.polled()) == 1
    assert b.nic.counters[Count.DUPLICATE] == 2 * len(bursts)
    assert [c.status for c in pair.run_until(3)] == [WcStatus.SUCCESS] * 3


def test_both_sides_at_once() -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    for end, peer in ((a, b), (b, a)):
        end.memory.view[:300_000] = random.Random(id(end) & 1).randbytes(300_000)
        end.post(SendOpcode.RDMA_WRITE, end.sge(0, 300_000), to=peer, at=300_000)
        end.post(SendOpcode.RDMA_READ, end.sge(600_000, 300_000), to=peer)
    assert pair.network.run(lambda: len(a.cq) == 2 and len(b.cq) == 2)
    for end, peer in ((a, b), (b, a)):
        assert [c.status for c in end.polled()] == [WcStatus.SUCCESS] * 2
        assert end.memory.view[300_000:600_000] == peer.memory.view[:300_000]
        assert end.memory.view[600_000:900_000] == peer.memory.view[:300_000]


def test_many_connections_share_what_one_socket_buffer_holds() -> None:
    pair = Pair(1 << 17, window_bytes=16 << 10)
    ends = [(pair.a, pair.b)]
    for _ in range(7):
        a = make_end(pair.a.nic, 1 << 17)
        b = make_end(pair.b.nic, 1 << 17)
        for end, peer in ((a, b), (b, a)):
            move_up(end, attributes_for(end, peer))
        ends.append((a, b))
    for number, (a, b) in enumerate(ends):
        a.memory.view[:60_000] = bytes([number + 1]) * 60_000
        a.post(SendOpcode.RDMA_WRITE, a.sge(0, 60_000), to=b)
        a.post(SendOpcode.RDMA_READ, a.sge(60_000, 60_000), to=b)
    path, most = pair.a.nic.path_to(pair.b.nic.address), 0

    def all_done() -> bool:
        nonlocal most
        most = max(most, path.in_flight)
        return all(len(a.cq) == 2 for a, _ in ends)

    assert pair.network.run(all_done)
    for number, (a, b) in enumerate(ends):
        assert [c.status for c in a.polled()] == [WcStatus.SUCCESS] * 2
        assert b.memory.view[:60_000] == a.memory.view[60_000:120_000] == bytes([number + 1]) * 60_000
    assert 2 * (16 << 10) <= most <= 3 * (16 << 10)
    assert path.in_flight == 0


def test_a_connection_that_ends_gives_its_share_back() -> None:
    pair = Pair(1 << 17, window_bytes=16 << 10)
    other, peer = make_end(pair.a.nic, 1 << 17), make_end(pair.b.nic, 1 << 17)
    for end, far in ((other, peer), (peer, other)):
        move_up(end, attributes_for(end, far))
    third, far = make_end(pair.a.nic, 1 << 17), make_end(pair.b.nic, 1 << 17)
    for end, to in ((third, far), (far, third)):
        move_up(end, attributes_for(end, to))
    for end, to in ((pair.a, pair.b), (other, peer), (third, far)):
        end.post(SendOpcode.RDMA_WRITE, end.sge(0, 100_000), to=to)
    output_of(pair.a.nic)
    path = pair.a.nic.path_to(pair.b.nic.address)
    assert path.in_flight >= path.budget
    pair.a.qp.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
    pair.a.nic.destroy_qp(other.qp)
    assert pair.a.nic.ready
    assert pair.run_until(1, third)[0].status is WcStatus.SUCCESS
    assert path.in_flight == 0


def test_a_silent_peer_keeps_no_other_connection_waiting_for_long() -> None:
    pair = Pair(1 << 17, window_bytes=16 << 10, changes={"timeout": 19})
    silent = [pair.a]
    for _ in range(2):
        silent.append(make_end(pair.a.nic, 1 << 17))
        move_up(silent[-1], attributes_for(silent[-1], pair.b, dest_qpn=0x123456, timeout=19))
    pair.b.qp.modify(QpAttributes(state=QpState.ERR), QpAttr.STATE)
    for end in silent:
        end.post(SendOpcode.RDMA_WRITE, end.sge(0, 100_000), to=pair.b)
    alive, peer = make_end(pair.a.nic, 1 << 17), make_end(pair.b.nic, 1 << 17)
    for end, to in ((alive, peer), (peer, alive)):
        move_up(end, attributes_for(end, to))
    pair.network.collect()
    alive.post(SendOpcode.RDMA_WRITE, alive.sge(0, 100_000), to=peer)
    assert pair.run_until(1, alive)[0].status is WcStatus.SUCCESS
    assert pair.network.now < 0.1
