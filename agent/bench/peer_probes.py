"""The same work by other stores, each by its own client in an environment of its own (peers/)."""

from __future__ import annotations

from agent.bench.client_process import LineClient, speed
from agent.bench.pool_probes import puts_at_a_time, values_got
from agent.bench.rounds import Sample
from agent.bench.sites import Sites


class PeerProbe:
    """`verb` is "get" or "put"; one value a call, so many calls in flight."""

    def __init__(self, sites: Sites, peer: str, verb: str, value_bytes: int, in_flight: int) -> None:
        self._sites, self._peer, self._verb = sites, peer, verb
        self._bytes, self._in_flight = value_bytes, in_flight
        self._client: LineClient

    def prepare(self) -> None:
        self._client = self._sites.peer(self._peer)
        values, puts = values_got(self._bytes), puts_at_a_time(self._bytes)
        self._client.ask("prepare", bytes=self._bytes, values=values, puts=puts)

    def round(self, seconds: float) -> Sample:
        return speed(self._client.ask(self._verb, seconds, bytes=self._bytes, in_flight=self._in_flight))
