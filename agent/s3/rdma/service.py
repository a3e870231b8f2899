"""Requests of the S3 door that move an object's bytes by RDMA, and the connections for it.

A client makes a connection once: `POST /.s3rdma-rc/connect` with its queue pair, answered with the door's.
Then each GetObject, PutObject or UploadPart may name a piece of the client's memory in `x-amz-rdma-token`.
The bytes of a get are written there before the answer is sent, and those of a put are read from there;
neither is in the HTTP body. Everything else of a request is as without RDMA: signature, tenant, places,
conditions, ranges, checksums. Each answer has the CRC-64/NVME of the bytes that moved.

A client that gave its request up may use its memory for something else. So nothing moves once its end of
the HTTP connection is closed: the RDMA connection is broken off then. What a put reads after a time-out that
nobody can see yet is refused by its checksum, which it must have.

A request whose form is another is declined with 501 (token.py).
"""

import base64
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias

import trio
from awscrt import checksums

from agent.config.s3_section import S3Section
from agent.http.connection import BrokenOff
from agent.http.patience import Patience
from agent.s3.answers import Answer, Stream
from agent.s3.body import Body
from agent.s3.checksums import ALGORITHMS, PREFIX
from agent.s3.chunked import WORDS
from agent.s3.counters import S3Counters
from agent.s3.errors import S3Error
from agent.s3.rdma.connections import Caller, ClientConnections
from agent.s3.rdma.engine import BUFFER_BYTES, Connection, TransferEngine, TransferFailed
from agent.s3.rdma.one_piece import OnePiece
from agent.s3.rdma.token import (
    BYTES,
    PSN,
    REPLY,
    SESSION,
    STATUS,
    TOKEN,
    Memory,
    declined,
    encode_pair,
    parse_memory,
    parse_pair,
    parse_session,
)
from agent.s3.requests import Hosts, Operation, S3Request, s3_request
from agent.s3.signature import EMPTY_SHA256, UNSIGNED, HttpRequest, Signer
from agent.s3.store import ObjectStore
from nvmeof.errors import ConnectionLost
from nvmeof.transport.rdma_direct import PairEnd, address_of_gid

