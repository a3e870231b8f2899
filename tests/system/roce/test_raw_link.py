"""The port that checks the ICRC in full, where raw sockets are allowed."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from emulator.roce.link.raw import RawCheckedLink
from emulator.roce.link.udp import UdpLink
from emulator.roce.nic.verbs import Burst, SendOpcode, WcStatus
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.icrc import icrc_of
from tests.support.needs import NO_RAW_SOCKETS
from tests.support.roce.devices import Program, connect, some_ip


@pytest.fixture
def links() -> Iterator[tuple[UdpLink, RawCheckedLink]]:
    try:
        checked = RawCheckedLink(some_ip())
    except PermissionError:
        pytest.skip(NO_RAW_SOCKETS)
    plain = UdpLink(some_ip())
    try:
        yield plain, checked
    finally:
        plain.close()
        checked.close()


def packet(sender: UdpLink, receiver: UdpLink, identification: int = 0, size: int = 100) -> bytes:
    """Some bytes of which the last four are the right ICRC."""
    covered = bytes([4, 0, 0xFF, 0xFF, 0, 0, 0, 9]) + bytes(number & 0xFF for number in range(size - 8))
    flow = flow_of(sender.address.ip, receiver.address.ip, sender.address.port)
    return covered + icrc_of(covered, flow, identification).to_bytes(4, "little")


def test_only_what_is_intact_arrives(links: tuple[UdpLink, RawCheckedLink]) -> None:
    plain, checked = links
    good = packet(plain, checked)
    bent = bytearray(good)
    bent[50] ^= 1
    # Right for another identification than the one that it travels with: solving would let it pass.
    solvable = packet(plain, checked, identification=77)
    for data in (bytes(bent), solvable, b"short", good):
        plain.send(Burst(memoryview(data), len(data), checked.address))
    got = []
    while len(got) < 1:
        assert select.select([checked], [], [], 10)[0]
        received = checked.receive()
        if received is not None:
            got.append((bytes(received.data), received.source))
    assert got == [(good, plain.address)]
    assert checked.counters.wrong_icrc == 3
    assert checked.receive() is None


def test_what_it_cannot_part_is_counted(links: tuple[UdpLink, RawCheckedLink]) -> None:
    plain, checked = links
    data = packet(plain, checked, size=1000) * 10
    plain.send(Burst(memoryview(data), len(data) // 10, checked.address))
    assert select.select([checked], [], [], 10)[0]
    assert checked.receive() is None
    assert checked.counters.not_checkable == 1


def test_datagrams_for_other_ports_are_not_its_business(links: tuple[UdpLink, RawCheckedLink]) -> None:
    plain, checked = links
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((checked.address.ip, 0))
        plain._socket.sendto(b"for somebody else", other.getsockname())
        assert select.select([checked], [], [], 10)[0]
        assert checked.receive() is None
    assert checked.counters.wrong_icrc == 0


def test_it_sends_as_any_other(links: tuple[UdpLink, RawCheckedLink]) -> None:
    plain, checked = links
    checked.send(Burst(memoryview(bytes(2500)), 1000, plain.address))
    assert select.select([plain], [], [], 10)[0]
    received = plain.receive()
    assert received is not None
    assert (len(received.data), received.segment_size) == (2500, 1000)
    assert checked.receive_buffer_bytes > 100_000
    checked.close()
    assert checked.fileno() == -1
    assert checked.receive() is None


def test_a_device_on_it_is_a_device(links: tuple[UdpLink, RawCheckedLink]) -> None:
    first, second = Program(some_ip(), check_icrc_in_full=True), Program(some_ip())
    try:
        _, _, rkey = connect(second, first)
        # Single packets each: what is longer would come as one.
        for number in range(20):
            second.post(SendOpcode.RDMA_WRITE, 0, 4096, rkey=rkey, remote=number * 4096)
            assert second.done()[0].status is WcStatus.SUCCESS
        assert first.device.link.counters.wrong_icrc == 0
    finally:
        first.close()
        second.close()


def test_ipv6_needs_none() -> None:
    with pytest.raises(ValueError, match="IPv6"):
        RawCheckedLink("::1")
