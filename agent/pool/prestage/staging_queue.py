"""What is to be read ahead, and in which order: without threads and without a clock of its own.

First what clients announced, and while there is none of that what was guessed (readahead.py), at a bounded
rate. A full queue refuses: prestaging that comes later than the get it was for is only load. For the same
reason a key whose get has come meanwhile, or whose deadline is over, is not given out.
"""

from collections import deque
from typing import Final, NamedTuple

from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.bandwidth import TokenBucket
from agent.pool.volume.volume import Volume

WAITING_MAX: Final = 4096
GUESSES_MAX: Final = 256
"""The most guesses from learned continuations. The oldest guess goes, for it is the likeliest to be late."""


class Item(NamedTuple):
    """One key that is to be read. `until`: when it is of no use any more, in seconds of `now`."""

    volume: Volume
    pseudonym: bytes
    key: bytes | None
    """None where it was guessed."""
    until: float | None = None


class StagingQueue:
    """One agent's. Its owner lets one thread at a time call it. `now`: seconds that never go back."""

    def __init__(self, cache: PrestageCache, guess_rate: int, now: float) -> None:
        """`guess_rate`: bytes a second that are read for guesses; 0: as many as there is time for."""
        self._cache = cache
        self._allowance = TokenBucket(guess_rate, now, 1.0) if guess_rate else None
        self._announced: deque[Item] = deque()
        self._guesses: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._announced) + len(self._guesses)

    def ask(self, item: Item) -> bool | None:
        """True: on its way. None: it is there already. False: refused, the queue is full."""
        place = (item.volume.settings.volume_id, item.pseudonym)
        expected = self._cache.expect(*place, guessed=item.key is None)
        if not expected:
            return None if expected is None else True
        if item.key is None:
            if len(self._guesses) >= GUESSES_MAX:
                self.forget(self._guesses.popleft())
            self._guesses.append(item)
        elif len(self._announced) >= WAITING_MAX:
            self._cache.expect_no_more(*place)
            return False
        else:
            self._announced.append(item)
        return True

    def next(self, now: float) -> Item | None:
        """The next key that is still worth reading; its owner calls `forget` when it was read. None: none."""
        while self._announced or self._guesses:
            item = self._announced.popleft() if self._announced else self._guesses.popleft()
            guessed = item.key is None
            if not self._cache.is_expected(item.volume.settings.volume_id, item.pseudonym, guessed=guessed):
                continue  # its get has come, or it was announced since
            if self._is_in_time(item, now):
                return item
            self.forget(item)
        return None

    def forget(self, item: Item) -> None:
        """Nobody reads it any more."""
        volume_id = item.volume.settings.volume_id
        self._cache.expect_no_more(volume_id, item.pseudonym, guessed=item.key is None)

    def drop_all(self) -> None:
        for waiting in (self._announced, self._guesses):
            while waiting:
                self.forget(waiting.popleft())

    def _is_in_time(self, item: Item, now: float) -> bool:
        if item.key is None:
            size = item.volume.settings.slot_bytes
            return self._allowance is None or self._allowance.take(size, now)
        return item.until is None or now <= item.until
