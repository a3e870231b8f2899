"""While a call of host_shim waits for the agent, the engine's other threads go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from host_shim.named_values import NamedValues
from tests.support.pool_up import PoolUp

VALUE_BYTES = 64 << 10
SLOW_MS = 1500
"""So long that a busy machine's own hold-ups are short beside it."""
COUNT = 64
"""Of values of a call: those that one request names take more than 1,024 bytes to name."""
PARTS, PART_BYTES = 100, 4096


class Ticker:
    """A thread that wants the interpreter's lock every millisecond, and the longest time it had to wait."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.001):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


@contextlib.contextmanager
def held_for_less_than(pool_up: PoolUp, seconds: float) -> Iterator[None]:
    """What is called within waits for a slow drive, and no other thread waits for that."""
    pool_up.fault(0, "slow", drive=0, latency_ms=SLOW_MS)
    try:
        with Ticker() as ticker:
            began = time.monotonic()
            yield
            took = time.monotonic() - began
    finally:
        pool_up.fault(0, "slow", drive=0, latency_ms=0)
    assert took >= SLOW_MS / 1e3
    assert ticker.longest < seconds, "the call held the interpreter's lock"


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    return ("--enclosures", "1", "--value-size", "1M", "--no-files", "--read-deadline-ms", "20000")


def test_many_values_of_one_request(whole_pool: PoolUp) -> None:
    with whole_pool.pool() as pool:
        kv, memory = pool.volume("kv"), pool.memory(COUNT * VALUE_BYTES)
        pieces = [memory[at : at + VALUE_BYTES] for at in range(0, len(memory), VALUE_BYTES)]
        keys = [number.to_bytes(16, "big") for number in range(COUNT)]
        assert all(kv.put_many(keys, pieces))
        assert kv.get_many(keys, pieces) == [VALUE_BYTES] * COUNT  # directories are remembered from now on
        with held_for_less_than(whole_pool, SLOW_MS / 2e3):
            assert kv.get_many(keys, pieces) == [VALUE_BYTES] * COUNT


def test_a_value_of_many_parts(whole_pool: PoolUp) -> None:
    with whole_pool.pool() as pool:
        memory = pool.memory(PARTS * PART_BYTES)
        parts = [memory[at : at + PART_BYTES] for at in range(0, len(memory), PART_BYTES)]
        values = NamedValues(pool, "kv")
        assert values.store([b"in parts"], [parts]) == [True]
        assert values.load([b"in parts"], [parts]) == [len(memory)]
        with held_for_less_than(whole_pool, SLOW_MS / 2e3):
            assert values.load([b"in parts"], [parts]) == [len(memory)]
