"""Connections of clients without a key yet, and the bounds of the door.

Anybody who reaches the port may connect. So a connection counts against its peer until a request was signed
by a known key, and a peer has at most as many as it leaves to others. From then on it counts against the
tenant, who has a share of them (agent/s3/shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent.host_os.per_user_bounds import ALL, SHARED, Bound, Bounds, Limit
from agent.s3.service import S3Service
from agent.s3.shares import Shares
from agent.s3.store import ObjectStore

KNOWN: Final = "clients with a key"
CONNECTIONS: Final = Limit(
    "s3-connections", "connections of S3 (`s3.connections`)", 256,
    by="peer, until it shows a key", share=SHARED, refused="it is closed", bytes_each=640 << 10,
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

    def __init__(self, bound: Bound, peer: str) -> None:
        self._bound = bound
        self._peer = peer

    def enter(self) -> bool:
        """Count it; False where its peer may have no more."""
        return self._bound.take(self._peer)

    def identify(self) -> None:
        """It has shown a key. Idempotent."""
        if self._peer != KNOWN:
            self._bound.pass_on(self._peer, KNOWN)
            self._peer = KNOWN

    def leave(self) -> None:
        self._bound.give_back(self._peer)


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
