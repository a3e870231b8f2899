"""Multicast at the UDP port of an emulated NIC: groups that are joined and left on the loopback device."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

import pytest

from emulator.roce.link.raw import RawCheckedLink
from emulator.roce.link.tap import TappedLink
from emulator.roce.link.udp import UdpLink
from emulator.roce.nic.verbs import ROCE_PORT, Address, Burst
from tests.support.roce.devices import some_ip


def some_group(last: int = 1) -> str:
    """A group that no other test of this machine uses now."""
    return f"239.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}.{last}"


def to_group(group: str, data: bytes) -> Burst:
    return Burst(memoryview(data), len(data), Address(group, ROCE_PORT))


def taken(link: UdpLink) -> tuple[bytes, Address, str]:
    """The next datagram, waited for as the runtime does."""
    assert select.select([link.fileno(), link.groups_fileno()], [], [], 10)[0]
    received = link.receive()
    assert received is not None
    return bytes(received.data), received.source, received.group


def test_each_member_gets_a_copy_and_the_sender_too(links: tuple[UdpLink, UdpLink]) -> None:
    first = links[0]
    group = some_group()
    for link in links:
        link.join(group)
        link.join(group)
    first.send(to_group(group, b"to all"))
    for link in links:
        assert taken(link) == (b"to all", first.address, group)
        assert link.receive() is None
        assert (link.counters.bursts_received, link.counters.bytes_received) == (1, 6)


def test_groups_are_told_apart_and_left(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    one, other = some_group(1), some_group(2)
    second.join(one)
    second.join(other)
    first.send(to_group(one, b"one"))
    first.send(to_group(other, b"other"))
    assert {taken(second)[::2] for _ in range(2)} == {(b"one", one), (b"other", other)}
    second.leave(one)
    second.leave(one)
    first.send(to_group(one, b"one again"))
    first.send(to_group(other, b"other again"))
    assert taken(second)[::2] == (b"other again", other)
    assert second.receive() is None
    assert first.receive() is None


def test_neither_a_group_nor_the_own_address_waits_for_the_other(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    group = some_group()
    second.join(group)
    for number in range(8):
        first.send(to_group(group, b"g%d" % number))
        first.send(Burst(memoryview(b"own%d" % number), 4, second.address))
    came = []
    while len(came) < 16:
        received = second.pending()
        came.append((bytes(received.data), received.group) if received else taken(second)[::2])
    assert {where for _, where in came[:8]} == {"", group}
    assert [data for data, where in came if where] == [b"g%d" % number for number in range(8)]
    assert [data for data, where in came if not where] == [b"own%d" % number for number in range(8)]


def test_a_capture_shows_the_group(tmp_path: Path) -> None:
    group = some_group()
    link = TappedLink(UdpLink(some_ip()), tmp_path / "groups.pcap")
    try:
        link.join(group)
        link.send(to_group(group, b"captured"))
        assert select.select([link.groups_fileno()], [], [], 10)[0]
        received = link.receive()
        assert received is not None
        assert received.group == group
        link.leave(group)
    finally:
        link.close()
    packed = bytes(map(int, group.split(".")))
    assert (tmp_path / "groups.pcap").read_bytes().count(packed) == 2, "sent and received"


def test_where_no_group_can_be_joined_it_is_refused() -> None:
    link = UdpLink("::1")
    try:
        with pytest.raises(OSError, match="not supported") as refused:
            link.join("ff02::77")
        assert refused.value.errno == errno.EOPNOTSUPP
    finally:
        link.close()
    if os.geteuid() == 0:
        raw = RawCheckedLink(some_ip())
        try:
            assert raw.groups_fileno() == -1
            with pytest.raises(OSError, match="not supported") as refused:
                raw.join(some_group())
            assert refused.value.errno == errno.EOPNOTSUPP
        finally:
            raw.close()


def test_what_the_system_refuses_leaves_nothing_behind(links: tuple[UdpLink, UdpLink]) -> None:
    link = links[0]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"assign|argument"):
        link.join("192.0.2.77")
    assert len(os.listdir("/proc/self/fd")) == before
    link.join(some_group())
    link.close()
    link.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_forked_child_takes_no_group_from_its_parent(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    group = some_group()
    second.join(group)
    child = os.fork()
    if not child:
        second.leave(group)
        second.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.send(to_group(group, b"still here"))
    assert taken(second)[0] == b"still here"


def test_a_group_is_left_though_a_child_still_has_its_socket(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    group = some_group()
    second.join(group)
    until, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    try:
        second.leave(group)
        second.join(some_group(2))
        first.send(to_group(group, b"nobody's"))
        first.send(to_group(some_group(2), b"of the other"))
        assert taken(second)[::2] == (b"of the other", some_group(2))
        assert second.receive() is None
        assert not select.select([second.groups_fileno()], [], [], 0)[0], "nothing is left to wake up for"
    finally:
        os.close(until)
        os.close(end)
        os.waitpid(child, 0)
