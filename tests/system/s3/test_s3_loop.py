"""How long the door's event loop works without a turn for others, with the worst that each bound lets in."""

from __future__ import annotations

import gc
import hashlib
import socket
import time
from collections.abc import Iterator

import pytest
import trio

from agent.http.connection import HEAD_BYTES_MAX, HEAD_LINES_MAX
from agent.s3.chunked import UNSIGNED_TRAILER
from tests.support.engines.s3_served import Served, answer_of, signed_head
from tests.support.waiting import wait_until

TURN_SECONDS = 0.06
"""Of the loop's own processor time; ten times what a turn takes on a machine that does nothing else."""
G = b"GET / HTTP/1.1\r\nhost: a\r\n"


class Turns(trio.abc.Instrument):
    """The longest turn of a task, in seconds of processor time of the loop's thread."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self.longest = 0.0
        self._began: float | None = None
        self._token = token

    def wait_for_the_end(self) -> None:
        """Of the turn that is under way."""
        ended: list[None] = []
        self._token.run_sync_soon(ended.append, None)
        wait_until(lambda: bool(ended))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is not None:
            self.longest = max(self.longest, time.thread_time() - self._began)


@pytest.fixture
def turns(s3: Served) -> Iterator[Turns]:
    token = s3.door._token
    assert token is not None
    watched = Turns(token)
    token.run_sync_soon(trio.lowlevel.add_instrument, watched)
    watched.wait_for_the_end()
    # Whichever thread happens to begin a collection pays for all that the tests before have left.
    gc.disable()
    yield watched
    gc.enable()
    token.run_sync_soon(trio.lowlevel.remove_instrument, watched)


def posted(target: str, body: bytes, method: str = "POST") -> bytes:
    headers = {"content-length": str(len(body))}
    return signed_head(method, target, headers, hashlib.sha256(body).hexdigest())[0] + body


def in_chunks(rest: bytes) -> bytes:
    headers = {"transfer-encoding": "chunked", "x-amz-decoded-content-length": "9"}
    return signed_head("PUT", "/blocks/a", headers, UNSIGNED_TRAILER)[0] + rest


def with_trailer(trailer: bytes) -> bytes:
    body = b"4\r\nbody\r\n0\r\n" + trailer + b"\r\n\r\n"
    headers = {
        "content-length": str(len(body)), "x-amz-decoded-content-length": "4",
        "content-encoding": "aws-chunked", "x-amz-trailer": "x-amz-checksum-crc32",
    }  # fmt: skip
    return signed_head("PUT", "/blocks/a", headers, UNSIGNED_TRAILER)[0] + body


def rows(count: int, row: bytes, root: bytes) -> bytes:
    return b"<%s>%s</%s>" % (root, row * count, root)


KEYS = b"<Object><Key>%s</Key></Object>" % (b"&amp;" * 1000)
PARTS = b"<Part><PartNumber>1</PartNumber><ETag>%032d</ETag></Part>" % 1
BLANKS = b" " * 15_000
WORST = {
    "a field of blanks": G + b"x:" + BLANKS + b"\0\r\n\r\n",
    "many fields": G + b"a:\r\n" * 3900 + b"\r\n",
    "folded lines": G + b"x: a\r\n" + b" a\r\n" * 3900 + b"\r\n",
    "parameters": b"GET /?" + b"&" * 8100 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    "a trailer of blanks": with_trailer(b"a:" + b" " * 1000 + b"\0"),
    "a chunk's line of blanks": in_chunks(b"5;" + BLANKS + b"\nx\r\n"),
    "a trailer of HTTP's": in_chunks(b"0\r\nx:" + BLANKS + b"\0\r\n\r\n"),
    "rows of escapes": posted("/blocks?delete", rows(600, KEYS, b"Delete")),
    "comments": posted("/blocks?delete", rows(590_000, b"<!---->", b"Delete")),
    "blanks of 4 MiB": posted("/blocks?delete", rows((4 << 20) - 20, b" ", b"Delete")),
    "keys of a removal": posted(
        "/blocks?delete",
        rows(1000, b"<Object><Key>%s</Key></Object>" % ("\u00e9".encode() * 512), b"Delete"),
    ),
    "parts": posted("/blocks/a?uploadId=a", rows(9999, PARTS, b"CompleteMultipartUpload")),
}  # fmt: skip


@pytest.mark.parametrize("what", WORST)
def test_no_request_keeps_the_loop_from_others(s3: Served, turns: Turns, what: str) -> None:
    with s3.connect() as connection:
        connection.sendall(WORST[what])
        connection.shutdown(socket.SHUT_WR)
        answer_of(connection)
    # The turn that sent the answer may go on yet.
    turns.wait_for_the_end()
    assert turns.longest < TURN_SECONDS


@pytest.mark.parametrize("fields", [b"x: " + b"y" * 2 * HEAD_BYTES_MAX, b"a:\r\n" * HEAD_LINES_MAX])
def test_a_head_behind_a_body_has_the_bounds_of_any(s3: Served, turns: Turns, fields: bytes) -> None:
    with s3.connect() as connection:
        # One piece for the loop: what is behind a body is there before it is asked for.
        connection.sendall(posted("/blocks/a", b"body", "PUT") + G + fields + b"\r\n\r\n")
        assert answer_of(connection)[0] == 200
        assert answer_of(connection)[0] == 400
