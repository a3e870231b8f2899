"""A request of a worker under way, on blocks or on keys, as its channel (remote/channel.py) knows it."""

from collections.abc import Sequence
from typing import Final

from agent.inline.scatter import Buffer
from agent.remote.circuit_breaker import Outstanding
from agent.remote.path_choice import Request, left_by_its_path
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import stretch
from nvmeof.transport import HostQueue
from nvmeof.wire.status import Status

_OF_THE_NAMESPACE: Final = frozenset(
    {
        Status.CAPACITY_EXCEEDED,
        Status.INVALID_VALUE_SIZE,
        Status.INVALID_KEY_SIZE,
        Status.KEY_NOT_FOUND,
        Status.UNRECOVERED_ERROR,
        Status.KEY_EXISTS,
    }
)
"""Generic statuses that a KV namespace gives of itself: the way to it is fine."""

_ANSWERS: Final = frozenset({Status.KEY_NOT_FOUND, Status.KEY_EXISTS, Status.CAPACITY_EXCEEDED})
"""And those that say nothing against it."""


class PendingRequest:
    """One read or write: a command, or several where the controller's MDTS is short."""

    __slots__ = ("_fault", "base", "began", "commands", "outstanding", "queue", "request")

    def __init__(self) -> None:
        self.queue: HostQueue | None = None
        self.commands: Sequence[Command] = ()
        self.outstanding: Outstanding | None = None
        """Judges the namespace by its answer; None where nothing was sent."""
        self._fault: str | None = None
        self.request: Request | None = None
        """Of a write, and of a read with more than one path, until it goes by no other path any more."""
        self.began = 0
        """Which session it was sent over last (agent/pool/write/flush_tracking.py)."""
        self.base = 0
        """Bytes that came by an earlier path; the commands are about those behind them."""

    def goes_on(
        self, queue: HostQueue, sent: Sequence[Command], outstanding: Outstanding, base: int, began: int
    ) -> None:
        """It was sent, or again by another path, without the `base` bytes at its beginning."""
        self.queue, self.commands, self.outstanding, self.base = queue, sent, outstanding, base
        self.began = began

    def sent_at(self, now: float) -> float:
        """When it was sent by its present path; `now` where it was not."""
        return now if self.outstanding is None else self.outstanding.since

    @property
    def done(self) -> bool:
        if self._fault is not None:
            return True
        for command in self.commands:
            if not command.done:
                return False
        # Where its path left it, the waiter has it sent by another path, or is told that there is none.
        return self.request is None or not left_by_its_path(self.commands)

    @property
    def received(self) -> int:
        total = self.base
        for command in self.commands:
            total += command.received
            if command.received < command.in_bytes:
                break
        return total

    @property
    def fault(self) -> str | None:
        if self._fault is not None:
            return self._fault
        for command in self.commands:
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
            for command in self.commands
            if command.failure() is not None
        )

    def take_answer(self, now: float) -> bool:
        """Count the answer, which nobody has waited for, where it is there and good, and is not that to a
        read which another path could have brought. False: nothing was done."""
        request = self.request
        if self._fault is not None or (request is not None and request.is_read):
            return False
        for command in self.commands:
            if not command.done or command.lost or command.status:
                return False
        if request is not None:
            request.tried[-1].answered(now)
            self.request = None
        if self.outstanding is not None:
            self.outstanding.answered(now, failed=False, waited=0.0)
        return True

    def is_error(self, command: Command) -> bool:
        """Whether the answer to a command is an error of the namespace's, which counts against it."""
        return bool(command.status)

    def fail(self, why: str) -> None:
        self._fault, self.request = why, None

    def give_up(self, reason: str) -> None:
        """Abandon its commands; nothing is written into its buffers from now on."""
        if self._fault is None:
            self._fault = reason
            if self.queue is not None:
                for command in self.commands:
                    if not command.done:
                        self.queue.abandon(command)


class KvPendingRequest(PendingRequest):
    """One command on a key: agent.pool.kv.commands.KvPending."""

    __slots__ = ()

    @property
    def _status(self) -> int | None:
        if self._fault is not None or not self.commands:
            return None
        return self.commands[0].status

    @property
    def missing(self) -> bool:
        return self._status == Status.KEY_NOT_FOUND

    @property
    def full(self) -> bool:
        return self._status == Status.CAPACITY_EXCEEDED

    @property
    def present(self) -> bool:
        return self._status == Status.KEY_EXISTS

    @property
    def value_bytes(self) -> int:
        return self.commands[0].result if self.commands else 0

    @property
    def unreachable(self) -> bool:
        return self._status not in _OF_THE_NAMESPACE and super().unreachable

    def is_error(self, command: Command) -> bool:
        """That a key is or is not there, or that there is no room, is none."""
        return bool(command.status) and command.status not in _ANSWERS


def block_commands(
    nsid: int,
    lba_bytes: int,
    offset: int,
    size: int,
    into: memoryview | None,
    parts: Sequence[Buffer],
    max_transfer: int,
) -> Sequence[Command]:
    """Commands that move `size` bytes at `offset`: into `into`, or else those of `parts`; 0 bytes flush."""
    if not size:
        return (commands.flush(nsid),)
    first = offset // lba_bytes
    if size <= max_transfer:
        if into is not None:
            return (commands.read(nsid, first, size // lba_bytes, into),)
        return (commands.write(nsid, first, size // lba_bytes, parts),)
    step = max_transfer // lba_bytes * lba_bytes
    if into is not None:
        return [
            commands.read(
                nsid,
                first + at // lba_bytes,
                len(into[at : at + step]) // lba_bytes,
                into[at : at + step],
            )
            for at in range(0, size, step)
        ]
    pieces = ((at, stretch(parts, at, step)) for at in range(0, size, step))
    return [
        commands.write(nsid, first + at // lba_bytes, sum(map(len, piece)) // lba_bytes, piece)
        for at, piece in pieces
    ]
