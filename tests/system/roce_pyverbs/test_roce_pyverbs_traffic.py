"""Every kind of work request between two emulated devices, posted and polled by pyverbs' names."""

from __future__ import annotations

import errno
import time

import pytest

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import AH
from emulator.roce.pyverbs.base import inc_rkey
from emulator.roce.pyverbs.cq import PollCqAttr
from emulator.roce.pyverbs.mr import MW, MWBind, MWBindInfo
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.pyverbs.qp import DataBuffer, QPEx
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from tests.support.roce.verbs_pair import SECONDS, Side, two_sides
from tests.support.waiting import wait_until


def test_messages_both_ways() -> None:
    with two_sides() as (left, right):
        for number, (one, other) in enumerate([(left, right), (right, left)] * 4):
            text = bytes([number]) * 5000
            one.mr.write(text, len(text), 8192)
            other.receive(length=8192, wr_id=number)
            one.qp.post_send(one.request(e.IBV_WR_SEND, 8192, len(text), wr_id=100 + number))
            assert one.completion().wr_id == 100 + number
            got = other.completion()
            assert (got.wr_id, got.opcode, got.byte_len) == (number, e.IBV_WC_RECV, len(text))
            assert got.qp_num == other.qp.qp_num
            assert other.mr.read(len(text), 0) == text


@pytest.mark.parametrize("opcode", ["IBV_WR_SEND_WITH_IMM", "IBV_WR_RDMA_WRITE_WITH_IMM"])
def test_immediate_data_comes_as_it_was_given(opcode: str) -> None:
    with two_sides() as (left, right):
        right.receive()
        request = left.request(getattr(e, opcode), length=100, imm=0x01020304)
        request.set_wr_rdma(right.mr.rkey, right.mr.buf + 4096)
        left.qp.post_send(request)
        left.completion()
        got = right.completion()
        assert got.wc_flags & e.IBV_WC_WITH_IMM
        assert got.imm_data == 0x01020304
        assert got.byte_len == 100


def test_write_and_read() -> None:
    with two_sides() as (left, right):
        text = bytes(range(256)) * 100
        left.mr.write(text, len(text), 0)
        write = left.request(e.IBV_WR_RDMA_WRITE, 0, len(text))
        write.set_wr_rdma(right.mr.rkey, right.mr.buf + 1000)
        left.qp.post_send(write)
        assert left.completion().opcode == e.IBV_WC_RDMA_WRITE
        assert right.mr.read(len(text), 1000) == text
        read = left.request(e.IBV_WR_RDMA_READ, 30000, len(text))
        read.set_wr_rdma(right.mr.rkey, right.mr.buf + 1000)
        left.qp.post_send(read)
        assert left.completion().opcode == e.IBV_WC_RDMA_READ
        assert left.mr.read(len(text), 30000) == text


@pytest.mark.parametrize("extended", [False, True])
def test_unreliable_connections(extended: bool) -> None:
    """UC: SENDs and WRITEs, with and without immediate data; no READ."""
    with two_sides(kind=e.IBV_QPT_UC, extended=extended) as (left, right):
        text = bytes(range(256)) * 40
        left.mr.write(text, len(text), 0)
        if extended:
            assert isinstance(left.qp, QPEx)
            right.receive()
            left.qp.wr_start()
            left.qp.wr_rdma_write_imm(right.mr.rkey, right.mr.buf + 1000, 5)
            left.qp.wr_set_sge(left.sge(0, len(text))[0])
            left.qp.wr_complete()
        else:
            right.receive(length=20000)
            right.receive()
            left.qp.post_send(left.request(e.IBV_WR_SEND, 0, len(text)))
            assert left.completion().opcode == e.IBV_WC_SEND
            assert right.completion().byte_len == len(text)
            assert right.mr.read(len(text), 0) == text
            write = left.request(e.IBV_WR_RDMA_WRITE_WITH_IMM, 0, len(text), imm=5)
            write.set_wr_rdma(right.mr.rkey, right.mr.buf + 1000)
            left.qp.post_send(write)
            assert (left.completion().opcode, right.completion().imm_data) == (e.IBV_WC_RDMA_WRITE, 5)
            with pytest.raises(PyverbsRDMAError) as refused:
                left.qp.post_send(left.request(e.IBV_WR_RDMA_READ))
            assert refused.value.error_code == errno.EINVAL
        wait_until(lambda: right.mr.read(len(text), 1000) == text)


