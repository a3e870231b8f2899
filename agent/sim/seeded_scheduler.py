"""Runs many steps at once in virtual time, in an order that one seed decides.

A task is a generator of steps (agent/pool/steps.py). At every yield the scheduler may go on with any
other task that can run; which one is drawn from the seeded generator, so a seed is an interleaving and
the same seed is the same run. Time stands still while anything can run, and then leaps to the next
event or deadline. Besides `Wait` and `Acquire`, a task of a test may yield `Sleep`.

A step costs the same however many tasks there are: those that can run stand in a list, those that wait
in a heap by the time that they wait to and, by what they wait for, in a table. Nobody tells the
scheduler that a pending is done, so an event is planned with what it is `about`; after an event that
says nothing, and before time leaps, everything that is waited for is looked at.

`digest` covers every choice and every event: two runs with equal digests took the same path.
"""

import hashlib
import heapq
import itertools
import random
import threading
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
    """One run of steps. When its `owner` is killed, it ends with it."""

    name: str
    steps: TaskSteps
    owner: Hashable = None
    wanted: Yielded | None = None
    until: float = 0.0
    """When it can run whatever has come of what it waits for."""
    turn: int = 0
    """Grows with every step: an entry of the heap that names an older one is of no use any more."""
    ready: bool = False
    finished: bool = False
    killed: bool = False
    result: Any = None
    started_at: float = 0.0
    finished_at: float = 0.0


@dataclass(order=True, slots=True)
class _Event:
    at: float
    number: int
    action: Callable[[], None] = field(compare=False)
    about: object = field(compare=False)


