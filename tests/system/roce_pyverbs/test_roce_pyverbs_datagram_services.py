"""RDMA_PS_UDP by pyverbs' names: a service is found by address and port, and datagrams go both ways."""

from __future__ import annotations

import errno
import select

import pytest

from emulator.roce.pyverbs import cm_enums as ce
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import AH
from emulator.roce.pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam, UDParam
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.pyverbs.qp import QPCap, QPInitAttr
from tests.support.roce.verbs_pair import SECONDS, devices, ip_of

PORT = "7472"
GRH = 40


def _event(channel: CMEventChannel, wanted: int) -> CMEvent:
    assert select.select([channel.fd], [], [], SECONDS)[0], f"no event {wanted}"
    one = CMEvent(channel)
    assert one.event_type == wanted, one.event_str()
    return one


def _attr(kind: int = e.IBV_QPT_UD) -> QPInitAttr:
    return QPInitAttr(kind, cap=QPCap(max_recv_wr=4, max_send_wr=4))


class Service:
    """A listening side and an active side on two devices, the route resolved, and a request under way."""

    def __init__(self, first: str, second: str) -> None:
        self.channels = CMEventChannel(), CMEventChannel()
        self.listener = CMID(creator=self.channels[1], port_space=ce.RDMA_PS_UDP)
        self.listener.bind_addr(
            AddrInfo(src=ip_of(second), src_service=PORT, port_space=ce.RDMA_PS_UDP, flags=ce.RAI_PASSIVE)
        )
        self.listener.listen(4)
        self.asking = CMID(creator=self.channels[0], port_space=ce.RDMA_PS_UDP)
        self.asking.resolve_addr(
            AddrInfo(src=ip_of(first), dst=ip_of(second), dst_service=PORT, port_space=ce.RDMA_PS_UDP)
        )
        _event(self.channels[0], ce.RDMA_CM_EVENT_ADDR_RESOLVED)
        self.asking.resolve_route()
        _event(self.channels[0], ce.RDMA_CM_EVENT_ROUTE_RESOLVED)
        self.asking.create_qp(_attr())
        self.asking.connect(ConnParam())
        request = _event(self.channels[1], ce.RDMA_CM_EVENT_CONNECT_REQUEST)
        self.child = CMID(creator=request, listen_id=self.listener)
        self.child.create_qp(_attr())

    def close(self) -> None:
        for thing in (self.child, self.asking, self.listener, *self.channels):
            thing.close()


def test_a_service_is_found_and_answers_what_comes() -> None:
    with devices() as (first, second):
        service = Service(first, second)
        child, asking = service.child, service.asking
        child.accept(ConnParam())
        param = UDParam(_event(service.channels[0], ce.RDMA_CM_EVENT_ESTABLISHED))
        assert (param.qp_num, param.qkey) == (child.qpn, 0x01234567)
        assert asking.pd is not None
        assert child.pd is not None
        there, here = child.reg_msgs(4096), asking.reg_msgs(4096)
        child.post_recv(there)
        asking.post_recv(here)
        here.write(b"who is it?", 10)
        asking.post_ud_send(here, AH(asking.pd, attr=param.ah_attr), rqpn=param.qp_num, length=10)
        asking.get_send_comp()
        got = child.get_recv_comp()
        assert got is not None
        assert there.read(10, GRH) == b"who is it?"
        answer = AH(child.pd, wc=got, port_num=1, grh=there.buf)
        there.write(b"it is me", 8)
        child.post_ud_send(there, answer, rqpn=got.src_qp, length=8)
        child.get_send_comp()
        asking.get_recv_comp()
        assert here.read(8, GRH) == b"it is me"
        with pytest.raises(PyverbsRDMAError) as refused:
            asking.disconnect()
        assert refused.value.error_code == errno.EINVAL
        service.close()


def test_a_refused_request_is_unreachable() -> None:
    with devices() as (first, second):
        service = Service(first, second)
        service.child.reject(b"not today")
        told = _event(service.channels[0], ce.RDMA_CM_EVENT_UNREACHABLE)
        assert told.private_data.startswith(b"not today")
        assert (UDParam(told).qp_num, UDParam(told).qkey) == (0, 0)
        service.close()


def test_queue_pairs_are_those_of_the_port_space() -> None:
    with devices() as (first, second):
        service = Service(first, second)
        with pytest.raises(PyverbsRDMAError) as refused:
            CMID(creator=CMEventChannel(), port_space=ce.RDMA_PS_IPOIB)
        assert refused.value.error_code == errno.EOPNOTSUPP
        cmid = CMID(creator=service.channels[0], port_space=ce.RDMA_PS_UDP)
        cmid.resolve_addr(AddrInfo(src=ip_of(first), dst=ip_of(second), dst_service=PORT))
        _event(service.channels[0], ce.RDMA_CM_EVENT_ADDR_RESOLVED)
        with pytest.raises(PyverbsRDMAError) as refused:
            cmid.create_qp(_attr(e.IBV_QPT_RC))
        assert refused.value.error_code == errno.EINVAL
        cmid.close()
        service.close()
