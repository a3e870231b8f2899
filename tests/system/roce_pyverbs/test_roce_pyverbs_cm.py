"""Connections by address and port: synchronous, asynchronous, with queue pairs of either kind, refused."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from emulator.roce.pyverbs import cm_enums as ce
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from emulator.roce.pyverbs.cq import CQ
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.mr import MR
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import QP, QPCap, QPInitAttr
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from tests.support.roce.verbs_pair import SECONDS, devices, ip_of

PORT = "7471"
RC = e.IBV_QPT_RC


class Passive(threading.Thread):
    """The synchronous listening side, in a thread of its own; what goes wrong there comes out of `finish`."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self.join(SECONDS)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


def event(channel: CMEventChannel, wanted: int) -> CMEvent:
    """The next event, which is this one."""
    assert select.select([channel.fd], [], [], SECONDS)[0], f"no event {wanted}"
    one = CMEvent(channel)
    assert one.event_type == wanted, one.event_str()
    return one


@contextmanager
def listening(ip: str | None) -> Iterator[tuple[CMID, CMEventChannel]]:
    channel = CMEventChannel()
    listener = CMID(creator=channel)
    listener.bind_addr(AddrInfo(src=ip, src_service=PORT, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE))
    listener.listen(8)
    try:
        yield listener, channel
    finally:
        listener.close()
        channel.close()


@contextmanager
def asking(source: str | None, destination: str) -> Iterator[tuple[CMID, CMEventChannel]]:
    """An active CMID with its route resolved."""
    channel = CMEventChannel()
    cmid = CMID(creator=channel)
    try:
        cmid.resolve_addr(AddrInfo(src=source, dst=destination, dst_service=PORT))
        event(channel, ce.RDMA_CM_EVENT_ADDR_RESOLVED).ack_cm_event()
        cmid.resolve_route()
        event(channel, ce.RDMA_CM_EVENT_ROUTE_RESOLVED).ack_cm_event()
        yield cmid, channel
    finally:
        cmid.close()
        channel.close()


class Own:
    """A queue pair of the program's own on a CMID's device, with memory for one message each way."""

    def __init__(self, cmid: CMID) -> None:
        assert cmid.context is not None
        assert cmid.pd is not None
        self.cmid = cmid
        self.context = cmid.context
        self.cq = CQ(self.context, 8)
        self.mr = MR(cmid.pd, 8192, e.IBV_ACCESS_LOCAL_WRITE)
        self.qp = QP(cmid.pd, QPInitAttr(RC, None, self.cq, self.cq, cap=QPCap(4, 4)))

    def to(self, *states: int) -> None:
        for state in states:
            self.qp.modify(*self.cmid.init_qp_attr(state))

    def receive(self) -> None:
        self.qp.post_recv(RecvWR(1, 1, [SGE(self.mr.buf, 4096, self.mr.lkey)]))

    def send(self, text: bytes) -> None:
        self.mr.write(text, len(text), 4096)
        self.qp.post_send(SendWR(2, num_sge=1, sg=[SGE(self.mr.buf + 4096, len(text), self.mr.lkey)]))

    def completion(self) -> int:
        assert self.context.drive_until(self.cq.native.__len__, self.context.now() + SECONDS)
        one = self.cq.poll()[1][0]
        assert one.status == e.IBV_WC_SUCCESS
        return one.byte_len

    def close(self) -> None:
        for one in (self.qp, self.mr, self.cq):
            one.close()


def parameters(own: Own, text: bytes) -> ConnParam:
    param = ConnParam(resources=4, depth=4, retry=7, rnr_retry=7, qp_num=own.qp.qp_num, data_len=len(text))
    param.set_private_data(text)
    return param


