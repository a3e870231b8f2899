"""What a peer may not do, and what both sides are told: NAKs, completions, events, and memory that stays as
it is."""

from __future__ import annotations

import pytest

from emulator.roce.nic.memory import Bind
from emulator.roce.nic.verbs import (
    Access,
    AsyncEvent,
    EventType,
    MwType,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    WcFlags,
    WcStatus,
)
from emulator.roce.nic.work_requests import SendRequest
from tests.support.roce.ends import ALL_ACCESS, End, Pair

NO_REMOTE = Access.LOCAL_WRITE | Access.MW_BIND


def _status(pair: Pair, opcode: SendOpcode, length: int = 64, **rest: object) -> WcStatus:
    pair.a.post(opcode, pair.a.sge(0, length), **rest)  # type: ignore[arg-type]
    (completion,) = pair.run_until(1)
    return completion.status


REACHING = [
    (SendOpcode.RDMA_WRITE, Access.REMOTE_WRITE, 64),
    (SendOpcode.RDMA_READ, Access.REMOTE_READ, 64),
    (SendOpcode.ATOMIC_FETCH_AND_ADD, Access.REMOTE_ATOMIC, 8),
    (SendOpcode.ATOMIC_CMP_AND_SWP, Access.REMOTE_ATOMIC, 8),
]


@pytest.mark.parametrize(("opcode", "right", "length"), REACHING)
def test_a_region_that_does_not_grant_it(opcode: SendOpcode, right: Access, length: int) -> None:
    pair = Pair(access=ALL_ACCESS & ~right)
    before = bytes(pair.b.memory.view)
    assert _status(pair, opcode, length, to=pair.b) is WcStatus.REM_ACCESS_ERR
    assert pair.a.qp.state is pair.b.qp.state is QpState.ERR
    assert [event.type for event in pair.b.nic.async_events] == [EventType.QP_ACCESS_ERR]
    assert bytes(pair.b.memory.view) == before


@pytest.mark.parametrize(("opcode", "right", "length"), REACHING)
def test_a_queue_pair_that_does_not_grant_it(opcode: SendOpcode, right: Access, length: int) -> None:
    pair = Pair(changes={"access": ALL_ACCESS & ~right})
    assert _status(pair, opcode, length, to=pair.b) is WcStatus.REM_INV_REQ_ERR
    assert [event.type for event in pair.b.nic.async_events] == [EventType.QP_REQ_ERR]


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ])
@pytest.mark.parametrize(
    "change",
    [
        {"rkey": 1},
        {"remote_address": 0x10_0000 + 4096 - 63},
        {"remote_address": 0x10_0000 - 1},
        {"remote_address": (1 << 64) - 32},
        {"remote_address": 0},
    ],
)
def test_a_wrong_key_or_range(opcode: SendOpcode, change: dict[str, int]) -> None:
    pair = Pair(4096)
    assert _status(pair, opcode, 64, to=pair.b, **change) is WcStatus.REM_ACCESS_ERR
    assert pair.b.memory.intact
    assert not any(pair.b.memory.view)


def test_nothing_is_reached_where_no_byte_is_asked_for() -> None:
    pair = Pair()
    assert _status(pair, SendOpcode.RDMA_WRITE, 0, rkey=1, remote_address=5) is WcStatus.SUCCESS
    assert _status(pair, SendOpcode.RDMA_READ, 0, rkey=1, remote_address=5) is WcStatus.SUCCESS


def test_a_stale_key_misses_the_region_that_came_after() -> None:
    pair = Pair()
    b = pair.b
    old = b.region
    b.nic.dereg_mr(old)
    b.region = b.nic.reg_mr(b.pd, b.memory.view, old.address, ALL_ACCESS)
    assert b.region.rkey != old.rkey
    remote = {"remote_address": old.address, "rkey": old.rkey}
    assert _status(pair, SendOpcode.RDMA_WRITE, 64, **remote) is WcStatus.REM_ACCESS_ERR


