"""One read, write or other request of a worker under way, as its lanes (remote/channel.py) know it."""

from __future__ import annotations

from collections.abc import Sequence

from agent.remote.outstanding import Outstanding
from agent.remote.paths import Request, left_by_its_path
from nvmeof.host.command import Command
from nvmeof.transport import HostQueue


class PendingRequest:
    """One read or write: a command, or several where the controller's MDTS is short."""

    __slots__ = ("_commands", "_fault", "asked", "base", "began", "queue", "request")

    def __init__(
        self,
        queue: HostQueue | None,
        commands_sent: Sequence[Command],
        asked: Outstanding | None,
        fault: str | None = None,
    ) -> None:
        self.queue = queue
        self._commands = commands_sent
        self.asked = asked
        """What judges the namespace by its answer; None where nothing was sent."""
        self._fault = fault
        self.request: Request | None = None
        """Of a write, and of a read with more than one path, until it is settled what becomes of it."""
        self.began = 0
        """Which session it was sent over last (agent/pool/flush_tracking.py)."""
        self.base = 0
        """Bytes that came by an earlier path; the commands are about those behind them."""

    def goes_on(
        self, queue: HostQueue, commands_sent: Sequence[Command], asked: Outstanding, base: int, began: int
    ) -> None:
        """It was sent, or again by another path, without the `base` bytes at its beginning."""
        self.queue, self._commands, self.asked, self.base = queue, commands_sent, asked, base
        self.began = began

    @property
    def commands(self) -> Sequence[Command]:
        return self._commands

    @property
    def done(self) -> bool:
        if self._fault is not None:
            return True
        if self.request is not None and left_by_its_path(self._commands):
            # Whoever waits for it has it sent by another path, or is told that there is none.
            return False
        return all(command.done for command in self._commands)

    @property
    def received(self) -> int:
        total = self.base
        for command in self._commands:
            total += command.received
            if command.received < command.in_bytes:
                break
        return total

    @property
    def fault(self) -> str | None:
        if self._fault is not None:
            return self._fault
        for command in self._commands:
            if command.done and (why := command.failure()) is not None:
                return why
        return None

    @property
    def unreachable(self) -> bool:
        """Whether the way failed rather than the medium.

        Status types 0 (generic: the namespace is gone or not ready), 3 (path) and above say nothing of
        the data; type 2 is a media and data integrity error.
        """
        if self._fault is not None:
            return True
        return any(
            command.done and (command.lost or (command.status or 0) >> 8 != 2)
            for command in self._commands
            if command.failure() is not None
        )

    def is_error(self, command: Command) -> bool:
        """Whether the answer to a command is an error of the namespace's, which counts against it."""
        return bool(command.status)

    def fail(self, why: str) -> None:
        """It could not be sent."""
        self._fault, self.request = why, None

    def give_up(self, reason: str) -> None:
        """Abandon what is under way; nothing is written into its buffers from now on."""
        if self._fault is None:
            self._fault = reason
            if self.queue is not None:
                for command in self._commands:
                    if not command.done:
                        self.queue.abandon(command)
