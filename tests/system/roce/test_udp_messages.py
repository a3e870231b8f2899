"""Several bursts by one call of the socket: `Inbox` and `Outbox` in a `UdpLink`."""

from __future__ import annotations

import errno
import os
import select
import socket

import pytest

from emulator.roce.link.messages import Outbox, address_in, name_of
from emulator.roce.link.udp import MERGED_BURSTS, UdpLink
from emulator.roce.nic.verbs import Address, Burst
from tests.support.roce.devices import some_ip

SEGMENT = 4112
WHOLE = 15 * SEGMENT
"""Bytes of the longest burst of such segments."""


def rest(link: UdpLink) -> list[tuple[bytes, int, Address]]:
    """All that has come, as it is given; something has."""
    found = []
    assert select.select([link], [], [], 10)[0]
    while (received := link.receive()) is not None:
        found.append((bytes(received.data), received.segment_size, received.source))
    return found


def send(link: UdpLink, to: UdpLink, data: bytes, segment_size: int = SEGMENT) -> None:
    link.send(Burst(memoryview(bytearray(data)), segment_size, to.address))


def test_a_volley_goes_by_one_call_and_comes_as_one_burst(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    data = os.urandom(3 * WHOLE + 2 * SEGMENT + 100)
    for _ in range(3):
        send(first, second, data)
        pieces = rest(second)
        assert b"".join(piece for piece, _, _ in pieces) == data
        assert {(size, source) for _, size, source in pieces} == {(SEGMENT, first.address)}
    # Since the receiver knows how long a burst is they lie side by side.
    assert len(pieces) == 1
    assert (first.counters.bursts_sent, first.counters.bytes_sent) == (12, 3 * len(data))
    assert (second.counters.bursts_received, second.counters.bytes_received) == (12, 3 * len(data))


def test_more_bursts_than_one_call_takes(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    data = os.urandom(11 * WHOLE + 7)
    send(first, second, data)
    assert b"".join(piece for piece, _, _ in rest(second)) == data
    assert first.counters.bursts_sent == 12
    send(first, second, data)
    assert max(len(piece) for piece, _, _ in rest(second)) == MERGED_BURSTS * WHOLE


def test_memory_that_cannot_be_written_is_sent_too(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    data = os.urandom(2 * WHOLE)
    first.send(Burst(memoryview(data), SEGMENT, second.address))
    assert b"".join(piece for piece, _, _ in rest(second)) == data


def test_bursts_of_other_sizes_stay_whole_and_in_order(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    third = UdpLink(some_ip())
    try:
        send(first, second, bytes(WHOLE))
        assert len(rest(second)) == 1
        sent: list[tuple[bytes, int, Address]] = []
        # One that is longer than the place for bursts of 4112 bytes, single ones, and another sender's.
        for link, size, segment_size in (
            (first, 65_000, 1040), (first, 100, 100), (third, WHOLE, SEGMENT), (first, 5 * SEGMENT, SEGMENT),
            (first, 64_480, 1040), (third, 64_480, 1040), (first, SEGMENT, SEGMENT),
        ):  # fmt: skip
            data = os.urandom(size)
            send(link, second, data, segment_size)
            sent.append((data, segment_size, link.address))
        found = rest(second)
        for data, _, source in sent:
            assert b"".join(piece for piece, _, whose in found if whose == source).count(data) == 1
        for link in (first, third):
            in_order = b"".join(data for data, _, source in sent if source == link.address)
            assert b"".join(piece for piece, _, source in found if source == link.address) == in_order
    finally:
        third.close()


def test_what_is_held_is_given_to_who_asks_for_it(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    for size in (10, 20, 30):
        send(first, second, bytes(size), size)
    assert select.select([second], [], [], 10)[0]
    received = second.receive()
    assert received is not None
    found = [len(received.data)]
    assert not select.select([second], [], [], 0)[0]
    while (received := second.pending()) is not None:
        found.append(len(received.data))
    assert found == [10, 20, 30]


def test_a_volley_to_nobody_is_counted_and_the_next_one_is_not_lost(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    nobody = Address(some_ip())
    data = os.urandom(2 * WHOLE)
    first.send(Burst(memoryview(bytearray(data)), SEGMENT, nobody))
    send(first, second, data)
    assert b"".join(piece for piece, _, _ in rest(second)) == data
    assert first.receive() is None
    assert first.counters.unreachable >= 1
    assert not select.select([first], [], [], 0)[0]


def test_a_closed_link_sends_and_receives_nothing(links: tuple[UdpLink, UdpLink]) -> None:
    first, second = links
    for size in (10, 20):
        send(first, second, bytes(size), size)
    assert select.select([second], [], [], 10)[0]
    assert second.receive() is not None
    second.close()
    assert second.pending() is None
    assert second.receive() is None
    send(second, first, bytes(2 * WHOLE))
    assert second.counters.bursts_sent == 0


def test_an_outbox_says_why_it_sent_nothing() -> None:
    outbox = Outbox(2)
    assert not outbox.send(-1, memoryview(bytearray(200)), 200, 100, 10, name_of("127.0.0.1", 9))
    assert outbox.error == errno.EBADF


@pytest.mark.parametrize("ip", ["127.0.0.1", "192.0.2.77", "::1", "2001:db8::7"])
def test_names_of_addresses(ip: str) -> None:
    assert address_in(name_of(ip, 4791)) == (ip, 4791)


def test_a_name_is_what_a_socket_binds_to() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((some_ip(), 0))
        ip, port = sock.getsockname()
        outbox = Outbox(1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sent = outbox.send(sender.fileno(), memoryview(bytearray(b"hello")), 5, 5, 5, name_of(ip, port))
        assert sent == 1
        assert sock.recv(100) == b"hello"


@pytest.mark.parametrize("ip", ["fe80::1%lo", "nowhere"])
def test_an_address_without_a_name(ip: str) -> None:
    with pytest.raises(OSError, match=r"."):
        name_of(ip, 4791)
