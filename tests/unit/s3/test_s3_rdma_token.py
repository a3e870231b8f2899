"""What a client writes into the headers of RDMA: golden vectors, and every kind of nonsense."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.s3.errors import S3Error
from agent.s3.rdma.service import wants_rdma
from agent.s3.rdma.token import (
    REPLY,
    STATUS,
    Memory,
    encode_pair,
    parse_memory,
    parse_pair,
    parse_reply,
    parse_session,
)
from agent.s3.requests import Hosts, http_request
from nvmeof.transport.rdma_direct import PairEnd, address_of_gid, gid_of

GID = bytes(10) + b"\xff\xff" + bytes((10, 1, 2, 3))
PAIR = (
    "01"  # RC
    "12020000"  # queue pair 0x212
    "00000000000000000000ffff0a010203"
    "00000000" "0000000000000000" "0000000000000000"
    "01" "0000"
)  # fmt: skip
SESSION = "0123456789abcdef0123456789abcdef"
MEMORY = f"rc:{SESSION}:00007f3a12345000:0000000000100000:0001e240"
CUOBJECT = f"00007396 7e5ff000:00400000:01f2e973:0000:007a03:1:{GID.hex()}".replace(" ", "")


def refusal(call: object, *args: str) -> S3Error:
    with pytest.raises(S3Error) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


def test_a_queue_pair_is_44_bytes_with_the_least_significant_first() -> None:
    end = PairEnd(0x212, GID, 0xABCDEF)
    assert encode_pair(end) == PAIR
    assert len(PAIR) == 88
    assert parse_pair(PAIR, "abcdef") == end
    assert parse_pair(PAIR.upper(), "ABCDEF") == end
    assert parse_reply(f"200:{PAIR}", "abcdef") == end


def test_memory_is_named_by_its_connection_address_length_and_key() -> None:
    found = parse_memory(MEMORY)
    assert found == Memory(SESSION, 0x7F3A12345000, 1 << 20, 123456)
    assert str(found) == MEMORY
    assert parse_memory(f"RC:{SESSION.upper()}:7F3A12345000:100000:1E240") == found
    assert parse_memory(f"rc:{SESSION}:0:0:0") == Memory(SESSION, 0, 0, 0)
    assert parse_memory(f"rc:{SESSION}:ffffffffffffffff:1:0").address == (1 << 64) - 1


@pytest.mark.parametrize(
    "other", [CUOBJECT, PAIR, f"{PAIR}:00007f3a12345000:100000", "ofi:tcp", "dc:1:2:3", "", " rc:", "\xe9"]
)
def test_another_form_is_declined_so_that_its_client_uses_plain_http(other: str) -> None:
    refused = refusal(parse_memory, other)
    assert (refused.status, refused.code) == (501, "NotImplemented")
    assert dict(refused.headers) == {REPLY: "501", STATUS: "unsupported"}


@pytest.mark.parametrize(
    "bad",
    [
        "rc:",
        f"rc:{SESSION}",
        f"rc:{SESSION}:1:2",
        f"rc:{SESSION}:1:2:3:4",
        f"rc:{SESSION[1:]}:1:2:3",
        f"rc:{SESSION}0:1:2:3",
        f"rc:{SESSION}:-1:2:3",
        f"rc:{SESSION}:0x1:2:3",
        f"rc:{SESSION}:1:2:123456789",
        f"rc:{SESSION}:11112222333344445:2:3",
        f"rc:{SESSION}:1:11112222333344445:3",
        f"rc:{SESSION}:1::3",
        f"rc:{SESSION}:1:2:3 ",
        f"rc:{SESSION}:1:2:\u0663",
        f"rc:{SESSION}:ffffffffffffffff:2:3",
        f"rc:{SESSION}:2:ffffffffffffffff:3",
    ],
)
def test_memory_in_no_form_is_refused(bad: str) -> None:
    refused = refusal(parse_memory, bad)
    assert (refused.status, refused.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    "other",
    ["", PAIR[2:], PAIR + "00", "00" + PAIR[2:], "02" + PAIR[2:], "g" + PAIR[1:], f" {PAIR[1:]}", MEMORY],
)
def test_a_queue_pair_of_another_form_or_transport_is_declined(other: str) -> None:
    assert refusal(parse_pair, other, "1").status == 501


@pytest.mark.parametrize("number", ["00000000", "01000000", "00000001", "ffffffff"])
def test_a_queue_pair_with_a_number_that_none_has_is_refused(number: str) -> None:
    assert refusal(parse_pair, PAIR[:2] + number + PAIR[10:], "1").code == "InvalidArgument"


@pytest.mark.parametrize("psn", ["", "1000000", "-1", "0x1", "g", " 1"])
def test_a_packet_number_beyond_24_bits_is_refused(psn: str) -> None:
    assert refusal(parse_pair, PAIR, psn).code == "InvalidArgument"


@pytest.mark.parametrize("reply", ["", "200", f"501:{PAIR}", f"ok:{PAIR}", f"200:{PAIR[2:]}"])
def test_a_reply_without_a_queue_pair_is_refused(reply: str) -> None:
    refusal(parse_reply, reply, "1")


def test_a_connection_has_32_digits() -> None:
    assert parse_session(SESSION.upper()) == SESSION
    for bad in ("", SESSION[1:], SESSION + "0", "g" * 32):
        assert refusal(parse_session, bad).code == "InvalidArgument"


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    statuses = set()
    for parse in (parse_memory, parse_session, lambda each: parse_pair(each, each)):
        try:
            parse(text)
        except S3Error as refused:
            statuses.add(refused.status)
    assert statuses <= {400, 501}


@given(st.integers(2, (1 << 24) - 1), st.binary(min_size=16, max_size=16), st.integers(0, (1 << 24) - 1))
def test_every_queue_pair_comes_back(number: int, gid: bytes, psn: int) -> None:
    end = PairEnd(number, gid, psn)
    assert parse_pair(encode_pair(end), f"{psn:06x}") == end


def test_a_gid_is_the_address_of_its_device() -> None:
    assert gid_of("10.1.2.3") == GID
    assert address_of_gid(GID) == ipaddress.ip_address("10.1.2.3")
    assert address_of_gid(gid_of("fd00::7")) == ipaddress.ip_address("fd00::7")


@pytest.mark.parametrize(
    ("target", "headers", "wanted"),
    [
        ("/b/k", [(b"x-amz-rdma-token", b"rc:1")], True),
        ("/b/k?X-Amz-Rdma-Token=rc%3A1", [], True),
        ("/.s3rdma-rc/connect", [], True),
        ("/.hipobj-rc/prepare", [], True),
        ("/b/x-amz-rdma-token", [], False),
        ("/b/.s3rdma-rc/connect", [], False),
        ("/b/k?x-id=GetObject", [(b"x-amz-rdma-reply", b"200")], False),
        ("/.s3rdma-rc/connect", [(b"host", b"b.s3.test")], False),
        ("/.hipobj-rc/prepare", [(b"host", b"b.s3.test")], False),
        ("/k", [(b"host", b"b.s3.test"), (b"x-amz-rdma-token", b"rc:1")], True),
    ],
)
def test_a_request_that_asks_for_rdma_is_told_apart(
    target: str, headers: list[tuple[bytes, bytes]], wanted: bool
) -> None:
    assert wants_rdma(http_request(b"GET", target.encode(), headers), Hosts("s3.test")) is wanted
