"""How authentication went, over all queues of a target."""

from __future__ import annotations

import logging
import math
from typing import Final

log = logging.getLogger(__name__)

WARN_EVERY_S: Final = 10.0
"""A host with a wrong secret tries again and again; the log hears of failures this often at most."""


class AuthenticationTally:
    """Counters, for statistics and the log. Changed with `Target.lock` held."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed = 0
        self.turned_away = 0
        """Admin queues for which there was no room among those that had yet to authenticate."""
        self.last_failure = ""
        self._warn_at = -math.inf

    def fail(self, who: str, why: str, now: float) -> None:
        """Count a failure, and log it unless another was logged a moment ago."""
        self.failed += 1
        self.last_failure = f"{who}: {why}"
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning("authentication failed, %s (%d so far)", self.last_failure, self.failed)

    def described(self) -> dict[str, int | str]:
        """For statistics."""
        return {
            "succeeded": self.succeeded,
            "failed": self.failed,
            "turned_away": self.turned_away,
            "last_failure": self.last_failure,
        }
