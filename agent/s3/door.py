"""The S3 door: objects of its tenants behind an `HttpDoor`.

An event loop of its own, in the thread `s3`, has the sockets; `s3-0` and so on have a channel each and do
whatever blocks.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import trio

from agent.config.s3_section import S3Section
from agent.fs.doors.door import MakeRunner
from agent.host_os.per_user_bounds import ALL, SHARED, Bounds, Limit
from agent.host_os.rate_limited_log import Complaints
from agent.http.door import HttpDoor
from agent.http.shares import Shares
from agent.http.unauthenticated_clients import KNOWN
from agent.http.workers import Workers
from agent.pool.map.document import tenant_id
from agent.pool.steps import Runner
from agent.s3.connection import Connection
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error, slow_down
from agent.s3.service import S3Service
from agent.s3.store import ObjectStore

log = logging.getLogger(__name__)

CONNECTIONS: Final = Limit(
    "s3-connections", "connections of S3 (`s3.connections`)", 256,
    by="peer, until it shows a key", share=SHARED, refused="the oldest without a key is closed, or it",
    bytes_each=640 << 10,
)  # fmt: skip
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
    ) -> None:
        """`stores` by tenant. Raises ConfigError where the certificate is not usable."""
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
        )
        self._section = section
        self._keys = {key.key_id: key for key in keys}
        self._stores = dict(stores)
        self._service: S3Service
        self._lock = threading.Lock()
        """Held by other threads that use the stores, against their being closed meanwhile."""

    def close(self) -> None:
        super().close()
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
        self._service = S3Service(self._section, self._keys, self._stores, self._workers, self.counters)
        watch_shares(self._bounds, self._service, self._stores)
        await self._workers.run(None, self._make_buckets)

    def _connection(self, stream: trio.abc.Stream, known: Callable[[], None]) -> Connection:
        return Connection(self._service, stream, self._section.idle_s, self._complaints, known=known)

    async def _tend(self) -> None:
        """Remove spare files, a batch at a time; end old uploads."""
        next_look, seconds = 0.0, self._section.upload_hours * 3600
        while True:
            more, now = False, trio.current_time()
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
        """Seal everything that is staged."""

        def seal(runner: Runner) -> None:
            for store in self._stores.values():
                runner.run(store.files.seal_everything())

        await self._workers.run(None, seal)


def watch_shares(bounds: Bounds, service: S3Service, stores: Mapping[str, ObjectStore]) -> None:
    """Show the shares of tenants, and the files that readers hold."""
    bounds.watch(
        OF_TENANTS,
        service.connections.of_each,
        lambda: service.connections.refusals,
        service.connections.total,
    )
    transfers: Shares = service.transfers
    bounds.watch(TRANSFERS, transfers.of_each, lambda: transfers.refusals, transfers.total)
    bounds.watch(
        HELD_FILES,
        lambda: {name: store.files_held() for name, store in list(stores.items())},
        most=transfers.total * 10_000,
    )
