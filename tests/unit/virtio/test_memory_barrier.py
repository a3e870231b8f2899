"""The barrier is one whoever else is at one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agent.virtio import memory_barrier


def test_no_fence_finds_its_lock_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held is found so by a plain read, which orders nothing. So two threads that are in a
    fence at once must not meet at one."""
    outcomes: list[bool] = []
    within = 0

    class Lock:
        def __init__(self) -> None:
            self._lock = lock_type()

        def acquire(self, *words: Any, **more: Any) -> bool:
            nonlocal within
            taken = self._lock.acquire(False)
            outcomes.append(taken)
            if within < 3:
                within += 1
                made()  # another thread, at this very moment
            return taken

        def release(self) -> None:
            self._lock.release()

    lock_type = threading.Lock
    monkeypatch.setattr(threading, "Lock", Lock)
    made = memory_barrier._by_lock()
    monkeypatch.undo()
    made()
    assert outcomes == [True] * 4


def test_there_is_one() -> None:
    memory_barrier.full_fence()
    memory_barrier.ordering_fence()
