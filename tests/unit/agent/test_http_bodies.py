"""How bodies come to a door: what is there already costs no wait, and what is not is waited for."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from agent.http.connection import RECEIVED_BY_NOW, BodyFault, HttpConnection
from agent.http.server_side import Request
from agent.http.shares import Shares

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


class Echo(HttpConnection):
    """Answers each request with its body, and counts what the stream was asked for."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream, 10.0, Shares(4, ["one"]))
        self.receives = 0

    async def _some(self, most: int = RECEIVED_BY_NOW) -> bytes:
        self.receives += 1
        return await super()._some(most)

    async def _answer(self, request: Request) -> bool:
        body = bytearray()
        while (piece := await self._receive_body()) is not None:
            body += piece
        await self._send_whole(200, [], bytes(body))
        return True

    async def _refuse_head(self, is_too_large: bool) -> None:
        raise AssertionError("every head is good")

    def _body_refusal(self, fault: BodyFault) -> Exception:
        return AssertionError(fault.value)


def echoed(parts: list[bytes], whole: bytes) -> int:
    """Send the parts, each once the door waits for it; how often the door asked its stream until the answer,
    which has `whole`, was there."""

    async def main() -> int:
        theirs, ours = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in pair)
        door = Echo(ours)
        async with trio.open_nursery() as nursery:
            await theirs.send_all(parts[0])
            nursery.start_soon(door.serve)
            for part in parts[1:]:
                await trio.testing.wait_all_tasks_blocked()
                await theirs.send_all(part)
            answer = b""
            while not answer.endswith(whole) or b"\r\n\r\n" not in answer:
                answer += await theirs.receive_some()
            nursery.cancel_scope.cancel()
        return door.receives

    first, second = pair = socket.socketpair()
    with first, second:
        return trio.run(main)


@pytest.mark.parametrize("size", [1, 40 << 10])
def test_a_body_right_behind_its_head_is_not_waited_for(size: int) -> None:
    body = bytes(size)
    assert echoed([HEAD % size + body], body) <= 2, "the head's, and at the most that for the next request"


def test_a_body_that_comes_later_is_waited_for() -> None:
    assert echoed([HEAD % 6, b"abc", b"def"], b"abcdef") >= 3


def test_a_client_that_leaves_amid_its_body_is_no_error_of_the_door() -> None:
    async def main() -> None:
        theirs, ours = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in pair)
        await theirs.send_all(HEAD % 6 + b"abc")
        await theirs.aclose()
        with pytest.raises(Exception, match="the client left after 3 of 6 bytes"):
            await Echo(ours).serve()
        await ours.aclose()

    first, second = pair = socket.socketpair()
    with first, second:
        trio.run(main)
