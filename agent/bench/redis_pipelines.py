"""Batches of values by Redis, each a pipeline of redis-py with hiredis; a client for each thread."""

import itertools
from typing import Any

from agent.bench.contents import Contents
from agent.bench.pool_probes import puts_at_a_time, values_got
from agent.bench.rounds import Sample, Timed, Turn, in_bursts, rate, together
from agent.bench.sites import IN_FLIGHT, Sites
from agent.errors import G35Error

PIPELINED = 32
"""Values of a batch, here and at the pool beside it."""


class PipelineProbe:
    """`verb` is "get" or "put"."""

    def __init__(self, sites: Sites, verb: str, value_bytes: int) -> None:
        self._sites, self._verb, self._bytes = sites, verb, value_bytes

    def prepare(self) -> None:
        self._clients = [self._sites.redis.client(tls=False) for _ in range(IN_FLIGHT)]
        self._contents = Contents(self._bytes)
        # redis-py wants bytes; making them of a view would be a copy inside the time.
        self._values = [bytes(self._contents.value(number)) for number in range(values_got(self._bytes))]
        client = self._clients[0]
        for number, value in enumerate(self._values):
            client.set(self._name("get", number), value)
        for number, value in enumerate(self._values):
            if client.get(self._name("get", number)) != value:
                raise G35Error(f"Redis: value {number} did not come back as it was stored")

    def round(self, seconds: float) -> Sample:
        if self._verb == "put":
            return rate(in_bursts(self._burst, seconds))
        return rate(together([self._getter(first) for first in range(IN_FLIGHT)], seconds))

    def _getter(self, first: int) -> Turn:
        numbers = range(first, len(self._values), IN_FLIGHT)
        client, round_about = self._clients[first], itertools.cycle(numbers)
        batch = min(PIPELINED, len(numbers))

        def turn() -> int:
            pipeline = client.pipeline(transaction=False)
            for number in itertools.islice(round_about, batch):
                pipeline.get(self._name("get", number))
            found = pipeline.execute()
            if any(value is None or len(value) != self._bytes for value in found):
                raise G35Error("Redis: a value of a pipeline is not there, or has another length")
            return batch * self._bytes

        return turn

    def _burst(self, seconds: float) -> Timed:
        names = [self._name("put", number) for number in range(puts_at_a_time(self._bytes))]
        turns = [self._putter(client, names[first::IN_FLIGHT]) for first, client in enumerate(self._clients)]
        timed = together(turns, seconds)
        client = self._clients[0]
        if client.get(names[0]) != self._values[0]:
            raise G35Error("Redis: a value did not come back as it was put")
        client.delete(*names)
        return timed

    def _putter(self, client: Any, names: list[str]) -> Turn:
        left = iter(names)
        values = itertools.cycle(self._values)

        def turn() -> int | None:
            batch = list(itertools.islice(left, PIPELINED))
            if not batch:
                return None
            pipeline = client.pipeline(transaction=False)
            for name in batch:
                pipeline.set(name, next(values))
            if not all(pipeline.execute()):
                raise G35Error("Redis refused a value of a pipeline")
            return len(batch) * self._bytes

        return turn

    def _name(self, prefix: str, number: int) -> str:
        return f"{prefix}-{self._bytes}-{number}"
