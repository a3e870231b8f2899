"""The query door over pools in memory, on loopback, and a client of it."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from agent.config.query_section import QuerySection
from agent.host_os.per_user_bounds import Bounds
from agent.pool.steps import IoChannel, Runner, Steps
from agent.query.access_tokens import Token
from agent.query.door import QueryDoor
from tests.support.pool.memory_pool import MemoryPool, PoolAgent

T = TypeVar("T")
TOKENS = {"one": "a" * 40, "two": "b" * 40}


def token_of(tenant: str) -> Token:
    return Token(hashlib.sha256(TOKENS[tenant].encode()).digest(), tenant)


class Queried:
    """A door of two tenants. `one` has a volume `v`; `two` has none of that name."""

    def __init__(self, agent: PoolAgent | None = None, **section: Any) -> None:
        self.agent = agent or MemoryPool((64, 64), value_bytes=4096).agent()
        tenants = [{"tenant": name, "tokens": "/nonexistent"} for name in TOKENS]
        section = {"deadline_ms": 10_000, **section}  # so that no key is late on a busy machine
        self.section = QuerySection.model_validate({"listen": ["127.0.0.1:0"], "tenants": tenants, **section})
        self.bounds = Bounds()
        self._drives = False
        self.runs = 0
        """How often a thread of the door drove steps."""
        self.door = QueryDoor(
            self.section,
            [token_of(name) for name in TOKENS],
            {"one": [self.agent.served], "two": []},
            self.agent.prestage,
            self._channel,
            lambda member: self.agent.channel.namespaces[member].down,
            self._runner,
            self.bounds,
        )
        self.door.start()

    def _runner(self, number: int) -> Runner:
        return self

    def run(self, steps: Steps[T]) -> T:
        """As an agent's worker: its channel is there while steps are driven."""
        self._drives = True
        self.runs += 1
        try:
            return self.agent.channel.run(steps)
        finally:
            self._drives = False

    def _channel(self) -> IoChannel:
        assert self._drives, "no thread has a channel outside of steps"
        return self.agent.channel

    @property
    def port(self) -> int:
        return self.door.ports[0]

    def post(
        self, document: Any, tenant: str = "one", headers: dict[str, str] | None = None, path: str = "/query"
    ) -> tuple[int, Any]:
        """Status and document of the answer."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        wanted = {"authorization": f"Bearer {TOKENS.get(tenant, tenant)}", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", path, body, wanted)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ask(self, keys: Sequence[bytes], tenant: str = "one", volume: str = "v") -> dict[str, Any]:
        """What is told of one prompt."""
        status, found = self.post({"volume": volume, "prompts": [[key.hex() for key in keys]]}, tenant)
        assert status == 200, found
        told: dict[str, Any] = found["prompts"][0]
        return told


@contextmanager
def queried(**options: Any) -> Iterator[Queried]:
    made = Queried(**options)
    try:
        yield made
    finally:
        made.door.stop(0.0)
