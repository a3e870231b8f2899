"""The same work by Redis: redis-py with hiredis, each thread with a client of its own."""

from __future__ import annotations

import itertools
from typing import Any

from agent.bench.clocked import together_clocked
from agent.bench.contents import Contents
from agent.bench.pool_probes import latencies, puts_at_a_time, values_got
from agent.bench.rounds import Sample, Turn, rate
from agent.bench.sites import IN_FLIGHT, Sites
from agent.errors import G35Error


class RedisGetProbe:
    """Gets by `clients` clients; `median_only`: the median of their times, by one client, not a rate."""

    def __init__(
        self,
        sites: Sites,
        value_bytes: int,
        *,
        tls: bool,
        clients: int = IN_FLIGHT,
        median_only: bool = False,
    ) -> None:
        self._sites, self._tls, self._clients = sites, tls, clients
        self._median_only = median_only
        self._contents = Contents(value_bytes)
        self._readers: list[_Reader] = []

    def prepare(self) -> None:
        site = self._sites.redis()
        count = values_got(self._contents.value_bytes)
        connections = [site.client(tls=self._tls) for _ in range(self._clients)]
        for number in range(count):
            key, value = _key(self._contents, "get", number), bytes(self._contents.value(number))
            connections[0].set(key, value)
            if connections[0].get(key) != value:
                raise G35Error(f"Redis did not return value {number} as it was stored")
        self._readers = [
            _Reader(connection, self._contents, list(range(first, count, self._clients)))
            for first, connection in enumerate(connections)
        ]

    def round(self, seconds: float) -> Sample:
        if self._median_only:
            return latencies(self._readers[0], seconds)
        return rate(together_clocked(self._readers, seconds))


class _Reader:
    def __init__(self, client: Any, contents: Contents, numbers: list[int]) -> None:
        self._get = client.get
        self._length = contents.value_bytes
        self._round_about = itertools.cycle([_key(contents, "get", number) for number in numbers])

    def __call__(self) -> int:
        got = self._get(next(self._round_about))
        if got is None or len(got) != self._length:
            raise G35Error("Redis returned something else than the value")
        return self._length


class RedisPutProbe:
    """Sets of fresh keys, which are deleted again outside the time."""

    def __init__(self, sites: Sites, value_bytes: int, *, tls: bool, clients: int = IN_FLIGHT) -> None:
        self._sites, self._tls, self._in_flight = sites, tls, clients
        self._contents = Contents(value_bytes)
        self._numbers = itertools.count()
        self._values: list[bytes] = []
        self._clients: list[Any] = []

    def prepare(self) -> None:
        site = self._sites.redis()
        self._clients = [site.client(tls=self._tls) for _ in range(self._in_flight)]
        # redis-py wants bytes; making them of a view would be a copy inside the time.
        self._values = [bytes(self._contents.value(number)) for number in range(16)]

    def round(self, seconds: float) -> Sample:
        operations = moved = 0
        took = 0.0
        taken: tuple[float, ...] = ()
        while took < seconds:
            fresh = [next(self._numbers) for _ in range(puts_at_a_time(self._contents.value_bytes))]
            turns = [
                self._writer(client, fresh[first :: self._in_flight])
                for first, client in enumerate(self._clients)
            ]
            timed = together_clocked(turns, seconds - took)
            removed = self._clients[0].delete(*[_key(self._contents, "put", number) for number in fresh])
            if removed != timed.operations:
                raise G35Error(f"{timed.operations} values were stored in Redis, {removed} were there")
            operations += timed.operations
            moved += timed.bytes
            took += timed.seconds
            taken += timed.latencies
        return Sample(moved / took / (1 << 30), operations, moved, took, taken)

    def _writer(self, client: Any, numbers: list[int]) -> Turn:
        left = iter([(_key(self._contents, "put", number), self._values[number % 16]) for number in numbers])
        length = self._contents.value_bytes

        def turn() -> int | None:
            step = next(left, None)
            if step is None:
                return None
            client.set(*step)
            return length

        return turn


def _key(contents: Contents, prefix: str, number: int) -> str:
    return f"{prefix}:{contents.value_bytes}:{number}"
