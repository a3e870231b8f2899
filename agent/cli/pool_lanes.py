"""Lanes for a verb that looks at a pool or changes it: connect, do the work, hang up.

Ctrl-C ends a verb as a crash would: nothing more is sent than what is under way, which is waited for shortly.
What a verb leaves half-done is completed or undone by its next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import trio

from agent.cli.trio_run import run_unwrapped
from agent.config import Configuration
from agent.pool.steps import Steps
from agent.reaching import connected
from agent.remote.fabric import Fabric
from agent.remote.lane_pending import LanePending
from agent.remote.lanes import WorkerLanes

T = TypeVar("T")
END_SECONDS = 2.0
"""How long the end of a verb waits for the request that is under way; it may be one to a dead enclosure."""


class Interrupted(BaseException):
    """The verb is at its end, on the thread that works for it. No `except Exception` goes on after it."""


class VerbLanes(WorkerLanes):
    """Lanes that can be stopped from another thread."""

    def __init__(self, fabric: Fabric, queue_id: int) -> None:
        super().__init__(fabric, queue_id)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """No step goes on after the request that it waits for now. On any thread."""
        self._stopping.set()

    def run(self, steps: Steps[T]) -> T:
        if self._stopping.is_set():
            raise Interrupted
        return super().run(steps)

    def _wait(self, pending: LanePending, deadline: float, at_least: int | None) -> bool:
        came = super()._wait(pending, deadline, at_least)
        if self._stopping.is_set():
            raise Interrupted
        return came


def with_lanes(configuration: Configuration, work: Callable[[Fabric, WorkerLanes], T]) -> T:
    """Connect, and do blocking work on lanes of its own thread."""

    async def main() -> T:
        async with connected(configuration, 1) as supervisor:
            fabric = supervisor.fabric
            lanes = VerbLanes(fabric, 1)
            ended = threading.Event()

            def on_thread() -> T:
                try:
                    lanes.connect_ahead()
                    return work(fabric, lanes)
                finally:
                    lanes.close()
                    ended.set()

            try:
                return await trio.to_thread.run_sync(on_thread, abandon_on_cancel=True)
            finally:
                lanes.stop()
                with trio.CancelScope(shield=True), trio.move_on_after(END_SECONDS):
                    while not ended.is_set():  # noqa: ASYNC110 - an abandoned thread cannot tell trio
                        await trio.sleep(0.02)

    return run_unwrapped(main)
