"""Requests of the S3 door that move an object's bytes by RDMA, and the connections for it.

A client makes a connection once: `POST /.s3rdma-rc/connect` with its queue pair, answered with the door's.
Then each GetObject, PutObject or UploadPart may name a piece of the client's memory in `x-amz-rdma-token`.
The bytes of a get are written there before the answer is sent, and those of a put are read from there;
neither is in the HTTP body. Everything else of a request is as without RDMA: signature, tenant, places,
conditions, ranges, checksums. Each answer has the CRC-64/NVME of the bytes that moved.

A request whose form is another is declined with 501 (token.py).
"""

import base64
import ipaddress
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from awscrt import checksums

from agent.config.s3_section import S3Section
from agent.http.connection import BrokenOff
from agent.s3.answers import Answer, Stream
from agent.s3.body import Body
from agent.s3.checksums import PREFIX
from agent.s3.chunked import WORDS
from agent.s3.counters import S3Counters
from agent.s3.errors import S3Error
from agent.s3.rdma.connections import ClientConnections
from agent.s3.rdma.engine import BUFFER_BYTES, Connection, TransferEngine, TransferFailed
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
from agent.s3.signature import HttpRequest, Signer
from agent.s3.store import ObjectStore
from nvmeof.errors import ConnectionLost
from nvmeof.transport.rdma_direct import PairEnd, address_of_gid

CONTROL: Final = b"/.s3rdma-rc/"
"""No bucket's name begins with a dot."""
OTHERS: Final = b"/.hipobj-rc/"
"""hipObject's second version: a session for each object, whose client writes and does not read."""
CRC: Final = PREFIX + "crc64nvme"

Receive: TypeAlias = Callable[[], Awaitable[bytes | None]]
Answering: TypeAlias = Callable[[], Awaitable[Answer]]
PlainAnswer: TypeAlias = Callable[[S3Request, str, Body], Awaitable[Answer]]


