"""The same work by Redis: redis-py with hiredis, each thread with a client of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent.bench.contents import pages
from agent.bench.peers.lines import PeerFailed, Sized
from agent.bench.pool_probes import puts_at_a_time, values_got
from agent.bench.redis_site import RedisSite
from agent.bench.rounds import LATENCIES_MIN, Sample, median_time, rate
from agent.bench.sites import IN_FLIGHT, Sites
from agent.errors import G35Error


class RedisStore:
    """A server by its clients; see `Store` of peers/lines.py."""

    def __init__(self, site: RedisSite, *, tls: bool) -> None:
        self._site, self._tls = site, tls
        self.new_buffer = pages

    def made_ready(self, value: memoryview) -> bytes:
        # redis-py wants bytes; making them of a view would be a copy inside the time.
        return bytes(value)

    def done_with(self, ready: bytes) -> None:
        """It is freed by itself."""

    def lane(self, value_bytes: int) -> "RedisLane":
        return RedisLane(self._site.client(tls=self._tls))

    def close(self) -> None:
        """Its connections end with the server."""


class RedisLane:
    def __init__(self, client: Any) -> None:
        self._client, self.put = client, client.set

    def get(self, name: str) -> memoryview:
        found = self._client.get(name)
        if found is None:
            raise PeerFailed(f"Redis does not have {name}")
        return memoryview(found)

    def remove(self, name: str) -> None:
        if not self._client.delete(name):
            raise PeerFailed("a value that was put into Redis was not there to be removed")


class RedisProbe:
    """`verb` is "get" or "put", by `clients` clients; `median_only`: the median of their times in ms."""

    def __init__(
        self, sites: Sites, verb: str, value_bytes: int, *, tls: bool, clients: int, median_only: bool
    ) -> None:
        self._sites, self._verb, self._bytes, self._tls = sites, verb, value_bytes, tls
        self._clients, self._median_only = clients or IN_FLIGHT, median_only
        self._sized: Sized

    def prepare(self) -> None:
        store = RedisStore(self._sites.redis, tls=self._tls)
        with explained():
            self._sized = Sized(store, self._bytes, values_got(self._bytes), puts_at_a_time(self._bytes))

    def round(self, seconds: float) -> Sample:
        with explained():
            if self._median_only:
                return median_time(self._sized.get(self._clients, seconds, LATENCIES_MIN))
            work = self._sized.get if self._verb == "get" else self._sized.put
            return rate(work(self._clients, seconds))


@contextmanager
def explained() -> Iterator[None]:
    try:
        yield
    except PeerFailed as why:
        raise G35Error(f"Redis: {why}") from None
