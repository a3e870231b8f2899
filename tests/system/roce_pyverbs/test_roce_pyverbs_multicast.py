"""Multicast by pyverbs' names: attached queue pairs, groups of the connection manager, another process."""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import QpCapabilities, QpType
from emulator.roce.pyverbs import cm_enums as ce
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from emulator.roce.pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, JoinMCAttrEx, UDParam
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import QPAttr, QPCap, QPInitAttr
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR
from tests.support.processes import Processes
from tests.support.roce.verbs_pair import SECONDS, Side, devices, ip_of

ROOT = Path(__file__).resolve().parents[3]
MEMBER = ROOT / "tests/support/roce/member_program.py"
GROUP = f"239.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}.200"
GRH = 40
QKEY = 0x1111
MULTICAST = 0xFFFFFF
EXTENDED = ce.RDMA_CM_JOIN_MC_ATTR_ADDRESS | ce.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS


def gid(address: str) -> GID:
    digits = bytes(map(int, address.split("."))).hex()
    return GID(f"0000:0000:0000:0000:0000:ffff:{digits[:4]}:{digits[4:]}")


def _event(channel: CMEventChannel, wanted: int) -> CMEvent:
    assert select.select([channel.fd], [], [], SECONDS)[0], f"no event {wanted}"
    one = CMEvent(channel)
    assert one.event_type == wanted, one.event_str()
    return one


def fill(cmid: CMID) -> None:
    """Take all the groups that the CMID's device has, but for the one of these tests."""
    nic = cmid.opened().nic
    with cmid.opened().turn():
        pd, cq = nic.alloc_pd(), nic.create_cq(1)
        qp = nic.create_qp(pd, QpType.UD, cq, cq, QpCapabilities(1, 1, 1, 1))
        for last in range(nic.limits.max_mcast_grp):
            nic.attach_mcast(qp, gid(f"{GROUP.rpartition('.')[0]}.{last}").raw)


class Member:
    """A CMID of a device with a queue pair and memory, its address resolved, in no group yet."""

    def __init__(self, name: str) -> None:
        self.channel = CMEventChannel()
        self.cmid = CMID(creator=self.channel, port_space=ce.RDMA_PS_UDP)
        self.cmid.resolve_addr(AddrInfo(src=ip_of(name), dst=GROUP))
        _event(self.channel, ce.RDMA_CM_EVENT_ADDR_RESOLVED)
        self.cmid.create_qp(QPInitAttr(e.IBV_QPT_UD, cap=QPCap(max_recv_wr=4, max_send_wr=4)))
        self.memory = self.cmid.reg_msgs(256)
        self.param: UDParam | None = None

    def join(self, attr: JoinMCAttrEx | None = None) -> None:
        if attr is None:
            self.cmid.join_multicast(AddrInfo(src=GROUP))
        else:
            self.cmid.join_multicast(mc_attr=attr)
        self.param = UDParam(_event(self.channel, ce.RDMA_CM_EVENT_MULTICAST_JOIN))

    def send(self, data: bytes) -> None:
        assert self.param is not None
        assert self.cmid.pd is not None
        self.memory.write(data, len(data))
        with AH(self.cmid.pd, attr=self.param.ah_attr) as way:
            self.cmid.post_ud_send(self.memory, way, rqpn=self.param.qp_num, length=len(data))
            self.cmid.get_send_comp()

    def received(self, length: int) -> bytes:
        done = self.cmid.get_recv_comp()
        assert done is not None
        assert done.byte_len == length + GRH
        return bytes(self.memory.read(length, GRH))

    def close(self) -> None:
        self.cmid.close()
        self.channel.close()


def _datagrams(side: Side) -> Side:
    attr = QPAttr(port_num=1)
    attr.qkey = QKEY
    side.qp.to_rts(attr)
    return side


def _completed(side: Side, count: int) -> list[object]:
    side.context.drive_until(lambda: len(side.cq.native) >= count, time.monotonic() + SECONDS)
    return list(side.cq.poll(count)[1])


def test_an_attached_queue_pair_receives_what_is_sent_to_its_group() -> None:
    with devices() as (first, second), Context(name=first) as here, Context(name=second) as there:
        assert here.query_device().max_mcast_grp == 64
        assert here.query_device().max_mcast_qp_attach == 64
        sender, member = (_datagrams(Side(context, kind=e.IBV_QPT_UD)) for context in (here, there))
        member.qp.attach_mcast(gid(GROUP), 0)
        member.qp.post_recv(RecvWR(1, 1, [SGE(member.mr.buf, 1024, member.mr.lkey)]))
        sender.mr.write(b"to the group", 12)
        wr = SendWR(2, e.IBV_WR_SEND, 1, 0, [SGE(sender.mr.buf, 12, sender.mr.lkey)])
        route = GlobalRoute(dgid=gid(GROUP), hop_limit=1)
        wr.set_wr_ud(AH(sender.pd, attr=AHAttr(is_global=1, port_num=1, gr=route)), MULTICAST, QKEY)
        sender.qp.post_send(wr)
        assert len(_completed(sender, 1)) == 1
        assert len(_completed(member, 1)) == 1
        assert member.mr.read(12, GRH) == b"to the group"
        member.qp.detach_mcast(str(gid(GROUP)))
        with pytest.raises(PyverbsRDMAError) as refused:
            member.qp.detach_mcast(gid(GROUP))
        assert refused.value.error_code == errno.EINVAL


