"""Runs many steps at once in virtual time, in an order that one seed decides.

A task is a generator of steps (agent/pool/steps.py). At every yield the scheduler may go on with any
other task that can run; which one is drawn from the seeded generator, so a seed is an interleaving and
the same seed is the same run. Time stands still while anything can run, and then leaps to the next
event or deadline. Besides `Wait` and `Acquire`, a task of a test may yield `Sleep`.

`digest` covers every choice and every event: two runs with equal digests took the same path.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any

from agent.pool.steps import Acquire, Wait

STEPS_MAX = 5_000_000
"""A run that takes more is going round in a circle."""


@dataclass(slots=True)
class Sleep:
    """Resume me with False at `until`."""

    until: float


Yielded = Wait | Acquire | Sleep
TaskSteps = Generator[Any, bool, Any]


@dataclass(slots=True, eq=False)
class Task:
    """One run of steps. `owner` names whoever takes it along when it is killed."""

    name: str
    steps: TaskSteps
    owner: Hashable = None
    wanted: Yielded | None = None
    finished: bool = False
    killed: bool = False
    result: Any = None
    started_at: float = 0.0
    finished_at: float = 0.0
    error: BaseException | None = None


@dataclass(order=True, slots=True)
class _Event:
    at: float
    number: int
    action: Callable[[], None] = field(compare=False)


class StepScheduler:
    """Tasks, events and the clock that they share."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(f"scheduler {seed}")
        self.now = 1000.0
        self.tasks: list[Task] = []
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._digest = hashlib.blake2b(digest_size=16)
        self.steps_taken = 0

    # -- what runs --------------------------------------------------------------------------------

    def spawn(self, name: str, steps: TaskSteps, owner: Hashable = None) -> Task:
        """Add a task; it begins when the scheduler first draws it."""
        task = Task(name, steps, owner, started_at=self.now)
        self.tasks.append(task)
        return task

    def call_at(self, at: float, action: Callable[[], None]) -> None:
        """Run `action` at a time; what is due at once runs in the order in which it was asked for."""
        heapq.heappush(self._events, _Event(max(at, self.now), next(self._numbers), action))

    def kill(self, owner: Hashable) -> int:
        """End every task of an owner where it stands, as a crash does; how many there were."""
        killed = 0
        for task in self.tasks:
            if task.owner == owner and not task.finished:
                task.killed = task.finished = True
                task.finished_at = self.now
                killed += 1
        # Closed only now: what a generator does on its way out (locks of a dead process) must not let
        # another task of the same owner run on.
        for task in self.tasks:
            if task.killed:
                task.steps.close()
        self.tasks = [task for task in self.tasks if not task.killed]
        self.note("kill", owner, killed)
        return killed

    def note(self, *what: object) -> None:
        """Make something part of the digest."""
        self._digest.update(repr(what).encode())

    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- running ----------------------------------------------------------------------------------

    def run(self, until: float | None = None) -> None:
        """Until no task is left, or the clock would pass `until`. Raises what a task raised."""
        while True:
            live = [task for task in self.tasks if not task.finished]
            if len(live) * 2 < len(self.tasks):
                self.tasks = live
            if not live:
                return
            ready = [task for task in live if self._can_run(task)]
            due = bool(self._events) and self._events[0].at <= self.now
            if ready and (not due or self.random.random() < 0.5):
                self._advance(self.random.choice(ready))
            elif due:
                heapq.heappop(self._events).action()
            else:
                moments = [task.wanted_until() for task in map(_Waiting, live)]
                if self._events:
                    moments.append(self._events[0].at)
                moment = min(moments)
                if until is not None and moment > until:
                    self.now = until
                    return
                self.now = max(self.now, moment)

    def finish(self, steps: TaskSteps, name: str = "one") -> Any:
        """Run one task to its end, everything else beside it; its result."""
        task = self.spawn(name, steps)
        while not task.finished:
            self._run_once_more(task)
        return task.result

    def _run_once_more(self, task: Task) -> None:
        others = [each for each in self.tasks if each is not task]
        self.tasks = [task]
        try:
            self.run()
        finally:
            self.tasks = others

    def _can_run(self, task: Task) -> bool:
        wanted = task.wanted
        if wanted is None:
            return True
        if isinstance(wanted, Sleep):
            return self.now >= wanted.until
        if self.now >= wanted.deadline:
            return True
        if isinstance(wanted, Acquire):
            return not wanted.lock.locked()
        return _arrived(wanted)

    def _advance(self, task: Task) -> None:
        self.steps_taken += 1
        assert self.steps_taken < STEPS_MAX, "no end in sight"
        wanted = task.wanted
        self.note(task.name, round(self.now, 9), type(wanted).__name__)
        try:
            if wanted is None:
                task.wanted = next(task.steps)
            else:
                answer = False
                if isinstance(wanted, Acquire):
                    answer = wanted.lock.acquire(blocking=False)
                elif isinstance(wanted, Wait):
                    answer = _arrived(wanted)
                task.wanted = task.steps.send(answer)
        except StopIteration as end:
            task.finished, task.result, task.finished_at = True, end.value, self.now
        except BaseException as error:
            task.finished, task.error, task.finished_at = True, error, self.now
            raise


@dataclass(slots=True)
class _Waiting:
    task: Task

    def wanted_until(self) -> float:
        wanted = self.task.wanted
        if wanted is None:
            return 0.0
        return wanted.until if isinstance(wanted, Sleep) else wanted.deadline


def _arrived(wanted: Wait) -> bool:
    pending = wanted.pending
    return pending.done or (wanted.at_least is not None and pending.received >= wanted.at_least)