def test_synchronous_connection_with_queue_pairs_of_the_cmids() -> None:
    with devices() as (first, second), ExitStack() as stack:
        info = AddrInfo(src=ip_of(second), src_service=PORT, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
        wanted = QPInitAttr(qp_type=RC, cap=QPCap(8, 8))
        listener = CMID(creator=info, qp_init_attr=wanted)
        stack.callback(listener.close)
        listener.listen()

        def passive() -> None:
            request = listener.get_request()
            memory = request.reg_msgs(64)
            request.post_recv(memory)
            request.accept()
            request.get_recv_comp()
            memory.write(memory.read(64, 0).upper(), 64)
            request.post_send(memory)
            request.get_send_comp()
            request.disconnect()
            request.close()

        server = Passive(passive)
        active = CMID(
            creator=AddrInfo(src=ip_of(first), dst=ip_of(second), dst_service=PORT), qp_init_attr=wanted
        )
        stack.callback(active.close)
        assert active.dev_name == first
        assert active.qpn
        memory = active.reg_msgs(64)
        active.connect()
        memory.write("hello" + " " * 59, 64)
        active.post_send(memory)
        active.get_send_comp()
        active.post_recv(memory)
        active.get_recv_comp()
        assert memory.read(5, 0) == b"HELLO"
        active.disconnect()
        server.finish()


def test_external_queue_pairs_with_private_data_both_ways() -> None:
    with (
        devices() as (first, second),
        listening(ip_of(second)) as (listener, heard),
        asking(ip_of(first), ip_of(second)) as (cmid, channel),
    ):
        ours = Own(cmid)
        ours.to(e.IBV_QPS_INIT)
        ours.receive()
        cmid.connect(parameters(ours, b"asked" * 6))
        request = event(heard, ce.RDMA_CM_EVENT_CONNECT_REQUEST)
        assert request.private_data[:30] == b"asked" * 6
        assert request.param is not None
        assert request.param.qp_num == ours.qp.qp_num
        answering = CMID(creator=request, listen_id=listener)
        theirs = Own(answering)
        theirs.to(e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS)
        theirs.receive()
        answering.accept(parameters(theirs, b"told" * 40))
        response = event(channel, ce.RDMA_CM_EVENT_CONNECT_RESPONSE)
        assert response.private_data[:160] == b"told" * 40
        response.ack_cm_event()
        assert response.event_str() == ""
        ours.to(e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS)
        cmid.establish()
        event(heard, ce.RDMA_CM_EVENT_ESTABLISHED)
        ours.send(b"first")
        ours.completion()
        assert theirs.completion() == 5
        theirs.send(b"second")
        theirs.completion()
        assert ours.completion() == 6
        assert ours.mr.read(6, 0) == b"second"
        cmid.disconnect()
        event(channel, ce.RDMA_CM_EVENT_DISCONNECTED)
        event(heard, ce.RDMA_CM_EVENT_DISCONNECTED)
        for own in (ours, theirs):
            own.close()
        answering.close()


def test_a_request_is_rejected_with_private_data() -> None:
    with (
        devices() as (first, second),
        listening(ip_of(second)) as (_, heard),
        asking(ip_of(first), ip_of(second)) as (cmid, channel),
    ):
        ours = Own(cmid)
        cmid.connect(parameters(ours, b"please"))
        request = event(heard, ce.RDMA_CM_EVENT_CONNECT_REQUEST)
        assert request.id is not None
        request.id.reject(b"no\0never")
        told = event(channel, ce.RDMA_CM_EVENT_REJECTED)
        assert told.private_data[:8] == b"no\0never"
        assert told.status == 28
        request.id.close()
        ours.close()


def test_nobody_listens() -> None:
    with devices() as (first, second), Context(name=second), ExitStack() as stack:
        cmid, channel = stack.enter_context(asking(ip_of(first), ip_of(second)))
        ours = Own(cmid)
        cmid.connect(parameters(ours, b""))
        assert event(channel, ce.RDMA_CM_EVENT_REJECTED).status == 8
        ours.close()
        active = CMID(
            creator=AddrInfo(src=ip_of(first), dst=ip_of(second), dst_service=PORT),
            qp_init_attr=QPInitAttr(qp_type=RC, cap=QPCap()),
        )
        stack.callback(active.close)
        with pytest.raises(PyverbsRDMAError) as refused:
            active.connect()
        assert refused.value.error_code == errno.ECONNREFUSED


def test_one_listener_has_many_connections() -> None:
    """Each event names its CMID; the listener stays open while connections come and go."""
    count = 5
    with devices() as (first, second), listening(None) as (listener, heard), ExitStack() as stack:
        asked = []
        for number in range(count):
            cmid, channel = stack.enter_context(asking(ip_of(first), ip_of(second)))
            cmid.create_qp(QPInitAttr(qp_type=RC, cap=QPCap()))
            param = ConnParam(data_len=1)
            param.set_private_data(bytes([65 + number]))
            cmid.connect(param)
            asked.append((cmid, channel))
        answering = {}
        for _ in range(count):
            request = event(heard, ce.RDMA_CM_EVENT_CONNECT_REQUEST)
            assert request.listen_id is listener
            assert request.id is not None
            assert request.id.dev_name == second
            answering[request.private_data[0]] = request.id
            request.id.create_qp(QPInitAttr(qp_type=RC, cap=QPCap()))
            request.id.accept()
        assert sorted(answering) == [65 + number for number in range(count)]
        for _, channel in asked:
            event(channel, ce.RDMA_CM_EVENT_ESTABLISHED)
        for _ in range(count):
            assert event(heard, ce.RDMA_CM_EVENT_ESTABLISHED).id in answering.values()
        for number, (cmid, channel) in enumerate(asked):
            cmid.disconnect()
            event(channel, ce.RDMA_CM_EVENT_DISCONNECTED)
            gone = event(heard, ce.RDMA_CM_EVENT_DISCONNECTED)
            assert gone.id is answering[65 + number]
            gone.id.close()


def test_an_address_without_a_device() -> None:
    with devices(1) as (name,):
        with pytest.raises(PyverbsRDMAError) as refused:
            CMID(creator=AddrInfo(src="127.0.0.1", src_service=PORT, flags=ce.RAI_PASSIVE))
        assert refused.value.error_code == errno.ENODEV
        channel = CMEventChannel()
        cmid = CMID(creator=channel)
        cmid.resolve_addr(AddrInfo(src="127.0.0.1", dst=ip_of(name), dst_service=PORT))
        told = event(channel, ce.RDMA_CM_EVENT_ADDR_ERROR)
        assert told.id is cmid
        assert told.status == -errno.ENODEV
        with pytest.raises(PyverbsUserError):
            _ = cmid.dev_name
        cmid.close()
        channel.close()


def test_a_port_has_one_listener() -> None:
    with devices(1) as (name,), listening(ip_of(name)):
        channel = CMEventChannel()
        second = CMID(creator=channel)
        second.bind_addr(AddrInfo(src=ip_of(name), src_service=PORT, flags=ce.RAI_PASSIVE))
        with pytest.raises(PyverbsRDMAError) as refused:
            second.listen()
        assert refused.value.error_code == errno.EADDRINUSE
        second.close()
        channel.close()


def test_a_channel_that_does_not_block_says_eagain() -> None:
    channel = CMEventChannel()
    os.set_blocking(channel.fd, False)
    with pytest.raises(PyverbsRDMAError) as refused:
        CMEvent(channel)
    assert refused.value.error_code == errno.EAGAIN
    channel.close()
    with pytest.raises(PyverbsRDMAError) as refused:
        CMEvent(channel)
    assert refused.value.error_code == errno.EBADF


def test_calls_out_of_turn_are_refused() -> None:
    with devices() as (first, second), asking(ip_of(first), ip_of(second)) as (cmid, _):
        for call in (cmid.establish, cmid.disconnect, cmid.reject, cmid.accept):
            with pytest.raises(PyverbsRDMAError) as refused:
                call()
            assert refused.value.error_code == errno.EINVAL
        with pytest.raises(PyverbsRDMAError):
            cmid.init_qp_attr(e.IBV_QPS_RTR)
        with pytest.raises(PyverbsRDMAError):
            cmid.get_request()
        with pytest.raises(PyverbsRDMAError):
            cmid.join_multicast(AddrInfo(src="224.0.0.1"))
    with pytest.raises(PyverbsRDMAError) as refused:
        CMID(creator=CMEventChannel(), port_space=ce.RDMA_PS_IPOIB)
    assert refused.value.error_code == errno.EOPNOTSUPP
