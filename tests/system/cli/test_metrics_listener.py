"""The metrics listener: on loopback or not at all, and nothing can be changed through it."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent.errors import ConfigError
from agent.pool.prestage import PrestageCache
from agent.remote.fabric import Enclosure, Fabric
from agent.telemetry import metrics, snapshot
from tests.support.memory_pool import MemoryPool


def state() -> dict[str, Any]:
    agent = MemoryPool().agent()
    sources = snapshot.Sources(
        "pool", 1, "/mnt/secret-place", "fuse", [agent.volume], Fabric([Enclosure("shelf")]), agent.cache,
        PrestageCache(1 << 20), lambda: [agent.lanes.tallies], lambda: None,
    )  # fmt: skip
    return snapshot.take(sources)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    stop = metrics.serve(f"127.0.0.1:{number}", state)
    yield number
    stop()


def asked(port: int, method: str, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body=b"x=1" if method in ("POST", "PUT", "PATCH") else None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9035", "[::]:9035", "192.0.2.1:9035", "10.0.0.1:1", "host:9035"]
)
def test_metrics_are_refused_anywhere_but_on_loopback(address: str) -> None:
    with pytest.raises(ConfigError):
        metrics.serve(address, state)


def test_metrics_are_read_and_nothing_else(port: int) -> None:
    status, text = asked(port, "GET")
    assert status == 200
    assert "g35_volume_puts_total" in text
    assert "secret-place" not in text, "numbers under names, and no paths"
    before = [line for line in text.splitlines() if re.match(r"g35_volume_(puts|deletes)_total", line)]
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        status, _ = asked(port, method)
        assert status in (405, 501), method
    after = asked(port, "GET")[1].splitlines()
    assert set(before) <= set(after)
