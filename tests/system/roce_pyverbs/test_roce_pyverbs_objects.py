"""Life of the objects: channels and their descriptors, memory that is not ours, closing and forgetting."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import select
import threading
import time

import pytest

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.cq import CQ, CompChannel
from emulator.roce.pyverbs.device import Context, get_device_list
from emulator.roce.pyverbs.mr import MR, MW
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from emulator.roce.pyverbs.srq import SrqAttr
from emulator.roce.pyverbs.wr import SGE, SendWR
from emulator.roce.runtime import registry
from tests.support.roce.verbs_pair import EVERYTHING, SECONDS, devices, two_sides


def readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_a_completion_channel_is_readable_while_an_event_waits() -> None:
    with two_sides(events=True) as (left, right):
        assert right.channel is not None
        assert right.cq.comp_channel is right.channel
        right.receive()
        right.cq.req_notify()
        assert not readable(right.channel.fd, 0)
        left.qp.post_send(left.request(e.IBV_WR_SEND))
        assert readable(right.channel.fd, SECONDS)
        assert len(right.channel) == 1
        right.channel.get_cq_event(right.cq)
        assert right.channel
        assert not len(right.channel)
        assert not readable(right.channel.fd, 0)
        assert right.cq.poll()[0] == 1
        right.cq.ack_events(1)


def test_a_solicited_event_comes_for_a_solicited_message_only() -> None:
    with two_sides(events=True) as (left, right):
        assert right.channel is not None
        right.receive()
        right.receive()
        right.cq.req_notify(True)
        left.qp.post_send(left.request(e.IBV_WR_SEND))
        right.completions(1)
        assert not readable(right.channel.fd, 0)
        asking = left.request(e.IBV_WR_SEND)
        asking.send_flags = e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED
        left.qp.post_send(asking)
        assert readable(right.channel.fd, SECONDS)


def test_who_waits_for_an_event_is_woken_by_it() -> None:
    with two_sides(events=True) as (left, right):
        assert right.channel is not None
        right.receive()
        right.cq.req_notify()
        waiter = threading.Thread(target=right.channel.get_cq_event, args=(right.cq,))
        waiter.start()
        left.qp.post_send(left.request(e.IBV_WR_SEND))
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        assert right.cq.num_events == 1


def test_who_waits_is_woken_by_what_another_thread_does_here() -> None:
    """Nothing comes from the network: work is flushed, a channel is closed."""
    with two_sides() as (left, _):
        left.receive(wr_id=7)
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(left.completions(1)[0].wr_id))
        waiter.start()
        left.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
        waiter.join(SECONDS / 2)
        assert got == [7]
    with devices(1) as (name,), Context(name=name) as context:
        channel = CompChannel(context)
        cq = CQ(context, 4, None, channel)
        refused: list[int] = []

        def wait() -> None:
            try:
                channel.get_cq_event(cq)
            except PyverbsRDMAError as error:
                refused.append(error.error_code)

        waiter = threading.Thread(target=wait)
        waiter.start()
        channel.close()
        waiter.join(SECONDS)
        assert refused == [errno.EBADF]


def test_a_descriptor_that_does_not_block_says_eagain() -> None:
    with devices(1) as (name,), Context(name=name) as context:
        channel = CompChannel(context)
        cq = CQ(context, 4, None, channel)
        os.set_blocking(channel.fd, False)
        with pytest.raises(PyverbsRDMAError) as refused:
            channel.get_cq_event(cq)
        assert refused.value.error_code == errno.EAGAIN


def test_what_is_no_memory_is_not_registered() -> None:
    with two_sides() as (left, _):
        pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        libc, middle = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(start + mmap.PAGESIZE)
        assert libc.mprotect(middle, mmap.PAGESIZE, mmap.PROT_READ) == 0
        read_only = (start + mmap.PAGESIZE, mmap.PAGESIZE, e.IBV_ACCESS_LOCAL_WRITE)
        reaches_in = (start, mmap.PAGESIZE + 1, EVERYTHING)
        for address, length, access in [(0x10, 64, 1), (1 << 63, 64, 1), read_only, reaches_in]:
            with pytest.raises(PyverbsRDMAError) as refused:
                MR(left.pd, length, access, address=address)
            assert refused.value.error_code == errno.EFAULT
        MR(left.pd, 3 * mmap.PAGESIZE, 0, address=start).close()
        assert libc.mprotect(middle, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        MR(left.pd, 3 * mmap.PAGESIZE, EVERYTHING, address=start).close()


def test_memory_that_exists_is_registered_by_its_address() -> None:
    with two_sides() as (left, right):
        mapping = mmap.mmap(-1, 8192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        theirs = MR(right.pd, 8192, EVERYTHING, address=address)
        assert (theirs.buf, theirs.length) == (address, 8192)
        write = left.request(e.IBV_WR_RDMA_WRITE, 0, 4)
        write.set_wr_rdma(theirs.rkey, address + 100)
        left.mr.write("text", 4)
        left.qp.post_send(write)
        left.completion()
        assert mapping[100:104] == b"text"
        assert theirs.read(4, 100) == b"text"
        theirs.close()
        assert theirs.buf == 0
        with pytest.raises(PyverbsUserError):
            theirs.read(1, 0)


@pytest.mark.parametrize(
    ("length", "access", "number"),
    [
        (0, "IBV_ACCESS_LOCAL_WRITE", errno.EINVAL),
        (64, "IBV_ACCESS_REMOTE_WRITE", errno.EINVAL),
        (64, "IBV_ACCESS_ON_DEMAND", errno.EOPNOTSUPP),
    ],
)
def test_regions_that_libibverbs_refuses(length: int, access: str, number: int) -> None:
    with devices(1) as (name,), Context(name=name) as context, PD(context) as pd:
        with pytest.raises(PyverbsRDMAError) as refused:
            MR(pd, length, getattr(e, access))
        assert refused.value.error_code == number


def test_a_region_registered_anew_keeps_its_keys_and_loses_its_rights() -> None:
    with two_sides() as (left, right):
        key = right.mr.rkey
        right.mr.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, access=e.IBV_ACCESS_LOCAL_WRITE)
        assert right.mr.rkey == key
        read = left.request(e.IBV_WR_RDMA_READ)
        read.set_wr_rdma(key, right.mr.buf)
        left.qp.post_send(read)
        assert left.completions(1)[0].status == e.IBV_WC_REM_ACCESS_ERR


def test_to_close_a_context_closes_everything_below_it() -> None:
    with devices(1) as (name,):
        context = Context(name=name)
        pd = PD(context)
        mr = MR(pd, 4096, EVERYTHING)
        mw = MW(pd, e.IBV_MW_TYPE_2)
        cq = CQ(context, 8, None, CompChannel(context))
        qp = QP(pd, QPInitAttr(e.IBV_QPT_RC, None, cq, cq, cap=QPCap()))
        opened = context.device
        context.close()
        assert opened.closed
        assert mr.buf == 0
        for gone in (
            lambda: qp.qp_num,
            lambda: cq.cqe,
            lambda: mw.type,
            lambda: mr.lkey,
            lambda: pd.handle,
            context.query_device,
        ):
            with pytest.raises(PyverbsUserError):
                gone()
        for one in (qp, cq, mw, mr, pd, context):
            one.close()


def test_what_is_forgotten_is_given_back() -> None:
    with devices(1) as (name,), Context(name=name) as context:
        limits = context.device.nic.limits
        pd = PD(context)
        for _ in range(3):
            cq = CQ(context, 4)
            qp = QP(pd, QPInitAttr(e.IBV_QPT_RC, None, cq, cq, cap=QPCap(limits.max_qp_wr, 1)))
            mr = MR(pd, 4096, EVERYTHING)
            key = mr.lkey
        cycle = [mr, qp, cq]
        cycle.append(cycle)  # type: ignore[arg-type]  # a cycle, which only the collector finds
        del mr, qp, cq, cycle
        gc.collect()
        MR(pd, 4096, EVERYTHING)
        assert key not in [region.lkey for region in context.device.nic.keys._regions.values()]
        pd.close()


def test_two_contexts_share_a_device() -> None:
    with devices(1) as (name,):
        one, two = Context(name=name), Context(name=name)
        one.close()
        assert two.query_port(1).state == e.IBV_PORT_ACTIVE
        two.close()
        assert [known.name for known in get_device_list()].count(name.encode()) == 1
    with pytest.raises(PyverbsRDMAError):
        Context(name=name)


def test_a_device_whose_address_is_taken_cannot_be_opened() -> None:
    with devices(1) as (name,), Context(name=name) as context:
        registry.add_device("elsewhere", "198.51.100.1")
        try:
            with pytest.raises(PyverbsRDMAError) as refused:
                Context(name="elsewhere")
            assert refused.value.error_code == errno.ENODEV
        finally:
            registry.remove_device("elsewhere")
        assert context.name == name


def test_the_device_tells_of_a_shared_queue_that_runs_low() -> None:
    with two_sides(shared=True) as (left, right):
        assert right.srq is not None
        for _ in range(2):
            right.receive()
        right.srq.modify(SrqAttr(srq_limit=2), e.IBV_SRQ_LIMIT)
        left.qp.post_send(left.request(e.IBV_WR_SEND))
        event = right.context.get_async_event()
        event.ack()
        assert event.event_type == e.IBV_EVENT_SRQ_LIMIT_REACHED
        assert right.srq.query().srq_limit == 0


def test_moves_that_are_not_legal() -> None:
    with devices(1) as (name,), Context(name=name) as context, PD(context) as pd:
        cq = CQ(context, 4)
        qp = QP(pd, QPInitAttr(e.IBV_QPT_RC, None, cq, cq, cap=QPCap()))
        for state in (e.IBV_QPS_RTR, e.IBV_QPS_RTS):
            with pytest.raises(PyverbsRDMAError) as refused:
                qp.modify(QPAttr(qp_state=state), e.IBV_QP_STATE)
            assert refused.value.error_code == errno.EINVAL
        with pytest.raises(PyverbsRDMAError) as refused:
            qp.post_send(SendWR(num_sge=1, sg=[SGE(0, 0, 0)]))
        assert refused.value.error_code == errno.EINVAL
        with pytest.raises(PyverbsRDMAError) as refused:
            QP(pd, QPInitAttr(e.IBV_QPT_RAW_PACKET, None, cq, cq, cap=QPCap()))
        assert refused.value.error_code == errno.EOPNOTSUPP


def test_to_drive_until_gives_up_at_its_deadline() -> None:
    with devices(1) as (name,), Context(name=name) as context:
        began = time.monotonic()
        assert not context.drive_until(lambda: False, context.now() + 0.02)
        assert 0.02 <= time.monotonic() - began < SECONDS
        assert context.drive_until(lambda: True, None)
