"""h11 with linear patterns: the same lines are taken and refused, and none takes longer than its length."""

from __future__ import annotations

import re
import time

import h11
import hypothesis.strategies as st
import pytest
from h11 import _abnf
from hypothesis import given

from agent.telemetry.http_connection import LINEAR, http_connection

H11S_OWN = {name: re.compile(getattr(_abnf, name.removesuffix("_re")).encode()) for name in LINEAR}
ALPHABET = st.sampled_from(
    [
        b"a",
        b"a",
        b"5",
        b"F",
        b":",
        b" ",
        b" ",
        b"\t",
        b";",
        b"\0",
        b"\r",
        b"\n",
        b"\r\n",
        b"\x0b",
        b"\xff",
        b"=",
    ]
)
LINES = st.lists(ALPHABET, max_size=12).map(b"".join)


@given(st.sampled_from(["", "a:", "5"]), LINES, st.sampled_from(["", "\r\n"]))
def test_what_is_taken_and_what_is_found_in_it_stays_the_same(first: str, line: bytes, last: str) -> None:
    whole = first.encode() + line + last.encode()
    for name, pattern in LINEAR.items():
        before, now = H11S_OWN[name].fullmatch(whole), pattern.fullmatch(whole)
        assert (before is None) == (now is None)
        if before is not None and now is not None:
            assert now.groupdict() == before.groupdict()


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t"])
def test_a_field_of_blanks_costs_no_more_than_its_length(blanks: bytes) -> None:
    connection = http_connection(16 << 10)
    connection.receive_data(
        b"GET / HTTP/1.1\r\nhost: a\r\nx:" + blanks * (15_000 // len(blanks)) + b"\0\r\n\r\n"
    )
    began = time.thread_time()
    with pytest.raises(h11.RemoteProtocolError):
        connection.next_event()
    assert time.thread_time() - began < 0.05
