"""The ANA log page: its layout, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.errors import MalformedPdu
from nvmeof.wire.ana import AnaGroup, AnaLog, AnaState, ana_log_bytes, decode_ana_log_untrusted

GOLDEN = bytes.fromhex(
    "0807060504030201 0200 000000000000"
    "04030201 02000000 1817161514131211 02 000000000000000000000000000000"
    "2423222134333231"
    "08070605 00000000 2827262524232221 0f 000000000000000000000000000000"
)
LOG = AnaLog(
    0x0102030405060708,
    (
        AnaGroup(0x01020304, AnaState.NON_OPTIMIZED, 0x1112131415161718, (0x21222324, 0x31323334)),
        AnaGroup(0x05060708, AnaState.CHANGE, 0x2122232425262728),
    ),
)


def test_golden() -> None:
    assert LOG.encode() == GOLDEN
    assert decode_ana_log_untrusted(GOLDEN) == LOG
    assert decode_ana_log_untrusted(GOLDEN + bytes(100)) == LOG, "what lies behind is ignored"


def test_what_is_cut_short_is_refused() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises(MalformedPdu):
            decode_ana_log_untrusted(GOLDEN[:length])


def test_an_unknown_state_and_too_many_groups_are_refused() -> None:
    with pytest.raises(MalformedPdu, match="state 0x5"):
        decode_ana_log_untrusted(GOLDEN[:32] + b"\x05" + GOLDEN[33:])
    with pytest.raises(MalformedPdu, match="1025 groups"):
        decode_ana_log_untrusted(GOLDEN[:8] + (1025).to_bytes(2, "little") + GOLDEN[10:])


@given(st.binary(max_size=200))
def test_anything_decodes_or_is_refused(data: bytes) -> None:
    try:
        log = decode_ana_log_untrusted(data)
    except MalformedPdu:
        return
    assert len(log.encode()) <= len(data)


@given(st.lists(st.tuples(st.integers(1, 2**32 - 1), st.sampled_from(AnaState)), max_size=20))
def test_groups_alone_have_the_length_that_is_asked_for(groups: list[tuple[int, AnaState]]) -> None:
    log = AnaLog(1, tuple(AnaGroup(number, state, 2) for number, state in groups))
    assert len(log.encode()) == ana_log_bytes(len(groups))
    assert decode_ana_log_untrusted(log.encode()) == log
