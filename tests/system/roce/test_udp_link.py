"""The UDP port of an emulated NIC on the loopback device: bursts, what cannot be sent, and its capture."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from emulator.roce.link.base import LinkCounters
from emulator.roce.link.tap import FILE_HEADER, RECORD_HEADER, TappedLink
from emulator.roce.link.udp import MAX_BACKLOG, UdpLink, interface_mtu
from emulator.roce.nic.verbs import ROCE_PORT, Address, Burst
from tests.support.needs import needs_ipv6
from tests.support.roce.devices import some_ip

SEGMENT = 4112


def burst(to: UdpLink, data: bytes, segment_size: int = SEGMENT) -> Burst:
    return Burst(memoryview(data), segment_size, to.address)


def take(link: UdpLink) -> tuple[bytes, int, Address]:
    received = link.pending()
    if received is None:
        assert select.select([link], [], [], 10)[0]
        received = link.receive()
    assert received is not None
    return bytes(received.data), received.segment_size, received.source


def test_a_burst_is_one_call_on_either_side(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    data = os.urandom(14 * SEGMENT + 100)
    first.send(burst(second, data))
    assert take(second) == (data, SEGMENT, first.address)
    assert second.receive() is None
    assert (first.counters.bursts_sent, first.counters.bytes_sent) == (1, len(data))
    assert (second.counters.bursts_received, second.counters.bytes_received) == (1, len(data))


def test_a_descriptor_that_is_no_socket_is_an_error_and_no_endless_loop() -> None:
    link = UdpLink(some_ip())
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(other, link.fileno())
        with pytest.raises(OSError, match="for good") as found:
            link.receive()
        assert found.value.errno == errno.ENOTSOCK
    finally:
        os.close(other)
        link.close()


@pytest.mark.parametrize("size", [1, 20, SEGMENT])
def test_a_single_datagram(links: tuple[UdpLink, UdpLink], size: int) -> None:
    first, second = links
    data = os.urandom(size)
    first.send(burst(second, data))
    received, segment_size, source = take(second)
    assert (received, source) == (data, first.address)
    assert segment_size >= size


def test_without_offload_each_datagram_goes_by_itself(links: tuple[UdpLink, UdpLink]) -> None:
    _, second = links
    plain = UdpLink(some_ip(), offload=False)
    try:
        data = os.urandom(3 * 1000 + 7)
        plain.send(burst(second, data, 1000))
        assert [len(take(second)[0]) for _ in range(4)] == [1000, 1000, 1000, 7]
        assert plain.counters.bursts_sent == 4
        assert not plain.numbers_segments(second.address.ip)
    finally:
        plain.close()


def test_a_peer_that_is_not_there_is_counted_and_nothing_else(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    nobody = Address(some_ip())
    for _ in range(3):
        first.send(Burst(memoryview(b"x"), 1, nobody))
        assert select.select([first], [], [], 10)[0]
        assert first.receive() is None
    assert first.counters.unreachable == 3
    # What is sent next is not lost for what an earlier one met.
    first.send(Burst(memoryview(b"x"), 1, nobody))
    first.send(burst(second, b"hello"))
    assert take(second)[0] == b"hello"
    assert first.receive() is None
    assert first.counters.unreachable == 4
    assert not select.select([first], [], [], 0)[0]


def test_a_network_that_is_not_there_is_counted(links: tuple[UdpLink, UdpLink]) -> None:
    first, _ = links
    first.send(Burst(memoryview(b"x"), 1, Address("203.0.113.1")))
    assert first.counters.unreachable + first.counters.refused == 1


def test_what_is_too_large_for_a_datagram_is_counted(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    first.send(burst(second, bytes(65_508), 65_508))
    assert first.counters.refused == 1
    assert second.receive() is None


class _Refusing:
    """A socket whose sends fail in a chosen way, and for the rest is a real one."""

    def __init__(self, inner: socket.socket, number: int, only_offload: bool) -> None:
        self.inner, self.number, self.only_offload = inner, number, only_offload

    def sendmsg(self, *arguments: object) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def sendto(self, *arguments: object) -> int:
        if not self.only_offload:
            raise OSError(self.number, os.strerror(self.number))
        return self.inner.sendto(*arguments)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EMSGSIZE])
def test_a_destination_that_refuses_the_offload_gets_single_datagrams(
    links: tuple[UdpLink, UdpLink], number: int
) -> None:
    first, second = links
    told: list[str] = []
    first.on_no_offload = told.append
    inner = first._socket
    first._socket = _Refusing(inner, number, only_offload=True)  # type: ignore[assignment]
    try:
        first.send(burst(second, bytes(3000), 1000))
        assert second.receive() is None
        assert told == [second.address.ip]
        assert first.counters.offload_refused == 1
        first.send(burst(second, bytes(3000), 1000))
        assert [len(take(second)[0]) for _ in range(3)] == [1000] * 3
    finally:
        first._socket = inner


def test_what_the_socket_does_not_take_waits_and_the_wait_is_bounded(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    inner = first._socket
    first._socket = _Refusing(inner, errno.EAGAIN, only_offload=False)  # type: ignore[assignment]
    for number in range(MAX_BACKLOG + 5):
        first.send(burst(second, bytes([number % 256]) * 3000, 1000))
    assert (first.backlog, first.counters.backlog_full) == (MAX_BACKLOG, 5)
    first.flush()
    assert first.backlog == MAX_BACKLOG
    first._socket = inner
    got = []
    while first.backlog:
        first.flush()
        while (received := second.receive()) is not None:
            data, size = received.data, received.segment_size
            got += [(data[at], len(data[at : at + size])) for at in range(0, len(data), size)]
    assert got == [(number % 256, 1000) for number in range(MAX_BACKLOG) for _ in range(3)]
    assert first.counters.waited == 1


def test_numbering_of_segments_follows_the_offload(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    # From loopback to loopback a burst stays one packet; elsewhere somebody may cut it.
    assert not first.numbers_segments(second.address.ip)
    everywhere = UdpLink("0.0.0.0", 0)
    try:
        assert everywhere.numbers_segments("192.0.2.1")
        everywhere._without_offload("192.0.2.1")
        assert not everywhere.numbers_segments("192.0.2.1")
        assert everywhere.numbers_segments("192.0.2.2")
    finally:
        everywhere.close()


@needs_ipv6
def test_ipv6_works_where_the_machine_has_it() -> None:
    first, second = UdpLink("::1", 0), UdpLink("::1", 0)
    try:
        first.send(Burst(memoryview(bytes(2500)), 1000, second.address))
        assert take(second) == (bytes(2500), 1000, first.address)
        assert not first.numbers_segments("2001:db8::1")
    finally:
        first.close()
        second.close()


def test_a_port_can_be_had_once_and_closed_twice() -> None:
    ip = some_ip()
    link = UdpLink(ip)
    assert link.address == Address(ip, ROCE_PORT)
    assert link.receive_buffer_bytes > 100_000
    assert ip in repr(link)
    with pytest.raises(OSError, match="in use"):
        UdpLink(ip)
    link.close()
    link.close()
    assert link.fileno() == -1
    link.send(Burst(memoryview(b"x"), 1, Address(ip)))
    assert link.receive() is None
    assert link.counters == LinkCounters()


def test_the_mtu_of_an_interface() -> None:
    mtu = interface_mtu("127.0.0.77")
    assert mtu is not None
    assert mtu >= 1500
    assert interface_mtu("203.0.113.1") is None
    assert interface_mtu("::1") is None


def test_a_tap_captures_both_ways_and_passes_everything_on(
    links: tuple[UdpLink, UdpLink], tmp_path: Path
) -> None:
    first, second = links
    capture = tmp_path / "tap.pcap"
    tapped = TappedLink(first, capture)
    tapped.send(burst(second, bytes(2500), 1000))
    assert take(second)[1] == 1000
    second.send(Burst(memoryview(b"answer"), 6, tapped.address))
    assert select.select([tapped], [], [], 10)[0]
    received = tapped.receive()
    assert received is not None
    assert received.data == b"answer"
    assert tapped.receive() is None
    tapped.flush()
    assert (tapped.backlog, tapped.counters) == (0, first.counters)
    assert not tapped.numbers_segments(second.address.ip)
    tapped.close()
    assert tapped.fileno() == -1
    # A file header, then four packets: a record header and an IPv4 and a UDP header before each payload.
    assert capture.stat().st_size == 24 + 4 * (16 + 28) + 2500 + 6


def test_a_capture_that_cannot_be_written_ends_and_packets_go_on(
    links: tuple[UdpLink, UdpLink], expects_log: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    expects_log("the capture /dev/full ends here, packets go on: No space left on device")
    first, second = links
    tapped, packet = TappedLink(first, Path("/dev/full")), bytes(4096)
    for _ in range(300):  # more than waits to be written, twice
        tapped.send(burst(second, packet))
        assert take(second)[0] == packet
    tapped.close()
    assert tapped.fileno() == -1
    assert len(caplog.records) == 1


def test_a_full_capture_says_where_it_ends_and_how_many_packets_it_leaves_out(
    links: tuple[UdpLink, UdpLink],
    tmp_path: Path,
    expects_log: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture = tmp_path / "tap.pcap"
    expects_log(
        f"the capture {capture} is full and ends here, packets go on",
        f"the capture {capture} leaves 3 later packets out",
    )
    room = FILE_HEADER.size + 2 * (RECORD_HEADER.size + 28 + 100)
    tapped = TappedLink(links[0], capture, max_bytes=room)
    for _ in range(5):
        tapped.send(burst(links[1], bytes(100)))
        assert take(links[1])[0] == bytes(100)
    tapped.close()
    assert capture.stat().st_size == room
    assert len(caplog.records) == 2


def test_a_capture_that_cannot_be_completed_says_so(
    links: tuple[UdpLink, UdpLink], expects_log: Callable[..., None]
) -> None:
    expects_log("the capture /dev/full ends here")
    tapped = TappedLink(links[0], Path("/dev/full"))
    tapped.send(burst(links[1], b"one"))
    tapped.close()
    assert tapped.fileno() == -1
