"""Lanes for a verb that looks at a pool or changes it: connect, do the work, hang up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from agent.agent import connected
from agent.cli.trio_run import run_unwrapped
from agent.config import Configuration
from agent.remote.fabric import Fabric
from agent.remote.lanes import WorkerLanes

T = TypeVar("T")


def with_lanes(configuration: Configuration, work: Callable[[Fabric, WorkerLanes], T]) -> T:
    """Connect, and do blocking work on lanes of its own thread."""

    async def main() -> T:
        async with connected(configuration, 1) as supervisor:
            fabric = supervisor.fabric
            lanes = WorkerLanes(fabric, 1)

            def on_thread() -> T:
                try:
                    lanes.connect_ahead()
                    return work(fabric, lanes)
                finally:
                    lanes.close()

            return await trio.to_thread.run_sync(on_thread)

    return run_unwrapped(main)
