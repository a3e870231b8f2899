"""A value in the agent's memory, being read: one that waits for its storing (write_back.py), or one that was
prestaged and waits opened (plaintext_cache.py).

Its memory counts against the bound of what it waits in until the reader is done, also where it is stored,
dropped or deleted meanwhile. Without that, values that are kept open had no bound but their number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from agent.inline.scatter import Target
from agent.pool.counters import MissCause
from agent.pool.steps import Lanes, Steps
from agent.pool.volume.volume import Volume


class MemoryReading:
    """It looks as a `Reading` does. Safe from any thread."""

    def __init__(
        self,
        volume: Volume,
        key: bytes,
        data: memoryview,
        expires: int,
        let_go: Callable[[], None],
        *,
        prestaged: bool,
    ) -> None:
        """`expires`: seconds since the epoch, 0: never. `let_go` is called once, when nobody reads on."""
        self.volume = volume
        self.key = key
        self.cause: MissCause | None = None
        self._data = data
        self._expires = expires
        self._let_go: Callable[[], None] | None = let_go
        self._prestaged = prestaged
        self._counting = threading.Lock()
        self._hit = False

    @property
    def length(self) -> int | None:
        return len(self._data) if self._hit else None

    def close(self) -> None:
        """Nobody reads on."""
        with self._counting:
            let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

    def give_up(self, lanes: Lanes, cause: MissCause) -> None:
        """It does not serve its reader after all: a miss, and no hit."""
        with self._counting:
            self._lose(lanes, cause)

    def _lose(self, lanes: Lanes, cause: MissCause) -> None:
        """Called with the lock held."""
        if self.cause is None:
            self.cause = cause
            tally = lanes.tally(self.volume.settings.name)
            tally.gets_hit -= self._hit
            tally.prestage_hits -= self._hit and self._prestaged
            tally.miss(cause)

    def read(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; how many bytes were there. 0 with `cause` set is a miss."""
        yield from ()  # steps, of which there are none
        if self.cause is not None or not len(into):
            return 0
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self.volume.erased or 0 < self._expires <= lanes.wall():
                self._lose(lanes, MissCause.WRONG_KEY if self.volume.erased else MissCause.EXPIRED)
                return 0
            if not self._hit:
                self._hit = True
                tally.gets_hit += 1
                tally.prestage_hits += self._prestaged
        count = max(0, min(len(into), len(self._data) - offset))
        into[:count] = self._data[offset : offset + count]
        tally.bytes_read += count
        tally.bytes_copied += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, count)
        return count
