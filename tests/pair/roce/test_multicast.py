"""Multicast of datagram queue pairs: who gets a copy, who gets none and why, and what there may be of it."""

from __future__ import annotations

import errno
import random

import pytest

from emulator.roce.nic.counters import Count
from emulator.roce.nic.multicast import MULTICAST_QPN
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.verbs import (
    GRH_BYTES,
    Address,
    Limits,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    VerbsError,
    WcStatus,
)
from emulator.roce.wire.extended import Deth
from emulator.roce.wire.flow import flow_of, gid_of
from emulator.roce.wire.malformed import Cause
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.memory_network import MemoryNetwork
from tests.support.roce.packets import encode_packet
from tests.support.roce.posts import QKEY, Post
from tests.support.roce.weather import CALM, Weather

GROUP = "239.1.2.3"
OTHER_GROUP = "239.1.2.4"
ROOM = GRH_BYTES + 256


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(CALM)


def joined(network: MemoryNetwork, address: str, *, beside: Post | None = None, group: str = GROUP) -> Post:
    """A queue pair that is attached to the group and has a receive posted."""
    post = Post(network, address, beside=beside)
    post.nic.attach_mcast(post.qp, gid_of(group))
    post.receive(ROOM)
    return post


def payload(post: Post, size: int = 256) -> bytes:
    return bytes(post.memory.view[0x8000 + GRH_BYTES : 0x8000 + GRH_BYTES + size])


@pytest.mark.parametrize(
    ("addresses", "group"),
    [(("10.0.0.1", "10.0.0.2", "10.0.0.3"), GROUP), (("fd00::1", "fd00::2", "fd00::3"), "ff0e::77")],
)
def test_every_attached_queue_pair_gets_one_copy(
    network: MemoryNetwork, addresses: tuple[str, str, str], group: str
) -> None:
    sender = Post(network, addresses[0])
    members = [joined(network, address, group=group) for address in addresses[1:]]
    members.append(joined(network, addresses[2], beside=members[1], group=group))
    sender.memory.view[:256] = bytes(range(256))
    sender.send_to_group(group, 256)
    network.run()
    assert [done.status for done in sender.polled()] == [WcStatus.SUCCESS]
    for member in members:
        (done,) = member.polled()
        assert (done.status, done.byte_len, done.src_qp, done.source) == (
            WcStatus.SUCCESS, ROOM, sender.qp.number, addresses[0],
        )  # fmt: skip
        assert payload(member) == bytes(range(256))
        header = bytes(member.memory.view[0x8000 : 0x8000 + GRH_BYTES])
        assert header.endswith(gid_of(group)[-4:]), "the header names the group that it was sent to"


def test_the_senders_own_queue_pairs_get_their_copy(network: MemoryNetwork) -> None:
    sender = joined(network, "10.0.0.1")
    beside = joined(network, "10.0.0.1", beside=sender)
    sender.send_to_group(GROUP, 8)
    network.run()
    assert len(sender.polled()) == 2, "the send and the receive"
    assert len(beside.polled()) == 1


def test_who_has_left_or_never_joined_gets_nothing(network: MemoryNetwork) -> None:
    sender = Post(network, "10.0.0.1")
    stranger = Post(network, "10.0.0.2")
    left, other = joined(network, "10.0.0.3"), joined(network, "10.0.0.4")
    stays = joined(network, "10.0.0.4", beside=other)
    stranger.receive(ROOM)
    for gone in (left, other):
        gone.nic.detach_mcast(gone.qp, gid_of(GROUP))
    sender.send_to_group(GROUP, 8)
    network.run()
    assert not any(post.polled() for post in (stranger, left, other))
    assert len(stays.polled()) == 1
    assert not left.nic.counters[Count.PACKETS_IN], "nothing is sent to a device without members"


def test_who_cannot_take_a_copy_loses_it_alone_and_it_is_counted(network: MemoryNetwork) -> None:
    sender, fine = Post(network, "10.0.0.1"), joined(network, "10.0.0.2")
    full = Post(network, "10.0.0.2", beside=fine)
    strange, idle = joined(network, "10.0.0.2", beside=fine), joined(network, "10.0.0.2", beside=fine)
    fine.nic.attach_mcast(full.qp, gid_of(GROUP))
    strange.qp.modify(QpAttributes(state=QpState.RTS, qkey=QKEY + 1), QpAttr.STATE | QpAttr.QKEY)
    idle.qp.modify(QpAttributes(state=QpState.RESET), QpAttr.STATE)
    sender.send_to_group(GROUP, 8)
    network.run()
    assert [done.status for done in fine.polled()] == [WcStatus.SUCCESS]
    assert not any(post.polled() for post in (full, strange, idle))
    counters = fine.nic.counters
    assert (counters[Count.NO_RECEIVE], counters[Count.WRONG_QKEY], counters[Count.NOT_READY]) == (1, 1, 1)
    assert counters[Count.PACKETS_IN] == 1