def wants_rdma(http: HttpRequest) -> bool:
    """Whether a request is for this file. Also where there is no RDMA here: a put without a body, whose bytes
    should have come by RDMA, would else store an empty object."""
    return (
        http.path.startswith((CONTROL, OTHERS))
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores` by their tenants; `plain` carries out a request whose body is at hand."""
        self._engine = engine
        self._stores = stores
        self._counters = counters
        self._plain = plain
        self._clock = clock
        self._hosts = Hosts(section.domain, section.bucket_of_host)
        self._networks = [ipaddress.ip_network(text) for text in section.rdma_clients]
        self.connections = ClientConnections(section.rdma_connections, stores, self._disconnect_pair)

    def start(self) -> None:
        if self._engine is not None:
            self._engine.start()

    def tend(self) -> None:
        """Now and then: end connections that nobody uses, and those of tenants that were erased."""
        self.connections.end_idle(self._clock(), self._is_erased)

    def close(self) -> None:
        """Requests are over. Idempotent."""
        self.connections.close()
        if self._engine is not None:
            self._engine.close()

    def prepare(self, http: HttpRequest, signer: Signer, receive: Receive, peer: str) -> Answering:
        """What answers a request that `wants_rdma`. `peer`: the address that it came from. Raises S3Error."""
        tenant = signer.access_key.tenant
        if self._engine is None or http.path.startswith(OTHERS):
            raise declined("This form of RDMA is not done here. Please use plain HTTP.")
        if http.path.startswith(CONTROL):
            verbs = {b"connect": self._connect, b"disconnect": self._disconnect}
            verb = verbs.get(http.path.removeprefix(CONTROL))
            if verb is None or http.method != "POST":
                raise S3Error("MethodNotAllowed", "That is not done to this resource.")
            return partial(verb, http.headers, tenant, Body(http.headers, signer, receive), peer)
        wanted = s3_request(http, self._hosts)
        memory = parse_memory(wanted.headers[TOKEN])
        if wanted.operation is Operation.GET_OBJECT:
            body = Body(wanted.body_headers, signer, receive)
            return partial(self._get, self._engine, wanted, tenant, body, memory)
        if wanted.operation in (Operation.PUT_OBJECT, Operation.UPLOAD_PART):
            return partial(self._put, self._engine, wanted, signer, receive, memory)
        raise declined("Only GetObject, PutObject and UploadPart move bytes by RDMA.")

    # --- connections --------------------------------------------------------------------------------------

    async def _connect(self, headers: Mapping[str, str], tenant: str, body: Body, peer: str) -> Answer:
        engine = self._engine
        assert engine is not None, "else the request was declined"
        await body.nothing()
        self._counters.requests["RdmaConnect"] += 1
        if self._is_erased(tenant):
            raise S3Error("InvalidAccessKeyId", "The tenant of this access key was erased.")
        end = parse_pair(headers.get(TOKEN, ""), headers.get(PSN, ""))
        self._check_place(end, peer)
        try:
            made = self.connections.add(tenant, partial(engine.connect, end), self._clock())
        except ConnectionLost as lost:
            raise S3Error("ServiceUnavailable", f"The RDMA device did not connect: {lost}") from None
        own = made.connection.end
        says = [(SESSION, made.name), (REPLY, f"200:{encode_pair(own)}"), (PSN, f"{own.psn:06x}")]
        return Answer(200, says)

    async def _disconnect(self, headers: Mapping[str, str], tenant: str, body: Body, peer: str) -> Answer:
        await body.nothing()
        self._counters.requests["RdmaDisconnect"] += 1
        self.connections.remove(parse_session(headers.get(SESSION, "")), tenant)
        return Answer(200, [(REPLY, "200")])

    def _disconnect_pair(self, connection: Connection) -> None:
        if self._engine is not None:
            self._engine.disconnect(connection)

    def _is_erased(self, tenant: str) -> bool:
        return self._stores[tenant].is_erased()

    def _check_place(self, end: PairEnd, peer: str) -> None:
        """A client brings in its own memory, not that of other hosts: packets of this device are trusted by
        the queue pairs of others, such as those of enclosures."""
        address = address_of_gid(end.gid)
        if address != _address(peer) and not any(address in network for network in self._networks):
            raise S3Error(
                "AccessDenied",
                f"The queue pair is at {address}, from where this request does not come; "
                "s3.rdma_clients does not have that address either.",
            )

    # --- objects ------------------------------------------------------------------------------------------

    async def _get(
        self, engine: TransferEngine, wanted: S3Request, tenant: str, body: Body, memory: Memory
    ) -> Answer:
        # The checksum that the object was stored with is compared below, so it is asked for.
        headers = {**wanted.headers, PREFIX + "mode": "ENABLED"}
        with self.connections.use(memory.session, tenant, self._clock()) as connection:
            answer = await self._plain(replace(wanted, headers=headers), tenant, body)
            stream = answer.stream
            if stream is None:
                return answer
            try:
                crc = await self._deliver(engine, stream, connection, memory)
            finally:
                await stream.close()
        length = stream.length
        own = base64.b64encode(crc.to_bytes(8, "big")).decode()
        stored = [value for name, value in answer.headers if name == CRC]
        if stored and stored[0] != own:
            raise S3Error("ServiceUnavailable", "The bytes are not those that were stored. Please try again.")
        kept = [each for each in answer.headers if each[0] != CRC]
        answer.headers = [*kept, (CRC, own), (REPLY, str(answer.status)), (BYTES, str(length))]
        answer.stream, answer.length = None, 0
        return answer

    async def _deliver(
        self, engine: TransferEngine, stream: Stream, connection: Connection, memory: Memory
    ) -> int:
        """Write the whole stream into the client's memory; its CRC-64/NVME. Raises S3Error."""
        if stream.length > memory.length:
            raise S3Error(
                "InvalidRequest", f"{stream.length} bytes do not fit into the client's {memory.length}."
            )
        crc, at = 0, memory.address

        async def send(data: memoryview) -> None:
            nonlocal crc, at
            while data:
                part, data = data[:BUFFER_BYTES], data[BUFFER_BYTES:]
                async with engine.buffer() as staging:
                    staging.view[: len(part)] = part
                    crc = checksums.crc64nvme(staging.view[: len(part)], crc)
                    await engine.write(connection, staging, len(part), at, memory.key)
                at += len(part)
                self._counters.bytes_read += len(part)
                self._counters.rdma_bytes_read += len(part)

        try:
            await stream.send(send)
        except TransferFailed as failed:
            raise self._failure(failed) from None
        except BrokenOff as broken:
            # Nothing of the answer was sent, so the client can be told.
            raise S3Error("ServiceUnavailable", f"The object could not be read: {broken}") from None
        return crc

    async def _put(
        self, engine: TransferEngine, wanted: S3Request, signer: Signer, receive: Receive, memory: Memory
    ) -> Answer:
        headers = wanted.body_headers
        if signer.payload in WORDS:
            raise S3Error("InvalidRequest", "A body that comes by RDMA has no chunks.", closes=True)
        if headers.get("content-length", "0") != "0" or await receive() is not None:
            raise S3Error("InvalidRequest", "With RDMA the body of a put is empty.", closes=True)
        with self.connections.use(memory.session, signer.access_key.tenant, self._clock()) as connection:
            source = _Source(engine, connection, memory)
            body = Body({**headers, "content-length": str(memory.length)}, signer, source.next)
            if wanted.operation is Operation.PUT_OBJECT:
                body.checks.compute("crc64nvme")
            try:
                answer = await self._plain(wanted, signer.access_key.tenant, body)
            except TransferFailed as failed:
                raise self._failure(failed) from None
        self._counters.rdma_bytes_written += memory.length
        if not any(name == CRC for name, _ in answer.headers):
            answer.headers.append((CRC, base64.b64encode(source.crc.to_bytes(8, "big")).decode()))
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


def _address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of a client as its socket tells it; None where it has none."""
    try:
        found = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found


class _Source:
    """The bytes of a put, as a body receives them: read from the client's memory in turn."""

    def __init__(self, engine: TransferEngine, connection: Connection, memory: Memory) -> None:
        self._engine, self._connection, self._memory = engine, connection, memory
        self._done = 0
        self.crc = 0

    async def next(self) -> bytes | None:
        """Raises TransferFailed."""
        memory, left = self._memory, self._memory.length - self._done
        if not left:
            return None
        length = min(left, BUFFER_BYTES)
        async with self._engine.buffer() as staging:
            at = memory.address + self._done
            await self._engine.read(self._connection, staging, length, at, memory.key)
            data = bytes(staging.view[:length])
        self._done += length
        self.crc = checksums.crc64nvme(data, self.crc)
        return data
