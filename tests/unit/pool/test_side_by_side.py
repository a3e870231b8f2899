"""Parts of one operation: which answers are waited for, where none is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from agent.pool.steps import Wait
from agent.pool.volume.side_by_side import AnyOf, Parts

UNTIL = 5.0


class _Answer:
    done = False
    received = 0
    fault = None
    unreachable = False


class _Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


def _part(answers: list[_Answer]) -> Iterator[Any]:
    left = list(answers)
    while left:
        yield AnyOf(left, UNTIL)  # type: ignore[arg-type]
        for answer in [each for each in left if each.done] or list(left):
            left.remove(answer)


def test_each_of_several_answers_is_waited_for() -> None:
    """An answer may show to its own waiter alone: on another path's queue, or where its path died."""
    clock, waited = _Clock(), Counter[int]()
    parts = Parts(clock)  # type: ignore[arg-type]
    answers = [[_Answer(), _Answer()] for _ in range(2)]
    for namespace, both in enumerate(answers):
        parts.start(namespace, _part(both))  # type: ignore[arg-type]

    def run() -> Iterator[Any]:
        while len(parts):
            yield from parts.go_on(may_grow=False)

    steps, found = run(), False
    wait = next(steps)
    while wait is not None:
        assert isinstance(wait, Wait)
        waited[id(wait.pending)] += 1
        clock.time = max(clock.time, wait.deadline)
        wait = _next(steps, found)
    assert set(waited) == {id(answer) for both in answers for answer in both}
    assert clock.time <= UNTIL + 0.1


def _next(steps: Any, answer: bool) -> Any:
    try:
        return steps.send(answer)
    except StopIteration:
        return None
