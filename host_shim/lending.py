"""A bounded number of control sessions, lent to one call at a time.

Lending one that is free takes no lock: `list.pop` and `list.append` are atomic under the interpreter's
lock, and this is on the way of every get. The condition is there for opening, closing and waiting.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from host_shim.registered_memory import RegisteredMemory
from host_shim.session import Files, Session, SessionDead

REOPEN_SECONDS = 0.05
"""While there is no agent, the mount is asked for one this often and not with every call."""


class Loan:
    """One call's session, as a context; `None` while there is no agent."""

    __slots__ = ("_lender", "_session")

    def __init__(self, lender: SessionLender) -> None:
        self._lender = lender
        self._session: Session | None = None

    def __enter__(self) -> Session | None:
        self._session = self._lender.take()
        return self._session

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._lender.give_back(self._session)


class SessionLender:
    """Opens sessions as they are needed, `maximum` of them, and forgets those whose agent has died."""

    def __init__(self, path: str, files: Files, maximum: int, memory: RegisteredMemory | None = None) -> None:
        self._memory = memory
        self._path = path
        self._files = files
        self._maximum = maximum
        self._changed = threading.Condition()
        self._free: list[Session] = []
        self._open = 0
        self._waiting = 0
        self._ask_again_at = 0.0
        self.closed = False
        self.reached = False
        """Whether there ever was an agent."""
        self.why_not = ""
        """Why there was none when one was last looked for."""

    def lend(self) -> Loan:
        """A session for the caller alone: `with lender.lend() as session`. Waits while all are lent."""
        return Loan(self)

    def ask_at_once(self) -> None:
        """Look for an agent with the next call, even if there was none a moment ago."""
        self._ask_again_at = 0.0

    def take(self) -> Session | None:
        """See `lend`."""
        try:
            session = self._free.pop()
        except IndexError:
            return self._open_or_wait()
        if self.closed:
            self.give_back(session)
            raise RuntimeError("the pool is closed")
        return session

    def give_back(self, session: Session) -> None:
        """The end of a loan."""
        if session.dead or self.closed:
            # Its agent is gone, so those of the same agent that wait here are dead as well.
            self._drop([session, *self._all_free()])
            return
        self._free.append(session)
        if self._waiting:
            with self._changed:
                self._changed.notify()
        if self.closed:  # close() may have looked before this one was back
            self._drop(self._all_free())  # type: ignore[unreachable]

    def close(self) -> None:
        """Close the free sessions now, lent ones when they come back. Later calls raise RuntimeError."""
        self.closed = True
        self._drop(self._all_free())

    def wait_until_all_are_back(self, seconds: float) -> bool:
        """After `close`: wait for the sessions that are lent; False where that took longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open <= 0, timeout=seconds)

    def abandon(self) -> None:
        """In the child of a fork: close what belongs to the parent, and begin anew."""
        sessions, self._free = self._free, []
        self._changed = threading.Condition()
        self._open = self._waiting = 0
        for session in sessions:
            session.close()

    def _all_free(self) -> list[Session]:
        taken = []
        while self._free:
            try:
                taken.append(self._free.pop())
            except IndexError:
                break  # another thread had the last one
        return taken

    def _drop(self, sessions: list[Session]) -> None:
        for session in sessions:
            session.close()
        with self._changed:
            self._open -= len(sessions)
            self._changed.notify_all()

    def _open_or_wait(self) -> Session | None:
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self.closed:
                        raise RuntimeError("the pool is closed")
                    if self._free:
                        try:
                            return self._free.pop()
                        except IndexError:
                            continue
                    if self._open < self._maximum:
                        break
                    self._changed.wait()
                if time.monotonic() < self._ask_again_at:
                    return None
                self._open += 1
            finally:
                self._waiting -= 1
        try:
            session = Session(self._path, self._files, self._memory)
        except SessionDead as dead:
            self.why_not = str(dead)
            self._ask_again_at = time.monotonic() + REOPEN_SECONDS
            self._drop_place()
            return None
        except BaseException:  # an interrupt: the place is free again
            self._drop_place()
            raise
        self.reached = True
        return session

    def _drop_place(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()
