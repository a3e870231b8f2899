"""Virtual time, for runs that measure: each step goes on as soon as what it waits for has come.

seeded_scheduler.py draws at random who goes on, to hunt faults of order; here nothing is drawn, so that a
hundred thousand requests are quick. What waits is woken by what it waits for, and nothing is looked at in
between. Events of one moment run in the order in which they were planned.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final, Protocol

from agent.errors import UserError
from agent.pool.steps import Acquire, Wait


class Sleep:
    """Resume me with True at `until`."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


class Signal:
    """Something that happens once. A task yields it to wait for it."""

    __slots__ = ("fired", "waiting")

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Task] = []


class Wakes(Protocol):
    """A pending that knows who waits for it."""

    waiter: "Task | None"


TaskSteps = Generator[Any, bool, Any]
NEVER: Final = float("inf")
LATEST: Final = 3e9
"""Seconds, nearly a hundred years: what the agent writes has no room for the nanoseconds of six hundred."""


class Task:
    """Steps that run. `turn` grows with each step, so that an event for an older one is of no use."""

    __slots__ = ("alarm", "deadline", "owner", "pending", "steps", "turn")

    def __init__(self, steps: TaskSteps, owner: object) -> None:
        self.steps = steps
        self.owner = owner
        self.turn = 0
        self.pending: Wakes | None = None
        """What it waits for, until `deadline`."""
        self.deadline = 0.0
        self.alarm = NEVER
        """When the loop looks at the deadline next. Nearly all waits end long before theirs, and those of one
        get or put have the same one: so there is an event for many of them."""


class VirtualLoop:
    """The clock, the events and the tasks of one run. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._ready: deque[tuple[Task, int, bool]] = deque()
        self._at_locks: list[tuple[threading.Lock, Task, int]] = []
        self._owned: dict[object, dict[Task, None]] = {}

    def call_at(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call an action at a time; what is due at once runs in the order in which it was asked for."""
        self._number += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self._number, action, arguments))

    def spawn(self, steps: TaskSteps, owner: object = None) -> Task:
        """Run steps, from their first one at once. `owner` may be killed."""
        task = Task(steps, owner)
        if owner is not None:
            self._owned.setdefault(owner, {})[task] = None
        self._ready.append((task, task.turn, False))
        return task

    def kill(self, owner: object) -> int:
        """End the tasks of an owner where they stand; how many there were."""
        tasks = list(self._owned.pop(owner, {}))
        for task in tasks:
            task.turn = -1
        self._at_locks = [each for each in self._at_locks if each[1].turn >= 0]
        for task in tasks:
            task.steps.close()
        return len(tasks)

    def fire(self, signal: Signal) -> None:
        """It has happened: who waits for it goes on."""
        signal.fired = True
        waiting, signal.waiting = signal.waiting, []
        for task in waiting:
            self._ready.append((task, task.turn, True))

    def came(self, pending: Wakes) -> None:
        """A pending is done: who waits for it goes on."""
        task, pending.waiter = pending.waiter, None
        if task is not None:
            self._ready.append((task, task.turn, True))

    def run(self) -> None:
        """Until nothing is left to happen. Raises what a task raised, and UserError past `LATEST`."""
        heap, ready = self._heap, self._ready
        while True:
            while ready:
                task, turn, answer = ready.popleft()
                if task.turn == turn:
                    self._advance(task, answer)
                if self._at_locks:
                    self._look_at_locks()
            if not heap:
                return
            at, _, action, arguments = heapq.heappop(heap)
            if at > LATEST:
                raise UserError(
                    f"the run takes more than {LATEST:,.0f} s of virtual time",
                    "see the rates that are given, and the lengths and times of a trace",
                )
            self.now = at
            self.events += 1
            action(*arguments)
            if self._at_locks:
                self._look_at_locks()

    def _alarm(self, task: Task) -> None:
        """See whether a task has waited too long. An event for a later time may be left of an older wait."""
        if self.now >= task.alarm:
            task.alarm = NEVER
        pending = task.pending
        if task.turn < 0 or pending is None or pending.waiter is not task:
            return
        if self.now >= task.deadline:
            pending.waiter = task.pending = None
            self._ready.append((task, task.turn, False))
        elif task.deadline < task.alarm:
            task.alarm = task.deadline
            self.call_at(task.deadline, self._alarm, task)

    def _late(self, task: Task, turn: int) -> None:
        """A task has waited too long for a lock."""
        if task.turn == turn:
            self._ready.append((task, turn, False))

    def _advance(self, task: Task, answer: bool) -> None:
        while True:
            task.turn += 1
            try:
                wanted = next(task.steps) if task.turn == 1 else task.steps.send(answer)
            except StopIteration:
                if task.owner is not None:
                    self._owned.get(task.owner, {}).pop(task, None)
                task.turn = -1
                return
            if isinstance(wanted, Wait):
                pending: Any = wanted.pending
                if pending.done:
                    answer = True
                    continue
                pending.waiter = task
                asked = pending.asked
                deadline = wanted.deadline if asked is None else asked.wait_until(wanted.deadline)
                task.pending, task.deadline = pending, deadline
                if deadline < task.alarm:
                    task.alarm = deadline
                    self.call_at(deadline, self._alarm, task)
            elif isinstance(wanted, Signal):
                if wanted.fired:
                    answer = True
                    continue
                wanted.waiting.append(task)
            elif isinstance(wanted, Sleep):
                self.call_at(wanted.until, self._woken, task, task.turn)
            else:
                assert isinstance(wanted, Acquire)
                if wanted.lock.acquire(blocking=False):
                    answer = True
                    continue
                self._at_locks.append((wanted.lock, task, task.turn))
                self.call_at(wanted.deadline, self._late, task, task.turn)
            return

    def _woken(self, task: Task, turn: int) -> None:
        if task.turn == turn:
            self._ready.append((task, turn, True))

    def _look_at_locks(self) -> None:
        """Hand locks that are free to those who have waited longest."""
        waiting, self._at_locks = self._at_locks, []
        for each in waiting:
            lock, task, turn = each
            if task.turn != turn:
                continue
            if lock.acquire(blocking=False):
                # Resumed at once, so that an end by its deadline cannot cross it with the lock in hand.
                self._advance(task, True)
            else:
                self._at_locks.append(each)
