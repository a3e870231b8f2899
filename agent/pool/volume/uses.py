"""Uses of values that another process of the agent has served: they decide what is evicted.

A process that serves gets and writes no directory notes here which entries it has followed. It hands them
over now and then, and the process that writes directories counts them there, as if it had served the gets.
"""

import threading
from typing import Final, NamedTuple

USES_MAX: Final = 4096
"""Entries whose uses wait to be handed over. Uses of others are not counted meanwhile."""


class Use(NamedTuple):
    """An entry that was followed, and how often."""

    namespace: int
    offset: int
    slot: int
    generation: int
    times: int


class Uses:
    """What was followed since the last hand-over. Safe from any thread."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int, int, int], int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._times)

    def note(self, namespace: int, offset: int, slot: int, generation: int) -> None:
        entry = (namespace, offset, slot, generation)
        with self._lock:
            times = self._times.get(entry, 0)
            if times or len(self._times) < USES_MAX:
                self._times[entry] = times + 1

    def hand_over(self) -> list[Use]:
        """All that was noted; from now on it is the caller's."""
        with self._lock:
            taken, self._times = self._times, {}
        return [Use(*entry, times) for entry, times in taken.items()]
