"""A lock for each key that somebody puts or deletes: it exists while a thread holds it or waits for it.

Without it, two puts of one key at once would both find the key absent and store it twice. A put holds the
lock while it looks and names, and never from one call to the next. So a thread drives each holder on, and
nobody waits for long.
"""

import threading

from agent.pool.steps import Acquire, Steps


class _KeyLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class KeyLocks:
    """Locks by key: at most one a thread, or one a value of a call that a thread serves. Safe from any
    thread."""

    def __init__(self) -> None:
        self._locks: dict[bytes, _KeyLock] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._locks)

    def take(self, key: bytes, deadline: float) -> Steps[bool]:
        """Wait for the lock. True: the caller has it until `end`; False: the deadline came first."""
        with self._guard:
            found = self._locks.get(key)
            if found is None:
                found = self._locks[key] = _KeyLock()
            found.users += 1
        ours = found.lock.acquire(blocking=False)
        try:
            if not ours:
                ours = yield Acquire(found.lock, deadline, gives_way=True)
        finally:
            if not ours:
                self._leave(key, found)
        return ours

    def take_at_once(self, key: bytes) -> bool:
        """The lock, until `end`, where nobody has it; False where somebody does: then `take`."""
        with self._guard:
            if key in self._locks:
                return False
            made = self._locks[key] = _KeyLock()
            made.users = 1
            return made.lock.acquire(blocking=False)

    def end(self, key: bytes) -> None:
        found = self._locks[key]
        found.lock.release()
        self._leave(key, found)

    def _leave(self, key: bytes, lock: _KeyLock) -> None:
        with self._guard:
            lock.users -= 1
            if not lock.users:
                del self._locks[key]