def test_atomics() -> None:
    with two_sides() as (left, right):
        right.mr.write((5).to_bytes(8, "little"), 8, 0)
        add = left.request(e.IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8)
        add.set_wr_atomic(right.mr.rkey, right.mr.buf, 37)
        left.qp.post_send(add)
        left.completion()
        assert int.from_bytes(left.mr.read(8, 0), "little") == 5
        swap = left.request(e.IBV_WR_ATOMIC_CMP_AND_SWP, 8, 8)
        swap.set_wr_atomic(right.mr.rkey, right.mr.buf, 42, 7)
        left.qp.post_send(swap)
        left.completion()
        assert int.from_bytes(left.mr.read(8, 8), "little") == 42
        assert int.from_bytes(right.mr.read(8, 0), "little") == 7


def test_atomic_writes() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        left.qp.wr_start()
        left.qp.wr_atomic_write(right.mr.rkey, right.mr.buf + 64, b"8 bytes!")
        left.qp.wr_complete()
        wait_until(lambda: right.mr.read(8, 64) == b"8 bytes!")
        left.qp.wr_start()
        left.qp.wr_atomic_write(right.mr.rkey, right.mr.buf + 4, b"8 bytes!")
        with pytest.raises(PyverbsRDMAError) as refused:
            left.qp.wr_complete()
        assert refused.value.error_code == errno.EINVAL
    with two_sides() as (left, right):
        left.mr.write(b"by a WR.", 8, 0)
        request = left.request(e.IBV_WR_ATOMIC_WRITE, 0, 8)
        request.set_wr_rdma(right.mr.rkey, right.mr.buf + 8)
        left.qp.post_send(request)
        assert left.completion().opcode == e.IBV_WC_ATOMIC_WRITE
        assert right.mr.read(16, 0) == bytes(8) + b"by a WR."


def test_requests_in_a_chain_are_posted_in_order_up_to_the_bad_one() -> None:
    with two_sides() as (left, right):
        right.receive(wr_id=1)
        right.receive(wr_id=2)
        bad = SendWR(3, e.IBV_WR_TSO, 1, 0, left.sge())
        second = left.request(e.IBV_WR_SEND, wr_id=2)
        second.next_wr = bad
        first = left.request(e.IBV_WR_SEND, wr_id=1)
        first.next_wr = second
        failed = left.request(e.IBV_WR_SEND)
        with pytest.raises(PyverbsRDMAError) as refused:
            left.qp.post_send(first, failed)
        assert refused.value.error_code == errno.EINVAL
        assert failed.wr_id == 3
        assert [one.wr_id for one in left.completions(2)] == [1, 2]
        assert [one.wr_id for one in right.completions(2)] == [1, 2]


def test_inline_data_is_taken_when_it_is_posted() -> None:
    """The same request, posted twice, sends what is in memory each time, and later changes do not matter."""
    with two_sides() as (left, right):
        right.receive(0)
        right.receive(64)
        request = left.request(e.IBV_WR_SEND, length=4)
        request.send_flags = e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE
        for text in (b"once", b"more"):
            left.mr.write(text, 4, 0)
            left.qp.post_send(request)
        left.mr.write(b"late", 4, 0)
        left.completions(2)
        right.completions(2)
        assert (right.mr.read(4, 0), right.mr.read(4, 64)) == (b"once", b"more")


