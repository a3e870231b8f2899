"""The S3 door: objects of its tenants behind an `HttpDoor`.

An event loop of its own, in the thread `s3`, has the sockets; `s3-0` and so on have a channel each and do
whatever blocks.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import trio

from agent.config.s3_section import S3Section
from agent.fs.doors.door import MakeRunner
from agent.host_os.per_user_bounds import ALL, Bounds, Limit
from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import peer_address
from agent.http.door import HttpDoor
from agent.http.unauthenticated_clients import KNOWN, UnprovenClient
from agent.http.workers import Workers
from agent.pool.map.document import tenant_id
from agent.pool.steps import Runner
from agent.s3.connection import Connection
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error, slow_down
from agent.s3.processes.carrying import serve_carried
from agent.s3.processes.lookups import OTHER_LINKS, Lookups
from agent.s3.rdma.engine import TransferEngine
from agent.s3.service import CONNECTIONS, S3Service
from agent.s3.store import ObjectStore

log = logging.getLogger(__name__)

OF_TENANTS: Final = Limit(
    "s3-tenant-connections", "connections of S3 whose client has shown a key (`s3.connections`)", 256,
    by="tenant", share="all but a half, in which each other tenant has an equal share", refused="SlowDown",
    bytes_each=0,
)  # fmt: skip
TRANSFERS: Final = Limit(
    "s3-transfers", "bodies of S3 that move (`s3.transfers`)", 32,
    by="tenant", share="all but a half, in which each other tenant has an equal share",
    refused="waits for 20 s, then SlowDown", bytes_each=2 << 20,
)  # fmt: skip
HELD_FILES: Final = Limit(
    "s3-held-files", "files of objects that are being read, 10,000 of one body (`s3.transfers`)", 320_000,
    by="tenant", share=ALL, refused="as its body", bytes_each=512,
)  # fmt: skip

RDMA: Final = Limit(
    "s3-rdma-connections", "RDMA connections of S3's clients (`s3.rdma_connections`)", 64,
    by="tenant", share="all but a half, in which each other tenant has an equal share",
    refused="that of its own that rested longest goes, or SlowDown", bytes_each=256 << 10,
)  # fmt: skip

TIDY_SECONDS: Final = 0.5
UPLOADS_SECONDS: Final = 60.0
"""Between two looks for forgotten uploads."""


class S3Door(HttpDoor):
    """A `Door`. It owns the stores. What requests write is whole or absent, also where it is stopped."""

    def __init__(
        self,
        section: S3Section,
        keys: Sequence[AccessKey],
        stores: Mapping[str, ObjectStore],
        make_runner: MakeRunner,
        bounds: Bounds | None = None,
        rdma: TransferEngine | None = None,
        enclosures: Callable[[], Iterable[str]] = tuple,
        *,
        is_shared: bool = False,
    ) -> None:
        """`stores` by tenant; `rdma` moves objects for clients that ask for it; `enclosures`: see `S3Rdma`;
        `is_shared`: readers listen as well. Raises ConfigError where the certificate is not usable."""
        self._bounds = bounds or Bounds()
        self.counters = S3Counters()
        super().__init__(
            "s3",
            "S3",
            section,
            Workers(section.workers, make_runner, refusal=slow_down),
            self._bounds.of(CONNECTIONS, section.connections, {KNOWN}),
            Complaints(log),
            self.counters,
            is_shared=is_shared,
        )
        self._section = section
        self._keys = {key.key_id: key for key in keys}
        self._stores = dict(stores)
        self._service: S3Service | None = None
        self._rdma = rdma
        self._enclosures = enclosures
        self._lock = threading.Lock()
        """Held by other threads that use the stores, against their being closed meanwhile."""
        self._lookups = Lookups(self._stores, self._lock)

    def close(self) -> None:
        super().close()
        if self._rdma is not None:
            self._rdma.close()
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def snapshot(self) -> Mapping[str, Any]:
        with self._lock:
            objects = sum(store.index.count() for store in self._stores.values())
        return {
            "listen": self.addresses,
            "tls": self.speaks_tls,
            "objects": objects,
            "rdma": self._rdma.address if self._rdma is not None else "",
            "rdma_lost": self._rdma.lost if self._rdma is not None else "",
            "rdma_connections": len(self._service.rdma.connections) if self._service is not None else 0,
            **self.counters.snapshot(),
        }

    def holds_anything(self, tenant: bytes) -> bool:
        """Whether a tenant, by its id, has objects here, so that its volumes of blocks are in use."""
        with self._lock:
            return any(
                store.holds_anything()
                for name, store in self._stores.items()
                if bytes.fromhex(tenant_id(name)) == tenant
            )

    def orphans(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `blocks` that no object's file has; none once the door is closed."""
        with self._lock:
            left = blocks if self._stores else ()
            for store in self._stores.values():
                left = store.files.orphans(left)
        return left

    async def _prepare(self) -> None:
        self._service = S3Service(
            self._section, self._keys, self._stores, self._workers, self.counters, self._rdma,
            self._enclosures,
        )  # fmt: skip
        self._service.rdma.start()
        watch_shares(self._bounds, self._service, self._stores)
        await self._workers.run(None, self._make_buckets)

    def _connection(self, stream: trio.abc.Stream, known: Callable[[], None]) -> Connection:
        return self._connection_of(peer_address(stream), stream, known)

    def _connection_of(self, peer: str, stream: trio.abc.Stream, known: Callable[[], None]) -> Connection:
        assert self._service is not None, "made before the first connection"
        return Connection(
            self._service, stream, self._section.idle_s, self._complaints, known=known, peer=peer
        )

    async def _serve_carried(self, connected: socket.socket, peer: str, received: bytes) -> bool:
        """Serve one request of a connection of a reader, and close the socket."""
        goes_on: list[bool] = []

        async def serve(stream: trio.SocketStream, stranger: UnprovenClient) -> None:
            async with stream:
                connection = self._connection_of(peer, stream, stranger.identify)
                goes_on.append(await connection.serve_carried(received))

        with connected:
            await self._wait_for_room()
            if (stranger := self._enter(peer)) is not None:
                connected.setblocking(False)
                carried = trio.SocketStream(trio.socket.from_stdlib_socket(connected))
                await self._serve_one(stranger, serve, carried)
        return goes_on == [True]

    @property
    def links_of_reader(self) -> int:
        """Sockets between this door and that of each reader: of those who ask, and one that carries."""
        return self._section.workers + OTHER_LINKS + 1

    def serve_reader(self, links: Sequence[socket.socket], carrying: socket.socket) -> None:
        """From any thread: a new process of a reader asks here, and has requests answered, until it has
        closed its ends."""
        self._lookups.begin(links)

        def start() -> None:
            if self._nursery is None:
                carrying.close()
            else:
                self._nursery.start_soon(serve_carried, carrying, self._serve_carried)

        try:
            assert self._token is not None, "readers start after the doors"
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            carrying.close()

    async def _tend(self) -> None:
        """Remove spare files, a batch at a time; end old uploads, and RDMA connections that rest."""
        assert self._service is not None, "made before"
        next_look, seconds = 0.0, self._section.upload_hours * 3600
        while True:
            more, now = False, trio.current_time()
            self._service.rdma.tend()
            for store in self._stores.values():
                try:
                    more |= await self._workers.run(store, store.tidy)
                    if now >= next_look:
                        for name in await self._workers.run(
                            store, partial(store.old_uploads, seconds=seconds)
                        ):
                            await self._workers.run(store, partial(store.end_upload, name=name))
                except Exception as bug:
                    self._complaints.bug("tidying up behind S3", bug)
            if now >= next_look:
                next_look = now + UPLOADS_SECONDS
            await trio.sleep(0.0 if more else TIDY_SECONDS)

    def _make_buckets(self, runner: Runner) -> None:
        for tenant in self._section.tenants:
            store = self._stores.get(tenant.tenant)
            if store is None:
                continue  # it was erased
            for name in tenant.buckets:
                try:
                    store.index.make_bucket(name, time.time_ns())
                except S3Error as refused:
                    log.warning("bucket %s of %s was not made: %s", name, tenant.tenant, refused)

    async def _finish(self) -> None:
        """End the RDMA connections; seal everything that is staged."""
        if self._service is not None:
            self._service.rdma.close()

        def seal(runner: Runner) -> None:
            for store in self._stores.values():
                runner.run(store.files.seal_everything())

        await self._workers.run(None, seal)


def watch_shares(bounds: Bounds, service: S3Service, stores: Mapping[str, ObjectStore]) -> None:
    """Show the shares of tenants, and the files that readers hold."""
    service.connections.show(bounds, OF_TENANTS)
    service.rdma.connections.shares.show(bounds, RDMA)
    service.transfers.show(bounds, TRANSFERS)
    bounds.watch(
        HELD_FILES,
        lambda: {name: store.files_held() for name, store in list(stores.items())},
        most=service.transfers.total * 10_000,
    )
