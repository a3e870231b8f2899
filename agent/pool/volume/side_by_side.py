"""Parts of one operation side by side: each goes on as soon as what it waits for is there.

`beside` (agent/pool/steps.py) has two parts, and the second goes on when the first has ended. `Parts` has any
number of them, and none waits for another. A channel waits for one answer at a time. So where no part
can go on, the worker waits for one queue or lock after another, each for a slice of time. What has
arrived at a queue meanwhile is taken with the next wait for it.
"""

from collections.abc import Generator, Sequence
from typing import Final, TypeAlias

from agent.pool.late_answers import has_arrived
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Wait

SLICE_FIRST: Final = 0.002
"""Seconds that one queue is waited for while others may have an answer; up to SLICE_MOST where none has."""
SLICE_MOST: Final = 0.05
_CLOCK_SLACK: Final = 0.001
"""A wait may end this much before its deadline, by the rounding of a poll."""


class AnyOf:
    """Resume me with True when one of these is done, with False at `deadline`."""

    __slots__ = ("deadline", "pendings")

    def __init__(self, pendings: Sequence[Pending], deadline: float) -> None:
        self.pendings: Final = pendings
        self.deadline: Final = deadline


Part: TypeAlias = Generator[Wait | Acquire | AnyOf, bool, None]
"""Steps of one part of the call, which may also wait for one of several answers."""


class _Part:
    """One that is under way."""

    __slots__ = ("looks", "namespace", "since", "steps", "wanted")

    def __init__(self, namespace: int, since: float, steps: Part) -> None:
        self.namespace: Final = namespace
        self.since: Final = since
        self.steps: Final = steps
        self.wanted: Wait | Acquire | AnyOf | None = None
        """None: it has not begun, or has ended."""
        self.looks = 0
        """Waits for one of several answers so far: each answer has its turn."""


class Parts:
    """Those of one operation, on one channel. They may not use the same buffer of it."""

    def __init__(self, channel: IoChannel) -> None:
        self._channel: Final = channel
        self._under_way: Final[list[_Part]] = []
        self._turn = 0
        self._slice = SLICE_FIRST

    def __len__(self) -> int:
        return len(self._under_way)

    def close(self) -> None:
        for part in self._under_way:
            part.steps.close()

    def namespaces(self, *, begun_before: float) -> set[int]:
        """Of the parts that were begun before a moment of the channel's clock and have not ended."""
        return {part.namespace for part in self._under_way if part.since < begun_before}

    def has_begun_since(self, moment: float) -> bool:
        """Whether a part that is under way was begun then or later."""
        return any(part.since >= moment for part in self._under_way)

    def start(self, namespace: int, steps: Part) -> None:
        """Begin a part, up to its first wait. `namespace`: where its answers come from."""
        part = _Part(namespace, self._channel.now(), steps)
        self._under_way.append(part)
        self._advance(part, None)

    def _advance(self, part: _Part, answer: bool | None) -> None:
        try:
            part.wanted = part.steps.send(answer)  # type: ignore[arg-type]  # a generator begins with None
        except StopIteration:
            part.wanted = None
            self._under_way.remove(part)

    def go_on(self, *, may_grow: bool) -> Steps[None]:
        """Go on with every part whose answer is there, or whose time is up; if there is none, wait for a
        little. `may_grow`: the caller may have parts to begin in a while."""
        if not (yield from self._go_on_at_once()):
            yield from self._wait_a_little(may_grow)

    def look(self) -> Steps[bool]:
        """Take what has arrived at the queues, without a wait, and go on with that. Whether there was any."""
        looked_at: set[int] = set()
        for part in self._under_way:
            wanted = part.wanted
            if isinstance(wanted, Wait) and part.namespace not in looked_at and not wanted.pending.done:
                looked_at.add(part.namespace)
                yield Wait(wanted.pending, self._channel.now(), wanted.at_least, wanted.deadline)
        return (yield from self._go_on_at_once())

    def _go_on_at_once(self) -> Steps[bool]:
        now, moved = self._channel.now(), False
        for part in list(self._under_way):
            # As far as it comes: a part mostly waits for several answers that arrive together.
            while (wanted := part.wanted) is not None:
                is_over = now >= wanted.deadline
                if isinstance(wanted, Acquire):
                    ours = wanted.lock.acquire(blocking=False)
                    if not ours and not is_over:
                        break
                    self._advance(part, ours)
                elif isinstance(wanted, AnyOf):
                    if not is_over and not any(each.done for each in wanted.pendings):
                        break
                    self._advance(part, not is_over)
                elif wanted.pending.done:
                    self._channel.took(wanted.pending)
                    self._advance(part, True)
                elif is_over or has_arrived(wanted.pending, wanted.at_least):
                    # Also for what has arrived: the wait counts the answer for the namespace.
                    self._advance(part, (yield wanted))
                else:
                    break
                moved = True
        return moved

    def _wait_a_little(self, may_grow: bool) -> Steps[None]:
        """Wait for one part, for a slice of time: a queue receives for all commands that it has, and others
        may have an answer meanwhile. Queues and locks take turns."""
        turns: dict[int, list[_Part]] = {}
        for part in self._under_way:
            at = id(part.wanted.lock) if isinstance(part.wanted, Acquire) else part.namespace
            turns.setdefault(at, []).append(part)
        turn, self._turn = self._turn, self._turn + 1
        of_turn = list(turns.values())[turn % len(turns)]
        part = of_turn[turn // len(turns) % len(of_turn)]
        wanted = part.wanted
        assert wanted is not None
        until = wanted.deadline
        several = isinstance(wanted, AnyOf) and len(wanted.pendings) > 1
        if len(self._under_way) > 1 or may_grow or several:
            until = min(until, self._channel.now() + self._slice)
        if isinstance(wanted, Acquire):
            came = yield Acquire(wanted.lock, until, gives_way=wanted.gives_way)
        elif isinstance(wanted, AnyOf):
            pending = wanted.pendings[part.looks % len(wanted.pendings)]
            part.looks += 1
            came = yield Wait(pending, until, None, wanted.deadline)
        else:
            came = yield Wait(wanted.pending, until, wanted.at_least, wanted.deadline)
        # One that ends before its time gets no more: its namespace gets no more patience, or it gives way.
        if (came and not isinstance(wanted, AnyOf)) or (
            not came and self._channel.now() + _CLOCK_SLACK < until
        ):
            self._advance(part, came)
        if came:
            self._slice = SLICE_FIRST
        elif not (turn + 1) % len(turns):
            self._slice = min(2 * self._slice, SLICE_MOST)
