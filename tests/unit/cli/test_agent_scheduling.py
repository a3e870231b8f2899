"""How the agent's threads are scheduled. Tests ask in threads, which end with what they asked for."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import pytest

from agent.scheduling import Scheduling, be_scheduled


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("scheduling", "policy"), [("batch", os.SCHED_BATCH), ("normal", os.SCHED_OTHER)])
def test_threads_started_from_then_on_are_scheduled_so(scheduling: Scheduling, policy: int) -> None:
    found: list[int] = []

    def agent() -> None:
        be_scheduled(scheduling)
        in_a_thread(lambda: found.append(os.sched_getscheduler(0)))

    in_a_thread(agent)
    assert found == [policy]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_who_may_not_goes_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with caplog.at_level(logging.INFO):
        be_scheduled("batch")
    assert "as any others: Operation not permitted" in caplog.text
