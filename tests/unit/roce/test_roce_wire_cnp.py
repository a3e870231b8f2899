"""The congestion notification packet: bytes laid out by hand after IBTA annex A17.9.3."""

from __future__ import annotations

import contextlib
import random

import pytest

from emulator.roce.wire.cnp import CNP_BYTES, Cnp, decode_cnp_untrusted, is_cnp_untrusted
from emulator.roce.wire.flow import flow_of
from emulator.roce.wire.malformed import Cause, MalformedPacket
from tests.support.roce.packets import check_icrc_untrusted

FLOW = flow_of("192.0.2.1", "198.51.100.2", 0xC0DE)
CNP = Cnp(0xABCDEF, 0x8765)
GOLDEN = bytes.fromhex("81 00 8765  40 abcdef  00 000000" + "00" * 16 + "5d5e9874")
"""Opcode 0x81, no flags, P_Key; BECN alone and the queue pair; no acknowledge request, PSN 0; 16 reserved."""


def test_every_field() -> None:
    assert len(GOLDEN) == CNP_BYTES
    assert CNP.encode(FLOW) == GOLDEN
    assert decode_cnp_untrusted(GOLDEN) == CNP
    check_icrc_untrusted(GOLDEN, FLOW, 0)


def test_what_is_reserved_is_ignored() -> None:
    """By a receiver: flags but for the version, byte 4 of the BTH, PSN, and the sixteen bytes."""
    raw = bytes.fromhex("81 c0 8765  ff abcdef  80 fedcba") + bytes(range(1, 17)) + GOLDEN[-4:]
    assert decode_cnp_untrusted(raw) == CNP


@pytest.mark.parametrize("size", [each for each in range(40) if each != CNP_BYTES])
def test_another_length_is_none(size: int) -> None:
    with pytest.raises(MalformedPacket) as found:
        decode_cnp_untrusted((GOLDEN + bytes(8))[:size])
    assert found.value.cause == (Cause.SHORT if size < CNP_BYTES else Cause.UNWANTED_PAYLOAD)


@pytest.mark.parametrize(
    ("at", "value", "cause"), [(0, 0x80, Cause.OPCODE), (1, 1, Cause.VERSION), (5, 0, Cause.QUEUE_PAIR_0)]
)
def test_other_fields_are_none(at: int, value: int, cause: Cause) -> None:
    raw = bytearray(GOLDEN)
    raw[at] = value
    if at == 5:
        raw[5:8] = bytes(3)
    with pytest.raises(MalformedPacket) as found:
        decode_cnp_untrusted(raw)
    assert found.value.cause is cause


def test_bytes_of_all_kinds() -> None:
    dice = random.Random(35)
    for _ in range(2000):
        raw = dice.randbytes(dice.choice([0, 1, 31, 32, 32, 32, 33]))
        assert is_cnp_untrusted(raw) == (raw[:1] == b"\x81")
        with contextlib.suppress(MalformedPacket):
            assert 0 < decode_cnp_untrusted(raw).queue_pair < 1 << 24
