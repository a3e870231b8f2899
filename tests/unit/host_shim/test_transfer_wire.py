"""The bytes of transfers: golden vectors with every field non-zero, and whatever else a client might send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_shim.control_wire import TICKETS_MAX, VALUE_BYTES_MAX, MalformedControl
from host_shim.transfer_wire import (
    IOCTL_BYTES_MAX,
    NO_TICKET,
    PARTS_MAX,
    Ioctl,
    decode_done_untrusted,
    decode_many_untrusted,
    decode_register_untrusted,
    decode_registered_untrusted,
    decode_transfer_untrusted,
    decode_unregister_untrusted,
    encode_done,
    encode_many,
    encode_register,
    encode_registered,
    encode_transfer,
    ioctl_command,
    ioctl_of,
)

KEY = bytes(range(1, 17))
BY_KEY = (
    "0102030405060708090a0b0c0d0e0f10"  # key
    "ffffffff"  # no ticket
    "58020000"  # 600 s
    "0200"  # name
    "0200"  # parts
    "00000000"
    "07000000" "00100000" "0010000000000000"
    "08000000" "40000000" "c0ff0f0000000000"
    "6b76"
)  # fmt: skip
BY_TICKET = "00" * 16 + "ff0f000000000000000001000000000007000000000010000000200000000000"


def test_a_transfer_by_key() -> None:
    parts = [(7, 0x1000, 0x1000), (8, 0xFFFC0, 0x40)]
    assert encode_transfer("kv", KEY, None, parts, 600).hex() == BY_KEY
    found = decode_transfer_untrusted(bytes.fromhex(BY_KEY))
    assert (found.volume, found.key, found.ticket, found.ttl_seconds) == ("kv", KEY, None, 600)
    assert found.parts == parts


def test_a_transfer_by_ticket() -> None:
    parts = [(7, 0x200000, 0x100000)]
    assert encode_transfer("kv", KEY, 4095, parts, 600).hex() == BY_TICKET
    found = decode_transfer_untrusted(bytes.fromhex(BY_TICKET))
    assert (found.volume, found.key, found.ticket, found.ttl_seconds) == ("", bytes(16), 4095, 0)
    assert found.parts == parts


def test_registering() -> None:
    asked = encode_register(0x01020304, 0x1112131415160000)
    assert asked.hex() == "04030201000000000000161514131211"
    assert decode_register_untrusted(asked) == (0x01020304, 0x1112131415160000)
    answer = encode_registered(0x21222324, 0x4142434445464748)
    assert answer.hex() == "24232221000000004847464544434241"
    assert decode_registered_untrusted(answer) == (0x21222324, 0x4142434445464748)
    assert decode_unregister_untrusted(bytes.fromhex("24232221" + "00" * 12)) == 0x21222324
    assert encode_done(6, 0x01020304).hex() == "0600000004030201"
    assert decode_done_untrusted(encode_done(6, 0x01020304) + b"rest") == (6, 0x01020304)


def test_many_transfers() -> None:
    """The bytes that an agent and a shim of this version exchange."""
    data = encode_many("kv", [b"a" * 16, b"b" * 16], [(1, 4096, 100), (2, 0, 5)], 60)
    assert data[:16] == bytes.fromhex("02000000 0200 0000 3c000000 00000000")
    assert data[16:48] == b"a" * 16 + bytes.fromhex("01000000 64000000 0010000000000000")
    assert data[80:] == b"kv"
    many = decode_many_untrusted(data)
    assert (many.volume, many.ttl_seconds, list(many.keys)) == ("kv", 60, [b"a" * 16, b"b" * 16])
    assert list(many.parts) == [(1, 4096, 100), (2, 0, 5)]
    for at in (6, 7, 12, 15):
        wrong = bytearray(data)
        wrong[at] = 1
        with pytest.raises(MalformedControl):
            decode_many_untrusted(wrong)


def test_numbers_of_ioctls() -> None:
    """_IOWR('g', 3, 48) of the kernel's headers."""
    assert ioctl_command(Ioctl.LOAD, 48) == 0xC0306703
    assert ioctl_of(0xC0306703) is Ioctl.LOAD
    for other in (0x80306703, 0x40306703, 0xC0306803, 0xC0306707, 0x5401, 0):
        assert ioctl_of(other) is None


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (16, (TICKETS_MAX).to_bytes(4, "little")),
        (16, (5).to_bytes(4, "little")),  # a ticket, and a key with it
        (24, b"\x03\0"),
        (24, b"\x41\0"),
        (26, b"\0\0"),
        (26, b"\x03\0"),
        (28, b"\1"),
        (36, b"\0\0\0\0"),
        (36, (VALUE_BYTES_MAX).to_bytes(4, "little")),
        (64, b"\xff\xfe"),
    ],
)
def test_refused(at: int, wrong: bytes) -> None:
    bad = bytearray.fromhex(BY_KEY)
    bad[at : at + len(wrong)] = wrong
    with pytest.raises(MalformedControl):
        decode_transfer_untrusted(bad)


@pytest.mark.parametrize("length", range(len(BY_KEY) // 2))
def test_cut_short(length: int) -> None:
    with pytest.raises(MalformedControl):
        decode_transfer_untrusted(bytes.fromhex(BY_KEY)[:length])


def test_as_long_as_they_come() -> None:
    parts = [(number + 1, number << 12, 4096) for number in range(PARTS_MAX)]
    encoded = encode_transfer("v" * 64, KEY, None, parts, 1)
    assert len(encoded) <= IOCTL_BYTES_MAX
    assert decode_transfer_untrusted(encoded).parts == parts
    with pytest.raises(MalformedControl):
        decode_transfer_untrusted(encode_transfer("v", KEY, None, [*parts, (1, 0, 1)], 1))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_the_one_exception(data: bytes) -> None:
    for decode in (
        decode_transfer_untrusted,
        decode_register_untrusted,
        decode_registered_untrusted,
        decode_unregister_untrusted,
        decode_done_untrusted,
    ):
        try:
            decode(data)
        except MalformedControl:
            continue


@given(
    st.text(max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, NO_TICKET),
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(1, 4096)),
        min_size=1,
        max_size=20,
    ),
)
def test_there_and_back(volume: str, key: bytes, ttl: int, parts: list[tuple[int, int, int]]) -> None:
    found = decode_transfer_untrusted(encode_transfer(volume, key, None, parts, ttl))
    assert (found.volume, found.key, found.ttl_seconds, found.parts) == (volume, key, ttl, parts)