def test_a_request_that_was_posted_can_be_changed_and_posted_again() -> None:
    with two_sides() as (left, right):
        right.receive(0)
        right.receive(4096)
        request = left.request(e.IBV_WR_SEND, wr_id=1)
        left.qp.post_send(request)
        request.wr_id = 2
        request.sg_list = SGE(left.mr.buf + 64, 8, left.mr.lkey)
        left.qp.post_send(request)
        assert [one.wr_id for one in left.completions(2)] == [1, 2]
        assert [one.byte_len for one in right.completions(2)] == [64, 8]


def test_a_shared_receive_queue() -> None:
    with two_sides(shared=True) as (left, right):
        assert right.srq is not None
        assert right.srq.query().max_wr == 32
        for number in range(3):
            right.receive(4096 * number, wr_id=number)
        with pytest.raises(PyverbsRDMAError):
            right.qp.post_recv(RecvWR(9, 1, right.sge()))
        for number in range(3):
            left.qp.post_send(left.request(e.IBV_WR_SEND, wr_id=number))
        assert [one.wr_id for one in right.completions(3)] == [0, 1, 2]


def test_a_window_of_type_2_is_bound_used_and_invalidated_by_the_peer() -> None:
    with two_sides() as (left, right):
        window = MW(right.pd, e.IBV_MW_TYPE_2)
        key = inc_rkey(window.rkey)
        bind = SendWR(1, e.IBV_WR_BIND_MW)
        bind.set_bind_wr(window, MWBindInfo(right.mr, right.mr.buf + 512, 512, e.IBV_ACCESS_REMOTE_WRITE))
        assert bind.rkey == key
        right.qp.post_send(bind)
        assert right.completion().opcode == e.IBV_WC_BIND_MW
        write = left.request(e.IBV_WR_RDMA_WRITE, 0, 512)
        write.set_wr_rdma(key, right.mr.buf + 512)
        left.mr.write(b"w" * 512, 512, 0)
        left.qp.post_send(write)
        left.completion()
        assert right.mr.read(512, 512) == b"w" * 512
        right.receive()
        left.qp.post_send(left.request(e.IBV_WR_SEND_WITH_INV, imm=key))
        left.completion()
        got = right.completion()
        assert got.wc_flags & e.IBV_WC_WITH_INV
        assert got.imm_data == key
        left.qp.post_send(write)
        assert left.completions(1)[0].status == e.IBV_WC_REM_ACCESS_ERR


def test_a_window_of_type_1_gets_a_new_key_with_each_bind() -> None:
    with two_sides() as (left, right):
        window = MW(right.pd, e.IBV_MW_TYPE_1)
        keys = [window.rkey]
        for start in (0, 1024):
            info = MWBindInfo(right.mr, right.mr.buf + start, 64, e.IBV_ACCESS_REMOTE_READ)
            right.qp.bind_mw(window, MWBind(info, e.IBV_SEND_SIGNALED, 5))
            assert right.completion().wr_id == 5
            keys.append(window.rkey)
        assert keys == [keys[0], inc_rkey(keys[0]), inc_rkey(inc_rkey(keys[0]))]
        read = left.request(e.IBV_WR_RDMA_READ)
        read.set_wr_rdma(window.rkey, right.mr.buf + 1024)
        left.qp.post_send(read)
        left.completion()


def test_without_the_right_the_peer_is_refused_and_the_rest_is_flushed() -> None:
    with two_sides() as (left, right):
        left.receive(wr_id=1)
        request = left.request(e.IBV_WR_RDMA_WRITE, wr_id=2)
        request.set_wr_rdma(right.mr.rkey ^ 0x100, right.mr.buf)
        left.qp.post_send(request)
        failed, flushed = left.completions(2)
        assert (failed.wr_id, failed.status) == (2, e.IBV_WC_REM_ACCESS_ERR)
        assert (flushed.wr_id, flushed.status) == (1, e.IBV_WC_WR_FLUSH_ERR)
        assert left.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_ERR


