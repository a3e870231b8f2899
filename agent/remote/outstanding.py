"""One request to a namespace: how long it is waited for, and what its answer says of the namespace.

The worker's lanes (remote/channel.py) and the simulator's (tests/support/sim_flash.py) both go by this, so
that what the simulation shows of gray failure holds for the agent. Without I/O; times in seconds of the
lanes' clock.
"""

from __future__ import annotations

import math
from typing import Final

from agent.remote.health import Health

NOT_ANSWERING: Final = "the namespace has not been answering"
"""Why a request was not sent: `Health.may_ask` said no."""
CLOCK_SLACK: Final = 0.001
"""A wait may end this much before its deadline, by the rounding of a poll."""


class Outstanding:
    """A request under way, and the `Health` that hears of its answer: once, or not at all."""

    __slots__ = ("_health", "_is_read", "_judged", "_since", "_until")

    def __init__(self, health: Health, now: float, *, is_read: bool) -> None:
        self._health = health
        self._since = now
        self._is_read = is_read
        self._judged = False
        self._until = math.inf

    def wait_until(self, deadline: float) -> float:
        """When to stop waiting: the deadline, or earlier where the namespace gets less patience."""
        if self._is_read:
            deadline = min(deadline, self._since + self._health.patience)
        self._until = deadline
        return deadline

    def answered(self, now: float, *, failed: bool, lost: bool = False) -> None:
        """The answer came, or what was wanted of it. `failed`: an error of the namespace's own; `lost`: the
        way died under it, which says nothing of the namespace."""
        if not self._judged and not lost:
            self._judged = True
            self._health.answered(now - self._since, read=self._is_read, failed=failed)

    def given_up(self, now: float) -> None:
        """Nobody waits for it any more. That is the namespace's fault only where somebody waited to the end:
        the rest of a value whose header proved wrong is given up as well."""
        if now + CLOCK_SLACK >= self._until:
            self._health.late(now)
