"""Which data key of a volume seals during a rotation, and whether a value under it may be acknowledged.

A verb that ends a rotation counts twice what the directories name under the earlier key, and drops the key
(key_epochs.py). So no agent may acknowledge a value under that key that it could have written after the
second count. That holds for an agent that has not looked at the pool map for a while, and for one whose time
to seal with the new key has come.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import SlotCodec
from agent.pool.steps import IoChannel, Steps

MAP_AGE_SECONDS: Final = 2.0
"""An agent that has not looked at the pool map for so long looks before it acknowledges."""
SETTLE_SECONDS: Final = 3.0
"""For how long an agent that has seen a rotation begin seals with the earlier key still."""
_BOOTTIME: Final = time.CLOCK_BOOTTIME
SLEEP_SECONDS_MIN: Final = 0.25
"""A shorter sleep of the machine counts as none; QUIET_SECONDS has room for it."""
GRACE_SECONDS: Final = 1.0
"""What was begun under the earlier key and is not on flash so long after that is refused."""
QUIET_SECONDS: Final = MAP_AGE_SECONDS + SETTLE_SECONDS + GRACE_SECONDS + 1.0
"""Between the two counts. So long after the map with the new key is on every namespace, no agent acknowledges
a value under the earlier key; a second is left for clocks that run unlike."""

Ask: TypeAlias = Callable[[IoChannel, int, float], Steps[MissCause | None]]
"""Whether the pool map on a namespace has the known keys of the volume: None; WRONG_KEY for others; another
cause where the map was not read by the deadline. So, too, where the pool has grown since, and was settled."""

InForce: TypeAlias = Callable[[IoChannel, float], Steps[int | None]]
"""The version of the agent's pool map, where no namespace has a newer one. None: a namespace has, or did not
answer by the deadline."""


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
    """For how long the machine has slept since boot: CLOCK_MONOTONIC stands still then, other agents and
    verbs go on."""
    return time.clock_gettime(_BOOTTIME) - time.monotonic()


def slept_since(before: float) -> float:
    """Seconds of sleep since `slept_seconds` said that. Little is none: two clocks are read, one by one."""
    slept = slept_seconds() - before
    return slept if slept > SLEEP_SECONDS_MIN else 0.0


class MapAge:
    """When the pool map was last looked at for a volume (when a look began), and how to look. Without a
    `watch` (agent/attach/map_watch.py) the known map holds for ever."""

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

    def refresh(self, channel: IoChannel, namespace: int, deadline: float) -> Steps[MissCause | None]:
        """Look, where the last look is too old. WRONG_KEY: the keys are others now. Another cause: the map
        was not read by the deadline."""
        began, slept = channel.now(), slept_seconds()
        if self._ask is None or self.is_fresh(began):
            return None
        doubt = yield from self._ask(channel, namespace, deadline)
        if doubt is None:
            self.note(began, slept)
        return doubt
