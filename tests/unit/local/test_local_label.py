"""The label of a local namespace: what is written is read, and nothing else counts as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.local.label import LABEL_BYTES, Label, NoLabel, decode_label_untrusted

NGUID = b"g35l" + bytes(range(1, 13))


def test_the_bytes_lie_where_the_page_says() -> None:
    raw = Label(NGUID, 0x123456000).encode()
    assert (len(raw), raw[:8], raw[8:12]) == (LABEL_BYTES, b"g35local", b"\1\0\0\0")
    assert raw[16:32] == NGUID
    assert int.from_bytes(raw[32:40], "little") == 0x123456000
    assert not any(raw[48:])


@given(st.binary(min_size=12, max_size=12).filter(any), st.integers(1, 1 << 47))
def test_a_label_is_read_as_it_was_written(random: bytes, blocks: int) -> None:
    label = Label(b"g35l" + random, blocks * 4096)
    assert decode_label_untrusted(label.encode()) == label


@given(st.integers(0, 47 * 8 - 1))
def test_a_flipped_bit_makes_it_no_label(bit: int) -> None:
    raw = bytearray(Label(NGUID, 1 << 30).encode())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(NoLabel):
        decode_label_untrusted(bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(LABEL_BYTES),
        b"\xff" * LABEL_BYTES,
        Label(bytes(16), 1 << 30).encode(),
        Label(b"g35l" + bytes(12), 1 << 30).encode(),
        Label(b"nvme" + NGUID[4:], 1 << 30).encode(),
        Label(NGUID, 0).encode(),
        Label(NGUID, 4097).encode(),
        Label(NGUID, 1 << 61).encode(),
        Label(NGUID, 1 << 30).encode()[:4095],
    ],
)
def test_other_bytes_are_no_label(raw: bytes) -> None:
    with pytest.raises(NoLabel):
        decode_label_untrusted(raw)


@given(st.binary(max_size=200))
def test_any_bytes_end_well(raw: bytes) -> None:
    for start in (b"", b"g35local"):
        with pytest.raises(NoLabel):
            decode_label_untrusted((start + raw).ljust(LABEL_BYTES, b"\0"))
