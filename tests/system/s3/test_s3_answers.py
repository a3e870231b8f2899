"""Answers reach a client whole, however it takes them: slowly, several at once, or not to the end."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.s3.store import ObjectReader
from tests.support.engines.s3_served import Served, answer_of, served, signed_head
from tests.support.waiting import wait_until

BUCKET = "blocks"
BIG = random.Random(21).randbytes((3 << 20) + 77)


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20, len(BIG)])
def test_a_client_with_little_room_gets_all_of_it(s3: Served, size: int) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="a", Body=BIG[:size])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", s3.port))
        for _ in range(2):
            connection.sendall(signed_head("GET", "/blocks/a")[0])
            assert answer_of(connection) == (200, BIG[:size])


def test_requests_that_come_together_are_answered_in_their_order(s3: Served) -> None:
    bodies = [BIG[: 1 << 20], b"short", BIG[1:], b"", BIG[: (1 << 20) + 1]]
    for number, body in enumerate(bodies):
        s3.client().put_object(Bucket=BUCKET, Key=str(number), Body=body)
    with s3.connect() as connection:
        heads = [signed_head("GET", f"/blocks/{number}")[0] for number in range(len(bodies))]
        connection.sendall(b"".join(heads))
        assert [answer_of(connection) for _ in bodies] == [(200, body) for body in bodies]


def test_a_client_that_goes_in_the_middle_leaves_nothing_held(s3: Served) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="a", Body=BIG * 4)
    for _ in range(3):
        with s3.connect() as connection:
            connection.sendall(signed_head("GET", "/blocks/a")[0])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: s3.stores["one"].files_held() == 0, what="the readers to be closed")
    wait_until(lambda: s3.door._service.transfers.held == 0, what="the places to be given back")
    with s3.connect() as connection:
        connection.sendall(signed_head("GET", "/blocks/a")[0])
        assert answer_of(connection) == (200, BIG * 4)


def test_an_answer_ends_when_the_door_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, reads = threading.Event(), threading.Event(), 0
    read = ObjectReader.read

    def slow(self: Any, *arguments: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            begun.set()
            assert go_on.wait(60)
        read(self, *arguments)

    monkeypatch.setattr(ObjectReader, "read", slow)
    with served(tmp_path) as s3:
        s3.client().put_object(Bucket=BUCKET, Key="a", Body=BIG)
        with s3.connect() as asking, s3.connect() as idle:
            asking.sendall(signed_head("GET", "/blocks/a")[0])
            # A client that takes all that there is, so that the door never waits for it.
            got = bytearray()
            while len(got) <= 1 << 20:
                got += asking.recv(1 << 20)
            assert begun.wait(60)
            stopping = threading.Thread(target=s3.door.stop, args=(0.0,))
            stopping.start()
            assert idle.recv(1) == b"", "all connections are told at once"
            go_on.set()
            stopping.join()
            assert reads == 2
