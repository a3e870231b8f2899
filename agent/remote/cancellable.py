"""Lanes that another thread can stop: those of a verb, which ends at Ctrl-C."""

from __future__ import annotations

import threading
from typing import TypeVar

from agent.pool.steps import Steps
from agent.remote.channel import WorkerLanes
from agent.remote.fabric import Fabric
from agent.remote.pending_request import PendingRequest

T = TypeVar("T")


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

    def _wait(self, pending: PendingRequest, deadline: float, at_least: int | None) -> bool:
        came = super()._wait(pending, deadline, at_least)
        if self._stopping.is_set():
            raise Interrupted
        return came
