"""The reader of captures: streams come out whole whatever order the segments are in, and holes are told."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.lab.packet_capture import (
    FILE_HEADER,
    FLAG_SYN,
    LINKTYPE_ETHERNET,
    PCAP_MAGIC,
    RECORD_HEADER,
    SNAP_LENGTH,
    read_connections,
)

CLIENT, SERVER = 40000, 4420
VECTORS = Path(__file__).parents[2] / "vectors" / "kernel_tcp"


def frame(source: int, destination: int, sequence: int, flags: int, payload: bytes) -> bytes:
    tcp = struct.pack(">HHIIBBHHH", source, destination, sequence, 0, 5 << 4, flags, 512, 0, 0) + payload
    addresses = bytes((127, 0, 0, 1)) * 2
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + addresses
    return bytes(12) + b"\x08\x00" + ip + tcp


def capture(file: Path, *frames: bytes) -> Path:
    with file.open("wb") as pcap:
        pcap.write(FILE_HEADER.pack(PCAP_MAGIC, 2, 4, 0, 0, SNAP_LENGTH, LINKTYPE_ETHERNET))
        for each in frames:
            pcap.write(RECORD_HEADER.pack(0, 0, len(each), len(each)) + each)
    return file


OPENING = (frame(CLIENT, SERVER, 0xFFFFFFFD, FLAG_SYN, b""), frame(SERVER, CLIENT, 99, FLAG_SYN, b""))


def test_segments_out_of_order_and_twice(tmp_path: Path) -> None:
    # The sequence number wraps between the first and the second segment.
    first, second = frame(CLIENT, SERVER, 0xFFFFFFFE, 0, b"abc"), frame(CLIENT, SERVER, 1, 0, b"def")
    answer, other = frame(SERVER, CLIENT, 100, 0, b"yes"), frame(SERVER, 5, 100, 0, b"not ours")
    (found,) = read_connections(
        capture(tmp_path / "pcap", *OPENING, second, answer, first, first, other, b"no IP packet")
    )
    assert (found.client[1], found.server) == (CLIENT, ("127.0.0.1", SERVER))
    assert found.from_client == b"abcdef"
    assert found.from_server == b"yes"


def test_a_missing_segment_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        read_connections(capture(tmp_path / "pcap", *OPENING, frame(CLIENT, SERVER, 1, 0, b"def")))


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="no little-endian pcap"):
        read_connections(tmp_path / "file")


@pytest.mark.parametrize("file", sorted(VECTORS.glob("*.pcap.gz")), ids=lambda file: file.name)
def test_the_recorded_streams_are_whole_pdus(file: Path) -> None:
    for connection in read_connections(file):
        for stream, first_type in ((connection.from_client, 0), (connection.from_server, 1)):
            assert stream[0] == first_type
            offset = 0
            while offset < len(stream):
                offset += int.from_bytes(stream[offset + 4 : offset + 8], "little")
            assert offset == len(stream)
