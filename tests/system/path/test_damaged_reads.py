"""A path that damages what it brings, for a moment: no synced file and no stored value is lost by it."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.waiting import wait_until

BEHIND_THE_MAP = 1 << 20
"""An agent does not start where it cannot read the pool's map."""


def content(name: str) -> bytes:
    return random.Random(name).randbytes(300_000 + 50_000 * (len(name) % 5))


def sync(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def damage_reads(pool_up: PoolUp, enclosures: int = 2) -> None:
    for number in range(enclosures):
        pool_up.fault(number, "flip", drive=0, on_read=True, bits=3, offset=BEHIND_THE_MAP)


def heal(pool_up: PoolUp, enclosures: int = 2) -> None:
    for number in range(enclosures):
        pool_up.fault(number, "heal", drive=0)


def errno_of(path: Path) -> int:
    try:
        path.read_bytes()
    except OSError as refused:
        return refused.errno or -1
    return 0


def test_a_moment_of_damaged_reads_costs_no_synced_file_and_no_value(
    make_pool: Callable[..., PoolUp],
) -> None:
    pool_up = make_pool("--drives", "1")
    folder = pool_up.mount / "fs"
    names = [f"file{'x' * number}" for number in range(12)]
    keys = [number.to_bytes(16, "big") for number in range(30)]
    for name in names:
        sync(folder / name, content(name))
    with pool_up.pool() as pool:
        for key in keys:
            assert pool.volume("kv").put(key, content(key.hex()))
    damage_reads(pool_up)
    pool_up.wait_restarted("agent-process", pool_up.kill("agent-process"))
    assert {errno_of(folder / name) for name in names[:8]} == {errno.EIO}
    for name in names[8:10]:
        (folder / name).unlink()
    with pool_up.pool() as pool:
        assert not any(pool.volume("kv").get(key) for key in keys)
        for number in range(100, 110):
            pool.volume("kv").put(number.to_bytes(16, "big"), content("new"))
    until = time.monotonic() + 3
    wait_until(lambda: time.monotonic() > until, 10, "the agent to have looked into it")
    heal(pool_up)
    left = names[:8] + names[10:]
    for name in left:
        wait_until(lambda name=name: errno_of(folder / name) == 0, 30, "a file to be read again")
        assert (folder / name).read_bytes() == content(name)
    with pool_up.pool() as pool:
        wait_each_served(pool.volume("kv"), {key: content(key.hex()) for key in keys})
    assert pool_up.status()["files"]["files_lost"] == 0
    pool_up.wait_restarted("agent-process", pool_up.kill("agent-process"))
    for name in left:
        assert (folder / name).read_bytes() == content(name)


@pytest.mark.parametrize("zeroed", [256 << 20])
def test_a_file_whose_block_the_medium_has_lost_is_eio_and_then_gone(
    make_pool: Callable[..., PoolUp], zeroed: int
) -> None:
    """Without a scrub: the care that the agent always takes finds out that the block is no more."""
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    folder = pool_up.mount / "fs"
    for name in ("one", "other"):
        sync(folder / name, content(name))
    pool_up.wait_restarted("agent-process", pool_up.kill("agent-process"))
    # All that lies behind the map: directories without an entry, as whole as they were when they were new.
    pool_up.fault(0, "zero", drive=0, offset=BEHIND_THE_MAP, length=zeroed - 2 * BEHIND_THE_MAP)
    assert errno_of(folder / "one") == errno.EIO
    wait_until(lambda: errno_of(folder / "one") == errno.ENOENT, 60, "the file to be given up")
    assert (folder / "other").exists(), "nobody has read it"
    sync(folder / "one", content("again"))
    assert (folder / "one").read_bytes() == content("again")
