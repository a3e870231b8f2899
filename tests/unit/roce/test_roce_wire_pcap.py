"""The capture writer: what it writes is read back, and is, byte for byte, what the kernel would have sent."""

from __future__ import annotations

import io
from pathlib import Path

from emulator.roce.link.tap import FILE_HEADER, RECORD_HEADER, PcapWriter
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.opcodes import Opcode
from emulator.roce.wire.packet import Packet
from tests.support.roce.captures import VECTORS, read_packets
from tests.support.roce.packets import encode_packet, ip_id_of

FLOW = flow_of("192.0.2.1", "198.51.100.2", 0xC0DE)
SIX = flow_of("2001:db8::1", "2001:db8::2", 0xC0DE)


def test_a_capture_of_the_kernel_written_anew(tmp_path: Path) -> None:
    original = list(read_packets(VECTORS / "rping.pcap.gz"))
    with (tmp_path / "copy.pcap").open("wb") as file:
        writer = PcapWriter(file)
        for captured in original:
            writer.write(captured.flow, captured.datagram, captured.when, captured.ip_id)
    assert (writer.written, writer.left_out) == (len(original), 0)
    copied = list(read_packets(tmp_path / "copy.pcap"))
    assert [c[:4] for c in copied] == [c[:4] for c in original]
    assert all(abs(a.when - b.when) < 2e-6 for a, b in zip(copied, original, strict=True))


def test_a_burst_is_written_as_its_segments(tmp_path: Path) -> None:
    packets = [
        encode_packet(Packet(Opcode.WRITE_MIDDLE, 5, index, bytes(100 if index == 3 else 1024)), FLOW, index)
        for index in range(4)
    ]
    with (tmp_path / "burst.pcap").open("wb") as file:
        PcapWriter(file).write_burst(FLOW, b"".join(packets), len(packets[0]), 1.5)
    read = list(read_packets(tmp_path / "burst.pcap"))
    assert [captured.datagram for captured in read] == packets
    assert [captured.ip_id for captured in read] == [0, 1, 2, 3]
    assert all(ip_id_of(captured.datagram, captured.flow) == captured.ip_id for captured in read)
    assert {captured.when for captured in read} == {1.5}
    with (tmp_path / "zeros.pcap").open("wb") as file:
        PcapWriter(file).write_burst(FLOW, b"".join(packets), len(packets[0]), 1.5, numbered=False)
    assert [captured.ip_id for captured in read_packets(tmp_path / "zeros.pcap")] == [0] * 4


def test_ipv6(tmp_path: Path) -> None:
    raw = encode_packet(Packet(Opcode.SEND_ONLY, 5, 6, b"payload"), SIX)
    with (tmp_path / "six.pcap").open("wb") as file:
        PcapWriter(file).write(SIX, raw, 0.0)
    (captured,) = read_packets(tmp_path / "six.pcap")
    assert (captured.flow, captured.datagram) == (SIX, raw)


def test_the_file_stays_within_its_bound() -> None:
    file = io.BytesIO()
    raw = encode_packet(Packet(Opcode.SEND_ONLY, 5, 6, bytes(1000)), FLOW)
    one = RECORD_HEADER.size + 28 + len(raw)
    small = encode_packet(Packet(Opcode.SEND_ONLY, 5, 7), FLOW)
    writer = PcapWriter(file, max_bytes=FILE_HEADER.size + 3 * one + 100)
    for _ in range(5):
        writer.write(FLOW, raw, 0.0)
    # A smaller one would still fit, but a capture has no holes: it ends.
    writer.write(FLOW, small, 0.0)
    assert (writer.written, writer.left_out) == (3, 3)
    assert len(file.getvalue()) == FILE_HEADER.size + 3 * one
