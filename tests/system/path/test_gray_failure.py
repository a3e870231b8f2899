"""An enclosure that is there and does badly: noticed, spared of new values, and taken back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.halting import halted
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until

KEYS = [number.to_bytes(16, "big") for number in range(60)]


def content(key: bytes) -> bytes:
    return random.Random(key).randbytes(30_000)


def suspects(pool_up: PoolUp) -> list[int]:
    return [each["namespaces_suspect"] for each in pool_up.status()["enclosures"]]


def bytes_written(pool_up: PoolUp, enclosure: int) -> int:
    drives: list[dict[str, Any]] = pool_up.fault(enclosure, "stats")["drives"]
    return sum(drive["write_bytes"] for drive in drives)


@pytest.fixture
def pool_up(make_pool: Callable[..., PoolUp]) -> PoolUp:
    made = make_pool("--enclosures", "2", "--drives", "1", "--no-files", "--read-deadline-ms", "200")
    with made.pool() as pool:
        for key in KEYS:
            assert pool.volume("kv").put(key, content(key))
    return made


def read_all(pool_up: PoolUp) -> int:
    """Read every key once; how many came, none of them wrong."""
    with pool_up.pool() as pool:
        kv = pool.volume("kv")
        got = {key: kv.get(key) for key in KEYS}
    assert all(value in (None, content(key)) for key, value in got.items())
    return sum(value is not None for value in got.values())


def test_a_slow_drive_is_noticed_spared_and_still_read(pool_up: PoolUp) -> None:
    pool_up.fault(1, "slow", drive=0, latency_ms=40)

    def noticed() -> bool:
        read_all(pool_up)
        return suspects(pool_up) == [0, 1]

    wait_until(noticed, 30, "the slow drive to be noticed")
    before = bytes_written(pool_up, 1)
    with pool_up.pool() as pool:
        for number in range(20):
            assert pool.volume("kv").put((1000 + number).to_bytes(16, "big"), content(b"new"))
    assert bytes_written(pool_up, 1) == before, "new values go where there is no trouble"
    pool_up.fault(1, "slow", drive=0, latency_ms=0)

    def taken_back() -> bool:
        read_all(pool_up)
        return suspects(pool_up) == [0, 0]

    wait_until(taken_back, 60, "the drive to be taken back")
    # On a busy machine one of so many may be late, once.
    wait_until(lambda: read_all(pool_up) == len(KEYS), 60, "everything to be served")


def test_a_stopped_enclosure_is_noticed_and_puts_go_on(pool_up: PoolUp) -> None:
    with halted(pool_up.pid("jbof-0")):

        def noticed() -> bool:
            read_all(pool_up)
            # On a slow machine the keep-alive may find out first.
            return suspects(pool_up)[0] == 1 or not pool_up.status()["enclosures"][0]["connected"]

        wait_until(noticed, 30, "the stopped enclosure to be noticed")
        with pool_up.pool() as pool:
            assert pool.volume("kv").put((2000).to_bytes(16, "big"), content(b"new"))
    wait_until(lambda: read_all(pool_up) == len(KEYS), 60, "everything to be served again")


@pytest.mark.parametrize("folder", ["fs", "shared/shared"])
def test_files_of_a_slow_drive_are_read_and_made(make_pool: Callable[..., PoolUp], folder: str) -> None:
    """Who has a file open has nothing else: what is late for gets is waited for."""
    pool_up = make_pool(
        "--enclosures", "2", "--drives", "1", "--workers", "4", "--read-deadline-ms", "200", "--shared",
        "--drive-size", "512M",
    )  # fmt: skip
    with pool_up.pool() as pool:
        for key in KEYS:
            assert pool.volume("kv").put(key, content(key))
    files = {pool_up.mount / folder / f"{number}": content(bytes([number])) for number in range(12)}
    for path, data in files.items():
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    # Another mount, in whose pages there is nothing of them.
    pool_up.wait_restarted("agent-process", pool_up.kill("agent-process"))
    opened = {os.open(path, os.O_RDONLY): data for path, data in files.items()}
    slow = int(bytes_written(pool_up, 1) > bytes_written(pool_up, 0))
    stop = threading.Event()

    def get_on() -> None:
        while not stop.is_set():
            read_all(pool_up)

    getting = threading.Thread(target=get_on)
    pool_up.fault(slow, "slow", drive=0, latency_ms=400)
    getting.start()
    try:

        def noticed() -> bool:
            read_all(pool_up)
            return suspects(pool_up)[slow] == 1

        wait_until(noticed, 60, "the slow drive to be noticed")
        for descriptor, data in opened.items():
            assert os.pread(descriptor, len(data) + 1, 0) == data
        for number in range(3):
            made = pool_up.mount / folder / f"made-{number}"
            made.write_bytes(content(bytes([number])))
            made = made.rename(made.with_name(f"renamed-{number}"))
            assert made.read_bytes() == content(bytes([number]))
            made.unlink()
    finally:
        stop.set()
        getting.join(60)
        for descriptor in opened:
            os.close(descriptor)
    assert pool_up.status()["totals"]["misses"], "gets did not wait for it"
