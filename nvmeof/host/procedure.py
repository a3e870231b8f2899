"""Procedures: several admin commands in a row, written as a generator without I/O.

A procedure yields a `Command` and is resumed when it has ended, or a `Pause` and is resumed after it. It
returns its result. So "connect, enable, identify" reads from top to bottom, and still runs over a socket,
an in-memory link or a simulated network.

    def read_version() -> Procedure[int]:
        command = yield from done(commands.property_get(Property.VS))
        return command.result
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from nvmeof.errors import CommandFailed, NvmeofError
from nvmeof.host.command import Command
from nvmeof.wire.status import Status

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """Resume me after so many seconds."""

    seconds: float


Step: TypeAlias = Command | Pause
Procedure: TypeAlias = Generator[Step, None, T]


def done(command: Command) -> Procedure[Command]:
    """Issue a command and wait for it; raises `CommandFailed` or `ConnectionLost` if it fails."""
    yield command
    command.check()
    return command


def data_of(command: Command) -> Procedure[memoryview]:
    """Issue a command that brings data and wait for it; raises as `done` does."""
    yield from done(command)
    assert command.data_in is not None
    return command.data_in


LOST_ON_THE_WAY = frozenset(
    {Status.DATA_TRANSFER_ERROR, Status.ABORT_REQUESTED, Status.TRANSIENT_TRANSPORT_ERROR}
)
"""A command that ends with one of these has no answer about its subject: its data were damaged on the way, or
we gave it up."""


def unless_lost(failure: CommandFailed) -> None:
    """Raise `failure` again where it says something of the way to the controller only."""
    if failure.status in LOST_ON_THE_WAY:
        raise failure


def each_command(procedure: Procedure[Any]) -> Iterator[Command]:
    """The commands of a procedure without pauses, for a thread that runs each to its end in the loop."""
    for step in procedure:
        assert isinstance(step, Command)
        yield step


class Running:
    """A procedure under way. `step` goes on with it; exactly one of the two callbacks ends it."""

    def __init__(
        self,
        procedure: Procedure[Any],
        succeeded: Callable[[Any], None],
        failed: Callable[[NvmeofError], None],
    ) -> None:
        self.waiting_for: Command | None = None
        self.wake_at: float | None = None
        self._procedure = procedure
        self._succeeded = succeeded
        self._failed = failed

    def step(self, now: float) -> Command | None:
        """Resume it; the command that it issues, if it does not pause or end."""
        self.waiting_for = self.wake_at = None
        try:
            wanted = next(self._procedure)
        except StopIteration as end:
            self._succeeded(end.value)
            return None
        except NvmeofError as error:
            self._failed(error)
            return None
        if isinstance(wanted, Pause):
            self.wake_at = now + wanted.seconds
            return None
        self.waiting_for = wanted
        return wanted

    def lose(self, error: NvmeofError) -> NvmeofError:
        """The connection is lost, which ends it without calling anybody; the error, in its own words."""
        try:
            self._procedure.throw(error)
        except NvmeofError as told:
            return told
        except StopIteration:
            pass
        self.cancel()
        return error

    def cancel(self) -> None:
        """Stop it without calling anybody."""
        self._procedure.close()