def test_a_closed_queue_pair_has_left_its_groups() -> None:
    with devices(1) as (name,), Context(name=name) as context:
        side = _datagrams(Side(context, kind=e.IBV_QPT_UD))
        side.qp.attach_mcast(gid(GROUP))
        nic = context.device.nic
        assert nic.groups.members(GROUP)
        side.qp.close()
        assert not nic.groups.members(GROUP)
        connected = Side(context)
        with pytest.raises(PyverbsRDMAError) as refused:
            connected.qp.attach_mcast(gid(GROUP))
        assert refused.value.error_code == errno.EINVAL


def test_who_joins_to_send_gets_nothing_and_the_others_a_copy_each() -> None:
    with devices(3) as names:
        sender, *members = (Member(name) for name in names)
        group = AddrInfo(src=GROUP)
        sender.join(JoinMCAttrEx(group, EXTENDED, ce.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER))
        for member in members:
            member.join(JoinMCAttrEx(group, EXTENDED, ce.RDMA_MC_JOIN_FLAG_FULLMEMBER))
            member.cmid.post_recv(member.memory)
        assert sender.param is not None
        assert (sender.param.qp_num, sender.param.qkey) == (MULTICAST, 0x01234567)
        sender.cmid.post_recv(sender.memory)
        sender.send(b"news")
        assert [member.received(4) for member in members] == [b"news", b"news"]
        nic = sender.cmid.opened().nic
        assert not nic.groups.members(GROUP)
        assert nic.counters[Count.PACKETS_IN] == 0
        for one in (sender, *members):
            one.cmid.leave_multicast(group)
            with pytest.raises(PyverbsRDMAError) as refused:
                one.cmid.leave_multicast(group)
            assert refused.value.error_code == errno.EADDRNOTAVAIL
            one.close()


def test_what_the_channel_has_of_a_group_goes_when_it_is_left() -> None:
    with devices(1) as (name,):
        member = Member(name)
        member.cmid.join_multicast(AddrInfo(src=GROUP))
        assert len(member.channel) == 1
        member.cmid.leave_multicast(AddrInfo(src=GROUP))
        assert len(member.channel) == 0
        member.close()


def test_a_group_that_has_no_room_is_an_error_event() -> None:
    with devices(1) as (name,):
        member = Member(name)
        fill(member.cmid)
        member.cmid.join_multicast(AddrInfo(src=GROUP))
        told = _event(member.channel, ce.RDMA_CM_EVENT_MULTICAST_ERROR)
        assert (told.status, told.group) == (-errno.ENOMEM, GROUP)
        assert UDParam(told).qp_num == 0
        member.close()


def test_joins_that_make_no_sense_are_refused() -> None:
    with devices(1) as (name,):
        member = Member(name)
        group = AddrInfo(src=GROUP)
        for attr, number in (
            (JoinMCAttrEx(group, EXTENDED | 4, 0), errno.EOPNOTSUPP),
            (JoinMCAttrEx(group, ce.RDMA_CM_JOIN_MC_ATTR_ADDRESS, 0), errno.EINVAL),
            (JoinMCAttrEx(group, EXTENDED, 2), errno.EINVAL),
            (JoinMCAttrEx(AddrInfo(src=ip_of(name)), EXTENDED, 0), errno.EINVAL),
            (JoinMCAttrEx(AddrInfo(dst=GROUP), EXTENDED, 0), errno.EINVAL),
        ):
            with pytest.raises(PyverbsRDMAError) as refused:
                member.cmid.join_multicast(mc_attr=attr)
            assert refused.value.error_code == number
        with pytest.raises(PyverbsUserError):
            member.cmid.join_multicast()
        member.close()


def test_a_synchronous_id_joins_without_a_channel() -> None:
    with devices(1) as (name,):
        info = AddrInfo(src=ip_of(name), dst=GROUP, port_space=ce.RDMA_PS_UDP)
        cmid = CMID(creator=info, qp_init_attr=QPInitAttr(e.IBV_QPT_UD, cap=QPCap(max_recv_wr=1)))
        cmid.join_multicast(AddrInfo(src=GROUP))
        assert cmid.opened().nic.groups.members(GROUP)
        cmid.leave_multicast(AddrInfo(src=GROUP))
        fill(cmid)
        with pytest.raises(PyverbsRDMAError) as refused:
            cmid.join_multicast(AddrInfo(src=GROUP))
        assert refused.value.error_code == errno.ENOMEM
        cmid.close()


def test_a_member_in_another_process_gets_its_copy_until_it_leaves(processes: Processes) -> None:
    with devices(2) as (name, other):
        there = ip_of(other)
        peer = processes.python(MEMBER, there, GROUP, environment={"PYTHONPATH": str(ROOT)})
        number = int(peer.wait_for_line("ready").split()[1])
        here = Member(name)
        here.join()
        for word in (b"hello", b"leave"):
            here.cmid.post_recv(here.memory)
            here.send(word)
            assert here.received(len(word)) == word, "the sender's own copy"
            peer.wait_for_line(f"got {word.decode()}")
        peer.wait_for_line("left")
        here.send(b"unheard")
        assert here.cmid.pd is not None
        route = GlobalRoute(dgid=gid(there), hop_limit=64)
        here.memory.write(b"end", 3)
        way = AH(here.cmid.pd, attr=AHAttr(is_global=1, port_num=1, gr=route))
        here.cmid.post_ud_send(here.memory, way, rqpn=number, length=3)
        peer.wait_for_line("got end")
        assert "unheard" not in peer.output
        here.close()
