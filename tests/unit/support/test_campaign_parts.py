"""The parts of a campaign: values that say whose they are, what a table counts, and what the relay does."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.support.campaign.file_clients import PIECE, Kept
from tests.support.campaign.findings import HUNG, LOST, WRONG, Findings
from tests.support.campaign.relay import FAULTS, Direction, Weather
from tests.support.campaign.values import HEAD_BYTES, content, judged, name_of

ONE, OTHER = name_of("one"), name_of("other")


@pytest.mark.parametrize("size", [HEAD_BYTES, HEAD_BYTES + 1, 65_536])
def test_a_value_is_known_and_every_damage_to_it(size: int) -> None:
    value = content(ONE, 3, size)
    assert len(value) == size
    assert judged(ONE, value).version == 3
    assert not judged(ONE, value).wrong
    assert "another name" in judged(OTHER, value).wrong
    assert judged(ONE, value[:-1]).wrong
    assert judged(ONE, value + b"\0").wrong
    for at in (0, 8, 24, 32, size - 1):
        damaged = bytearray(value)
        damaged[at] ^= 1
        assert judged(ONE, damaged).wrong or judged(ONE, damaged).version != 3


def test_a_piece_of_a_file_is_as_new_as_was_promised() -> None:
    kept = Kept("file", promised=[2], begun=[4])
    for version, wrong in ((1, True), (2, False), (4, False), (5, True)):
        assert bool(kept.judge(0, content(name_of("file", 0), version, PIECE))) is wrong
    assert kept.judge(0, bytes(PIECE))
    assert not Kept("file", promised=[0], begun=[1]).judge(0, bytes(PIECE)), "a hole that nobody synced"


def test_the_table_counts_by_the_fault_that_was_on() -> None:
    findings = Findings()
    findings.begin("drive slow")
    findings.found(HUNG, "a get")
    findings.begin("relay: flip", 7)
    for kind in (WRONG, LOST, LOST):
        findings.found(kind, "this")
    rows = [line.split()[-4:] for line in findings.table()]
    assert rows == [
        ["injected", "wrong", "lost", "hung"],
        ["1", "0", "0", "1"],
        ["7", "1", "2", "0"],
        ["8", "1", "2", "1"],
    ]
    assert findings.bad == 4


class Ends:
    """Both ends of one direction of a relay, and the PDUs that came through it."""

    def __init__(self, **rates: float) -> None:
        self.weather = Weather()
        self.weather.rates = rates
        (self.host, source), (sink, self.target) = socket.socketpair(), socket.socketpair()
        self._ends = (source, sink)
        self._direction = Direction(source, sink, self.weather, "seed", FAULTS[:-1])
        self._direction.start()

    def through(self, *pdus: bytes) -> bytes:
        """What arrives of some PDUs behind which the host hangs up."""
        for pdu in pdus:
            self.host.sendall(pdu)
        self.host.shutdown(socket.SHUT_WR)
        parts = []
        self.target.settimeout(10)
        while part := self.target.recv(1 << 16):
            parts.append(part)
        self._direction.join(10)
        return b"".join(parts)

    def close(self) -> None:
        for end in (self.host, self.target, *self._ends):
            end.close()


@pytest.fixture
def ends() -> Iterator[list[Ends]]:
    made: list[Ends] = []
    yield made
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("relay")]


def pdu(number: int, size: int = 100) -> bytes:
    return struct.pack("<BBBBI", 7, 0, 24, 0, size) + bytes([number]) * (size - 8)


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        ("", pdu(1) + pdu(2) + pdu(3)),
        ("delay", pdu(1) + pdu(2) + pdu(3)),
        ("duplicate", 2 * pdu(1) + 2 * pdu(2) + 2 * pdu(3)),
        ("drop", b""),
        ("stall", b""),
        ("half_close", b""),
        ("reorder", pdu(2) + pdu(1) + pdu(3)),
    ],
)
def test_the_relay_does_what_it_is_told(ends: list[Ends], fault: str, arrives: bytes) -> None:
    ends.append(Ends(**({fault: 1.0} if fault else {})))
    found = ends[0].through(pdu(1), pdu(2), pdu(3))
    assert found == arrives
    assert (ends[0].weather.counts[fault] > 0) is bool(fault)


def test_flips_are_of_one_bit_and_truncation_is_short(ends: list[Ends]) -> None:
    ends += [Ends(flip=1.0), Ends(truncate=1.0)]
    flipped = ends[0].through(pdu(1))
    assert sum((one ^ other).bit_count() for one, other in zip(flipped, pdu(1), strict=True)) == 1
    assert pdu(1).startswith(ends[1].through(pdu(1)))
    assert ends[1].weather.counts["truncate"] == 1


def test_a_seed_has_one_course(ends: list[Ends]) -> None:
    pdus = [pdu(number) for number in range(50)]
    ends += [Ends(flip=0.2, drop=0.1, duplicate=0.1) for _ in range(2)]
    assert ends[0].through(*pdus) == ends[1].through(*pdus) != b"".join(pdus)
