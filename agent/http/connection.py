"""One HTTP connection: requests in turn, each answered by the door that it came to.

h11 has the protocol: framing, order, and the size of a head. This file has the clocks: a head is complete
within `HEAD_SECONDS` of its first byte, a body moves at `BODY_RATE_MIN` at least, and a client that moves
nothing for `idle_s` is disconnected. A connection is closed after a body that was not read to its end.

One event loop has all connections, so none may keep it for long: a body in small HTTP chunks is processed
with turns of others in between, and refused where most of it is chunk headers.
"""

import contextlib
import enum
import functools
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

import h11
import trio

from agent.http.patience import Patience
from agent.http.server_side import Event, PlainRequest, Request, ServerSide
from agent.http.shares import Place, Shares

HEAD_BYTES_MAX: Final = 16 << 10
HEAD_LINES_MAX: Final = 256
"""Each costs the loop some work before authentication."""
HEAD_SECONDS: Final = 10.0
RECEIVE_BYTES: Final = 256 << 10
RECEIVED_BY_NOW: Final = 64 << 10
"""Of a body, right behind its head."""
BODY_RATE_MIN: Final = 64 << 10
"""Bytes a second, over a whole body, either way, of the time spent waiting for the client."""
EVENTS_TOGETHER: Final = 64
"""Events of h11 before others have their turn: 2 ms."""
CHUNKS_FREE: Final = 1024
CHUNK_BYTES_MIN: Final = 1024
"""Of HTTP's chunks, on the average, beyond the first `CHUNKS_FREE`."""
TOGETHER_BYTES_MAX: Final = 64 << 10
UNACKNOWLEDGED_BYTES: Final = 384 << 10
"""Of an answer, in the kernel, for a client who has shown a key. A longer body keeps its place until the
client has taken the rest, and with `RECEIVE_BYTES` this is what a connection costs without a place."""
RECORD_BYTES: Final = 64 << 10
"""By which the kernel goes beyond the size of a buffer, at the most."""
DATES_MAX: Final = 16
LINGER_SECONDS: Final = 2.0
LINGER_BYTES_MAX: Final = 8 << 20
"""A client that still sends reads a refusal only if the connection is not reset."""


class BrokenOff(Exception):
    """The rest of a body is not available. The connection ends before its announced length."""


class AnsweredElsewhere(Exception):
    """Another process of the agent answers this request. Nothing was sent, and its body was not read."""


class BodyFault(enum.Enum):
    """What is wrong with the way in which a body came."""

    SMALL_CHUNKS = "The chunks are too small."
    NO_END = "The body has no end."
    TOO_SLOW = "The body came too slowly."


