"""Who sends a body that is there: the thread that read it, where the client takes it; else the event loop."""

from __future__ import annotations

import socket
import threading

import pytest

from agent.http import patience
from agent.http.connection import HttpConnection
from agent.s3.get_object import ROOMS_KEPT, Rooms
from tests.support.engines.s3_served import Served, answer_of, signed_head

MIB = 1 << 20
BODIES = {name: bytes([at]) * MIB for at, name in enumerate("abc", 1)}


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch, s3: Served) -> list[str]:
    """The threads that sent something, one entry a call. There are three objects of a MiB."""
    for name, body in BODIES.items():
        s3.client().put_object(Bucket="blocks", Key=name, Body=body)
    found: list[str] = []
    send = HttpConnection._send_now

    def noting(self: HttpConnection, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
        if parts:
            found.append(threading.current_thread().name)
        return send(self, parts)

    monkeypatch.setattr(HttpConnection, "_send_now", noting)
    return found


def ask(connection: socket.socket, name: str) -> None:
    connection.sendall(signed_head("GET", f"/blocks/{name}")[0])


def test_the_thread_that_read_a_body_sends_it(
    s3: Served, senders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WAIT_SECONDS", 30.0)
    monkeypatch.setattr(patience, "SOON_SECONDS", 30.0)  # this client is slow at times
    with s3.connect() as client:
        for name, body in BODIES.items():
            ask(client, name)
            assert answer_of(client) == (200, body)
    assert senders
    assert all(sender.startswith("s3-") for sender in senders)


def test_a_client_that_takes_nothing_keeps_no_thread(
    s3: Served, senders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "OF_A_CLIENT_SECONDS", 60.0)
    slow = []
    for name in BODIES:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", s3.port))
        ask(client, name)
        slow.append(client)
    for _ in range(2):
        for client, (name, body) in zip(slow, BODIES.items(), strict=True):
            with s3.connect() as quick:
                ask(quick, name)
                assert answer_of(quick) == (200, body)
            assert answer_of(client) == (200, body)
            ask(client, name)
    for client, body in zip(slow, BODIES.values(), strict=True):
        assert answer_of(client) == (200, body)
        client.close()
    assert "s3" in senders, "the rest of what a slow client takes is the event loop's"


def test_rooms_are_used_again_and_are_few() -> None:
    rooms = Rooms()
    taken = [rooms.take(MIB) for _ in range(ROOMS_KEPT + 1)]
    assert len({id(each.obj) for each in taken}) == ROOMS_KEPT + 1, "each for one body"
    first = taken[0].obj
    rooms.give_back(taken[:1])
    again = rooms.take(MIB // 2)
    assert len(again) == MIB // 2
    assert again.obj is first
    given = [*taken[1:], again]
    rooms.give_back(given)
    assert not given, "a second call gives nothing back again"
    assert len(rooms) == ROOMS_KEPT
    assert len(rooms.take(5)) == 5
    assert len(rooms) == ROOMS_KEPT, "little has memory of its own"