def _packet(opcode: Opcode, queue_pair: int, size: int = 8, p_key: int = 0xFFFF) -> Packet:
    deth = Deth(QKEY, 7) if opcode is Opcode.UD_SEND_ONLY else None
    return Packet(opcode, queue_pair, 1, bytes(size), p_key=p_key, deth=deth)


@pytest.mark.parametrize(
    ("packet", "group", "cause"),
    [
        (_packet(Opcode.UD_SEND_ONLY, 0x123456), GROUP, Count.NO_QUEUE_PAIR),
        (_packet(Opcode.UD_SEND_ONLY, MULTICAST_QPN), OTHER_GROUP, Count.NO_GROUP),
        (_packet(Opcode.SEND_ONLY, MULTICAST_QPN), GROUP, Count.WRONG_SERVICE),
        (_packet(Opcode.UD_SEND_ONLY, MULTICAST_QPN, p_key=0x8001), GROUP, Count.WRONG_PKEY),
    ],
)
def test_packets_that_are_no_good_for_a_group_are_counted(
    network: MemoryNetwork, packet: Packet, group: str, cause: str
) -> None:
    member = joined(network, "10.0.0.2")
    data = encode_packet(packet, flow_of("10.0.0.1", group, 4791))
    member.nic.receive(memoryview(data), len(data), Address("10.0.0.1", 4791), 0.0, group)
    assert member.nic.counters[cause] == 1
    assert not member.polled()


def test_the_icrc_covers_the_address_of_the_group(network: MemoryNetwork) -> None:
    member = joined(network, "10.0.0.2")
    packet = _packet(Opcode.UD_SEND_ONLY, MULTICAST_QPN)
    for destination in ("10.0.0.2", OTHER_GROUP):
        data = encode_packet(packet, flow_of("10.0.0.1", destination, 4791))
        member.nic.receive(memoryview(data), len(data), Address("10.0.0.1", 4791), 0.0, GROUP)
    assert member.nic.counters[Cause.ICRC] == 2
    short = memoryview(bytes(7))
    member.nic.receive(short, 7, Address("10.0.0.1", 4791), 0.0, GROUP)
    member.nic.receive(short, 7, Address("fd00::1", 4791), 0.0, GROUP)
    assert member.nic.counters[Cause.SHORT] == 1
    assert member.nic.counters[Count.STRANGE_SOURCE] == 1
    assert not member.polled()


def test_a_packet_for_the_device_alone_reaches_no_group(network: MemoryNetwork) -> None:
    sender, member = Post(network, "10.0.0.1"), joined(network, "10.0.0.2")
    sender.send_to_group("10.0.0.2", 8)
    network.run()
    assert member.nic.counters[Count.NO_QUEUE_PAIR] == 1
    assert not member.polled()


def test_a_group_is_left_with_its_last_member() -> None:
    nic = Nic("10.0.0.1", rng=random.Random(1))
    said: list[str] = []
    nic.groups.on_join, nic.groups.on_leave = (
        lambda group: said.append(f"join {group}"), lambda group: said.append(f"leave {group}"),
    )  # fmt: skip
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    first, second = (nic.create_qp(pd, QpType.UD, cq, cq, QpCapabilities(1, 1, 1, 1)) for _ in range(2))
    for qp in (first, second, first):
        nic.attach_mcast(qp, gid_of(GROUP))
    assert said == [f"join {GROUP}"]
    with pytest.raises(VerbsError) as refused:
        nic.destroy_qp(first)
    assert refused.value.errno == errno.EBUSY
    nic.detach_mcast(first, gid_of(GROUP))
    nic.destroy_qp(first)
    with pytest.raises(VerbsError) as refused:
        nic.attach_mcast(first, gid_of(GROUP))
    assert refused.value.errno == errno.EINVAL
    assert said == [f"join {GROUP}"]
    nic.close()
    assert said == [f"join {GROUP}", f"leave {GROUP}"]


