"""The order in which keys are read ahead, by a clock of the test."""

from __future__ import annotations

from agent.pool.prestage.staging_queue import GUESSES_MAX, WAITING_MAX, Item, StagingQueue
from agent.pool.read.prestage_cache import PrestageCache
from tests.support.pool.memory_pool import MemoryPool


def _name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_announced_keys_go_first_and_late_ones_not_at_all() -> None:
    volume, cache = MemoryPool((1,)).agent().volume, PrestageCache(1 << 20)
    queue = StagingQueue(cache, 0, 0.0)
    assert queue.ask(Item(volume, _name(1), None))
    assert queue.ask(Item(volume, _name(2), b"two", until=5.0))
    assert queue.ask(Item(volume, _name(3), b"three", until=9.0))
    assert len(queue) == 3
    assert [queue.next(6.0), queue.next(6.0), queue.next(6.0)] == [
        Item(volume, _name(3), b"three", 9.0), Item(volume, _name(1), None), None,
    ]  # fmt: skip
    # What was too late is expected no longer; what was given out is, until its owner has read it.
    volume_id = volume.settings.volume_id
    assert not cache.is_expected(volume_id, _name(2))
    assert cache.is_expected(volume_id, _name(3))
    queue.forget(Item(volume, _name(3), b"three", 9.0))
    assert not cache.is_expected(volume_id, _name(3))


def test_guesses_are_read_at_their_rate() -> None:
    volume = MemoryPool((1,)).agent().volume
    slot = volume.settings.slot_bytes
    queue = StagingQueue(PrestageCache(1 << 20), slot, 0.0)
    for number in range(3):
        queue.ask(Item(volume, _name(number), None))
    assert queue.next(0.0) is not None
    # Two more seconds' worth are left out: what comes late is of no use.
    assert queue.next(0.0) is None
    queue.ask(Item(volume, _name(9), None))
    assert queue.next(2.0) is not None


def test_a_full_queue_refuses_and_forgets_the_oldest_guess() -> None:
    volume, cache = MemoryPool((1,)).agent().volume, PrestageCache(1 << 20)
    queue = StagingQueue(cache, 0, 0.0)
    asked = [queue.ask(Item(volume, _name(number), b"key")) for number in range(WAITING_MAX + 1)]
    assert asked.count(True) == WAITING_MAX
    assert asked[-1] is False
    for number in range(GUESSES_MAX + 1):
        queue.ask(Item(volume, _name(1 << 20 | number), None))
    assert len(queue) == WAITING_MAX + GUESSES_MAX
    assert not cache.is_expected(volume.settings.volume_id, _name(1 << 20))
    queue.drop_all()
    assert len(queue) == 0
    assert not cache._expected