class StepScheduler:
    """Tasks, events and the clock that they share."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(f"scheduler {seed}")
        self.now = 1000.0
        self.tasks: dict[Task, None] = {}
        """Those that have not finished, in the order in which they came."""
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, int, Task]] = []
        self._waiting: dict[int, list[Task]] = {}
        """By the identity of what they wait for."""
        self._locks: dict[int, threading.Lock] = {}
        """The locks that somebody waits for."""
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._digest = hashlib.blake2b(digest_size=16)
        self.steps_taken = 0
        self.after_step: Callable[[Task], None] | None = None
        """Called with the task that has just taken a step: where a test checks what must always hold."""

    # -- what runs --------------------------------------------------------------------------------

    def spawn(self, name: str, steps: TaskSteps, owner: Hashable = None) -> Task:
        """Add a task; it begins when the scheduler first draws it."""
        task = Task(name, steps, owner, started_at=self.now)
        self.tasks[task] = None
        self._make_ready(task)
        return task

    def call_at(self, at: float, action: Callable[[], None], about: object = None) -> None:
        """Run `action` at a time; what is due at once runs in the order in which it was asked for.

        `about` is the only pending that it may change the state of; None: it may change any.
        """
        heapq.heappush(self._events, _Event(max(at, self.now), next(self._numbers), action, about))

    def kill(self, owner: Hashable) -> int:
        """End every task of an owner where it stands, as a crash does; how many there were."""
        killed = [task for task in self.tasks if task.owner == owner]
        for task in killed:
            task.killed = task.finished = True
            task.finished_at = self.now
            self._forget(task)
        # Closed only now: what a generator does on its way out (locks of a dead process) must not let
        # another task of the same owner run on.
        for task in killed:
            task.steps.close()
        self._ready = [task for task in self._ready if not task.killed]
        self.note("kill", owner, len(killed))
        self._look_at_locks()
        return len(killed)

    def note(self, *what: object) -> None:
        """Make something part of the digest."""
        self._digest.update(repr(what).encode())

    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- running ----------------------------------------------------------------------------------

    def run(self, until: float | None = None) -> None:
        """Until no task is left, or the clock would pass `until`. Raises what a task raised."""
        while self.tasks and self._go_on(until):
            pass

    def finish(self, steps: TaskSteps) -> Any:
        """Run one task to its end, everything else beside it; its result."""
        task = self.spawn("one", steps)
        while not task.finished:
            self._go_on(None)
        return task.result

    def _go_on(self, until: float | None) -> bool:
        """One step of a task, one event, or one leap of the clock; False: it would leap past `until`."""
        due = bool(self._events) and self._events[0].at <= self.now
        if self._ready and (not due or self.random.random() < 0.5):
            self._advance(self._draw())
        elif due:
            event = heapq.heappop(self._events)
            event.action()
            self._look_at(event.about)
        elif not self._look_at(None):
            return self._leap(until)
        return True

    def _draw(self) -> Task:
        ready = self._ready
        number = self.random.randrange(len(ready))
        ready[number], ready[-1] = ready[-1], ready[number]
        task = ready.pop()
        task.ready = False
        return task

    def _leap(self, until: float | None) -> bool:
        timers = self._timers
        while timers and timers[0][2] != timers[0][3].turn:
            heapq.heappop(timers)
        moments = ([timers[0][0]] if timers else []) + ([self._events[0].at] if self._events else [])
        moment = min(moments)
        if until is not None and moment > until:
            self.now = until
            return False
        self.now = max(self.now, moment)
        while timers and timers[0][0] <= self.now:
            _, _, turn, task = heapq.heappop(timers)
            if turn == task.turn and not task.ready:
                self._make_ready(task)
        return True

    def _make_ready(self, task: Task) -> None:
        task.ready = True
        self._ready.append(task)

    def _look_at(self, about: object) -> bool:
        """Whether somebody who waits for it (for anything, where it is None) can now go on."""
        keys = list(self._waiting) if about is None else [id(about)]
        found = False
        for key in keys:
            for task in self._waiting.get(key, ()):
                if not task.ready and _come(task.wanted):
                    self._make_ready(task)
                    found = True
        return found

    def _look_at_locks(self) -> None:
        for key, lock in self._locks.items():
            if not lock.locked():
                for task in self._waiting[key]:
                    if not task.ready:
                        self._make_ready(task)

    def _advance(self, task: Task) -> None:
        wanted = task.wanted
        answer = False
        if isinstance(wanted, Acquire):
            answer = wanted.lock.acquire(blocking=False)
            if not answer and self.now < task.until:
                return  # Somebody else was drawn first.
        elif isinstance(wanted, Wait):
            answer = _come(wanted)
        self.steps_taken += 1
        assert self.steps_taken < STEPS_MAX, "no end in sight"
        self.note(task.name, round(self.now, 9), type(wanted).__name__)
        self._forget(task)
        try:
            task.wanted = next(task.steps) if wanted is None else task.steps.send(answer)
        except StopIteration as end:
            task.finished, task.result, task.finished_at = True, end.value, self.now
            self.tasks.pop(task, None)
        except BaseException:
            task.finished, task.finished_at = True, self.now
            self.tasks.pop(task, None)
            raise
        else:
            self._remember(task)
        self._look_at_locks()
        if self.after_step is not None:
            self.after_step(task)

    def _remember(self, task: Task) -> None:
        """Note what a task waits for."""
        wanted = task.wanted
        assert wanted is not None
        if isinstance(wanted, Sleep):
            task.until = wanted.until
        else:
            # What judges the namespace by its answers, where the channel has that, may have less patience.
            asked = getattr(wanted.pending, "asked", None) if isinstance(wanted, Wait) else None
            task.until = wanted.deadline if asked is None else asked.wait_until(wanted.deadline)
            key = id(_object(wanted))
            self._waiting.setdefault(key, []).append(task)
            if isinstance(wanted, Acquire):
                self._locks[key] = wanted.lock
        if self.now < task.until:
            # Also where the lock is free just now: somebody else may be drawn first.
            heapq.heappush(self._timers, (task.until, next(self._numbers), task.turn, task))
        if self.now >= task.until or _come(wanted):
            self._make_ready(task)

    def _forget(self, task: Task) -> None:
        """It goes on, or has ended: what it waited for is not its concern any more."""
        task.turn += 1
        wanted = task.wanted
        if task.finished:
            self.tasks.pop(task, None)
        if wanted is None or isinstance(wanted, Sleep):
            return
        key = id(_object(wanted))
        others = self._waiting[key]
        others.remove(task)
        if not others:
            del self._waiting[key]
            self._locks.pop(key, None)


def _object(wanted: Wait | Acquire) -> object:
    return wanted.pending if isinstance(wanted, Wait) else wanted.lock


def _come(wanted: Yielded | None) -> bool:
    """Whether what is wanted is there; a task that has not begun wants nothing."""
    if isinstance(wanted, Wait):
        pending = wanted.pending
        return pending.done or (wanted.at_least is not None and pending.received >= wanted.at_least)
    return isinstance(wanted, Acquire) and not wanted.lock.locked()
