"""The bounds of the query door. agent/http/unproven_clients.py says whose a connection is."""

from typing import Final

from agent.host_os.per_user_bounds import SHARED, Limit
from agent.query.messages import BODY_BYTES_MAX

CONNECTIONS: Final = Limit(
    "query-connections", "connections of the query door (`query.connections`)", 256,
    by="peer, until it shows a token", share=SHARED, refused="the oldest without a token is closed, or it",
    bytes_each=640 << 10,
)  # fmt: skip
OF_TENANTS: Final = Limit(
    "query-tenant-connections", "connections of it whose client has shown a token (`query.connections`)", 256,
    by="tenant", share="all but a half, in which each other tenant has an equal share", refused="503",
    bytes_each=0,
)  # fmt: skip
REQUESTS: Final = Limit(
    "query-requests", "queries that are being received or answered (`query.requests`)", 16,
    by="tenant", share="all but a half, in which each other tenant has an equal share", refused="503",
    bytes_each=8 * BODY_BYTES_MAX,
)  # fmt: skip