def test_another_domain_is_out_of_reach() -> None:
    pair = Pair()
    b = pair.b
    foreign = b.nic.reg_mr(b.nic.alloc_pd(), bytearray(64), 0, ALL_ACCESS)
    remote = {"remote_address": 0, "rkey": foreign.rkey}
    assert _status(pair, SendOpcode.RDMA_WRITE, 64, **remote) is WcStatus.REM_ACCESS_ERR


def test_a_misaligned_atomic() -> None:
    pair = Pair()
    status = _status(pair, SendOpcode.ATOMIC_FETCH_AND_ADD, 8, to=pair.b, at=4)
    assert status is WcStatus.REM_INV_REQ_ERR


def test_reads_where_the_responder_has_no_resources() -> None:
    pair = Pair(changes={"max_dest_rd_atomic": 0})
    assert _status(pair, SendOpcode.RDMA_READ, 64, to=pair.b) is WcStatus.REM_INV_REQ_ERR


def test_reads_where_the_requester_may_have_none_under_way() -> None:
    pair = Pair(changes={"max_rd_atomic": 0})
    assert _status(pair, SendOpcode.RDMA_READ, 64, to=pair.b) is WcStatus.LOC_QP_OP_ERR


def test_a_message_longer_than_its_receive() -> None:
    pair = Pair()
    pair.b.receive(pair.b.sge(0, 63), wr_id=5)
    pair.b.receive(pair.b.sge(0, 63), wr_id=6)
    assert _status(pair, SendOpcode.SEND, 64) is WcStatus.REM_INV_REQ_ERR
    assert [(c.wr_id, c.status) for c in pair.b.polled()] == [
        (5, WcStatus.LOC_LEN_ERR),
        (6, WcStatus.WR_FLUSH_ERR),
    ]
    assert pair.b.memory.intact


def test_a_receive_into_memory_that_may_not_be_written() -> None:
    pair = Pair(access=Access(0))
    pair.b.receive(pair.b.sge(0, 64))
    assert _status(pair, SendOpcode.SEND, 64) is WcStatus.REM_OP_ERR
    assert [c.status for c in pair.b.polled()] == [WcStatus.LOC_PROT_ERR]


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendOpcode.RDMA_READ])
def test_our_own_key_is_wrong(opcode: SendOpcode) -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    b.receive(b.sge())
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=1, to=b)
    a.post(opcode, a.sge(0, 16)._replace(lkey=3), wr_id=2, to=b)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 16), wr_id=3, to=b)
    assert [(c.wr_id, c.status) for c in pair.run_until(3)] == [
        (1, WcStatus.SUCCESS),
        (2, WcStatus.LOC_PROT_ERR),
        (3, WcStatus.WR_FLUSH_ERR),
    ]


def test_what_was_read_before_a_refusal_still_comes() -> None:
    pair = Pair(1 << 18)
    a, b = pair.a, pair.b
    b.memory.view[:100_000] = bytes(range(250)) * 400
    a.post(SendOpcode.RDMA_READ, a.sge(0, 100_000), wr_id=1, to=b)
    a.post(SendOpcode.RDMA_WRITE, a.sge(0, 64), wr_id=2, to=b, rkey=0)
    assert [(c.wr_id, c.status) for c in pair.run_until(2)] == [
        (1, WcStatus.SUCCESS),
        (2, WcStatus.REM_ACCESS_ERR),
    ]
    assert a.memory.view[:100_000] == b.memory.view[:100_000]


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.SEND])
def test_memory_deregistered_meanwhile_is_not_written_any_more(opcode: SendOpcode) -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    a.memory.view[:] = b"\x11" * (1 << 20)
    b.receive(b.sge())
    a.post(opcode, a.sge(0, 1 << 20), to=b)
    pair.network.step()
    pair.network.step()
    b.nic.dereg_mr(b.region)
    so_far = bytes(b.memory.view)
    assert any(so_far)
    assert not all(so_far)
    (completion,) = pair.run_until(1)
    assert completion.status in (WcStatus.REM_ACCESS_ERR, WcStatus.REM_OP_ERR)
    assert bytes(b.memory.view) == so_far


