"""Which data key of a volume seals while it is rotated, and whether what it sealed may be acknowledged.

Whoever ends a rotation counts what the directories name under the earlier key, twice, and then drops it
(key_epochs.py). So nothing may be acknowledged under that key that could have been written after the second
count: not by an agent that has not looked at the pool map for a while, because it was stopped or its upkeep
is held up, and not by one whose time to seal with the new key has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.format.slot import SlotCodec
from agent.pool.steps import Lanes, Steps

MAP_AGE_SECONDS: Final = 2.0
"""Who has not looked at the pool map for so long looks before it acknowledges."""
SETTLE_SECONDS: Final = 3.0
"""For how long an agent that has seen a rotation begin seals with the earlier key still."""
_BOOTTIME: Final = time.CLOCK_BOOTTIME
SLEEP_SECONDS_MIN: Final = 0.25
"""A shorter sleep of the machine counts as none; QUIET_SECONDS has room for it."""
GRACE_SECONDS: Final = 1.0
"""What was begun under the earlier key and is not on flash so long after that is refused."""
QUIET_SECONDS: Final = MAP_AGE_SECONDS + SETTLE_SECONDS + GRACE_SECONDS + 1.0
"""Between the two counts. No agent acknowledges a value under the earlier key so long after the map with the
new one is on every namespace; a second is left for clocks that run unlike."""

Ask: TypeAlias = Callable[[Lanes, int, float], Steps[MissCause | None]]
"""Whether, by the pool map on a namespace, the volume's keys are those that this agent knows: None where they
are, WRONG_KEY where they are others, and otherwise why the map could not be read until a deadline."""

InForce: TypeAlias = Callable[[Lanes, float], Steps[int | None]]
"""The version of the pool map that this agent goes by, where no namespace of the pool has a newer one. None:
that cannot be told by a deadline, for a namespace does not answer, or has one."""


@dataclass(frozen=True, slots=True)
class KeyTransition:
    """A rotation as one agent goes through it: the codec with the new key seals from `seals_at` on."""

    codec: SlotCodec
    seals_at: float
    slept_at: float = field(default_factory=lambda: slept_seconds())

    def is_due(self, now: float, grace: float = 0.0) -> bool:
        """Whether `seals_at` is over, by `grace` seconds; the machine's sleep since counts."""
        return now + slept_since(self.slept_at) >= self.seals_at + grace


def words_for(doubt: MissCause) -> str:
    """Why something is not acknowledged, for people."""
    if doubt is MissCause.WRONG_KEY:
        return "its key was dropped"
    return "the pool map, by which its key holds, could not be read"


def slept_seconds() -> float:
    """For how long the machine has slept since it was booted, as far as its kernel knows: `now` stands still
    then (CLOCK_MONOTONIC), and the other agents and the verbs go on."""
    return time.clock_gettime(_BOOTTIME) - time.monotonic()


def slept_since(before: float) -> float:
    """Seconds of sleep since `slept_seconds` said that. Little is none: two clocks are read, one by one."""
    slept = slept_seconds() - before
    return slept if slept > SLEEP_SECONDS_MIN else 0.0


class MapAge:
    """When the pool map was last looked at for a volume (the time at which a look began), and how to look.

    An agent's upkeep sets it up (agent/attach/map_watch.py). Without, what is known is held to be so for
    ever.
    """

    def __init__(self) -> None:
        self.seen_at = float("inf")
        self._slept_at = slept_seconds()
        self._ask: Ask | None = None

    def watch(self, ask: Ask) -> None:
        """From now on the map counts as unseen until somebody has looked."""
        self._ask, self.seen_at = ask, float("-inf")

    def note(self, began: float, slept: float | None = None) -> None:
        """`slept`: what `slept_seconds` said when the look began; just now, where that is not given."""
        if began >= self.seen_at:
            self.seen_at, self._slept_at = began, slept_seconds() if slept is None else slept

    def age(self, now: float) -> float:
        """Seconds since the last look, those included that the machine slept."""
        return now - self.seen_at + slept_since(self._slept_at)

    def is_fresh(self, now: float) -> bool:
        return self.age(now) <= MAP_AGE_SECONDS

    def wants_look(self, now: float) -> bool:
        """Whether `refresh` would look."""
        return self._ask is not None and not self.is_fresh(now)

    def refresh(self, lanes: Lanes, namespace: int, deadline: float) -> Steps[MissCause | None]:
        """Look, where that was too long ago. WRONG_KEY: the keys are others now; another cause: whether they
        are cannot be told, for the map was not read by the deadline."""
        began, slept = lanes.now(), slept_seconds()
        if self._ask is None or self.is_fresh(began):
            return None
        doubt = yield from self._ask(lanes, namespace, deadline)
        if doubt is None:
            self.note(began, slept)
        return doubt
