"""Lanes for a verb that looks at a pool or changes it: connect, do the work, hang up.

Ctrl-C ends a verb as a crash would: nothing more is sent than what is under way, which is waited for shortly.
What a verb leaves half-done is completed or undone by its next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import trio

from agent.attach.connect import connected
from agent.cli.trio_run import run_unwrapped
from agent.config.configuration import Configuration
from agent.remote.cancellable import VerbLanes
from agent.remote.channel import WorkerLanes
from agent.remote.fabric import Fabric

T = TypeVar("T")
END_SECONDS = 2.0
"""How long the end of a verb waits for the request that is under way; it may be one to a dead enclosure."""


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
