"""What the processes of an agent tell each other."""

from __future__ import annotations

import socket

import pytest

from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.pool.counters import MissCause, Tally
from agent.pool.volume.uses import Use
from agent.service.reader_link import (
    LINE_BYTES_MAX,
    Lines,
    LinkBroken,
    Order,
    Report,
    decode_order,
    decode_report,
    encode_order,
    encode_report,
)

AGREED = Negotiated(36, InitFlag.MAX_PAGES | InitFlag.DIRECT_IO_ALLOW_MMAP, 1 << 20)


def test_an_order_comes_as_it_was_sent() -> None:
    configuration = '{"agent": {"mount": "/mnt/g35"}}'
    order = Order(3, 4, configuration, "/mnt/g35/.g35/process-3", AGREED, ("127.0.0.1:9036",), ("1f" * 16,))
    assert decode_order(encode_order(order).rstrip(b"\n")) == order
    without_a_mount = Order(3, 4, configuration)
    assert decode_order(encode_order(without_a_mount).rstrip(b"\n")) == without_a_mount


def test_a_report_comes_as_it_was_sent() -> None:
    tally = Tally(gets_hit=5, bytes_read=1 << 40)
    tally.miss(MissCause.LATE)
    tally.miss(MissCause.LATE)
    tally.prefix_holes[MissCause.EVICTED] = 7
    uses = [Use(0, 1 << 20, 63, 1 << 60, 2), Use(1, 4096, 0, 1, 1)]
    report = Report(
        {"kv": tally, "": Tally(flash_bytes_read=9)},
        uses,
        77,
        is_ready=True,
        s3={"bytes_read": 3, "requests": {"GetObject": 2}},
        guests={"0": {"bytes_read": 5, "bytes_copied": 2}, "12": {"bytes_read": 1 << 50, "bytes_copied": 0}},
    )
    assert decode_report(encode_report(report).rstrip(b"\n")) == report


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"ready": true, "moved": 1, "tallies": {"kv": {"misses": {"99": 1}}}, "uses": []}',
        b'{"ready": true, "moved": 1, "tallies": {"kv": {"no_such": 1}}, "uses": []}',
        b'{"ready": true, "moved": 1, "tallies": {}, "uses": [[1, 2]]}',
    ],
)
def test_nonsense_breaks_the_link(line: bytes) -> None:
    with pytest.raises(LinkBroken):
        decode_report(line)
    with pytest.raises(LinkBroken):
        decode_order(line)


def test_lines_come_whole_however_they_arrive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = Lines()
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            list(lines.receive(ours))
        theirs.sendall(b"one\ntw")
        assert list(lines.receive(ours)) == [b"one"]
        theirs.sendall(b"o\n\nthree\n")
        assert list(lines.receive(ours)) == [b"two", b"", b"three"]
        theirs.close()
        with pytest.raises(LinkBroken):
            list(lines.receive(ours))


def test_a_line_without_an_end_breaks_the_link() -> None:
    class Endless:
        def recv(self, size: int) -> bytes:
            return bytes(size)

    lines, chunk = Lines(), 64 << 10
    for _ in range(LINE_BYTES_MAX // chunk):
        assert not list(lines.receive(Endless()))  # type: ignore[arg-type]
    with pytest.raises(LinkBroken):
        list(lines.receive(Endless()))  # type: ignore[arg-type]
