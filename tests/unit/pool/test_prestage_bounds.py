"""What bounds prestaging: bytes, age, and the wait for its threads at the end."""

from __future__ import annotations

import threading

import pytest

from agent.pool.counters import MissCause
from agent.pool.prestage import prefetcher as prestaging
from agent.pool.prestage.prefetcher import Prefetcher
from agent.pool.read.prestage_cache import MAX_AGE_SECONDS, SWEEP_SECONDS, OpenValue, PrestageCache
from tests.support.pool.memory_pool import MemoryPool, key_of, stage_now
from tests.support.pool.staged import add_staged
from tests.support.waiting import wait_until

VOLUME, ONE, TWO = b"v" * 16, b"1" * 16, b"2" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_waits_too_long_is_not_served() -> None:
    clock = Clock()
    cache = PrestageCache(1 << 20, max_age=30.0, clock=clock)
    slot = memoryview(bytes(4096))
    assert add_staged(cache, VOLUME, ONE, 7, slot)
    clock.now += 29.0
    assert cache.holds(VOLUME, ONE)
    assert cache.find(VOLUME, ONE, 7) is slot, "being asked for does not make it younger"
    clock.now += 2.0
    assert not cache.holds(VOLUME, ONE), "so that it is read anew where somebody announces it again"
    assert cache.bytes_held == 4096
    assert cache.find(VOLUME, ONE, 7) is None
    assert cache.bytes_held == 0
    assert add_staged(cache, VOLUME, ONE, 7, slot)
    assert cache.holds(VOLUME, ONE)


@pytest.mark.parametrize("waits_open", [False, True])
def test_what_nobody_asks_for_goes_when_it_is_too_old(waits_open: bool) -> None:
    clock = Clock()
    cache = PrestageCache(1 << 20, max_age=30.0, clock=clock, waits_open=waits_open)
    assert add_staged(cache, VOLUME, ONE, 7, memoryview(bytes(4096)))
    clock.now += 20.0
    assert add_staged(cache, VOLUME, TWO, 7, memoryview(bytes(4096)))
    cache.sweep()
    assert cache.bytes_held == 8192
    clock.now += 10.0 + SWEEP_SECONDS
    cache.sweep()
    assert (cache.bytes_held, cache.holds(VOLUME, TWO)) == (4096, True)
    assert cache.counts(VOLUME).wasted_bytes == 4096


def test_an_idle_prestager_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestaging, "SWEEP_SECONDS", 0.01)
    agent, clock = MemoryPool().agent(), Clock()
    cache = PrestageCache(1 << 20, clock=clock)
    assert add_staged(cache, VOLUME, ONE, 7, memoryview(bytes(4096)))
    prestager = Prefetcher(cache, lambda _number: (agent.channel, agent.channel), threads=1)
    prestager.start()
    try:
        clock.now += MAX_AGE_SECONDS + SWEEP_SECONDS
        wait_until(lambda: cache.bytes_held == 0)
    finally:
        prestager.stop()


def test_a_delete_elsewhere_is_outlived_by_no_more_than_that_age() -> None:
    pool = MemoryPool()
    here, elsewhere = pool.agent(), pool.agent(prestage_bytes=1 << 20)
    here.put(key_of(0), b"a value")
    cache = elsewhere.prestage
    assert cache is not None
    clock = Clock()
    cache._clock = clock
    assert elsewhere.channel.run(stage_now(elsewhere.volume, cache, elsewhere.channel, key_of(0)))
    assert here.delete(key_of(0))
    assert elsewhere.get(key_of(0)) == b"a value", "nobody has told it"
    clock.now += MAX_AGE_SECONDS + 1
    assert isinstance(elsewhere.get(key_of(0)), MissCause)


def test_the_one_asked_for_longest_ago_makes_room() -> None:
    cache = PrestageCache(2 * 4096)
    for key in (ONE, TWO):
        assert add_staged(cache, VOLUME, key, 1, memoryview(bytes(4096)))
    assert cache.find(VOLUME, ONE, 1) is not None
    assert add_staged(cache, VOLUME, b"3" * 16, 1, memoryview(bytes(4096)))
    assert cache.holds(VOLUME, ONE)
    assert not cache.holds(VOLUME, TWO)
    assert not add_staged(cache, VOLUME, TWO, 1, memoryview(bytes(3 * 4096)))


@pytest.mark.expects_log("prestage-0 is still reading and is left behind")
def test_an_end_does_not_wait_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestaging, "STOP_SECONDS", 0.1)
    agent = MemoryPool().agent()
    reading, go_on = threading.Event(), threading.Event()

    class Hanging:
        def run(self, steps: object) -> None:
            reading.set()
            go_on.wait(30)
            steps.close()  # type: ignore[attr-defined]

    cache = PrestageCache(1 << 20)
    stager = Prefetcher(cache, lambda _: (agent.channel, Hanging()), threads=1)  # type: ignore[arg-type, return-value]
    stager.start()
    try:
        assert stager.request(agent.volume, ONE)
        assert reading.wait(10)
        stager.stop()
    finally:
        go_on.set()
        for thread in stager._threads:
            thread.join(10)


def test_what_comes_for_a_volume_that_was_erased_meanwhile_is_not_kept() -> None:
    """A prestaging thread that was opening its value when the tenant went."""
    volume_id, cache = bytes(16), PrestageCache(1 << 20, waits_open=True)
    slot, clear = memoryview(bytes(4096)), OpenValue(memoryview(b"in clear"), 0, 4096)
    assert cache.expect(volume_id, b"expected".ljust(16))
    cache.discard_volume(volume_id)
    assert cache.expect(volume_id, b"expected".ljust(16)), "asked for by one that has yet to notice"
    assert not cache.bring(volume_id, b"expected".ljust(16), 1, slot, clear=clear)
    assert not add_staged(cache, volume_id, b"added".ljust(16), 1, slot)
    assert cache.bytes_held == 0
    assert add_staged(cache, b"\1" * 16, b"another's".ljust(16), 1, slot)