def test_what_is_no_group_or_no_datagram_queue_pair_is_refused() -> None:
    nic = Nic("10.0.0.1", rng=random.Random(1), limits=Limits(max_mcast_grp=1, max_mcast_qp_attach=1))
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    caps = QpCapabilities(1, 1, 1, 1)
    qp, more, connected = (
        nic.create_qp(pd, kind, cq, cq, caps) for kind in (QpType.UD, QpType.UD, QpType.RC)
    )
    for queue_pair, gid, number in (
        (qp, gid_of("10.0.0.2"), errno.EINVAL),
        (qp, gid_of("ff0e::1"), errno.EINVAL),
        (qp, bytes(15), errno.EINVAL),
        (connected, gid_of(GROUP), errno.EINVAL),
    ):
        with pytest.raises(VerbsError) as refused:
            nic.attach_mcast(queue_pair, gid)
        assert refused.value.errno == number
    with pytest.raises(VerbsError) as refused:
        nic.detach_mcast(qp, gid_of(GROUP))
    assert refused.value.errno == errno.EINVAL
    nic.attach_mcast(qp, gid_of(GROUP))
    for queue_pair, gid in ((more, gid_of(GROUP)), (qp, gid_of(OTHER_GROUP))):
        with pytest.raises(VerbsError) as refused:
            nic.attach_mcast(queue_pair, gid)
        assert refused.value.errno == errno.ENOMEM


def test_a_group_that_the_link_cannot_join_has_no_member() -> None:
    def refuse(group: str) -> None:
        raise OSError(errno.ENOBUFS, "none left")

    nic = Nic("10.0.0.1", rng=random.Random(1))
    nic.groups.on_join = refuse
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    qp = nic.create_qp(pd, QpType.UD, cq, cq, QpCapabilities(1, 1, 1, 1))
    with pytest.raises(VerbsError) as refused:
        nic.attach_mcast(qp, gid_of(GROUP))
    assert refused.value.errno == errno.ENOBUFS
    assert not nic.groups.members(GROUP)


def test_no_queue_pair_gets_the_number_that_stands_for_groups() -> None:
    nic = Nic("10.0.0.1", rng=random.Random(1))
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    for _ in range(300):
        nic._next_qpn = MULTICAST_QPN - 1 - nic._rng.randrange(64)
        qp = nic.create_qp(pd, QpType.UD, cq, cq, QpCapabilities(1, 1, 1, 1))
        assert qp.number != MULTICAST_QPN
        nic.destroy_qp(qp)


def test_each_copy_has_its_own_fate() -> None:
    network = MemoryNetwork(Weather(loss=0.5), random.Random(7))
    sender, members = Post(network, "10.0.0.1"), [joined(network, f"10.0.0.{i}") for i in range(2, 34)]
    sender.send_to_group(GROUP, 8)
    network.run()
    got = sum(len(member.polled()) for member in members)
    assert 0 < got < len(members)
    network.detach("10.0.0.2")
    network.partition("10.0.0.1", "10.0.0.3")
    before = network.counters.partitioned
    sender.send_to_group(GROUP, 8)
    network.run()
    assert network.counters.partitioned == before + 1
    assert network.counters.nobody == 0


def test_hostile_bytes_for_a_group_are_dropped_and_counted(network: MemoryNetwork) -> None:
    member = joined(network, "10.0.0.2")
    flow = flow_of("10.0.0.1", GROUP, 4791)
    good = encode_packet(_packet(Opcode.UD_SEND_ONLY, MULTICAST_QPN, 64), flow)
    chance = random.Random(35)
    counters = member.nic.counters
    tries = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        del data[chance.randrange(1, len(data) + 1) if chance.random() < 0.3 else len(data) :]
        # Byte 4 of the BTH is outside of the ICRC: a packet that is wrong there alone is as good as this one.
        if bytes(data[:4] + data[5:]) != good[:4] + good[5:]:
            tries += 1
            member.nic.receive(
                memoryview(data), chance.randrange(1, 200), Address("10.0.0.1", 4791), 0.0, GROUP
            )
    assert tries > 2000
    assert not member.polled()
    dropped = sum(counters.values()) - counters[Count.PACKETS_IN]
    assert dropped == counters[Count.PACKETS_IN] >= tries
