"""The room that a volume's bundles take at a place: counted, and kept below its bound.

A listing counts what is there at the agent's start and once an hour; in between this agent's own bundles are
added. So agents that share a place learn of each other's bundles within the hour. Where the bound is
reached, the bundles of the oldest generation go first, a few at a time. What has no bundle's name is
counted, and is nobody's to delete here."""

import heapq
from typing import Final

from agent.spill.names import age_of, volume_of, volume_prefix
from agent.spill.target import Target

SURVEY_SECONDS: Final = 3600.0
AGAIN_SECONDS: Final = 60.0
"""Until the next listing, where one failed, or room is wanted and no old bundle is known."""
OLDEST_MAX: Final = 1024
"""Names of old bundles that are remembered from a listing."""
DELETED_AT_ONCE: Final = 16
FULL_SHARE: Final = 0.95
"""From this share of the bound on old bundles are deleted."""


class Room:
    """Of one volume at one place. For the place's thread."""

    def __init__(self, target: Target, pool_id: str, volume_id: bytes, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.used = 0
        self.deleted = 0
        """Bundles, since the agent's start."""
        self._target = target
        self._pool_id: Final = pool_id
        self._prefix: Final = volume_prefix(pool_id, volume_id)
        self._oldest: list[tuple[int, str, int]] = []
        self._next_survey = self._surveyed = 0.0

    def take(self, size: int) -> bool:
        """Set room aside for a bundle. False: there is none."""
        if self.used + size > self.max_bytes:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        """A bundle was not stored."""
        self.used = max(0, self.used - size)

    def survey(self, now: float, wall: float) -> None:
        """Count what is there, if it is time. Raises TargetError; it is tried again after a minute."""
        if now < self._next_survey:
            return
        self._surveyed, self._next_survey = now, now + AGAIN_SECONDS
        used = 0
        oldest: list[tuple[int, str, int]] = []
        for stored in self._target.names(self._prefix):
            used += stored.size
            if not volume_of(stored.name, self._pool_id):
                continue
            each = age_of(stored.name, wall), stored.name, stored.size
            if len(oldest) < OLDEST_MAX:
                heapq.heappush(oldest, each)
            else:
                heapq.heappushpop(oldest, each)
        self.used, self._oldest = used, sorted(oldest)
        self._next_survey = now + SURVEY_SECONDS

    def make_room(self) -> int:
        """Delete some of the oldest bundles, where the room is used up; how many. Raises TargetError."""
        count = 0
        while self.used > self.max_bytes * FULL_SHARE and count < DELETED_AT_ONCE:
            if not self._oldest:
                self._next_survey = min(self._next_survey, self._surveyed + AGAIN_SECONDS)
                break
            _, name, size = self._oldest.pop()
            self._target.delete(name)
            self.used -= size
            self.deleted += 1
            count += 1
        return count

    def delete_all(self) -> bool:
        """Delete some of all bundles: the volume was erased. True once none is left. Raises TargetError."""
        count = 0
        for stored in self._target.names(self._prefix):
            if not volume_of(stored.name, self._pool_id):
                continue
            if count == DELETED_AT_ONCE:
                return False
            self._target.delete(stored.name)
            self.deleted += 1
            count += 1
        self.used = 0
        return True
