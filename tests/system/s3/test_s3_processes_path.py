"""`g35 up --s3 --processes 2`: objects by both processes, of which one is killed in the middle of reads."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.pool.reader_pool import rows, wait_serving
from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until
from tests.system.s3.test_s3_path import client_of

BODIES = {f"object-{size}": random.Random(size).randbytes(size) for size in (1000, 70_000, 2_500_000)}


@pytest.fixture
def up(processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    options = ("--s3", "--processes", "2", "--drive-size", "256M", "--enclosures", "1")
    made = PoolUp(processes, tmp_path / "state", *options)
    wait_serving(made)
    yield made
    made.down()


def read_all(up: PoolUp, times: int = 1) -> None:
    """By a new client each time: the kernel gives its connection to one of the processes."""
    for _ in range(times):
        client = client_of(up)
        for name, body in BODIES.items():
            assert client.get_object(Bucket="kvcache", Key=name)["Body"].read() == body
        client.close()


def until_the_reader_serves(up: PoolUp) -> None:
    before = rows(up)[0]["gets"]

    def has_served() -> bool:
        read_all(up)
        return bool(rows(up)[0]["gets"] > before)

    wait_until(has_served, 60, "the reader to read objects")


def has_started_since(up: PoolUp, starts: int) -> bool:
    return bool(rows(up)[0]["starts"] > starts)


def put_all(up: PoolUp) -> None:
    client = client_of(up)
    for name, body in BODIES.items():
        client.put_object(Bucket="kvcache", Key=name, Body=body)
    client.close()


def test_objects_are_read_by_both_processes_and_counted_once(up: PoolUp) -> None:
    put_all(up)
    until_the_reader_serves(up)
    read_all(up, 5)
    whole = sum(map(len, BODIES.values()))

    def is_counted() -> bool:
        status = up.status()["s3"]
        times = status["requests"]["GetObject"] / len(BODIES)
        return bool(times >= 6 and status["bytes_read"] == times * whole)

    wait_until(is_counted, 10, "the reader to have told its counts")
    assert up.status()["s3"]["requests"]["PutObject"] == len(BODIES)


def test_a_reader_that_is_killed_costs_no_object(up: PoolUp) -> None:
    put_all(up)
    until_the_reader_serves(up)
    wrong: list[str] = []
    stop = threading.Event()

    def reads() -> None:
        while not stop.is_set():
            client = client_of(up)
            for name, body in BODIES.items():
                try:
                    if client.get_object(Bucket="kvcache", Key=name)["Body"].read() != body:
                        wrong.append(name)
                except (BotoCoreError, ClientError) as ended:
                    if isinstance(ended, ClientError):
                        wrong.append(str(ended))
            client.close()

    threads = [threading.Thread(target=reads) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for _ in range(2):
            wait_serving(up)
            [row] = rows(up)
            os.kill(row["pid"], signal.SIGKILL)
            wait_until(functools.partial(has_started_since, up, row["starts"]), 60, "another process")
    finally:
        stop.set()
        for each in threads:
            each.join()
    assert not wrong
    wait_serving(up)
    until_the_reader_serves(up)
    put_all(up)
    read_all(up)


def test_what_was_put_by_any_process_is_seen_at_once(up: PoolUp) -> None:
    clients: list[Any] = [client_of(up) for _ in range(6)]
    for number in range(30):
        body = random.Random(number).randbytes(1000 * number)
        clients[number % 6].put_object(Bucket="kvcache", Key="one", Body=body)
        for client in clients:
            assert client.get_object(Bucket="kvcache", Key="one")["Body"].read() == body
    for client in clients:
        client.close()
