"""vhost-user messages against bytes that QEMU 7.2 was seen to send, and against what nobody should send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.virtio.vhost_user import (
    PAYLOADS,
    U64,
    Header,
    InflightArea,
    OneRegion,
    Region,
    RegionTable,
    Request,
    VhostUserFormatError,
    VringAddress,
    VringFd,
    VringState,
    decode_payload_untrusted,
    decode_reply_untrusted,
    encode_message,
)

AS_QEMU_SENDS = [
    (Request.SET_FEATURES, "0000007001000000", U64(0x1_7000_0000)),
    (
        Request.ADD_MEM_REG,
        "0000000000000000 00000c0000000000 0000f43f00000000 00f00b80f17f0000 00000c0000000000",
        OneRegion(0xC0000, 0x3FF4_0000, 0x7FF1_800B_F000, 0xC0000),
    ),
    (Request.SET_VRING_NUM, "01000000 80000000", VringState(1, 128)),
    (Request.SET_VRING_BASE, "01000000 2a000000", VringState(1, 42)),
    (
        Request.SET_VRING_ADDR,
        "01000000 00000000 0020d8a5f17f0000 4029d8a5f17f0000 0028d8a5f17f0000 4039d82500000000",
        VringAddress(1, 0, 0x7FF1_A5D8_2000, 0x7FF1_A5D8_2940, 0x7FF1_A5D8_2800, 0x25D8_3940),
    ),
    (Request.SET_VRING_KICK, "0100000000000000", VringFd(1)),
    (Request.SET_VRING_CALL, "0201000000000000", VringFd(0x102)),
    (
        Request.GET_INFLIGHT_FD,
        "0011000000000000 0020000000000000 0300 0004 00000000",
        InflightArea(0x1100, 0x2000, 3, 1024),
    ),
]


@pytest.mark.parametrize(("request_number", "payload", "record"), AS_QEMU_SENDS)
def test_payloads(request_number: Request, payload: str, record: object) -> None:
    data = bytes.fromhex(payload)
    assert decode_payload_untrusted(request_number, data) == record
    assert record.encode() == data  # type: ignore[attr-defined]
    for cut in range(len(data)):
        with pytest.raises(VhostUserFormatError):
            decode_payload_untrusted(request_number, data[:cut])


def test_words_of_a_vring_descriptor() -> None:
    word = VringFd(0x103)
    assert (word.index, word.has_fd) == (3, False)
    assert (VringFd(7).index, VringFd(7).has_fd) == (7, True)


def test_a_memory_table_with_an_array_of_eight() -> None:
    table = RegionTable(
        (Region(1 << 12, 2 << 12, 3 << 12, 4 << 12), Region(5 << 12, 6 << 12, 7 << 12, 8 << 12))
    )
    data = table.encode()
    assert data.hex().startswith("0200000000000000" + "0010000000000000" + "0020000000000000")
    assert RegionTable.decode_untrusted(data) == table
    assert RegionTable.decode_untrusted(data.ljust(8 + 8 * 32, b"\xee")) == table
    for count in (3, 9, 0xFFFF_FFFF):
        with pytest.raises(VhostUserFormatError):
            RegionTable.decode_untrusted(count.to_bytes(4, "little") + data[4:])


def test_headers() -> None:
    data = encode_message(Request.ADD_MEM_REG, bytes(40), need_reply=True)
    assert data[:12].hex() == "25000000" + "09000000" + "28000000"
    header = Header.decode_untrusted(data)
    assert header == Header(37, 9, 40)
    assert (header.needs_reply, header.is_reply) == (True, False)
    reply = encode_message(Request.GET_QUEUE_NUM, U64(2).encode(), reply=True)
    assert reply.hex() == "11000000" + "05000000" + "08000000" + "0200000000000000"
    assert Header.decode_untrusted(reply).is_reply


@pytest.mark.parametrize("data", ["", "01" * 11, "010000000000000000000000", "010000000200000000000000"])
def test_headers_that_are_none(data: str) -> None:
    with pytest.raises(VhostUserFormatError):
        Header.decode_untrusted(bytes.fromhex(data))


def test_a_payload_longer_than_any() -> None:
    with pytest.raises(VhostUserFormatError, match="4096 is the most"):
        Header.decode_untrusted(Header(5, 1, 4097).encode())


def test_replies() -> None:
    assert decode_reply_untrusted(Request.GET_VRING_BASE, bytes.fromhex("010000002a000000")) == VringState(
        1, 42
    )
    assert decode_reply_untrusted(Request.ADD_MEM_REG, bytes(8)) == U64(0)
    assert decode_reply_untrusted(Request.GET_INFLIGHT_FD, InflightArea(1, 2, 3, 4).encode()).queues == 3  # type: ignore[union-attr]


@given(st.sampled_from(sorted(PAYLOADS)), st.binary(max_size=300))
def test_any_bytes_are_a_record_or_one_error(request_number: Request, payload: bytes) -> None:
    try:
        record = decode_payload_untrusted(request_number, payload)
    except VhostUserFormatError:
        return
    assert record is not None
    encoded = record.encode()
    assert encoded == payload[: len(encoded)] or request_number in (
        Request.ADD_MEM_REG, Request.REM_MEM_REG, Request.SET_MEM_TABLE,
        Request.GET_INFLIGHT_FD, Request.SET_INFLIGHT_FD,
    )  # fmt: skip