def test_datagrams_are_answered_by_what_came_with_them() -> None:
    with two_sides(kind=e.IBV_QPT_UD) as (left, right):
        left.receive(0)
        right.receive(0)
        request = left.request(e.IBV_WR_SEND, 8192, 100)
        request.set_wr_ud(AH(left.pd, attr=left.way_to(right)), right.qp.qp_num, 0x11111111)
        left.mr.write(b"q" * 100, 100, 8192)
        left.qp.post_send(request)
        left.completion()
        got = right.completion()
        assert (got.byte_len, got.src_qp) == (140, left.qp.qp_num)
        assert right.mr.read(100, 40) == b"q" * 100
        answer = right.request(e.IBV_WR_SEND, 8192, 10)
        answer.set_wr_ud(AH(right.pd, wc=got, grh=right.mr.buf, port_num=1), got.src_qp, 0x11111111)
        right.qp.post_send(answer)
        right.completion()
        assert left.completion().src_qp == right.qp.qp_num


def poll_one(side: Side) -> dict[str, int]:
    """The next completion of an extended queue, field by field."""
    cq, deadline = side.cq_ex, time.monotonic() + SECONDS
    side.context.drive_until(cq.native.__len__, deadline)
    assert cq.start_poll(PollCqAttr()) == 0
    try:
        assert cq.status == e.IBV_WC_SUCCESS
        return {
            "wr_id": cq.wr_id,
            "opcode": cq.read_opcode(),
            "bytes": cq.read_byte_len(),
            "imm": cq.read_imm_data(),
            "qp": cq.read_qp_num(),
        }
    finally:
        cq.end_poll()


def test_the_extended_calls() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        assert left.cq_ex.start_poll(None) == errno.ENOENT
        right.receive(0, wr_id=70)
        right.receive(4096, wr_id=71)
        qp = left.qp
        left.mr.write(b"some bytes here", 15, 0)
        qp.wr_start()
        qp.wr_id, qp.wr_flags = 1, e.IBV_SEND_SIGNALED
        qp.wr_send_imm(0x0A0B0C0D)
        qp.wr_set_sge(left.sge(0, 15)[0])
        qp.wr_id = 2
        qp.wr_rdma_write(right.mr.rkey, right.mr.buf + 8192)
        qp.wr_set_sge_list(2, [left.sge(0, 5)[0], left.sge(5, 10)[0]])
        qp.wr_id = 3
        qp.wr_send()
        qp.wr_set_inline_data_list(2, [DataBuffer(left.mr.buf, 4), DataBuffer(left.mr.buf + 5, 5)])
        qp.wr_complete()
        assert [poll_one(left)["wr_id"] for _ in range(3)] == [1, 2, 3]
        first, second = poll_one(right), poll_one(right)
        assert first == {
            "wr_id": 70, "opcode": e.IBV_WC_RECV, "bytes": 15, "imm": 0x0D0C0B0A, "qp": right.qp.qp_num,
        }  # fmt: skip
        assert (second["wr_id"], second["bytes"]) == (71, 9)
        assert right.mr.read(15, 8192) == b"some bytes here"
        assert right.mr.read(9, 4096) == b"somebytes"


def test_of_a_row_with_a_bad_request_nothing_is_posted() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        right.receive()
        left.qp.wr_start()
        left.qp.wr_send()
        left.qp.wr_set_inline_data(left.mr.buf, 4)
        left.qp.wr_send_tso(left.mr.buf, 1, 1)
        with pytest.raises(PyverbsRDMAError) as refused:
            left.qp.wr_complete()
        assert refused.value.error_code == errno.EOPNOTSUPP
        left.qp.wr_start()
        left.qp.wr_send()
        left.qp.wr_abort()
        deadline = time.monotonic() + 0.05
        assert not right.context.drive_until(right.cq_ex.native.__len__, deadline)


def place(side: Side, offset: int, length: int) -> tuple[int, int, int]:
    """Registered memory, as rows name it."""
    return side.mr.buf + offset, length, side.mr.lkey


