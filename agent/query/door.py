"""The query door: an `HttpDoor` with the service behind it, from the configuration and the pool's volumes."""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import trio

from agent.config.query_section import QuerySection
from agent.errors import ConfigError
from agent.fs.doors.door import MakeRunner
from agent.host_os.per_user_bounds import SHARED, Bounds, Limit
from agent.host_os.rate_limited_log import Complaints
from agent.http.door import HttpDoor
from agent.http.shares import Shares
from agent.http.unauthenticated_clients import KNOWN
from agent.http.workers import Workers
from agent.pool.access import ServedVolume
from agent.pool.map.document import tenant_id
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel
from agent.query.access_tokens import Token, read_tokens_file
from agent.query.connection import QueryConnection, Shared
from agent.query.counters import QueryCounters
from agent.query.query_json import BODY_BYTES_MAX
from agent.query.service import QueryService

log = logging.getLogger(__name__)

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


class QueryDoor(HttpDoor):
    """A `Door`: the thread `query` has the sockets, `query-0` and so on look up."""

    def __init__(
        self,
        section: QuerySection,
        tokens: Sequence[Token],
        volumes: Mapping[str, Sequence[ServedVolume]],
        prestage: PrestageCache | None,
        channel: Callable[[], IoChannel],
        is_away: Callable[[int], bool],
        make_runner: MakeRunner,
        bounds: Bounds | None = None,
    ) -> None:
        """`volumes`: those of each tenant, by its name. `channel`: that of the thread that asks. Raises
        ConfigError where the certificate is not usable."""
        bounds = bounds or Bounds()
        self.counters = QueryCounters()
        super().__init__(
            "query",
            "query",
            section,
            Workers(section.workers, make_runner, name="query", has_index=False),
            bounds.of(CONNECTIONS, section.connections, {KNOWN}),
            Complaints(log),
            self.counters,
        )
        service = QueryService(
            volumes,
            prestage,
            channel,
            is_away,
            self.counters,
            deadline=section.deadline_ms / 1e3,
            keys_per_s=section.keys_per_s,
            rests=self._workers.rests,
        )
        places, requests = Shares(section.connections, volumes), Shares(section.requests, volumes)
        places.show(bounds, OF_TENANTS)
        requests.show(bounds, REQUESTS)
        self._shared = Shared(
            service, tokens, self._workers, places, requests, self.counters, self._complaints, section.idle_s
        )

    def _connection(self, stream: trio.abc.Stream, known: Callable[[], None]) -> QueryConnection:
        return QueryConnection(self._shared, stream, known)

    def snapshot(self) -> Mapping[str, Any]:
        """Counters for the agent's status."""
        return {"listen": self.addresses, "tls": self.speaks_tls, **self.counters.snapshot()}


def make_query_door(
    section: QuerySection,
    served: Sequence[ServedVolume],
    prestage: PrestageCache | None,
    channel: Callable[[], IoChannel],
    is_away: Callable[[int], bool],
    make_runner: MakeRunner,
    erased: Container[str] = (),
    bounds: Bounds | None = None,
) -> QueryDoor:
    """A door, not open yet. The tokens of `erased` tenants are not valid. Raises ConfigError."""
    tokens: list[Token] = []
    volumes: dict[str, Sequence[ServedVolume]] = {}
    for each in section.tenants:
        if each.tenant in erased:
            log.info("the query door does without tenant %s, which was erased", each.tenant)
            continue
        own = read_tokens_file(each.tokens, each.tenant)
        if {token.digest for token in own} & {token.digest for token in tokens}:
            raise ConfigError(f"{each.tokens} has a token that another tenant has", "make another token")
        tokens += own
        whose = bytes.fromhex(tenant_id(each.tenant))
        volumes[each.tenant] = [
            volume for volume in served if volume.settings.kind == "kv" and volume.settings.tenant == whose
        ]
        if not volumes[each.tenant]:
            raise ConfigError(
                f"query.tenants names {each.tenant}, which has no key-value volume in this pool",
                "see g35 tenant list",
            )
    return QueryDoor(section, tokens, volumes, prestage, channel, is_away, make_runner, bounds)
