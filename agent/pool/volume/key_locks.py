"""One at a time for each key: a lock that exists for as long as somebody holds it or waits for it.

Two puts of one key at once would both find it absent and store it twice. So a put takes its key's turn
while it looks and names, and only then: a turn is never kept from one call to the next. Whoever holds one
is therefore being driven on by a thread, and whoever waits for it may keep a thread waiting.
"""

from __future__ import annotations

import threading

from agent.pool.steps import Acquire, Steps


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class KeyLocks:
    """Turns by key; as many as threads at most. Safe from any thread."""

    def __init__(self) -> None:
        self._turns: dict[bytes, _Turn] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, key: bytes, deadline: float) -> Steps[bool]:
        """Wait for the turn. True: it is the caller's, until `end`; False: it did not come in time."""
        with self._guard:
            turn = self._turns.get(key)
            if turn is None:
                turn = self._turns[key] = _Turn()
            turn.users += 1
        ours = turn.lock.acquire(blocking=False)
        try:
            if not ours:
                ours = yield Acquire(turn.lock, deadline)
        finally:
            if not ours:
                self._leave(key, turn)
        return ours

    def take_at_once(self, key: bytes) -> bool:
        """The turn, until `end`, where nobody has it; False where somebody has: then `take`."""
        with self._guard:
            if key in self._turns:
                return False
            turn = self._turns[key] = _Turn()
            turn.users = 1
            return turn.lock.acquire(blocking=False)

    def end(self, key: bytes) -> None:
        """Give the turn back."""
        turn = self._turns[key]
        turn.lock.release()
        self._leave(key, turn)

    def _leave(self, key: bytes, turn: _Turn) -> None:
        with self._guard:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]
