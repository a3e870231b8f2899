"""A drive that takes commands and answers none: reads of files that wait for it leave workers to others."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host_shim.pool import Pool
from tests.support.pool_up import PoolUp
from tests.support.waiting import wait_until
from tests.system.path.test_hung_drive_and_gets import (
    PATIENCE_SECONDS,
    VALUE,
    WRITE_DEADLINE_SECONDS,
    key,
    keys_on,
)

FILES = 12
CONTENT = bytes(range(256)) * 512
READERS = 6


def put_aside(pool_up: PoolUp) -> int:
    bounds = {row["name"]: row for row in pool_up.status()["bounds"]}
    return int(bounds["parked-requests"]["held"])


def read(path: Path) -> bytes | int:
    """The content, past the page cache, or the errno."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.pread(descriptor, len(CONTENT), 0)
    except OSError as refused:
        return refused.errno or 0
    finally:
        os.close(descriptor)


def test_gets_beside_reads_of_files_that_wait_for_a_hung_drive(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--workers", "2", "--no-restart", "--read-deadline-ms", "50")
    folder, numbers = pool_up.mount / "fs", range(40)
    for number in range(FILES):
        (folder / str(number)).write_bytes(CONTENT)
    with pool_up.pool() as pool:
        for number in numbers:
            assert pool.volume("kv").put(key(number), VALUE)
        others = keys_on(pool_up, pool, 1, numbers)
        assert others
        pool_up.fault(0, "hang", drive=0)
        try:
            with ThreadPoolExecutor(READERS) as programs:
                reads = [programs.submit(read, folder / str(number % FILES)) for number in range(4 * FILES)]
                took = _gets(pool, others)
                pool_up.fault(0, "heal", drive=0)
                outcomes = [each.result(120) for each in reads]
        finally:
            pool_up.fault(0, "heal", drive=0)
    # Before, a get waited behind two reads until the write deadline of these.
    assert took[-1] < PATIENCE_SECONDS + WRITE_DEADLINE_SECONDS / 2, took[-5:]
    assert set(outcomes) <= {CONTENT, errno.EIO}, "never another content"
    assert CONTENT in outcomes
    wait_until(lambda: put_aside(pool_up) == 0, what="all that was put aside to be answered")
    wait_until(lambda: all(read(folder / str(number)) == CONTENT for number in range(FILES)), 60)


def _gets(pool: Pool, others: list[bytes]) -> list[float]:
    """How long gets took, in order, for as long as a worker may wait."""
    took, end = list[float](), time.monotonic() + WRITE_DEADLINE_SECONDS
    while time.monotonic() < end:
        for each in others:
            began = time.monotonic()
            assert pool.volume("kv").get(each) in (None, VALUE)
            took.append(time.monotonic() - began)
    return sorted(took)
