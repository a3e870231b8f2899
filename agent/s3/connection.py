"""One HTTP connection of the S3 door: each request is authenticated, answered and counted.

agent/http/connection.py has the protocol and the clocks.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import h11
import trio

from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import AnsweredElsewhere, BodyFault, BrokenOff, HttpConnection
from agent.http.server_side import Request
from agent.s3.answers import Answer
from agent.s3.body import Body
from agent.s3.errors import S3Error
from agent.s3.rdma.service import Answering, HttpClient, wants_rdma
from agent.s3.requests import http_request, s3_request
from agent.s3.service import Serving
from agent.s3.signature import HttpRequest, Signer, check_region, verify
from agent.s3.xml_out import error

_BODY_FAULTS: Final = {
    BodyFault.SMALL_CHUNKS: "InvalidChunkSizeError",
    BodyFault.NO_END: "IncompleteBody",
    BodyFault.TOO_SLOW: "RequestTimeout",
}


class Connection(HttpConnection):
    """One connection; the caller closes the stream."""

    def __init__(
        self,
        service: Serving,
        stream: trio.abc.HalfCloseableStream | trio.abc.Stream,
        idle_seconds: float,
        complaints: Complaints,
        wall: Callable[[], float] = time.time,
        known: Callable[[], None] = lambda: None,
        peer: str = "",
    ) -> None:
        """`peer`: the address of the client, where the stream has one."""
        super().__init__(stream, idle_seconds, service.connections, known)
        self._service = service
        self._complaints = complaints
        self._wall = wall
        self._peer = peer

    async def _refuse_head(self, is_too_large: bool) -> None:
        code = "RequestHeaderSectionTooLarge" if is_too_large else "InvalidRequest"
        await self._refuse(S3Error(code, "That is no HTTP request of this door."), "/", False)

    def _body_refusal(self, fault: BodyFault) -> Exception:
        return S3Error(_BODY_FAULTS[fault], fault.value, closes=True)

    async def _answer(self, request: Request) -> bool:
        is_head, resource = request.method == b"HEAD", "/"
        began = time.thread_time()
        try:
            try:
                try:
                    http = http_request(request.method, request.target, list(request.headers))
                    resource = http.path.decode("utf-8", "replace")
                    # Authentication first: nobody else may learn about resources.
                    signer = verify(http, self._service.keys, self._wall(), self._service.signing_keys)
                    if not self._take_place(signer.access_key.tenant):
                        raise S3Error("SlowDown", "This tenant has too many connections.", closes=True)
                    check_region(signer, http, self._service.region)
                    resource, answering = self._answering(http, signer, resource)
                finally:
                    # After a refusal too: a stranger may send heads without end.
                    await self._service.rests.after_turn(began)
                answer = await answering()
            except S3Error as refusal:
                await self._refuse(refusal, resource, is_head)
                return not refusal.closes
            await self._send(answer)
        except AnsweredElsewhere:
            raise
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

    def _answering(self, http: HttpRequest, signer: Signer, path: str) -> tuple[str, Answering]:
        """The resource of a request, and what carries the request out. Raises S3Error."""
        if wants_rdma(http, self._service.hosts):
            client = HttpClient(self._peer, self._receive_body, self._is_client_gone)
            return path, self._service.by_rdma(http, signer, client)
        at_once = self._send_at_once if self._is_bare else None
        wanted = s3_request(http, self._service.hosts, self._is_client_gone, at_once)
        body = Body(wanted.body_headers, signer, self._receive_body)
        return wanted.resource, partial(self._service.answer, wanted, signer.access_key.tenant, body)

    async def _send(self, answer: Answer) -> None:
        stream, counters = answer.stream, self._service.counters
        try:
            if answer.unsent is not None and stream is not None:
                await self._send_all(*answer.unsent)
                counters.bytes_read += stream.length
            elif stream is None:
                await self._send_all(self._head_of_answer(answer), *self._http.data(answer.body))
            else:
                unsent = [self._head_of_answer(answer)]
                """The head goes with the first bytes, in one call."""

                async def send(data: memoryview) -> None:
                    first, unsent[:] = unsent[:], []
                    await self._send_all(*first, *self._http.data(data))
                    counters.bytes_read += len(data)

                await stream.send(send)
                await self._send_all(*unsent)
        finally:
            if stream is not None:
                await stream.close()
        await self._send_all(self._http.end())

    def _head_of_answer(self, answer: Answer) -> bytes:
        length = answer.length
        if length is None:
            length = len(answer.body) if answer.stream is None else answer.stream.length
        return self._head_of(answer.status, answer.headers, length)

    def _send_at_once(self, answer: Answer, body: memoryview) -> None:
        """In the thread that read the body, while the event loop waits for it."""
        head = self._head_of_answer(answer)
        answer.unsent = self._send_patiently([head, *self._http.data(body)], self._service.patience)

    def _head_of(self, status: int, headers: Sequence[tuple[str, str]], length: int) -> bytes:
        if not any(name == "x-amz-request-id" for name, _ in headers):
            headers = [*headers, ("x-amz-request-id", secrets.token_hex(8).upper())]
        return super()._head_of(status, headers, length)

    async def _refuse(self, refusal: S3Error, resource: str, is_head: bool) -> None:
        """Answer with an error, the last answer of this connection where the body is not read."""
        self._service.counters.refusals[refusal.code] += 1
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        number = secrets.token_hex(8).upper()
        document = error(refusal.code, refusal.message, resource, number, refusal.details)
        headers = [("content-type", "application/xml"), ("x-amz-request-id", number), *refusal.headers]
        unread = self._is_unread
        if unread:
            # The end of an unread body is unknown, and a client that waits for "100 Continue" gets none.
            headers.append(("connection", "close"))
        answer = Answer(refusal.status, headers, document)
        if is_head or refusal.status == 304:
            answer.body, answer.length = b"", len(document)
        await self._send(answer)
        if unread or refusal.closes:
            await self._linger()
