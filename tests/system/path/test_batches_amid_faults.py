"""Puts in batches while enclosures stop and die: what was acknowledged is there, and no wrong byte is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from host_shim.block_key import key_of
from tests.support.halting import halted
from tests.support.pool.reader_pool import value
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.waiting import wait_until

KEYS = 320


@pytest.mark.parametrize("ports", ["1", "2"])
def test_what_was_acknowledged_amid_faults_is_served(make_pool: Callable[..., PoolUp], ports: str) -> None:
    """With two ports a lost path has another beside it, and no write may land twice."""
    pool = make_pool(
        "--enclosures", "2", "--drives", "1", "--value-size", "64K", "--workers", "4", "--ports", ports
    )
    stop, turns = threading.Event(), [0] * 3
    acknowledged: dict[bytes, bytes] = {}

    def client(number: int) -> None:
        with pool.pool() as own:
            volume = own.volume("kv")
            while not stop.is_set():
                turn = turns[number]
                values = {
                    key_of(f"{number} {each}"): value(number * 1000 + each)
                    for each in (turn % (KEYS // 32) * 32 + at for at in range(32))
                }
                stored = volume.put_many(list(values), list(values.values()))
                for (key, data), is_stored in zip(values.items(), stored, strict=True):
                    if is_stored:
                        acknowledged[key] = data
                turns[number] += 1

    def some_turns(count: int) -> None:
        before = list(turns)
        wait_until(lambda: all(now >= was + count for now, was in zip(turns, before, strict=True)), 60)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for each in clients:
        each.start()
    try:
        some_turns(1)
        with halted(pool.pid("jbof-0")):
            some_turns(2)
        some_turns(1)
        for name in ("jbof-1", "jbof-0"):
            pool.wait_restarted(name, pool.kill(name))
            pool.wait_connected(2 * int(ports))  # each port counts
            some_turns(1)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert len(acknowledged) > KEYS
    with pool.pool() as own:
        wait_each_served(own.volume("kv"), acknowledged)