class HttpConnection(ABC):
    """One connection; the caller closes the stream. A subclass is a door's way to answer."""

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream | trio.abc.Stream,
        idle_seconds: float,
        places: Shares,
        known: Callable[[], None] = lambda: None,
    ) -> None:
        """`places`: connections of known tenants; `known` is called when a client has shown whose it is."""
        self._places = places
        self._place: Place | None = None
        """Among the tenant's connections, once the tenant is known."""
        self._known = known
        self._stream = stream
        self._idle_seconds = idle_seconds
        self._http = ServerSide(HEAD_BYTES_MAX)
        self._receiving_seconds = 0.0
        self._body_bytes = self._body_events = self._body_chunks = 0
        self._is_body_asked = False
        """Whether the socket was asked for more of the body without waiting."""
        self._sent_bytes = 0
        self._sending_seconds = 0.0
        self._no_wait_until = 0.0

    @abstractmethod
    async def _answer(self, request: Request) -> bool:
        """Answer one request. Whether the connection can go on."""

    @abstractmethod
    async def _refuse_head(self, is_too_large: bool) -> None:
        """Answer what is no request, before the connection ends."""

    @abstractmethod
    def _body_refusal(self, fault: BodyFault) -> Exception:
        """The exception for a body that cannot be received."""

    async def serve(self) -> None:
        """Serve until the client is done, or has to be disconnected."""
        await self._serve_all()

    async def serve_carried(self, received: bytes) -> bool:
        """Serve one request for another process, which has received its beginning, and those that came right
        behind it. Whether the other one may go on with the connection."""
        self._http.receive_data(received)
        return await self._serve_all(are_carried=True)

    async def _serve_all(self, *, are_carried: bool = False) -> bool:
        """Whether the connection goes on, which it does where what was carried is answered."""
        idle_seconds = min(HEAD_SECONDS, self._idle_seconds)
        try:
            while await self._serve_one(idle_seconds):
                if are_carried and not self._http.trailing_data:
                    return True
                idle_seconds = self._idle_seconds
        except BrokenOff:
            pass  # a client that takes no refusal
        finally:
            if self._place is not None:
                self._place.give_back()
        return False

    def _take_place(self, tenant: str) -> bool:
        """Count the connection as the tenant's, which may change from request to request. False where the
        tenant has too many."""
        if self._place is None or self._place.tenant != tenant:
            if self._place is not None:
                self._place.give_back()
            self._place = self._places.take_now(tenant)
            if self._place is None:
                self._places.refusals += 1
                return False
            self._known()
            self._take_more_at_once()
        return True

    def _take_more_at_once(self) -> None:
        """Let the kernel take a good part of a piece. Of trio's streams it takes 16 KiB above what is on its
        way, so a MiB would cost dozens of calls and turns of the event loop. A size of our own is a bound:
        of itself the kernel lets it grow to some MiB, for a client who acknowledges nothing too."""
        under = self._transport
        if isinstance(under, trio.SocketStream) and under.socket.family != socket.AF_UNIX:
            # Linux doubles what it is told.
            size = (UNACKNOWLEDGED_BYTES - RECORD_BYTES) // 2
            under.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            under.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNACKNOWLEDGED_BYTES)

    @property
    def _transport(self) -> trio.abc.Stream:
        return self._stream.transport_stream if isinstance(self._stream, trio.SSLStream) else self._stream

    def _is_client_gone(self) -> bool:
        """Whether the client has ended its side, or the connection is broken.

        A client that ends its side alone and waits on is rare, and looks the same.
        """
        under = self._transport
        if not isinstance(under, trio.SocketStream):
            return False
        asked = select.poll()
        asked.register(under.socket.fileno(), select.POLLRDHUP)
        return bool(asked.poll(0))

    async def _serve_one(self, idle_seconds: float) -> bool:
        """One request; whether there may be another."""
        try:
            request = await self._head(idle_seconds)
        except (h11.RemoteProtocolError, _HeadTooLarge) as malformed:
            large = isinstance(malformed, _HeadTooLarge) or malformed.error_status_hint == 431
            await self._refuse_head(large)
            return False
        if request is None:
            return False
        self._receiving_seconds, self._sending_seconds = 0.0, 0.0
        self._body_bytes = self._body_events = self._body_chunks = self._sent_bytes = 0
        self._is_body_asked = False
        goes_on = await self._answer(request)
        return goes_on and self._may_go_on()

    def _may_go_on(self) -> bool:
        """After an answer: whether there may be another request."""
        return self._http.may_go_on()

    async def _head(self, idle_seconds: float) -> Request | None:
        """The next request without its body; None where there is none.

        Raises RemoteProtocolError or _HeadTooLarge.
        """
        if not self._http.trailing_data:
            with trio.move_on_after(idle_seconds) as idle:
                self._http.receive_data(await self._some(HEAD_BYTES_MAX))
            if idle.cancelled_caught:
                return None
        # Most heads are there whole, and need no clock of their own.
        event = self._next_of_head()
        if event is h11.NEED_DATA:
            with trio.move_on_after(HEAD_SECONDS):
                while event is h11.NEED_DATA:
                    # In small pieces: h11 bounds incomplete heads, and a whole one may come at once.
                    self._http.receive_data(await self._some(HEAD_BYTES_MAX))
                    event = self._next_of_head()
        return event if isinstance(event, PlainRequest | h11.Request) else None

    def _next_of_head(self) -> Event:
        # Bytes behind the body before may be longer than one receive.
        _check_head(self._http.trailing_data)
        return self._http.next_event()

    async def _some(self, most: int = RECEIVE_BYTES) -> bytes:
        """The next bytes; none at the end of the stream."""
        data: bytes = await self._stream.receive_some(most)  # type: ignore[assignment]  # they are bytes
        return data

    async def _receive_body(self) -> bytes | None:
        """The next bytes of the body; None at its end. Raises what `_body_refusal` makes."""
        if self._http.they_are_waiting_for_100_continue:
            await self._send_all(self._http.go_on())
        # Most bodies are there by now, and need no clock.
        if (event := await self._next_of_body()) is h11.NEED_DATA and not self._is_body_asked:
            self._is_body_asked = True  # once, so that no client keeps the loop
            if data := self._received_by_now():
                self._http.receive_data(data)
                event = await self._next_of_body()
        if event is not h11.NEED_DATA:
            return self._taken(event)
        began = trio.current_time()
        left = self._idle_seconds + self._body_bytes / BODY_RATE_MIN - self._receiving_seconds
        with trio.move_on_after(_not_negative(min(left, self._idle_seconds))):
            while event is h11.NEED_DATA:
                self._http.receive_data(await self._some())
                event = await self._next_of_body()
            if isinstance(event, h11.Data):
                self._receiving_seconds += trio.current_time() - began
            return self._taken(event)
        raise self._body_refusal(BodyFault.TOO_SLOW)

    async def _next_of_body(self) -> Event:
        event = self._http.next_event()
        self._body_events += 1
        if not self._body_events % EVENTS_TOGETHER:
            await trio.lowlevel.checkpoint()
        return event

    def _taken(self, event: Event) -> bytes | None:
        """What an event of the body brings; None at its end."""
        if isinstance(event, h11.Data):
            self._body_bytes += len(event.data)
            self._body_chunks += event.chunk_start
            if self._body_chunks > CHUNKS_FREE + self._body_bytes // CHUNK_BYTES_MIN:
                raise self._body_refusal(BodyFault.SMALL_CHUNKS)
            return event.data
        if isinstance(event, h11.EndOfMessage):
            return None
        raise self._body_refusal(BodyFault.NO_END)

    def _received_by_now(self) -> bytes:
        """What a bare socket has received; nothing where the stream has to be asked. Clients send a body
        right behind its head, and a receive of trio's costs a turn of the event loop and a time-out."""
        if not isinstance(self._stream, trio.SocketStream):
            return b""
        try:
            return os.read(self._stream.socket.fileno(), RECEIVED_BY_NOW)
        except OSError:
            return b""  # it would wait, or the client is gone: the stream says which

    @property
    def _is_unread(self) -> bool:
        """Whether the request's body was not read to its end."""
        return self._http.their_state is not h11.DONE

    def _head_of(self, status: int, headers: Sequence[tuple[str, str]], length: int) -> bytes:
        fields = [*headers, ("date", http_time(time.time_ns())), ("server", "g35")]
        if status not in (204, 304):
            fields.append(("content-length", str(length)))
        encoded = [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in fields]
        # HTTP may leave the reason out; botocore does not recognise a line without it (its wait for 100).
        words = HTTPStatus(status).phrase.encode()
        return self._http.head(status, words, encoded)

    async def _send_whole(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        head = self._head_of(status, headers, len(body))
        await self._send_all(b"".join((head, *self._http.data(body), self._http.end())))

    async def _linger(self) -> None:
        if isinstance(self._stream, trio.SocketStream):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_eof()
        left = LINGER_BYTES_MAX
        with trio.move_on_after(LINGER_SECONDS), contextlib.suppress(trio.BrokenResourceError):
            while left > 0 and (data := await self._stream.receive_some(RECEIVE_BYTES)):
                left -= len(data)

    async def _send_all(self, *parts: bytes | memoryview | None) -> None:
        """Send the parts, one behind the other. Raises BrokenOff where the client takes too little. The time
        of drives does not count against it."""
        # What the kernel takes at once is no checkpoint, and a long answer has to see that the door stops.
        await trio.lowlevel.checkpoint_if_cancelled()
        for data in self._send_now([part for part in parts if part]):
            began = trio.current_time()
            self._sent_bytes += len(data)
            left = self._idle_seconds + self._sent_bytes / BODY_RATE_MIN - self._sending_seconds
            seconds = _not_negative(min(left, self._idle_seconds + len(data) / BODY_RATE_MIN))
            with trio.move_on_after(seconds) as clock:
                await self._stream.send_all(data)
                self._sending_seconds += trio.current_time() - began
            if clock.cancelled_caught:
                raise BrokenOff("the client takes nothing, or too little")

    @property
    def _is_bare(self) -> bool:
        """Whether bytes go to a socket as they are."""
        return isinstance(self._stream, trio.SocketStream)

    def _send_patiently(
        self, parts: list[bytes | memoryview], patience: Patience
    ) -> list[bytes | memoryview]:
        """In any thread, while the event loop leaves the socket alone: send as much as the client of a bare
        socket takes soon; what is left.

        The bytes are in the processor's cache, and a wait costs a system call. In the event loop it costs a
        turn and a time-out.
        """
        left, began = self._send_now(parts), patience.clock()
        if not left or not isinstance(self._stream, trio.SocketStream) or began < self._no_wait_until:
            return left
        room = select.poll()
        room.register(self._stream.socket.fileno(), select.POLLOUT)
        ends = patience.until()
        while left and (seconds := ends - patience.clock()) > 0:
            before = self._sent_bytes
            if any(event != select.POLLOUT for _, event in room.poll(seconds * 1e3)):
                return left  # the client is gone, as the stream will say
            left = self._send_now(left)
            if self._sent_bytes == before:
                break
        if left:
            self._no_wait_until = patience.waited_in_vain(began)
        else:
            patience.waited(began)
        return left

    def _send_now(self, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send as much as a bare socket takes without waiting, in one call; what is left.

        The time-out and the turn of the event loop, which each wait costs, cost as much as the call.
        """
        if not isinstance(self._stream, trio.SocketStream):
            # Of TLS, each call is a record: below some size a copy costs less.
            return [b"".join(parts)] if sum(map(len, parts)) <= TOGETHER_BYTES_MAX else parts
        if not parts:
            return parts
        try:
            sent = os.writev(self._stream.socket.fileno(), parts)
        except OSError:
            # It would wait, or the client is gone: the stream says which.
            return parts
        self._sent_bytes += sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
        return parts


def peer_address(stream: trio.abc.Stream) -> str:
    """Of a client."""
    bare = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return str(bare.socket.getpeername()[0]) if isinstance(bare, trio.SocketStream) else ""


def http_time(nanoseconds: int) -> str:
    """As in `Date` and `Last-Modified` (RFC 9110, 5.6.7)."""
    return _http_second(nanoseconds // 1_000_000_000)


@functools.lru_cache(maxsize=DATES_MAX)
def _http_second(seconds: int) -> str:
    # Each answer has the date, and many answers go out within one second.
    return formatdate(seconds, usegmt=True)


def _not_negative(seconds: float) -> float:
    """A time that is left. What comes at the last moment may be received a moment after it."""
    return max(0.0, seconds)


class _HeadTooLarge(Exception):
    """A head has too many bytes or lines."""


def _check_head(data: bytes) -> None:
    """Raises _HeadTooLarge. `data`: the beginning of a head, or a head and following bytes."""
    end = data.find(b"\r\n\r\n")
    size = len(data) if end < 0 else end
    if size > HEAD_BYTES_MAX or data.count(b"\n", 0, size) > HEAD_LINES_MAX:
        raise _HeadTooLarge
