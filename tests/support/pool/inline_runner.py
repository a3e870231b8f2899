"""A runner for tests that bring no channel: it settles steps in the calling thread."""

from __future__ import annotations

import time
from typing import TypeVar

from agent.pool.steps import Acquire, Steps

T = TypeVar("T")


class InlineRunner:
    """Drives steps in the calling thread; for `Wait` it polls, because tests bring no channel."""

    def run(self, steps: Steps[T]) -> T:
        answer: bool | None = None
        while True:
            try:
                request = steps.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                value: T = end.value
                return value
            left = max(0.0, request.deadline - time.monotonic())
            if isinstance(request, Acquire):
                answer = request.lock.acquire(timeout=left)
                continue
            pending = request.pending
            while not pending.done and time.monotonic() < request.deadline:
                time.sleep(0.0002)
            answer = pending.done


def inline_runner(_: int) -> InlineRunner:
    return InlineRunner()
