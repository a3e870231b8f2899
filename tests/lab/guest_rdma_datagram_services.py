"""Services of datagrams (RDMA_PS_UDP): the kernel's rdma_cm on rxe and the emulator, either one asking."""

from __future__ import annotations

import importlib
import os
import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nvmeof.transport.verbs_provider import load_verbs
from tests.support.lab.rdma_cable import KERNEL, OURS, Cable, far_device
from tests.support.waiting import wait_until

PORT = "7475"
GRH = 40
SECONDS = 60.0


def _descriptors() -> set[int]:
    """Those of this process, without the one that looks."""
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


class Side:
    """rdma_cm of one package, at one address, with a channel whose descriptor is found as a new one."""

    def __init__(self, package: str, address: str) -> None:
        load_verbs(package)
        self.m = SimpleNamespace(
            **{name: importlib.import_module(f"{package}.{name}")
               for name in ("addr", "cmid", "cm_enums", "enums", "qp")}
        )  # fmt: skip
        self.address = address
        before = _descriptors()
        self.channel = self.m.cmid.CMEventChannel()
        (new,) = _descriptors() - before
        self.fd = new

    def cmid(self) -> Any:
        return self.m.cmid.CMID(creator=self.channel, port_space=self.m.cm_enums.RDMA_PS_UDP)

    def info(self, **where: str) -> Any:
        return self.m.cmid.AddrInfo(port_space=self.m.cm_enums.RDMA_PS_UDP, **where)

    def event(self, wanted: str) -> Any:
        assert select.select([self.fd], [], [], SECONDS)[0], f"no {wanted}"
        event = self.m.cmid.CMEvent(self.channel)
        assert event.event_type == getattr(self.m.cm_enums, f"RDMA_CM_EVENT_{wanted}"), event.event_str()
        return event

    def attr(self) -> Any:
        return self.m.qp.QPInitAttr(
            qp_type=self.m.enums.IBV_QPT_UD, cap=self.m.qp.QPCap(max_recv_wr=4, max_send_wr=4)
        )


@pytest.mark.parametrize("who", ["kernel-asks", "we-ask"])
def test_a_service_is_found_and_datagrams_go_both_ways(cable: Cable, who: str) -> None:
    cable.set_mtu(1500)
    with far_device():
        kernel, ours = Side("pyverbs", KERNEL), Side("emulator.roce.pyverbs", OURS)
        asking, serving = (kernel, ours) if who == "kernel-asks" else (ours, kernel)
        listener = serving.cmid()
        passive = serving.m.cm_enums.RAI_PASSIVE
        listener.bind_addr(serving.m.cmid.AddrInfo(
            src=serving.address, src_service=PORT, port_space=serving.m.cm_enums.RDMA_PS_UDP, flags=passive,
        ))  # fmt: skip
        listener.listen(4)
        cmid = asking.cmid()
        cmid.resolve_addr(asking.info(src=asking.address, dst=serving.address, dst_service=PORT))
        asking.event("ADDR_RESOLVED").ack_cm_event()
        cmid.resolve_route()
        asking.event("ROUTE_RESOLVED").ack_cm_event()
        cmid.create_qp(asking.attr())
        cmid.connect(asking.m.cmid.ConnParam())
        request = serving.event("CONNECT_REQUEST")
        child = serving.m.cmid.CMID(creator=request, listen_id=listener)
        request.ack_cm_event()
        child.create_qp(serving.attr())
        child.accept(serving.m.cmid.ConnParam(qp_num=child.qpn))
        established = asking.event("ESTABLISHED")
        param = asking.m.cmid.UDParam(established)
        assert (param.qp_num, param.qkey) == (child.qpn, 0x01234567)
        there, here = child.reg_msgs(2048), cmid.reg_msgs(2048)
        child.post_recv(there)
        cmid.post_recv(here)
        here.write("who is it?", 10)
        ah = asking.m.addr.AH(cmid.pd, attr=param.ah_attr)
        established.ack_cm_event()
        cmid.post_ud_send(here, ah, rqpn=param.qp_num, length=10)
        _within(cmid.get_send_comp)
        got = _within(child.get_recv_comp)
        assert there.read(10, GRH) in (b"who is it?", "who is it?")
        answer = serving.m.addr.AH(child.pd, wc=got, port_num=1, grh=there.buf)
        there.write("it is me", 8)
        child.post_ud_send(there, answer, rqpn=got.src_qp, length=8)
        _within(child.get_send_comp)
        _within(cmid.get_recv_comp)
        assert here.read(8, GRH) in (b"it is me", "it is me")
        for thing in (ah, answer, there, here, child, cmid, listener):
            thing.close()


def _within(call: Any) -> Any:
    """What a call that waits gives, within the time: the package's calls wait without end."""
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(call()), daemon=True)
    waiting.start()
    wait_until(lambda: got, SECONDS, "a completion")
    return got[0]
