"""Traces are read line by line and believed in nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import UserError
from agent.replay.trace_lines import (
    BLOCK_TOKENS,
    BLOCKS_MAX,
    LINE_BYTES_MAX,
    BrokenLine,
    TraceFile,
    TraceRequest,
    block_tokens_of,
    decode_line_untrusted,
)

GOOD = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}'


def test_a_line_of_the_published_format() -> None:
    assert decode_line_untrusted(GOOD) == TraceRequest(27482.0, 6955, 52, (46, 47, 2353))


def test_a_line_says_how_many_tokens_a_block_has() -> None:
    small = GOOD.replace(b"{", b'{"block_size": 16, ')
    assert decode_line_untrusted(small) == TraceRequest(27482.0, 6955, 52, (46, 47, 2353), 16)
    assert decode_line_untrusted(small).tokens_of(2) == 32
    assert decode_line_untrusted(GOOD).block_tokens == BLOCK_TOKENS == 512


def test_all_blocks_of_a_trace_have_the_size_of_the_first(tmp_path: Path) -> None:
    small = GOOD.replace(b"{", b'{"block_size": 16, ')
    path = _trace(tmp_path, b"oops\n", small + b"\n", GOOD + b"\n", small + b"\n")
    trace = TraceFile(path)
    assert len(list(trace)) == 2
    assert trace.block_tokens == block_tokens_of(path) == 16
    assert trace.complaints[1] == "line 3: blocks of 512 tokens; those of the first request have 16"
    assert block_tokens_of(_trace(tmp_path, b"oops\n")) == 512


def test_smaller_blocks_than_a_trace_says_are_seen_where_tokens_matter(tmp_path: Path) -> None:
    """Three blocks of 16 tokens are 48; of 512 tokens, the third begins behind the prompt's 48."""
    short, just = GOOD.replace(b"6955", b"1024"), GOOD.replace(b"6955", b"1025")
    path = _trace(tmp_path, short + b"\n", just + b"\n")
    assert len(list(TraceFile(path))) == 2
    trace = TraceFile(path, fitting=True)
    assert len(list(trace)) == 1
    assert trace.complaints == [
        "line 1: 3 blocks of 512 tokens are more than a prompt of 1024; lines of a trace with smaller blocks "
        "say so: block_size"
    ]
    small = GOOD.replace(b"6955", b"33").replace(b"{", b'{"block_size": 16, ')
    assert len(list(TraceFile(_trace(tmp_path, small), fitting=True))) == 1


def test_the_last_block_is_rarely_full() -> None:
    request = decode_line_untrusted(GOOD.replace(b"6955", b"1100"))
    assert [request.tokens_of(blocks) for blocks in range(4)] == [0, 512, 1024, 1100]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no UTF-8 at column 1"),
        (GOOD.replace(b"46", b"\xc3("), "no UTF-8 at column"),
        (b"\0" * 90, "a NUL byte at column 1;"),
        (GOOD[:40] + b"\0" + GOOD[41:], "a NUL byte at column 41;"),
        (GOOD.decode().encode("utf-16"), "a NUL byte|no UTF-8"),
        (GOOD.decode().encode("utf-32-le"), "a NUL byte at column 2;"),
        (b"[" * 5000, "no JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"{}", "timestamp is missing"),
        (GOOD.replace(b"27482", b"-1"), "timestamp is no number"),
        (GOOD.replace(b"27482", b"NaN"), "timestamp is no number"),
        (GOOD.replace(b"27482", b"Infinity"), "timestamp is no number"),
        (GOOD.replace(b"6955", b"true"), "input_length is no number"),
        (GOOD.replace(b"6955", b"1.5"), "input_length is no number"),
        (GOOD.replace(b"6955", b"9" * 5000), "no JSON"),
        (GOOD.replace(b"6955", b"9" * 30), "input_length is no number"),
        (GOOD.replace(b"52", b'"52"', 1), "output_length is no number"),
        (GOOD.replace(b"[46, 47, 2353]", b"null"), "hash_ids is no list"),
        (GOOD.replace(b"46", b"-46"), "hash_ids has something else"),
        (GOOD.replace(b"{", b'{"block_size": 0, '), "block_size is no number from 1"),
        (GOOD.replace(b"{", b'{"block_size": true, '), "block_size is no number from 1"),
        (GOOD.replace(b"{", b'{"block_size": 9999999, '), "block_size is no number from 1"),
        (GOOD.replace(b"46", b"46.0"), "hash_ids has something else"),
        (GOOD.replace(b"46", b'"46"'), "hash_ids has something else"),
        (GOOD.replace(b"46", str(1 << 128).encode()), "hash_ids has something else"),
        (GOOD.replace(b"46", b"1" + b", 1" * BLOCKS_MAX), "hash_ids is no list of at most"),
    ],
)
def test_a_broken_line_says_why(line: bytes, why: str) -> None:
    with pytest.raises(BrokenLine, match=why):
        decode_line_untrusted(line)