def test_rows_are_posted_by_one_call() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        assert isinstance(right.qp, QPEx)
        signaled = int(e.IBV_SEND_SIGNALED)
        right.qp.post_rows([(70, place(right, 0, 4096)), (71, place(right, 4096, 4096))], [])
        left.mr.write(b"some bytes here", 15, 0)
        key, address = right.mr.rkey, right.mr.buf + 8192
        left.qp.post_rows(
            [(72, place(left, 20000, 100))],
            [
                (int(e.IBV_WR_RDMA_WRITE), 1, 0, place(left, 0, 15), key, address, None, None),
                (int(e.IBV_WR_SEND), 2, signaled, place(left, 0, 4), 0, 0, None, None),
                (int(e.IBV_WR_RDMA_READ), 3, signaled, place(left, 100, 15), key, address, None, None),
                (int(e.IBV_WR_SEND), 4, 0, None, 0, 0, None, None),
            ],
        )
        assert [poll_one(left)["wr_id"] for _ in range(4)] == [1, 2, 3, 4]
        assert [(one["wr_id"], one["bytes"]) for one in (poll_one(right), poll_one(right))] == [
            (70, 4),
            (71, 0),
        ]
        assert right.mr.read(15, 8192) == left.mr.read(15, 100) == b"some bytes here"
        right.qp.post_rows([], [(int(e.IBV_WR_SEND), 5, signaled, place(right, 0, 4), 0, 0, None, None)])
        assert poll_one(left)["wr_id"] == 72


def test_rows_bind_windows_and_close_them() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        assert isinstance(right.qp, QPEx)
        signaled = int(e.IBV_SEND_SIGNALED)
        window = MW(left.pd, e.IBV_MW_TYPE_2)
        key = inc_rkey(window.rkey)
        bind = MWBindInfo(left.mr, left.mr.buf, 4096, e.IBV_ACCESS_REMOTE_WRITE)
        left.qp.post_rows([], [(int(e.IBV_WR_BIND_MW), 1, signaled, None, key, 0, window, bind)])
        assert poll_one(left)["wr_id"] == 1
        left.qp.post_rows([(9, place(left, 8192, 100))], [])
        right.mr.write(b"through the window", 18, 0)
        rows = [
            (int(e.IBV_WR_RDMA_WRITE), 2, 0, place(right, 0, 18), key, left.mr.buf, None, None),
            (int(e.IBV_WR_SEND_WITH_INV), 3, signaled, place(right, 0, 4), key, 0, None, None),
        ]
        right.qp.post_rows([], rows)
        assert [poll_one(right)["wr_id"] for _ in range(2)] == [2, 3]
        assert poll_one(left)["wr_id"] == 9
        assert left.mr.read(18, 0) == b"through the window"
        # Closed by the peer already, so closing it fails, and the pair with it.
        left.qp.post_rows([], [(int(e.IBV_WR_LOCAL_INV), 4, signaled, None, key, 0, None, None)])
        assert left.context.drive_until(left.cq_ex.native.__len__, time.monotonic() + SECONDS)
        assert left.cq_ex.start_poll(PollCqAttr()) == 0
        assert (left.cq_ex.wr_id, left.cq_ex.status) == (4, e.IBV_WC_LOC_QP_OP_ERR)
        left.cq_ex.end_poll()


def test_of_rows_with_a_bad_one_nothing_is_sent() -> None:
    with two_sides(extended=True) as (left, right):
        assert isinstance(left.qp, QPEx)
        right.receive()
        good = (int(e.IBV_WR_SEND), 1, 0, place(left, 0, 4), 0, 0, None, None)
        most = left.qp.native.capabilities.max_send_wr
        for rows, number in (
            ([good, (77, *good[1:])], errno.EOPNOTSUPP),
            ([good, (good[0], 1, 64, *good[3:])], errno.EINVAL),
            ([good] * (most + 1), errno.ENOMEM),
        ):
            with pytest.raises(PyverbsRDMAError) as refused:
                left.qp.post_rows([], rows)
            assert refused.value.error_code == number
        deadline = time.monotonic() + 0.05
        assert not right.context.drive_until(right.cq_ex.native.__len__, deadline)
