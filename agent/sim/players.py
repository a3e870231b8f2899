"""Requests without engines, as `g35 replay` plays them: what the real path is compared with.

Several players take requests in order, each when its last one has ended. A player looks up the prefix, reads
its leading blocks one after the other up to the first hole, and stores the others one after the other.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from agent.sim.engine import Served
from agent.sim.pool_store import PoolStore
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]


class Players:
    """So many players before one pool. `ended` hears of each request that is served.

    The first player is the first host's, the second the second's, and so on around.
    """

    def __init__(
        self, store: PoolStore, requests: Iterator[Request], ended: Callable[[Served], None]
    ) -> None:
        self._store = store
        self._requests = requests
        self._ended = ended

    def play(self, number: int) -> Steps:
        """One player, until no request is left."""
        host = number % self._store.plan.hosts
        for request in self._requests:
            yield from self._play(host, request)

    def _play(self, host: int, request: Request) -> Steps:
        store, blocks = self._store, request.blocks
        began, tenant = store.loop.now, store.tenant(request)
        causes = yield from store.lookup(host, request)
        promised = next((at for at, cause in enumerate(causes) if cause is not None), len(causes))
        read = 0
        while read < promised:
            cause = yield from store.get(host, tenant, blocks[read])
            if cause is not None:
                causes[read] = cause
                break
            read += 1
        store.missed(causes[read:])
        loaded_after = store.loop.now - began
        for at in range(read, len(blocks)):
            # What lies behind a hole is there already.
            if causes[at] is not None:
                yield from store.put(store.agents[host], tenant, blocks[at])
        cached = min(request.tokens_of(read), request.input_tokens)
        self._ended(
            Served(
                request.number, host, loaded_after, request.input_tokens, cached, len(blocks), 0, 0, read,
            )
        )  # fmt: skip
