"""The ECN field of IP headers at real sockets: what a link sends with, and what it says of what arrives."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from emulator.roce.link.base import Received
from emulator.roce.link.messages import SOL_UDP, UDP_SEGMENT
from emulator.roce.link.raw import RawCheckedLink
from emulator.roce.link.udp import IP_MTU_DISCOVER, IP_RECVTOS, IPV6_RECVTCLASS, PMTUDISC_DO, UdpLink
from emulator.roce.nic.congestion import CongestionSettings
from emulator.roce.nic.counters import Count
from emulator.roce.nic.verbs import Burst
from emulator.roce.runtime.device import Device
from emulator.roce.wire.cnp import Cnp
from emulator.roce.wire.flow import flow_of
from tests.support.needs import NO_RAW_SOCKETS
from tests.support.roce.devices import some_ip

SEGMENT = 1040
NOT_CAPABLE, CAPABLE, MARKED = 0, 2, 3


@pytest.fixture(params=["ipv4", "ipv6"])
def link(request: pytest.FixtureRequest) -> Iterator[UdpLink]:
    ip = some_ip() if request.param == "ipv4" else "::1"
    link = UdpLink(ip, 0, ecn=True)
    yield link
    link.close()


def sender_to(link: UdpLink) -> socket.socket:
    """A plain socket that sends from another address, or port."""
    is_ipv6 = ":" in link.address.ip
    sock = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("::1" if is_ipv6 else some_ip(), 0))
    sock.connect(link.address)
    return sock


def say(sock: socket.socket, field: int) -> None:
    """From now on it sends with this ECN field, as if a switch had marked."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, field)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, field)


def take(link: UdpLink) -> Received:
    received = link.pending()
    if received is None:
        assert select.select([link], [], [], 10)[0]
        received = link.receive()
    assert received is not None
    return received


@pytest.mark.parametrize("segments", [1, 8])
def test_a_link_says_what_was_marked(link: UdpLink, segments: int) -> None:
    control = [(SOL_UDP, UDP_SEGMENT, SEGMENT.to_bytes(2, "little"))] if segments > 1 else []
    with sender_to(link) as sock:
        for field in (NOT_CAPABLE, CAPABLE, MARKED, 1, MARKED):
            say(sock, field)
            sock.sendmsg([bytes(segments * SEGMENT)], control)
            received = take(link)
            assert len(received.data) == segments * SEGMENT
            assert received.segment_size == SEGMENT
            assert received.marked == (field == MARKED)


def test_marked_and_unmarked_bursts_are_not_given_as_one(link: UdpLink) -> None:
    """Full bursts of one sender lie side by side, and are one where nothing tells them apart."""
    whole = 62 * SEGMENT
    control = [(SOL_UDP, UDP_SEGMENT, SEGMENT.to_bytes(2, "little"))]
    with sender_to(link) as sock:
        for _ in range(2):
            for field in (CAPABLE, MARKED, MARKED):
                say(sock, field)
                sock.sendmsg([bytes(whole)], control)
            marks = []
            while sum(size for size, _ in marks) < 3 * whole:
                received = take(link)
                marks.append((len(received.data), received.marked))
            assert sum(size for size, marked in marks if marked) == 2 * whole


def test_a_link_sends_what_may_be_marked(link: UdpLink) -> None:
    with sender_to(link) as sock:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVTCLASS, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVTOS, 1)
        ip, port = sock.getsockname()[:2]
        link.send(Burst(memoryview(bytearray(b"hello")), 5, link.address._replace(ip=ip, port=port)))
        assert select.select([sock], [], [], 10)[0]
        data, ((_, _, field),), _, _ = sock.recvmsg(100, 100)
        assert (data, field[0] & 3) == (b"hello", CAPABLE)


def test_a_link_that_was_not_told_to_looks_at_nothing() -> None:
    with closing(UdpLink(some_ip(), 0)) as link, sender_to(link) as sock:
        say(sock, MARKED)
        sock.send(bytes(SEGMENT))
        assert not take(link).marked


@pytest.mark.parametrize("field", [CAPABLE, MARKED])
def test_a_raw_socket_sees_marks_too(field: int) -> None:
    try:
        link = RawCheckedLink(some_ip(), ecn=True)
    except PermissionError:
        pytest.skip(NO_RAW_SOCKETS)
    # Unconnected and never in fragments, it sends identification 0, for which the ICRC is made.
    with closing(link), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_DO)
        sock.bind((some_ip(), 0))
        say(sock, field)
        flow = flow_of(sock.getsockname()[0], link.address.ip, sock.getsockname()[1])
        sock.sendto(Cnp(5, 0xFFFF).encode(flow), link.address)
        assert select.select([link], [], [], 10)[0]
        received = link.receive()
        assert received is not None
        assert received.marked == (field == MARKED)


@pytest.mark.parametrize("settings", [None, CongestionSettings(1e9)])
def test_a_device_counts_marks_where_it_controls_congestion(settings: CongestionSettings | None) -> None:
    device = Device("ecn", some_ip(), congestion=settings)
    with closing(device), sender_to_device(device) as sock:
        say(sock, MARKED)
        flow = flow_of(sock.getsockname()[0], device.ip, sock.getsockname()[1])
        sock.send(Cnp(0x123456, 0xFFFF).encode(flow))
        counters = device.nic.counters
        device.drive_until(lambda: counters[Count.PACKETS_IN], device.clock() + 10)
        # For no queue pair: the mark causes nothing, and the notification is for nobody.
        assert counters[Count.CNP_IGNORED] == (settings is not None)
        assert counters["opcode"] == (settings is None)


def sender_to_device(device: Device) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((some_ip(), 0))
    sock.connect(device.link.address)
    return sock
