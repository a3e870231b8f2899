"""Upkeep of /shared beside an enclosure that hangs: it keeps no record of the others unread for long."""

from __future__ import annotations

import random

import pytest

from agent.pool.maintenance.resync import Resync
from tests.support.fs.memory_shared import CHUNK, SharedPool

TURN_SECONDS = 0.5


@pytest.mark.parametrize("waits", ["chunks to be named", "chunks to be deleted"])
def test_an_enclosure_that_hangs_is_left_out_whatever_upkeep_waits_for(waits: str, seed: int) -> None:
    pool = SharedPool((2, 2), (4, 4))
    agent = pool.agent()
    channel, in_sync = agent.channel, agent.names.in_sync
    assert in_sync is not None
    resync = Resync(agent.names, in_sync)
    data = random.Random(seed).randbytes(8 * CHUNK)

    def upkeep() -> None:
        channel.clock += TURN_SECONDS
        channel.run(resync.turn(channel))
        agent.name()
        agent.collect()

    agent.put("gone", data)
    for _ in range(6):
        upkeep()
    file = agent.create("half")
    agent.pwrite(file, 0, data)
    if waits == "chunks to be deleted":
        agent.unlink("gone")
    pool.namespaces[0].hung = pool.namespaces[2].hung = True
    for _ in range(24):
        upkeep()
    for number in range(4):
        agent.put(f"new{number}", b"y")
    assert all(agent.stat(f"new{number}") is not None for number in range(4))
