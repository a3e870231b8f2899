"""The keep-alive of a session: when one is sent, how late its answer may be, and what its end means.

A controller that hears nothing for the keep-alive time (KATO) takes the host for dead (NVMe Base 2.0, 3.9).
One Keep Alive command is sent each half of that time, and its answer has the other half. Without a good
answer by then the connection is lost: an abort would only make the loss known later.

A `ControllerSession` asks `due_at` and `send`, and hands back what ended. No I/O, and no clock.
"""

from nvmeof.errors import ConnectionLost
from nvmeof.host import commands
from nvmeof.host.command import Command


class KeepAlive:
    """The timer of one session, and the command that is under way. `period_s` 0: none is ever sent."""

    def __init__(self, kato_s: float) -> None:
        self.period_s = kato_s / 2
        """Seconds from one to the next, and for the answer to each."""
        self._next: float | None = None
        self._under_way: Command | None = None

    def start(self, now: float) -> None:
        """The controller is up, and counts from now on."""
        if self.period_s:
            self._next = now + self.period_s

    def stop(self) -> None:
        self._next = self._under_way = None

    @property
    def due_at(self) -> float | None:
        """When the next is to be sent; None while one is under way, or none is wanted."""
        return self._next if self._under_way is None else None

    def send(self, now: float) -> Command | None:
        """The command to send, where one is due. Its answer may take `period_s`."""
        due = self.due_at
        if due is None or due > now:
            return None
        self._next = now + self.period_s
        self._under_way = commands.keep_alive()
        return self._under_way

    def is_under_way(self, command: Command) -> bool:
        """Whether this is our command: when it is not answered in time, the connection is lost."""
        return command is self._under_way

    def answered(self, command: Command) -> ConnectionLost | None:
        """It has ended; the error to end the session with where the controller refused it, or it was lost."""
        self._under_way = None
        return ConnectionLost(f"keep alive: {command.failure()}") if command.status else None