def test_memory_deregistered_while_it_is_read() -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    a.post(SendOpcode.RDMA_READ, a.sge(), to=b)
    pair.network.step()
    b.nic.dereg_mr(b.region)
    assert pair.run_until(1)[0].status is WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("opcode", [SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ])
def test_our_memory_deregistered_meanwhile(opcode: SendOpcode) -> None:
    pair = Pair(1 << 20)
    a, b = pair.a, pair.b
    b.memory.view[:] = b"\x22" * (1 << 20)
    a.post(opcode, a.sge(), to=b)
    pair.network.step()
    a.nic.dereg_mr(a.region)
    so_far = bytes(a.memory.view)
    assert pair.run_until(1)[0].status is WcStatus.LOC_PROT_ERR
    assert bytes(a.memory.view) == so_far


def test_events_of_what_is_destroyed_go_with_it() -> None:
    pair = Pair()
    b = pair.b
    other = b.nic.create_qp(b.pd, QpType.RC, b.cq, b.cq, QpCapabilities(1, 1, 1, 1, 0))
    full = b.nic.create_cq(1)
    for qp in (b.qp, other, b.qp):
        qp.tell(EventType.QP_FATAL)
    b.nic.raise_event(AsyncEvent(EventType.CQ_ERR, full))
    gone: list[object] = []
    b.nic.on_gone = gone.append
    b.nic.destroy_qp(b.qp)
    assert [event.element for event in b.nic.async_events] == [other, full]
    b.nic.destroy_cq(full)
    assert [event.element for event in b.nic.async_events] == [other]
    assert gone == [b.qp, full]


# --- memory windows ---------------------------------------------------------------------------------------


def _bind(
    end: End, kind: MwType = MwType.TYPE_2, access: Access = ALL_ACCESS & ~NO_REMOTE, **rest: int
) -> int:
    """Bind a window to 100 bytes at 1000 of an end's memory; the R_Key."""
    window = end.nic.alloc_mw(end.pd, kind)
    rkey = window.rkey & ~0xFF | 0x77
    bind = Bind(end.region, end.region.address + 1000, 100, access)
    end.post(SendOpcode.BIND_MW, window=window, window_rkey=rkey, bind=bind, **rest)
    return rkey


def test_a_window_opens_a_part_of_a_region_until_it_is_invalidated() -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    rkey = _bind(b)
    assert [c.status for c in pair.run_until(1, b)] == [WcStatus.SUCCESS]
    at = b.region.address + 1000
    a.memory.view[:100] = b"w" * 100
    assert _status(pair, SendOpcode.RDMA_WRITE, 100, rkey=rkey, remote_address=at) is WcStatus.SUCCESS
    assert b.memory.view[999:1101] == b"\0" + b"w" * 100 + b"\0"
    b.receive(b.sge(0, 64))
    assert _status(pair, SendOpcode.SEND_WITH_INV, 16, invalidate_rkey=rkey) is WcStatus.SUCCESS
    (received,) = b.polled()
    assert (received.flags, received.imm) == (WcFlags.WITH_INV, rkey)
    refused = _status(pair, SendOpcode.RDMA_WRITE, 100, rkey=rkey, remote_address=at)
    assert refused is WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize(("offset", "length"), [(999, 10), (1091, 10), (1000, 101)])
def test_a_window_ends_where_it_ends(offset: int, length: int) -> None:
    pair = Pair()
    rkey = _bind(pair.b)
    pair.run_until(1, pair.b)
    at = pair.b.region.address + offset
    status = _status(pair, SendOpcode.RDMA_WRITE, length, rkey=rkey, remote_address=at)
    assert status is WcStatus.REM_ACCESS_ERR


def test_a_window_of_type_2_is_its_queue_pairs_own() -> None:
    pair = Pair()
    b = pair.b
    window = b.nic.alloc_mw(b.pd, MwType.TYPE_2)
    bind = Bind(b.region, b.region.address, 64, Access.REMOTE_WRITE)
    b.nic.keys.bind(window, b.qp.number + 1, b.pd, bind, window.rkey)
    remote = {"rkey": window.rkey, "remote_address": b.region.address}
    assert _status(pair, SendOpcode.RDMA_WRITE, 16, **remote) is WcStatus.REM_ACCESS_ERR


