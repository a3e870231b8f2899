"""A tenant's quota of slots and bytes. One `Quota` for each tenant of this agent.

A value takes its whole slot, so bytes are those of slots with their headers. The room in use is what this
agent knows of all directories of the tenant's volumes (agent/pool/maintenance/usage_survey.py), and what its
own puts have set aside. Other agents' puts are seen by that walk only, so several agents may overshoot by
what they store between two walks.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.pool.format.occupancy import Occupancy


@dataclass(frozen=True, slots=True)
class Limits:
    """0: no limit."""

    slots: int = 0
    bytes: int = 0

    @property
    def of_room(self) -> bool:
        return bool(self.slots or self.bytes)


class Measured(NamedTuple):
    """A volume of the tenant: what is taken of it, and the bytes of one slot."""

    occupancy: Occupancy
    slot_bytes: int


@dataclass(slots=True)
class QuotaCounts:
    """What the quota has done since the agent's start."""

    puts_refused: int = 0
    evictions: int = 0
    """Of the tenant's own values, for new ones or because the quota was lowered."""


class Quota:
    """A tenant's limits, and what it has of them. Safe from any thread."""

    def __init__(self, volumes: Sequence[Measured], limits: Limits | None = None) -> None:
        self.limits = Limits()
        self.counts = QuotaCounts()
        self._volumes = volumes
        self._set_aside = [0, 0]
        self._lock = threading.Lock()
        self.limit(limits or Limits())

    def limit(self, limits: Limits) -> None:
        with self._lock:
            self.limits = limits
        if limits.of_room:
            for volume in self._volumes:
                volume.occupancy.keep_forgotten()

    def in_use(self) -> tuple[int, int]:
        """Slots and bytes: what is known to lie on flash, and what puts under way have set aside."""
        known_slots, known_size = self._known()
        return known_slots + self._set_aside[0], known_size + self._set_aside[1]

    def _known(self) -> tuple[int, int]:
        slots = size = 0
        for volume in self._volumes:
            known = volume.occupancy.known
            slots += known
            size += known * volume.slot_bytes
        return slots, size

    def _fits(self, slots: int, size: int) -> bool:
        limits = self.limits
        return (not limits.slots or slots <= limits.slots) and (not limits.bytes or size <= limits.bytes)

    def is_over(self) -> bool:
        """Whether more is stored than may be. Puts under way do not count: some exchange what there is."""
        return not self._fits(*self._known())

    def set_aside(self, slot_bytes: int) -> bool:
        """Room for one slot more. False: there is none; True: `give_back` once it is on flash, or is not."""
        with self._lock:
            slots, size = self.in_use()
            if not self._fits(slots + 1, size + slot_bytes):
                return False
            self._change(1, slot_bytes)
            return True

    def exchange(self, slot_bytes: int) -> None:
        """Room for one slot, for which another of the same volume goes right after."""
        with self._lock:
            self._change(1, slot_bytes)

    def give_back(self, slot_bytes: int) -> None:
        with self._lock:
            self._change(-1, -slot_bytes)

    def _change(self, slots: int, size: int) -> None:
        self._set_aside = [self._set_aside[0] + slots, self._set_aside[1] + size]

    def count(self, *, refused: int = 0, evicted: int = 0) -> None:
        with self._lock:
            self.counts.puts_refused += refused
            self.counts.evictions += evicted
