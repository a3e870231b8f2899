"""One HTTP connection: requests in turn, each authenticated, answered and counted.

h11 has the protocol: framing, order, and the size of a head. This file has the clocks: a head is complete
within `HEAD_SECONDS` of its first byte, a body moves at `BODY_RATE_MIN` at least, and a client that moves
nothing for `idle_s` is disconnected. A connection is closed after a body that was not read to its end.

One event loop has all connections, so none may keep it for long: a body in small HTTP chunks is processed
with turns of others in between, and refused where most of it is chunk headers.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Final, TypeAlias

import h11
import trio

from agent.host_os.complaints import Complaints
from agent.s3.answers import Answer, BrokenOff
from agent.s3.body import Body
from agent.s3.errors import S3Error
from agent.s3.requests import http_request, s3_request
from agent.s3.service import S3Service
from agent.s3.shares import Place
from agent.s3.signature import verify
from agent.s3.xml_out import error, http_time
from agent.telemetry.http_connection import http_connection

HEAD_BYTES_MAX: Final = 16 << 10
HEAD_LINES_MAX: Final = 256
"""Each costs the loop some work before authentication."""
HEAD_SECONDS: Final = 10.0
RECEIVE_BYTES: Final = 256 << 10
BODY_RATE_MIN: Final = 64 << 10
"""Bytes a second, over a whole body, either way, of the time spent waiting for the client."""
EVENTS_TOGETHER: Final = 64
"""Events of h11 before others have their turn: 2 ms."""
CHUNKS_FREE: Final = 1024
CHUNK_BYTES_MIN: Final = 1024
"""Of HTTP's chunks, on the average, beyond the first `CHUNKS_FREE`."""
LINGER_SECONDS: Final = 2.0
LINGER_BYTES_MAX: Final = 8 << 20
"""A client that still sends reads a refusal only if the connection is not reset."""
TOGETHER_BYTES_MAX: Final = 64 << 10
"""Head and body go in one segment up to here; above, a copy costs more than a call."""

Event: TypeAlias = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


