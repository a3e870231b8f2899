"""One HTTP connection of the query door: each request is authenticated, bounded, answered and counted.

agent/http/connection.py has the protocol and the clocks.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import h11
import trio

from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import BodyFault, BrokenOff, HttpConnection
from agent.http.server_side import Request
from agent.http.shares import Shares, TooBusy
from agent.http.workers import Workers
from agent.query.access_tokens import TOKEN_BYTES_MAX, Token, tenant_of
from agent.query.counters import QueryCounters
from agent.query.query_json import BODY_BYTES_MAX, BadQuery, encode
from agent.query.service import QueryService

PATH: Final = b"/query"
_BEARER = re.compile(rb"[Bb]earer +([!-~]{1,%d})" % TOKEN_BYTES_MAX)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_BODY_FAULTS: Final = {BodyFault.SMALL_CHUNKS: 400, BodyFault.NO_END: 400, BodyFault.TOO_SLOW: 408}


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of a door share. `places`: those of tenants; `requests`: queries under way."""

    service: QueryService
    tokens: Sequence[Token]
    workers: Workers
    places: Shares
    requests: Shares
    counters: QueryCounters
    complaints: Complaints
    idle_seconds: float


class QueryConnection(HttpConnection):
    """One connection; the caller closes the stream."""

    def __init__(
        self,
        shared: Shared,
        stream: trio.abc.HalfCloseableStream | trio.abc.Stream,
        known: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(stream, shared.idle_seconds, shared.places, known)
        self._shared = shared

    async def _refuse_head(self, is_too_large: bool) -> None:
        await self._refuse(BadQuery(431 if is_too_large else 400, "that is no HTTP request of this door"))

    def _body_refusal(self, fault: BodyFault) -> Exception:
        return BadQuery(_BODY_FAULTS[fault], fault.value)

    async def _answer(self, request: Request) -> bool:
        try:
            try:
                answer = await self._answer_to(request)
            except BadQuery as refusal:
                await self._refuse(refusal)
                return not self._is_unread
            except TooBusy as busy:
                await self._refuse(BadQuery(503, str(busy), [("retry-after", "1")]))
                return not self._is_unread
            await self._send_whole(200, [("content-type", "application/json")], answer)
        except (BrokenOff, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            return False
        except Exception as bug:
            self._shared.complaints.bug("a query", bug, "answered 500")
            with contextlib.suppress(Exception):
                await self._refuse(BadQuery(500, "this is a bug of g35"))
            return False
        return True

    async def _answer_to(self, request: Request) -> bytes:
        """Raises BadQuery or TooBusy."""
        # Authentication first: nobody else learns anything.
        tenant = self._tenant(request)
        if not self._take_place(tenant):
            raise BadQuery(503, "this tenant has too many connections")
        self._shared.counters.requests += 1
        if request.target.partition(b"?")[0] != PATH:
            raise BadQuery(404, "there is POST /query")
        if request.method != b"POST":
            raise BadQuery(405, "there is POST /query", [("allow", "POST")])
        self._shared.service.admit(tenant)
        length = _length_of(request)
        place = self._shared.requests.take_now(tenant)
        if place is None:
            self._shared.requests.refusals += 1
            raise TooBusy("this tenant has too many queries under way")
        with place:
            body = await self._body(length)
            found = self._shared.service.answer_at_once(tenant, body)
            if isinstance(found, bytes):
                return found
            if found is None:
                job = partial(self._shared.service.answer, tenant, body)
            else:
                job = partial(self._shared.service.finish, found)
            return await self._shared.workers.run(tenant, job, first=True, rests=True)

    def _tenant(self, request: Request) -> str:
        """Whose token the request has. Raises BadQuery."""
        values = [value for name, value in request.headers if name == b"authorization"]
        found = _BEARER.fullmatch(values[0].strip()) if len(values) == 1 else None
        tenant = tenant_of(found[1], self._shared.tokens) if found is not None else None
        if tenant is None:
            self._shared.counters.tokens_refused += 1
            challenge = [("www-authenticate", 'Bearer realm="g35"')]
            raise BadQuery(401, "no token of this door: send `Authorization: Bearer TOKEN`", challenge)
        return tenant

    async def _body(self, length: int) -> bytearray:
        found = bytearray()
        while (piece := await self._receive_body()) is not None:
            found += piece
            if len(found) > length:
                raise BadQuery(400, "the body is longer than was announced")
        return found

    async def _refuse(self, refusal: BadQuery) -> None:
        """Answer with an error, the last answer of this connection where the body is not read."""
        self._shared.counters.refusals[str(refusal.status)] += 1
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [("content-type", "application/json"), *refusal.headers]
        unread = self._is_unread
        if unread:
            headers.append(("connection", "close"))
        await self._send_whole(refusal.status, headers, encode({"error": refusal.why}))
        if unread:
            await self._linger()


def _length_of(request: Request) -> int:
    """The announced length of the body. Raises BadQuery, before any of it is read."""
    values = [value for name, value in request.headers if name == b"content-length"]
    if not values or _LENGTH.fullmatch(values[0]) is None:
        raise BadQuery(411, "Content-Length is missing")
    length = int(values[0])
    if length > BODY_BYTES_MAX:
        raise BadQuery(413, f"a body has {BODY_BYTES_MAX} bytes at the most: ask in several requests")
    return length
