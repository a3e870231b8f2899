"""What every door of the agent can do, whichever carries the requests. make_door.py makes one.

`make_runner(i)` is called once in each worker's own thread, and its runner is used in no other.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from agent.pool.steps import Runner

MakeRunner: TypeAlias = Callable[[int], Runner]

START_SECONDS = 10.0
"""How long the kernel may take from mount to INIT."""
GRACE_SECONDS = 1.0
"""How long `stop` waits for those who still have files open, before it takes the mount away from them."""


class Door(Protocol):
    """One mount point and the threads that serve it."""

    def start(self) -> None:
        """Mount and serve; `MountError` where that cannot be."""

    def wait(self, timeout: float | None = None) -> bool:
        """True once the mount is no longer served, by any unmount; False at the time-out.

        With 0 it waits for nothing, so an event loop may ask.
        """

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Unmount and end the threads. Who still has files open after the grace loses them (ENOTCONN)."""
