"""How long the threads of a door wait for clients who have still to take an answer.

A wait in the thread that has the bytes costs less than turns of the event loop, where the client takes them
soon. A client who does not gets the rest from the event loop. What threads wait in vain is a sixth of their
time at the most, and what they wait for clients who take all in the end is half, however many there are.
"""

import time
from collections.abc import Callable
from typing import Final

WAIT_SECONDS: Final = 0.02
"""For one answer: 1 MiB at 420 Mbit/s."""
SOON_SECONDS: Final = 0.003
"""What a client who is quick may take; longer waits count."""
REST_FACTOR: Final = 5
"""Nobody waits for so many times as long as somebody waited in vain."""
OF_A_CLIENT_SECONDS: Final = 1.0
"""Between two waits for a client who was too slow."""


class Patience:
    """The account of one door. Safe from any thread: what two of them note at once counts once, or twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._none_until = 0.0

    def until(self) -> float:
        """The time by which to give a client up; now, where there is none to spend."""
        now = self.clock()
        return now if now < self._none_until else now + WAIT_SECONDS

    def waited(self, began: float) -> None:
        """The client took all. After a long wait nobody waits for as long."""
        now = self.clock()
        if now - began > SOON_SECONDS:
            self._none_until = max(self._none_until, now) + (now - began)

    def waited_in_vain(self, began: float) -> float:
        """Until when not to wait for this client again."""
        now = self.clock()
        self._none_until = max(self._none_until, now) + REST_FACTOR * (now - began)
        return now + OF_A_CLIENT_SECONDS
