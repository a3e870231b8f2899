"""The bounds of the S3 door. agent/http/unproven_clients.py says whose a connection is."""

from collections.abc import Mapping
from typing import Final

from agent.host_os.per_user_bounds import ALL, SHARED, Bounds, Limit
from agent.http.shares import Shares
from agent.s3.service import S3Service
from agent.s3.store import ObjectStore

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
