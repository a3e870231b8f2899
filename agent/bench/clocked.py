"""How long each operation took, beside how many there were in all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from agent.bench.rounds import Timed, Turn, together


class Clocked:
    """A turn that writes down how long it took, in seconds. The clock is two calls of 50 ns each."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.taken: list[float] = []

    def __call__(self) -> int | None:
        before = time.perf_counter()
        moved = self._turn()
        if moved is not None:
            self.taken.append(time.perf_counter() - before)
        return moved


def together_clocked(turns: Sequence[Turn], seconds: float) -> Timed:
    """`together`, with the time of each operation. It is for turns of one operation."""
    clocked = [Clocked(turn) for turn in turns]
    timed = together(clocked, seconds)
    return replace(timed, latencies=tuple(one for each in clocked for one in each.taken))
