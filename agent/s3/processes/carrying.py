"""Requests that a reader does not serve, carried to the first process and its answers back.

A client's connection stays with the process that accepted it. The first process gets a descriptor of it for
one request, whose head the reader has received, and says when the answer is sent. Of TLS only the reader has
the state: the descriptor leads to the reader then, which passes the bytes on.
"""

import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import h11
import trio

from agent.host_os.own_descriptors import receive_from_ours
from agent.http.connection import EVENTS_TOGETHER
from agent.http.server_side import ServerSide
from agent.s3.processes.messages import (
    MESSAGE_BYTES_MAX,
    BadMessage,
    Carried,
    Carry,
    decode_carried,
    decode_carry,
    encode_carried,
    encode_carry,
)

log = logging.getLogger(__name__)

RELAY_BYTES: Final = 64 << 10
"""Of a connection by TLS, passed on at a time."""


class Carrier:
    """A reader's end. Lives in the event loop of its door."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link, self._sending = link, trio.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Answer] = {}
        self._is_closed = False

    async def hear(self) -> None:
        """Take the answers, until the first process is gone."""
        try:
            while message := await _receive(self._link):
                carried = decode_carried(message)
                if (answer := self._waiting.pop(carried.number, None)) is not None:
                    answer.goes_on = carried.goes_on
                    answer.event.set()
        except (OSError, BadMessage) as broken:
            log.debug("no request is carried any more: %s", broken)
        finally:
            self._is_closed = True
            for answer in self._waiting.values():
                answer.event.set()

    async def carry(self, client: int, peer: str, received: bytes) -> bool:
        """Have a request answered, whose sender is behind the descriptor. Whether its connection goes on."""
        if self._is_closed:
            return False
        number, answer = next(self._numbers), _Answer()
        message = encode_carry(Carry(number, peer, received))
        if len(message) > MESSAGE_BYTES_MAX:
            return False
        self._waiting[number] = answer
        try:
            await _send(self._link, self._sending, lambda: socket.send_fds(self._link, [message], [client]))
            await answer.event.wait()
        except OSError:
            return False
        finally:
            self._waiting.pop(number, None)
        return answer.goes_on


class _Answer:
    def __init__(self) -> None:
        self.event = trio.Event()
        self.goes_on = False


class RequestBytes:
    """Which bytes of a connection belong to the request whose head was taken from `http`."""

    def __init__(self, http: ServerSide) -> None:
        self._http = http
        self.is_whole = False
        self.behind = b""
        """What was received behind it."""

    async def part(self, data: bytes) -> bytes:
        """The next bytes as far as they belong to it, with turns of other connections in between."""
        try:
            self._http.receive_data(data)
            return data[: len(data) - len(await self.rest())]
        except h11.RemoteProtocolError:
            return data  # the first process says so

    async def rest(self) -> bytes:
        """What was received behind it so far. Raises RemoteProtocolError."""
        events = 0
        while (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                self.is_whole, self.behind = True, self._http.trailing_data
                break
            if not isinstance(event, h11.Data):
                break
            events += 1
            if not events % EVENTS_TOGETHER:
                await trio.lowlevel.checkpoint()
        return self.behind


class Relay:
    """Passes bytes on between a client and the process that answers its request. The answer is passed on to
    its end; the request, until the process has closed its end: it may read on to refuse a body."""

    def __init__(
        self, client: trio.abc.Stream, other: trio.SocketStream, request: RequestBytes, seconds: float
    ) -> None:
        """A client that takes nothing for `seconds` is given up."""
        self._client, self._other, self._request, self._seconds = client, other, request, seconds
        self.answered = trio.Event()
        """To be set when the process has closed its end."""
        self.is_broken = False
        """Not all that was to be passed on was."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_broken, self._upwards)
            await self._until_broken(self._downwards)
            await self.answered.wait()
            nursery.cancel_scope.cancel()

    async def _upwards(self) -> None:
        while not self._request.is_whole:
            data: bytes = await self._client.receive_some(RELAY_BYTES)  # type: ignore[assignment]  # they are bytes
            if not data:
                await self._other.send_eof()
                return
            await self._other.send_all(await self._request.part(data))

    async def _downwards(self) -> None:
        while data := await self._other.receive_some(RELAY_BYTES):
            with trio.fail_after(self._seconds):
                await self._client.send_all(data)

    async def _until_broken(self, pass_on: Callable[[], Awaitable[None]]) -> None:
        try:
            await pass_on()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self.is_broken = True
            # So that the process works for nobody any more, and waits for nobody.
            await self._other.aclose()


async def serve_carried(
    link: socket.socket, serve: Callable[[socket.socket, str, bytes], Awaitable[bool]]
) -> None:
    """In the first process: have all requests served that a reader carries here, until it is gone.

    `serve` gets the client's socket, which it closes, the client's address, and the request's first bytes; it
    says whether the connection goes on, and raises nothing.
    """
    link.setblocking(False)
    sending = trio.Lock()

    async def one(client: socket.socket | None, carry: Carry) -> None:
        goes_on = client is not None and await serve(client, carry.peer, carry.received)
        message = encode_carried(Carried(carry.number, goes_on))
        with contextlib.suppress(OSError):  # it is gone
            await _send(link, sending, lambda: link.send(message))

    with link:
        async with trio.open_nursery() as nursery:
            try:
                while True:
                    message, clients = await _receive_with_sockets(link)
                    if not message:
                        break
                    try:
                        carry = decode_carry(message)
                    except BadMessage as wrong:
                        log.error("a process of this agent carries no request here: %s", wrong)
                        for each in clients:
                            each.close()
                        break
                    # The kernel leaves a descriptor out where this process may have no more.
                    nursery.start_soon(one, clients[0] if clients else None, carry)
            except OSError:
                pass  # it has ended
            nursery.cancel_scope.cancel()


async def _receive_with_sockets(link: socket.socket) -> tuple[bytes, list[socket.socket]]:
    while True:
        await trio.lowlevel.wait_readable(link)
        with contextlib.suppress(BlockingIOError):
            message, descriptors = receive_from_ours(link, MESSAGE_BYTES_MAX + 1, 1)
            return message, [socket.socket(fileno=each) for each in descriptors]


async def _receive(link: socket.socket) -> bytes:
    while True:
        await trio.lowlevel.wait_readable(link)
        with contextlib.suppress(BlockingIOError):
            return link.recv(MESSAGE_BYTES_MAX + 1)


async def _send(link: socket.socket, turn: trio.Lock, send: Callable[[], object]) -> None:
    """Send one message, which may have to wait for others: of a socket only one task may. Raises OSError."""
    async with turn:
        while True:
            try:
                send()
                return
            except BlockingIOError:
                await trio.lowlevel.wait_writable(link)
