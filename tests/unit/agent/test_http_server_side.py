"""The short way of a plain request: it is read, and answered, as h11 would."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import h11
import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.http.server_side import PLAIN_LINES_MAX, PlainHead, PlainRequest, ServerSide, plain_head
from agent.telemetry.http_connection import http_connection

PLAIN = b"GET /b/k?x=1 HTTP/1.1\r\nHost: a\r\nX-Amz-Date: \tnow \r\nContent-Length: 0\r\n\r\n"
WITH_BODY = b"POST /query HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nx: y\r\n\r\n"
HEAD_MAX = 16 << 10
PARTS = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n", b"PUT /b HTTP/1.1\r\n", b"HEAD * HTTP/1.0\r\n", b"PRI / HTTP/1.1\r\n",
        b"GET  / HTTP/1.1\r\n", b"Host: a\r\n", b"host:a\r\n", b"host : a\r\n", b"x: 1\r\n", b" folded\r\n",
        b"content-length: 0\r\n", b"Content-Length: 00\r\n", b"content-length: 3\r\n",
        b"content-length: +0\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n",
        b"Connection: Keep-Alive\r\n",
        b"expect: 100-continue\r\n", b"upgrade: h2c\r\n", b"x: a\x00b\r\n", b"x: a\rb\r\n",
        b"x: a\nhost: b\r\n",
        b"x: \xff\xfe\r\n", b"x:\r\n", b": 1\r\n", b"\r\n", b"\n", b"abc",
    ]
)  # fmt: skip


class Read(NamedTuple):
    """What is read of some bytes: the request, how long its body is, what came of that, whether it is over
    and another may follow, and what is left."""

    request: PlainRequest
    length: int
    body: bytes
    goes_on: bool
    left: bytes


def as_h11_reads(data: bytes) -> Read:
    judge = http_connection(HEAD_MAX)
    judge.receive_data(data)
    request = judge.next_event()
    assert isinstance(request, h11.Request)
    body, event = b"", judge.next_event()
    while isinstance(event, h11.Data):
        assert not event.chunk_start
        body, event = body + event.data, judge.next_event()
    over = isinstance(event, h11.EndOfMessage)
    goes_on = over and judge.states[h11.CLIENT] is h11.DONE and not judge.they_are_waiting_for_100_continue
    lengths = [int(value) for name, value in request.headers if name == b"content-length"]
    plain = PlainRequest(request.method, request.target, list(request.headers))
    return Read(plain, max(lengths, default=0), body, goes_on, judge.trailing_data[0])


def as_read_here(data: bytes, found: PlainHead) -> Read:
    body = data[found.size :]
    return Read(found.request, found.length, body, len(body) == found.length, b"")


@pytest.mark.parametrize("data", [PLAIN, WITH_BODY, WITH_BODY + b"ab", WITH_BODY + b"a\r\n\r\n"])
def test_most_heads_are_plain(data: bytes) -> None:
    found = plain_head(data)
    assert found is not None
    assert as_read_here(data, found) == as_h11_reads(data)


@given(st.sampled_from([b"", b"GET /a HTTP/1.1\r\nhost: a\r\n"]), st.lists(PARTS, min_size=1, max_size=6))
def test_what_is_taken_is_what_h11_takes(begin: bytes, parts: list[bytes]) -> None:
    data = b"".join((begin, *parts, b"\r\n"))
    found = plain_head(data)
    if found is not None:
        assert as_read_here(data, found) == as_h11_reads(data)


@given(st.sampled_from([PLAIN, WITH_BODY + b"abcde"]), st.data(), st.binary(max_size=3))
def test_no_byte_is_read_in_another_way(head: bytes, choice: st.DataObject, other: bytes) -> None:
    at = choice.draw(st.integers(0, len(head) - 1))
    data = head[:at] + other + head[at + 1 :]
    found = plain_head(data)
    if found is not None:
        assert as_read_here(data, found) == as_h11_reads(data)


def test_a_head_of_many_lines_is_not_looked_at() -> None:
    assert plain_head(PLAIN[:-2] + b"a: b\r\n" * PLAIN_LINES_MAX + b"\r\n") is None


@pytest.mark.parametrize("behind", [b"abcdef", b"abcde" + PLAIN])
def test_a_body_with_another_request_behind_it_is_for_h11(behind: bytes) -> None:
    assert plain_head(WITH_BODY + behind) is None


def received(*pieces: bytes) -> ServerSide:
    side = ServerSide(HEAD_MAX)
    for piece in pieces:
        side.receive_data(piece)
    return side


def answered(side: ServerSide, status: int = 200, body: bytes = b"abc") -> bytes:
    """Read one request to its end, and answer it."""
    assert isinstance(side.next_event(), PlainRequest | h11.Request)
    assert (side.their_state, side.our_state) == (h11.SEND_BODY, h11.SEND_RESPONSE)
    while isinstance(event := side.next_event(), h11.Data):
        assert not event.chunk_start
    assert isinstance(event, h11.EndOfMessage)
    head = side.head(status, b"Words", [(b"a", b"b c"), (b"content-length", b"3")])
    return b"".join((head, *side.data(body), side.end()))


@pytest.mark.parametrize(("method", "status", "body"), [(b"GET", 200, b"abc"), (b"HEAD", 200, b"")])
def test_an_answer_is_that_of_h11(method: bytes, status: int, body: bytes) -> None:
    head = PLAIN.replace(b"GET", method)
    short, long = received(head), received(head[:20], head[20:])
    assert answered(short, status, body) == answered(long, status, body)
    assert short.may_go_on()
    assert long.may_go_on()


def test_requests_follow_each_other_by_either_way() -> None:
    side = ServerSide(HEAD_MAX)
    for pieces in ([PLAIN], [PLAIN[:9], PLAIN[9:]], [PLAIN], [PLAIN + PLAIN], [], [PLAIN]):
        for piece in pieces:
            side.receive_data(piece)
        assert answered(side).endswith(b"\r\n\r\nabc")
        assert side.may_go_on()
    assert not side.trailing_data


def test_what_comes_behind_an_unread_head_is_behind_it() -> None:
    side = received(PLAIN, PLAIN)
    assert side.trailing_data == PLAIN + PLAIN
    for _ in range(2):
        answered(side)
        assert side.may_go_on()


@pytest.mark.parametrize("way", [[PLAIN], [PLAIN[:9], PLAIN[9:]]], ids=["short", "h11"])
@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\0b", b" a", b"a\n"])
def test_no_header_of_an_answer_makes_another(way: list[bytes], value: bytes) -> None:
    side = received(*way)
    side.next_event()
    with pytest.raises(h11.LocalProtocolError):
        side.head(200, b"OK", [(b"x-amz-meta-a", value)])


@pytest.mark.parametrize("way", [[PLAIN], [PLAIN[:9], PLAIN[9:]]], ids=["short", "h11"])
def test_an_answer_has_the_length_that_it_says(way: list[bytes]) -> None:
    with pytest.raises(h11.LocalProtocolError):
        answered(received(*way), body=b"abcd")
    with pytest.raises(h11.LocalProtocolError):
        answered(received(*way), body=b"ab")


@pytest.mark.parametrize("way", [[PLAIN], [PLAIN[:9], PLAIN[9:]]], ids=["short", "h11"])
def test_after_an_answer_that_ends_the_connection_there_is_none(way: list[bytes]) -> None:
    side = received(*way)
    assert isinstance(side.next_event(), PlainRequest | h11.Request)
    assert isinstance(side.next_event(), h11.EndOfMessage)
    side.head(403, b"Forbidden", [(b"connection", b"close"), (b"content-length", b"0")])
    side.end()
    assert not side.may_go_on()


def test_a_request_that_was_not_read_to_its_end_is_the_last() -> None:
    side = received(PLAIN)
    side.next_event()
    side.head(403, b"Forbidden", [(b"content-length", b"0")])
    side.end()
    assert side.their_state is h11.SEND_BODY
    assert not side.may_go_on()


def pieces_of(data: bytes, sizes: list[int]) -> list[bytes]:
    """The bytes in pieces of these sizes, round about."""
    pieces, round_about = [], itertools.cycle(sizes)
    while data:
        size = next(round_about)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def story(side: ServerSide, pieces: list[bytes]) -> list[object]:
    """What happens on a connection whose client sends these pieces, and then ends its side."""
    told: list[object] = []
    pieces = [*pieces, b""]
    try:
        while True:
            event = side.next_event()
            if event is h11.NEED_DATA:
                if not pieces:
                    break
                side.receive_data(pieces.pop(0))
            elif isinstance(event, PlainRequest | h11.Request):
                told.append((event.method, event.target, list(event.headers)))
            elif isinstance(event, h11.Data):
                told += list(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                told.append(("end", side.their_state, side.our_state))
                side.head(200, b"OK", [(b"content-length", b"3")])
                told.append(b"".join((*side.data(b"abc"), side.end())))
                assert side.may_go_on()
            else:
                told.append(type(event))
                break
    except h11.RemoteProtocolError:
        told.append("refused")
    return told


@given(
    st.lists(st.sampled_from([PLAIN, WITH_BODY + b"abcde", WITH_BODY + b"abc"]), min_size=1, max_size=3),
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
)
def test_bodies_come_as_by_h11_however_they_are_cut(requests: list[bytes], sizes: list[int]) -> None:
    data = b"".join(requests)
    by_h11 = ServerSide(HEAD_MAX)
    by_h11.receive_data(data[:9])
    assert story(ServerSide(HEAD_MAX), pieces_of(data, sizes)) == story(by_h11, [data[9:]])


def test_a_body_that_ends_early_is_told_as_by_h11() -> None:
    side = received(WITH_BODY + b"abc")
    assert isinstance(side.next_event(), PlainRequest)
    assert isinstance(side.next_event(), h11.Data)
    assert side.next_event() is h11.NEED_DATA
    side.receive_data(b"")
    with pytest.raises(h11.RemoteProtocolError):
        side.next_event()


def test_a_request_whose_body_was_not_read_is_the_last() -> None:
    side = received(WITH_BODY + b"ab")
    side.next_event()
    assert side.trailing_data == b"ab"
    side.head(413, b"Too Large", [(b"connection", b"close"), (b"content-length", b"0")])
    side.end()
    assert side.their_state is not h11.DONE
    assert not side.may_go_on()