@dataclass(slots=True, eq=False)
class Connection:
    """One connection; the caller closes the stream. `known` is called when a client has shown a key."""

    _service: S3Service
    _stream: trio.abc.HalfCloseableStream | trio.abc.Stream
    _idle_seconds: float
    _complaints: Complaints
    wall: Callable[[], float] = time.time
    known: Callable[[], None] = lambda: None
    _http: h11.Connection = field(default_factory=partial(http_connection, HEAD_BYTES_MAX))
    _receiving_seconds: float = 0.0
    _body_bytes: int = 0
    _body_events: int = 0
    _body_chunks: int = 0
    _sent_bytes: int = 0
    _sending_seconds: float = 0.0
    _place: Place | None = None
    """Among the tenant's connections, once the tenant is known."""

    async def serve(self) -> None:
        """Serve until the client is done, or has to be disconnected."""
        idle_seconds = min(HEAD_SECONDS, self._idle_seconds)
        try:
            while await self._serve_one(idle_seconds):
                idle_seconds = self._idle_seconds
        except BrokenOff:
            pass  # a client that takes no refusal
        finally:
            if self._place is not None:
                self._place.give_back()

    async def _serve_one(self, idle_seconds: float) -> bool:
        """One request; whether there may be another."""
        try:
            request = await self._head(idle_seconds)
        except (h11.RemoteProtocolError, _HeadTooLarge) as malformed:
            large = isinstance(malformed, _HeadTooLarge) or malformed.error_status_hint == 431
            code = "RequestHeaderSectionTooLarge" if large else "InvalidRequest"
            await self._refuse(S3Error(code, "That is no HTTP request of this door."), "/", False)
            return False
        if request is None:
            return False
        goes_on = await self._answer(request)
        if not goes_on or self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self._http.start_next_cycle()
        return True

    async def _head(self, idle_seconds: float) -> h11.Request | None:
        """The next request without its body; None where there is none.

        Raises RemoteProtocolError or _HeadTooLarge.
        """
        if not self._http.trailing_data[0]:
            with trio.move_on_after(idle_seconds) as idle:
                self._http.receive_data(await self._some(HEAD_BYTES_MAX))
            if idle.cancelled_caught:
                return None
        with trio.move_on_after(HEAD_SECONDS):
            while True:
                # Bytes behind the body before may be longer than one receive.
                _check_head(self._http.trailing_data[0])
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    return event
                if event is not h11.NEED_DATA:
                    return None
                # In small pieces: h11 bounds incomplete heads, and a whole one may come at once.
                self._http.receive_data(await self._some(HEAD_BYTES_MAX))
        return None

    async def _answer(self, request: h11.Request) -> bool:
        """Whether the connection can go on."""
        is_head, resource = request.method == b"HEAD", "/"
        self._receiving_seconds, self._sending_seconds = 0.0, 0.0
        self._body_bytes = self._body_events = self._body_chunks = self._sent_bytes = 0
        began = time.thread_time()
        try:
            try:
                http = http_request(request.method, request.target, list(request.headers))
                resource = http.path.decode("utf-8", "replace")
                # Authentication first: nobody else may learn about resources.
                signer = verify(http, self._service.keys, self.wall())
                self._take_place(signer.access_key.tenant)
                wanted = s3_request(http, self._service.hosts)
                resource = wanted.resource
                body = Body(wanted.body_headers, signer, self._receive_body)
                await self._service.rests.after_turn(began)
                answer = await self._service.answer(wanted, signer.access_key.tenant, body)
            except S3Error as refusal:
                await self._refuse(refusal, resource, is_head)
                return not refusal.closes
            await self._send(answer)
        except BrokenOff:
            return False
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            return False
        except Exception as bug:
            self._complaints.bug("a request of S3", bug)
            with contextlib.suppress(Exception):
                await self._refuse(S3Error("InternalError", "This is a bug of g35."), resource, is_head)
            return False
        return True

    def _take_place(self, tenant: str) -> None:
        """Raises S3Error where the tenant has too many connections. A connection may change its key."""
        if self._place is None or self._place.tenant != tenant:
            if self._place is not None:
                self._place.give_back()
            self._place = self._service.connections.take_now(tenant)
            if self._place is None:
                self._service.connections.refusals += 1
                raise S3Error("SlowDown", "This tenant has too many connections.", closes=True)
            self.known()

    # -- receiving ------------------------------------------------------------------------------

    async def _some(self, most: int = RECEIVE_BYTES) -> bytes:
        """The next bytes; none at the end of the stream."""
        data: bytes = await self._stream.receive_some(most)  # type: ignore[assignment]  # they are bytes
        return data

    async def _receive_body(self) -> bytes | None:
        """The next bytes of the body; None at its end."""
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._send_all(self._http.send(go_on))
        began = trio.current_time()
        left = self._idle_seconds + self._body_bytes / BODY_RATE_MIN - self._receiving_seconds
        with trio.move_on_after(_not_negative(min(left, self._idle_seconds))):
            while True:
                event = self._http.next_event()
                self._body_events += 1
                if not self._body_events % EVENTS_TOGETHER:
                    await trio.lowlevel.checkpoint()
                if isinstance(event, h11.Data):
                    self._body_bytes += len(event.data)
                    self._body_chunks += event.chunk_start
                    if self._body_chunks > CHUNKS_FREE + self._body_bytes // CHUNK_BYTES_MIN:
                        raise S3Error("InvalidChunkSizeError", "The chunks are too small.", closes=True)
                    self._receiving_seconds += trio.current_time() - began
                    return event.data
                if isinstance(event, h11.EndOfMessage):
                    return None
                if event is not h11.NEED_DATA:
                    raise S3Error("IncompleteBody", "The body has no end.", closes=True)
                self._http.receive_data(await self._some())
        raise S3Error("RequestTimeout", "The body came too slowly.", closes=True)

    # -- sending --------------------------------------------------------------------------------

    async def _send(self, answer: Answer) -> None:
        stream, counters = answer.stream, self._service.counters
        try:
            length = answer.length
            if length is None:
                length = len(answer.body) if stream is None else stream.length
            head = self._head_of(answer.status, answer.headers, length)
            if stream is None and len(answer.body) > TOGETHER_BYTES_MAX:
                await self._send_all(head)
                for each in self._http.send_with_data_passthrough(h11.Data(data=answer.body)) or ():
                    await self._send_all(each)
            elif stream is None or stream.length <= TOGETHER_BYTES_MAX:
                together = [head, answer.body]
                if stream is not None:

                    async def keep(data: memoryview) -> None:
                        together.append(bytes(data))

                    await stream.send(keep)
                body = b"".join(together[1:])
                await self._send_all(head + self._data(memoryview(body)) if body else head)
                counters.bytes_read += 0 if stream is None else len(body)
            else:
                await self._send_all(head)

                async def send(data: memoryview) -> None:
                    for each in self._http.send_with_data_passthrough(h11.Data(data=data)) or ():  # type: ignore[arg-type]
                        await self._send_all(each)
                    counters.bytes_read += len(data)

                await stream.send(send)
            await self._send_all(self._http.send(h11.EndOfMessage()) or b"")
        finally:
            if stream is not None:
                await stream.close()

    def _data(self, data: memoryview) -> bytes:
        return self._http.send(h11.Data(data=bytes(data))) or b""

    def _head_of(self, status: int, headers: list[tuple[str, str]], length: int) -> bytes:
        fields = [*headers, ("date", http_time(time.time_ns())), ("server", "g35")]
        if not any(name == "x-amz-request-id" for name, _ in headers):
            fields.append(("x-amz-request-id", secrets.token_hex(8).upper()))
        if status not in (204, 304):
            fields.append(("content-length", str(length)))
        encoded = [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in fields]
        # HTTP may leave the reason out; botocore does not recognise a line without it (its wait for 100).
        words = HTTPStatus(status).phrase.encode()
        return self._http.send(h11.Response(status_code=status, headers=encoded, reason=words)) or b""

    async def _refuse(self, refusal: S3Error, resource: str, is_head: bool) -> None:
        """Answer with an error, the last answer of this connection where the body is not read."""
        self._service.counters.refusals[refusal.code] += 1
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        number = secrets.token_hex(8).upper()
        document = error(refusal.code, refusal.message, resource, number)
        headers = [("content-type", "application/xml"), ("x-amz-request-id", number), *refusal.headers]
        unread = self._http.their_state is not h11.DONE
        if unread:
            # The end of an unread body is unknown, and a client that waits for "100 Continue" gets none.
            headers.append(("connection", "close"))
        answer = Answer(refusal.status, headers, document)
        if is_head or refusal.status == 304:
            answer.body, answer.length = b"", len(document)
        await self._send(answer)
        if unread or refusal.closes:
            await self._linger()

    async def _linger(self) -> None:
        if isinstance(self._stream, trio.SocketStream):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_eof()
        left = LINGER_BYTES_MAX
        with trio.move_on_after(LINGER_SECONDS), contextlib.suppress(trio.BrokenResourceError):
            while left > 0 and (data := await self._stream.receive_some(RECEIVE_BYTES)):
                left -= len(data)

    async def _send_all(self, data: bytes | memoryview | None) -> None:
        """Raises BrokenOff where the client takes too little. The time of drives does not count against
        it."""
        if data:
            began = trio.current_time()
            self._sent_bytes += len(data)
            left = self._idle_seconds + self._sent_bytes / BODY_RATE_MIN - self._sending_seconds
            with trio.move_on_after(_not_negative(min(left, self._idle_seconds + len(data) / BODY_RATE_MIN))):
                await self._stream.send_all(data)
                self._sending_seconds += trio.current_time() - began
                return
            raise BrokenOff("the client takes nothing, or too little")


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
