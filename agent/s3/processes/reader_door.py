"""The S3 door of a reader: it serves reads of objects, and has the first process answer everything else."""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import h11
import trio

from agent.config.s3_section import S3Section
from agent.fs.doors.door import MakeRunner
from agent.host_os.per_user_bounds import Bounds
from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import HEAD_BYTES_MAX, RECEIVE_BYTES, AnsweredElsewhere, peer_address
from agent.http.door import HttpDoor
from agent.http.server_side import Request, ServerSide
from agent.http.unauthenticated_clients import KNOWN
from agent.http.workers import Workers
from agent.s3.answers import Answer
from agent.s3.body import Body
from agent.s3.connection import Connection
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import slow_down
from agent.s3.get_object import ObjectReads
from agent.s3.processes.carrying import Carrier, Relay, RequestBytes
from agent.s3.processes.reader_objects import BlocksOf, FirstProcess, ReaderObjects
from agent.s3.rdma.service import Answering, HttpClient
from agent.s3.requests import Operation, S3Request
from agent.s3.service import CONNECTIONS, Serving
from agent.s3.signature import HttpRequest, Signer

log = logging.getLogger(__name__)

TELL_SECONDS: Final = 0.5
"""After which the first process is told, at the latest, which objects are not read any more."""
_READS: Final = ("GET", "HEAD")
_OF_BODIES: Final = frozenset({"transfer-encoding", "expect"})
"""Headers of requests whose bodies the first process reads, and asks for."""


class ReaderDoor(HttpDoor):
    """A `Door`, without anything that has to be stopped in order: what it serves are reads."""

    def __init__(
        self,
        section: S3Section,
        keys: Sequence[AccessKey],
        links: Sequence[socket.socket],
        carrying: socket.socket,
        blocks_of: BlocksOf,
        make_runner: MakeRunner,
    ) -> None:
        """`section`: as this process is to serve it. `links`, `carrying`: to the first process. Raises
        ConfigError."""
        self.counters = S3Counters()
        self._section, self._keys = section, {key.key_id: key for key in keys}
        self._first = FirstProcess(links)
        self._carrying = carrying
        self._blocks_of = blocks_of
        super().__init__(
            "s3",
            "S3",
            section,
            Workers(section.workers, make_runner, refusal=slow_down),
            Bounds().of(CONNECTIONS, section.connections, {KNOWN}),
            Complaints(log),
            self.counters,
            is_shared=True,
        )

    async def _prepare(self) -> None:
        self._carrier = Carrier(self._carrying)
        tenants = {each.tenant for each in self._keys.values()}
        stores = {name: ReaderObjects(name, self._first, self._blocks_of) for name in tenants}
        self._service = ReaderService(self._section, self._keys, stores, self._workers, self.counters)

    def _connection(self, stream: trio.abc.Stream, known: Callable[[], None]) -> "ReaderConnection":
        return ReaderConnection(
            self._service, stream, self._section.idle_s, self._complaints, self._carrier, known,
            peer_address(stream),
        )  # fmt: skip

    async def _tend(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carrier.hear)
            while True:
                await trio.sleep(TELL_SECONDS)
                if self._first.is_owing:
                    # It waits where the first process hangs.
                    await trio.to_thread.run_sync(self._first.tell_done, abandon_on_cancel=True)


class ReaderService(Serving):
    """Reads of objects. Lives in the door's event loop."""

    def __init__(
        self,
        section: S3Section,
        keys: Mapping[str, AccessKey],
        stores: Mapping[str, ReaderObjects],
        workers: Workers,
        counters: S3Counters,
    ) -> None:
        super().__init__(section, keys, stores, workers, counters)
        self._stores = stores
        reads = ObjectReads(workers, counters, self.transfers)
        self._operations = {Operation.GET_OBJECT: reads.get, Operation.HEAD_OBJECT: reads.head}

    async def answer(self, request: S3Request, tenant: str, body: Body) -> Answer:
        """Raises S3Error, and AnsweredElsewhere."""
        operation = self._operations.get(request.operation)
        if operation is None:
            raise AnsweredElsewhere("only reads of objects are served here")
        await body.nothing()
        self.counters.requests[request.operation.value] += 1
        try:
            return await operation(self._stores[tenant], request)
        except AnsweredElsewhere:
            self.counters.requests[request.operation.value] -= 1  # that process counts it
            raise

    def by_rdma(self, http: HttpRequest, signer: Signer, client: HttpClient) -> Answering:
        raise AnsweredElsewhere("objects by RDMA are the first process' to move")


class ReaderConnection(Connection):
    """It remembers how a request begins, for the first process, which may have to answer it."""

    def __init__(
        self,
        service: ReaderService,
        stream: trio.abc.HalfCloseableStream | trio.abc.Stream,
        idle_seconds: float,
        complaints: Complaints,
        carrier: Carrier,
        known: Callable[[], None] = lambda: None,
        peer: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(service, stream, idle_seconds, complaints, wall, known, peer)
        self._carrier = carrier
        self._received = b""
        """Of the request, as it came."""
        self._is_carried = False
        """The first process has answered the request."""

    async def _serve_one(self, idle_seconds: float) -> bool:
        self._received, self._is_carried = self._http.trailing_data, False
        return await super()._serve_one(idle_seconds)

    def _may_go_on(self) -> bool:
        return self._is_carried or super()._may_go_on()

    async def _some(self, most: int = RECEIVE_BYTES) -> bytes:
        data = await super()._some(most)
        self._received += data
        return data

    async def _answer(self, request: Request) -> bool:
        try:
            return await super()._answer(request)
        except AnsweredElsewhere:
            self._is_carried = True
            return await self._carry()

    def _answering(self, http: HttpRequest, signer: Signer, path: str) -> tuple[str, Answering]:
        headers = http.headers
        has_body = headers.get("content-length", "0") != "0" or not _OF_BODIES.isdisjoint(headers)
        if http.method not in _READS or has_body:
            raise AnsweredElsewhere("only reads of objects are served here")
        return super()._answering(http, signer, path)

    async def _carry(self) -> bool:
        """Have the first process answer; whether the connection can go on here."""
        received, request = self._received, RequestBytes(self._http)
        self._received, self._http = b"", ServerSide(HEAD_BYTES_MAX)
        if isinstance(self._stream, trio.SocketStream):
            # It reads from the very socket, also what is behind the request.
            return await self._carrier.carry(self._stream.socket.fileno(), self._peer, received)
        try:
            behind = await request.rest()
        except h11.RemoteProtocolError:
            behind = b""  # the first process says so
        goes_on = await self._carry_apart(received[: len(received) - len(behind)], request)
        if request.behind:
            self._http.receive_data(request.behind)
        return goes_on and request.is_whole

    async def _carry_apart(self, received: bytes, request: RequestBytes) -> bool:
        """By a socket of its own, behind which this process speaks TLS with the client."""
        ours, theirs = trio.socket.socketpair()
        async with trio.SocketStream(ours) as other, trio.open_nursery() as nursery:
            relay = Relay(self._stream, other, request, self._idle_seconds)
            nursery.start_soon(relay.run)
            with theirs:
                goes_on = await self._carrier.carry(theirs.fileno(), self._peer, received)
            relay.answered.set()
        return goes_on and not relay.is_broken