CONTROL: Final = b"/.s3rdma-rc/"
"""No bucket's name begins with a dot."""
OTHERS: Final = b"/.hipobj-rc/"
"""hipObject's second version: a session for each object, whose client writes and does not read."""
CRC: Final = PREFIX + "crc64nvme"

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Receive: TypeAlias = Callable[[], Awaitable[bytes | None]]
Answering: TypeAlias = Callable[[], Awaitable[Answer]]
PlainAnswer: TypeAlias = Callable[[S3Request, str, Body], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class HttpClient:
    """The client at the other end of a HTTP connection."""

    peer: str
    """Its address, as its socket tells it; empty where it has none."""
    receive: Receive
    """The next bytes of the body."""
    is_gone: Callable[[], bool]
    """Whether its end of the connection is closed."""


def wants_rdma(http: HttpRequest, hosts: Hosts) -> bool:
    """Whether a request is for this file. Also where there is no RDMA here: a put without a body, whose bytes
    should have come by RDMA, would else store an empty object.

    Where the host names the bucket, the path is a key, which may begin as it likes.
    """
    is_path = http.path.startswith((CONTROL, OTHERS))
    return (
        (is_path and not hosts.bucket_of(http.headers.get("host", "")))
        or TOKEN in http.headers
        or any(name.lower() == TOKEN for name, _ in http.query)
    )


class S3Rdma:
    """All of it, for the door's event loop. Without an engine everything is declined."""

    def __init__(
        self,
        section: S3Section,
        stores: Mapping[str, ObjectStore],
        counters: S3Counters,
        plain: PlainAnswer,
        engine: TransferEngine | None = None,
        enclosures: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        patience: Patience | None = None,
    ) -> None:
        """`stores` by their tenants; `plain` carries out a request whose body is at hand. `enclosures`: names
        or addresses of the pool's, where no client is. `patience`: the door's, for its threads."""
        self._patience = patience or Patience()
        self._enclosures = enclosures
        self._engine = engine
        self._stores = stores
        self._counters = counters
        self._plain = plain
        self._clock = clock
        self._hosts = Hosts(section.domain, section.bucket_of_host)
        self._networks = [ipaddress.ip_network(text) for text in section.rdma_clients]
        self.connections = ClientConnections(section.rdma_connections, stores, self._disconnect_pair, clock)
        self._connecting = {tenant: trio.CapacityLimiter(1) for tenant in stores}
        """A device may take seconds for a connect, which are those of its tenant."""

    def start(self) -> None:
        if self._engine is not None:
            self._engine.start()

    def tend(self) -> None:
        """Now and then: end connections that nobody uses, those of tenants that were erased, and all where
        the device failed."""
        if self._engine is not None and self._engine.lost:
            self.connections.close()
        self.connections.end_idle(self._is_erased)

    def close(self) -> None:
        """Requests are over. Idempotent."""
        self.connections.close()
        if self._engine is not None:
            self._engine.close()

    def prepare(self, http: HttpRequest, signer: Signer, client: HttpClient) -> Answering:
        """What answers a request that `wants_rdma`. Raises S3Error."""
        peer = _address(client.peer)
        caller = Caller(signer.access_key.tenant, str(peer or client.peer), self._age(signer))
        is_path = not self._hosts.bucket_of(http.headers.get("host", ""))
        if self._engine is not None and self._engine.lost:
            raise declined("The RDMA device here failed. Please use plain HTTP.")
        if self._engine is None or (is_path and http.path.startswith(OTHERS)):
            raise declined("This form of RDMA is not done here. Please use plain HTTP.")
        if is_path and http.path.startswith(CONTROL):
            verbs = {b"connect": self._connect, b"disconnect": self._disconnect}
            verb = verbs.get(http.path.removeprefix(CONTROL))
            if verb is None or http.method != "POST":
                raise S3Error("MethodNotAllowed", "That is not done to this resource.")
            return partial(verb, http.headers, caller, Body(http.headers, signer, client.receive))
        wanted = s3_request(http, self._hosts)
        memory = parse_memory(wanted.headers[TOKEN])
        if wanted.operation is Operation.GET_OBJECT:
            body = Body(wanted.body_headers, signer, client.receive)
            return partial(self._get, wanted, caller, body, memory, client)
        if wanted.operation in (Operation.PUT_OBJECT, Operation.UPLOAD_PART):
            return partial(self._put, wanted, caller, signer, memory, client)
        raise declined("Only GetObject, PutObject and UploadPart move bytes by RDMA.")

    def _age(self, signer: Signer) -> float:
        """Of a request, since some fixed time: ages are compared with each other alone."""
        signed = datetime.fromisoformat(signer.stamp.removesuffix("Z")).replace(tzinfo=UTC)
        return self._clock() - signed.timestamp()

    @property
    def _device(self) -> TransferEngine:
        assert self._engine is not None, "else the request was declined"
        return self._engine

    # --- connections --------------------------------------------------------------------------------------

    async def _connect(self, headers: Mapping[str, str], caller: Caller, body: Body) -> Answer:
        engine = self._device
        await body.nothing()
        self._counters.requests["RdmaConnect"] += 1
        if self._is_erased(caller.tenant):
            raise S3Error("InvalidAccessKeyId", "The tenant of this access key was erased.")
        end = parse_pair(headers.get(TOKEN, ""), headers.get(PSN, ""))
        await self._check_place(engine, end, caller.peer)

        async def make() -> Connection:
            # In a thread: the kernel may look for the client's address meanwhile.
            limiter = self._connecting[caller.tenant]
            return await trio.to_thread.run_sync(engine.connect, end, limiter=limiter)

        try:
            made = await self.connections.add(caller, make)
        except ConnectionLost as lost:
            raise S3Error("ServiceUnavailable", f"The RDMA device did not connect: {lost}") from None
        own = made.connection.end
        says = [(SESSION, made.name), (REPLY, f"200:{encode_pair(own)}"), (PSN, f"{own.psn:06x}")]
        return Answer(200, says)

    async def _disconnect(self, headers: Mapping[str, str], caller: Caller, body: Body) -> Answer:
        await body.nothing()
        self._counters.requests["RdmaDisconnect"] += 1
        self.connections.remove(parse_session(headers.get(SESSION, "")), caller)
        return Answer(200, [(REPLY, "200")])

    def _disconnect_pair(self, connection: Connection) -> None:
        if self._engine is not None:
            self._engine.disconnect(connection)

    def _is_erased(self, tenant: str) -> bool:
        return self._stores[tenant].is_erased()

    async def _check_place(self, engine: TransferEngine, end: PairEnd, peer: str) -> None:
        """A client brings in its own memory, not that of other hosts: packets of this device are trusted by
        the queue pairs of others, such as those of enclosures. Raises S3Error."""
        address = address_of_gid(end.gid)
        if address == _address(peer):
            return
        if not any(address in network for network in self._networks):
            raise S3Error(
                "AccessDenied",
                f"The queue pair is at {address}, from where this request does not come; "
                "s3.rdma_clients does not have that address either.",
            )
        if address == _address(engine.address) or await self._is_enclosure(address):
            raise S3Error(
                "AccessDenied",
                f"The queue pair is at {address}, which is the agent's or an enclosure's, and from where "
                "this request does not come.",
            )

    async def _is_enclosure(self, address: IpAddress) -> bool:
        """Also where a name has no address just now, so that nobody can tell."""
        for host in self._enclosures():
            if (found := _address(host)) is not None:
                addresses = {found}
            else:
                try:
                    rows = await trio.socket.getaddrinfo(host, None)
                except OSError:
                    return True
                addresses = {ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows}
            if address in addresses:
                return True
        return False

    # --- objects ------------------------------------------------------------------------------------------

    async def _get(
        self, wanted: S3Request, caller: Caller, body: Body, memory: Memory, client: HttpClient
    ) -> Answer:
        # The checksum that the object was stored with is compared below, so it is asked for.
        headers = {**wanted.headers, PREFIX + "mode": "ENABLED"}
        with self.connections.use(memory.session, caller) as connection:
            way = _Way(self._device, connection, memory, client)
            piece = OnePiece(self._device, connection, memory, way.need, self._patience)
            wanted = replace(wanted, headers=headers, room=piece.room, send_at_once=piece.send)
            try:
                answer = await self._plain(wanted, caller.tenant, body)
                stream = answer.stream
                if stream is None:
                    return answer
                try:
                    if piece.has_begun:
                        crc = await self._sent(piece, stream.length)
                    else:
                        crc = await self._deliver(stream, way)
                finally:
                    await stream.close()
            finally:
                await piece.close()
        length = stream.length
        own = base64.b64encode(crc.to_bytes(8, "big")).decode()
        stored = [value for name, value in answer.headers if name == CRC]
        if stored and stored[0] != own:
            raise S3Error("ServiceUnavailable", "The bytes are not those that were stored. Please try again.")
        kept = [each for each in answer.headers if each[0] != CRC]
        answer.headers = [*kept, (CRC, own), (REPLY, str(answer.status)), (BYTES, str(length))]
        answer.stream, answer.length = None, 0
        return answer

    async def _sent(self, piece: OnePiece, length: int) -> int:
        """What `_deliver` gives, of a piece that is on its way. Raises S3Error."""
        try:
            await piece.sent()
        except TransferFailed as failed:
            raise self._failure(failed) from None
        self._counters.bytes_read += length
        self._counters.rdma_bytes_read += length
        return piece.crc

    async def _deliver(self, stream: Stream, way: "_Way") -> int:
        """Write the whole stream into the client's memory; its CRC-64/NVME. Raises S3Error."""
        if stream.length > way.left:
            raise S3Error("InvalidRequest", f"{stream.length} bytes do not fit into the client's {way.left}.")

        async def send(data: memoryview) -> None:
            while data:
                part, data = data[:BUFFER_BYTES], data[BUFFER_BYTES:]
                await way.send(part)
                self._counters.bytes_read += len(part)
                self._counters.rdma_bytes_read += len(part)

        try:
            await stream.send(send)
        except TransferFailed as failed:
            raise self._failure(failed) from None
        except BrokenOff as broken:
            # Nothing of the answer was sent, so the client can be told.
            raise S3Error("ServiceUnavailable", f"The object could not be read: {broken}") from None
        return way.crc

    async def _put(
        self, wanted: S3Request, caller: Caller, signer: Signer, memory: Memory, client: HttpClient
    ) -> Answer:
        headers = wanted.body_headers
        if signer.payload in WORDS:
            raise S3Error("InvalidRequest", "A body that comes by RDMA has no chunks.", closes=True)
        if headers.get("content-length", "0") != "0" or await client.receive() is not None:
            raise S3Error("InvalidRequest", "With RDMA the body of a put is empty.", closes=True)
        if signer.payload == EMPTY_SHA256:
            # Of the HTTP body, as SDKs sign it.
            signer = replace(signer, payload=UNSIGNED)
        _need_checksum(headers, signer)
        with self.connections.use(memory.session, caller) as connection:
            way = _Way(self._device, connection, memory, client)
            body = Body({**headers, "content-length": str(memory.length)}, signer, way.next)
            if wanted.operation is Operation.PUT_OBJECT:
                body.checks.compute("crc64nvme")
            try:
                answer = await self._plain(wanted, caller.tenant, body)
            except TransferFailed as failed:
                raise self._failure(failed) from None
        self._counters.rdma_bytes_written += memory.length
        if not any(name == CRC for name, _ in answer.headers):
            answer.headers.append((CRC, base64.b64encode(way.crc.to_bytes(8, "big")).decode()))
        answer.headers += [(REPLY, str(answer.status)), (BYTES, str(memory.length))]
        return answer

    def _failure(self, failed: TransferFailed) -> S3Error:
        self._counters.rdma_failures += 1
        over = [(STATUS, "unconnected")]
        if failed.refused:
            why = f"The client's device refused its key, address or length ({failed})."
            return S3Error("InvalidArgument", why, headers=over)
        if failed.late:
            return S3Error("RequestTimeout", f"The client's device did not answer ({failed}).", headers=over)
        return S3Error("ServiceUnavailable", f"The RDMA connection broke ({failed}).", headers=over)


def _need_checksum(headers: Mapping[str, str], signer: Signer) -> None:
    """Only a checksum tells the bytes that a client meant from those that its memory has when they are read.
    Raises S3Error."""
    named = ("content-md5", *(PREFIX + name for name in ALGORITHMS))
    if signer.payload == UNSIGNED and not any(name in headers for name in named):
        raise S3Error("InvalidRequest", f"A put by RDMA needs a checksum of its bytes, such as {CRC}.")


def _address(peer: str) -> IpAddress | None:
    """The address of a client as its socket tells it; None where it has none."""
    try:
        found = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found


class _Way:
    """Into the client's memory, or out of it: piece after piece, one call at a time."""

    def __init__(
        self, engine: TransferEngine, connection: Connection, memory: Memory, client: HttpClient
    ) -> None:
        self._engine, self._connection, self._client = engine, connection, client
        self._at, self._key = memory.address, memory.key
        self.left = memory.length
        self.crc = 0
        """CRC-64/NVME of what has moved."""

    def need(self) -> None:
        """Break the RDMA connection off where the client is gone. Raises TransferFailed."""
        if self._client.is_gone():
            why = "the client closed its HTTP connection"
            self._connection.break_off(why)
            raise TransferFailed(why)

    async def send(self, part: memoryview) -> None:
        """Write what a buffer holds. Raises TransferFailed."""
        async with self._engine.buffer() as staging:
            staging.view[: len(part)] = part
            self.crc = checksums.crc64nvme(staging.view[: len(part)], self.crc)
            self.need()
            await self._engine.write(self._connection, staging, len(part), self._at, self._key)
        self._moved(len(part))

    async def next(self) -> bytes | None:
        """The next bytes, as a body receives them. Raises TransferFailed."""
        # Before each piece, and after the last one: what was read until then may be stored.
        self.need()
        if not self.left:
            return None
        length = min(self.left, BUFFER_BYTES)
        async with self._engine.buffer() as staging:
            await self._engine.read(self._connection, staging, length, self._at, self._key)
            data = bytes(staging.view[:length])
        self._moved(length)
        self.crc = checksums.crc64nvme(data, self.crc)
        return data

    def _moved(self, length: int) -> None:
        self._at += length
        self.left -= length
