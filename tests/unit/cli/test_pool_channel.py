"""Ctrl-C ends a verb that works on a channel, and its thread sends nothing after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from agent.cli import pool_channel
from agent.cli.pool_channel import with_channel
from agent.pool.steps import Steps
from agent.remote.channel import Interrupted, WorkerChannel
from agent.remote.fabric import Fabric


def nothing() -> Steps[None]:
    yield from ()


@pytest.fixture(autouse=True)
def _no_enclosures(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(fabric=Fabric([]))

    monkeypatch.setattr(pool_channel, "connected", connected)


def test_an_interrupt_ends_the_work_at_its_next_step() -> None:
    outcome: list[BaseException] = []

    def work(_: Fabric, channel: WorkerChannel) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                channel.run(nothing())
                time.sleep(0.001)
        except BaseException as stopped:
            outcome.append(stopped)
            raise

    with pytest.raises(KeyboardInterrupt):
        with_channel(None, work)  # type: ignore[arg-type]
    assert [type(each) for each in outcome] == [Interrupted], "the thread has ended before the verb"


def test_an_interrupt_does_not_wait_for_work_that_does_not_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrub that sleeps to keep its pace, a command to a dead enclosure."""
    monkeypatch.setattr(pool_channel, "END_SECONDS", 0.05)
    release, gone = threading.Event(), threading.Event()

    def work(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(20)
        gone.set()

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            with_channel(None, work)  # type: ignore[arg-type]
        assert time.monotonic() - began < 10
    finally:
        release.set()
    assert gone.wait(20)


def test_the_outcome_and_the_error_of_the_work_arrive() -> None:
    def fail(*_: object) -> None:
        raise ValueError("of the work")

    assert with_channel(None, lambda fabric, channel: 7) == 7  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of the work"):
        with_channel(None, fail)  # type: ignore[arg-type]
