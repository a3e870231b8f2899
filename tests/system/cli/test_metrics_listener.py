"""The metrics listener: on loopback or not at all, and nothing can be changed through it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent.errors import ConfigError
from agent.pool.read.prestage_cache import PrestageCache
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.telemetry import listener, metrics, snapshot
from tests.support.pool.memory_pool import MemoryPool
from tests.support.waiting import wait_until


def state() -> dict[str, Any]:
    agent = MemoryPool().agent()
    sources = snapshot.Sources(
        pool_id="pool", map_version=lambda: 1, mount="/mnt/secret-place", door="fuse",
        volumes=[agent.volume], fabric=Fabric([Enclosure("shelf")]), directories=agent.cache,
        prestage=PrestageCache(1 << 20), tallies=lambda: [agent.channel.tallies], files=lambda: None,
    )  # fmt: skip
    return snapshot.take(sources)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    serving = metrics.listener_at(f"127.0.0.1:{number}", state)
    serving.start()
    yield number
    serving.stop()


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
        metrics.listener_at(address, state)


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


def test_a_crowd_that_says_nothing_holds_nothing_up(port: int) -> None:
    """Any user of the machine may connect. 400 do, half of them with half a request, and stay."""
    own = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with contextlib.ExitStack() as crowd:
        theirs = 0
        for number in range(400):
            client = crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            theirs += 1
            if number % 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a")
            if number % 100 == 50:
                assert asked(port, "GET")[0] == 200, "it is served between them"
        assert asked(port, "GET")[0] == 200
        assert len(os.listdir("/proc/self/fd")) - own - theirs <= listener.CONNECTIONS_MAX + 1
        assert threading.active_count() == threads, "one thread, whoever comes"


def test_who_says_nothing_is_hung_up_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECTION_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET / HT")
        assert client.recv(1) == b"", "its time is over"


def test_who_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is larger than any buffer, to somebody who never takes it."""
    monkeypatch.setattr(listener, "CONNECTION_SECONDS", 0.2)
    given: list[bytes] = []

    def application(_: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        given.append(b"" if given else bytes(32 << 20))
        return given[-1:]

    served = listener.Listener("127.0.0.1", 0, application)
    served.start()
    try:
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            wait_until(lambda: bool(given) and served.connections == 0)
            monkeypatch.setattr(listener, "CONNECTION_SECONDS", 5.0)
            assert asked(served.port, "GET", "/")[0] == 200
    finally:
        served.stop()


@pytest.mark.parametrize(
    "nonsense",
    [b"\0" * 40 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000, b"G" * 20_000, b"GET\r\n\r\n"],
    ids=["zeros", "a long header", "no end", "no target"],
)
def test_what_is_no_request_is_hung_up_on(port: int, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client, contextlib.suppress(OSError):
        client.sendall(nonsense)
        assert client.recv(1) == b""
    assert asked(port, "GET")[0] == 200
    assert asked(port, "HEAD")[0] == 405


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""As Prometheus 3 asks."""
OPENMETRICS, PLAIN = "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"


@pytest.mark.parametrize(
    ("accept", "format_of_it"),
    [
        (PROMETHEUS.encode(), OPENMETRICS),
        (b"application/openmetrics-text", OPENMETRICS),
        (b"application/openmetrics-text; version=2.0\xe9", PLAIN),
        (b"application/openmetrics-text; version=2.0", PLAIN),
        (b"text/plain; version=x", PLAIN),
        (b"text/plain; version=x, application/openmetrics-text; version=1.0.0", OPENMETRICS),
        (b"text/plain; version=1.0.0, " * 200, PLAIN),
        (b"application/openmetrics-text; escaping=\x80", PLAIN),
        (b",;=,;", PLAIN),
    ],
)
def test_what_a_scrape_wants_that_nobody_knows_is_answered_in_the_plain_format(
    port: int, accept: bytes, format_of_it: str
) -> None:
    """None of it ends the thread, or writes to the log."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: " + accept + b"\r\n\r\n")
        head = b""
        while (piece := client.recv(65536)) and b"\r\n\r\n" not in head:
            head += piece
    assert head.startswith(b"HTTP/1.1 200")
    assert f"Content-Type: {format_of_it}".encode().lower() in head.lower()


@pytest.mark.expects_log("a request for the metrics could not be answered; nor could 0 others")
def test_an_answer_that_cannot_be_sent_ends_its_request_alone_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Headers that are none of HTTP's, and a request to which nobody answers 200."""
    headers = [("Content-Type", "text/\xe9")]

    def application(_: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", headers)
        return [b"numbers"]

    served = listener.Listener("127.0.0.1", 0, application)
    served.start()
    try:
        for asks in (b"GET / HTTP/1.1", b"GET / HTTP/1.1", b"CONNECT a:1 HTTP/1.1"):
            if asks.startswith(b"CONNECT"):
                headers.clear()
            with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
                client.sendall(asks + b"\r\nHost: a\r\n\r\n")
                assert client.recv(1) == b""
        assert asked(served.port, "GET")[0] == 200
    finally:
        served.stop()
    assert len([each for each in caplog.records if "could not be answered" in each.message]) == 1


@pytest.mark.expects_log("the metrics could not be taken")
def test_metrics_that_cannot_be_taken_are_an_error_of_ours() -> None:
    def application(_: dict[str, Any], start_response: Any) -> list[bytes]:
        raise ValueError("a bug")

    served = listener.Listener("127.0.0.1", 0, application)
    served.start()
    try:
        assert asked(served.port, "GET")[0] == 500
        assert asked(served.port, "GET")[0] == 500, "and it goes on"
    finally:
        served.stop()