def test_local_invalidation_and_binding_again() -> None:
    pair = Pair()
    b = pair.b
    window = b.nic.alloc_mw(b.pd, MwType.TYPE_2)
    bind = Bind(b.region, b.region.address, 64, Access.REMOTE_WRITE)
    first, second = window.rkey & ~0xFF | 1, window.rkey & ~0xFF | 2
    b.post(SendOpcode.BIND_MW, window=window, window_rkey=first, bind=bind)
    b.post(SendOpcode.LOCAL_INV, invalidate_rkey=first)
    b.post(SendOpcode.BIND_MW, window=window, window_rkey=second, bind=bind)
    assert [c.status for c in pair.run_until(3, b)] == [WcStatus.SUCCESS] * 3
    at = b.region.address
    assert _status(pair, SendOpcode.RDMA_WRITE, 16, rkey=second, remote_address=at) is WcStatus.SUCCESS
    assert _status(pair, SendOpcode.RDMA_WRITE, 16, rkey=first, remote_address=at) is WcStatus.REM_ACCESS_ERR


def test_a_window_of_type_1_moves_by_binding() -> None:
    pair = Pair()
    b = pair.b
    window = b.nic.alloc_mw(b.pd, MwType.TYPE_1)
    at = b.region.address
    rkeys = []
    for i in range(2):
        bind = Bind(b.region, at + i * 64, 64, Access.REMOTE_WRITE)
        rkeys.append(window.rkey & ~0xFF | (window.rkey + 1 & 0xFF))
        b.qp.post_send(
            SendRequest(
                0, SendOpcode.BIND_MW, SendFlags.SIGNALED, window=window, window_rkey=rkeys[i], bind=bind
            )
        )
    assert [c.status for c in pair.run_until(2, b)] == [WcStatus.SUCCESS] * 2
    remote = {"rkey": rkeys[1], "remote_address": at + 64}
    assert _status(pair, SendOpcode.RDMA_WRITE, 64, **remote) is WcStatus.SUCCESS
    remote = {"rkey": rkeys[0], "remote_address": at}
    assert _status(pair, SendOpcode.RDMA_WRITE, 64, **remote) is WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("wrong", ["bound already", "no bind access", "outside", "no local write"])
def test_binds_that_are_refused(wrong: str) -> None:
    pair = Pair(access=ALL_ACCESS & ~Access.MW_BIND if wrong == "no bind access" else ALL_ACCESS)
    b = pair.b
    window = b.nic.alloc_mw(b.pd, MwType.TYPE_2)
    region, length = b.region, 64
    if wrong == "no local write":
        region = b.nic.reg_mr(b.pd, bytearray(64), 0, Access.MW_BIND | Access.REMOTE_READ)
    if wrong == "outside":
        length = 1 << 17
    bind = Bind(region, region.address, length, Access.REMOTE_WRITE)
    count = 2 if wrong == "bound already" else 1
    for _ in range(count):
        b.post(SendOpcode.BIND_MW, window=window, window_rkey=window.rkey, bind=bind)
    assert pair.run_until(count, b)[-1].status is WcStatus.MW_BIND_ERR
    assert b.qp.state is QpState.ERR


@pytest.mark.parametrize("remote", [False, True])
def test_an_ordinary_region_is_never_invalidated(remote: bool) -> None:
    pair = Pair()
    a, b = pair.a, pair.b
    if remote:
        b.receive(b.sge(0, 64))
        status = _status(pair, SendOpcode.SEND_WITH_INV, 16, invalidate_rkey=b.region.rkey)
        assert status is WcStatus.REM_ACCESS_ERR
        assert [c.status for c in b.polled()] == [WcStatus.REM_INV_REQ_ERR]
    else:
        a.post(SendOpcode.LOCAL_INV, invalidate_rkey=a.region.rkey, flags=SendFlags(0))
        assert [c.status for c in pair.run_until(1)] == [WcStatus.LOC_QP_OP_ERR]
