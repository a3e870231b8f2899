"""Connections of clients without a key yet, and the bounds of the door.

Anybody who reaches the port may connect. So a connection counts against its peer until a request was signed
by a known key, and a peer has at most as many as it leaves to others. From then on it counts against the
tenant, who has a share of them (agent/s3/shares.py).

Beyond that the oldest connection without a key gives way to a new one: of the same peer, or of any peer where
that has none. A client says its first request within milliseconds, a connection that is held says none. So a
peer keeps clients behind its address out only while it connects faster than they can speak.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import trio

from agent.host_os.per_user_bounds import ALL, SHARED, Bound, Bounds, Limit
from agent.s3.service import S3Service
from agent.s3.shares import Shares
from agent.s3.store import ObjectStore

KNOWN: Final = "clients with a key"
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


class UnprovenClient:
    """One connection, counted."""

    def __init__(self, clients: UnprovenClients, peer: str) -> None:
        self._clients = clients
        self.holder = peer
        """Who has its place in the books; empty where it has none."""
        self.scope = trio.CancelScope()
        """What serves it; cancelled where it gives way."""

    def identify(self) -> None:
        """It has shown a key. Idempotent."""
        self._clients.identify(self)

    def leave(self) -> None:
        """It has ended. Idempotent."""
        self._clients.leave(self)


class UnprovenClients:
    """The connections of one door. Lives in its event loop."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._unproven: OrderedDict[UnprovenClient, None] = OrderedDict()
        """The oldest comes first."""

    def enter(self, peer: str) -> UnprovenClient | None:
        """A new connection of a peer, counted; None where there is no room and nobody gives way."""
        client = UnprovenClient(self, peer)
        if not self._bound.take(peer):
            oldest = self._oldest(peer)
            if oldest is None:
                return None
            self._bound.pass_on(oldest.holder, peer)
            oldest.holder = ""
            self._end(oldest)
        self._unproven[client] = None
        return client

    def make_room(self) -> None:
        """The oldest ends, of whatever peer."""
        if (oldest := next(iter(self._unproven), None)) is not None:
            self._end(oldest)

    def _oldest(self, peer: str) -> UnprovenClient | None:
        own = (client for client in self._unproven if client.holder == peer)
        return next(own, None) or next(iter(self._unproven), None)

    def _end(self, client: UnprovenClient) -> None:
        del self._unproven[client]
        client.scope.cancel()

    def identify(self, client: UnprovenClient) -> None:
        if client in self._unproven:
            del self._unproven[client]
            self._bound.pass_on(client.holder, KNOWN)
            client.holder = KNOWN

    def leave(self, client: UnprovenClient) -> None:
        self._unproven.pop(client, None)
        if client.holder:
            self._bound.give_back(client.holder)
            client.holder = ""


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