_json = st.recursive(st.none() | st.integers() | st.text(), st.lists)


@given(st.binary(max_size=200) | _json.map(lambda value: json.dumps(value).encode()))
def test_noise_is_a_broken_line_and_nothing_else(line: bytes) -> None:
    with pytest.raises(BrokenLine):
        decode_line_untrusted(line)


@given(st.data())
def test_a_changed_byte_is_a_request_or_a_broken_line(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOOD) - 1))
    changed = GOOD[:at] + bytes([data.draw(st.integers(0, 255))]) + GOOD[at + 1 :]
    with contextlib.suppress(BrokenLine):
        assert isinstance(decode_line_untrusted(changed), TraceRequest)


def _trace(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_broken_lines_are_counted_with_their_numbers_and_skipped(tmp_path: Path) -> None:
    trace = TraceFile(_trace(tmp_path, GOOD + b"\n", b"\n", b"oops\n", GOOD + b"\r\n", b"{}\n", GOOD))
    assert len(list(trace)) == 3
    assert trace.requests == 3
    assert trace.broken_lines == 2
    assert [complaint.partition(":")[0] for complaint in trace.complaints] == ["line 3", "line 5"]
    assert trace.finished


def test_a_torn_block_of_zeros_is_said_with_its_line(tmp_path: Path) -> None:
    trace = TraceFile(_trace(tmp_path, GOOD + b"\n", bytes(512) + b"\n", GOOD + b"\n"))
    assert len(list(trace)) == 2
    assert trace.complaints == ["line 2: a NUL byte at column 1; traces are UTF-8 text"]


def test_strict_stops_at_the_first_broken_line(tmp_path: Path) -> None:
    trace = TraceFile(_trace(tmp_path, GOOD + b"\n", b"oops\n", GOOD), strict=True)
    requests = iter(trace)
    next(requests)
    with pytest.raises(UserError, match="line 2: no JSON") as stopped:
        next(requests)
    assert "--strict" in stopped.value.advice


def test_a_line_without_end_costs_bounded_memory_and_is_one_line(tmp_path: Path) -> None:
    endless = b"[" + b" " * (3 * LINE_BYTES_MAX) + b"]\n"
    trace = TraceFile(_trace(tmp_path, endless, GOOD + b"\n", b" " * LINE_BYTES_MAX))
    assert len(list(trace)) == 1
    assert trace.broken_lines == 2
    assert trace.complaints[0] == f"line 1: longer than {LINE_BYTES_MAX} bytes"


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    line = GOOD + b" " * (LINE_BYTES_MAX - len(GOOD) - 1) + b"\n"
    assert len(list(TraceFile(_trace(tmp_path, line, GOOD)))) == 2


def test_only_the_first_requests(tmp_path: Path) -> None:
    trace = TraceFile(_trace(tmp_path, *[GOOD + b"\n"] * 10), requests_max=4)
    assert len(list(trace)) == 4
    assert trace.finished


def test_many_complaints_are_counted_and_a_few_are_kept(tmp_path: Path) -> None:
    trace = TraceFile(_trace(tmp_path, *[b"x\n"] * 1000))
    assert list(trace) == []
    assert trace.broken_lines == 1000
    assert len(trace.complaints) == 20


def test_no_such_trace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        next(iter(TraceFile(tmp_path / "none")))


def test_the_real_trace(real_trace: Path) -> None:
    trace = TraceFile(real_trace, strict=True)
    blocks = [hash_id for request in trace for hash_id in request.hash_ids]
    assert (trace.requests, len(blocks), len(set(blocks))) == (12_031, 288_500, 182_790)
