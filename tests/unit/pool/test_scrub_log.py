"""What a scrub tells the log while a drive fails: one line for many, with the namespace's name."""

from __future__ import annotations

import pytest

from agent.host_os.rate_limited_log import Complaints
from agent.pool.maintenance.scrub import ScrubCounters, take_out_bad
from agent.pool.volume.media_errors import log
from agent.pool.volume.settings import Timing
from tests.support.pool.memory_pool import EXTENT_AT, MemoryPool, key_of, nguid_of


@pytest.mark.expects_log("nothing was removed there")
def test_a_namespace_that_fails_all_reads_is_said_by_its_name_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = MemoryPool((4,), value_bytes=8192)
    agent = pool.agent()
    for number in range(20):
        agent.put(key_of(number), b"value")
    agent.channel.clock += 2 * Timing().write_deadline + 1
    pool.namespaces[0].unreadable |= set(pool.namespaces[0].blocks)
    counters, now = ScrubCounters(), [0.0]
    monkeypatch.setattr(agent.volume.media_errors, "complaints", Complaints(log, clock=lambda: now[0]))
    for _ in range(400):
        agent.channel.run(take_out_bad(agent.volume, agent.channel, 0, EXTENT_AT, [0], counters))
    assert counters.sets_skipped == 400
    [line] = caplog.messages
    assert f"namespace {nguid_of(0).hex()} fails other slots as well" in line
    now[0] += 60
    agent.channel.run(take_out_bad(agent.volume, agent.channel, 0, EXTENT_AT, [0], counters))
    assert "399 more like it" in caplog.messages[1]
