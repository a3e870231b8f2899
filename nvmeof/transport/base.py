"""The interface of the transports TCP (`tcp.py`) and RDMA (`rdma.py`). Nothing above it knows which it has.

A transport is an implementation of `HostQueue`, one connected I/O queue of one thread, and a module with
`open_controller` (an async context manager around an admin session) and `connect_io_queue`.
`open_controller` has one option of the transport's own: `digests` of TCP, `verbs` of RDMA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from nvmeof.errors import LocalProtocolError
from nvmeof.host.bring_up import ControllerFacts, SessionConfig
from nvmeof.host.command import Command
from nvmeof.tcp.pdu import NO_DIGESTS, Digests


@dataclass(frozen=True, slots=True)
class Address:
    """Where a controller listens. Hosts are addresses, not names to be resolved, in the pool map."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_PROVIDER: Final = "pyverbs"


@dataclass(frozen=True, slots=True)
class VerbsChoice:
    """Which verbs to use: the provider's package, and the local address to connect from ("": any)."""

    provider: str
    local_address: str = ""


class MediaOfThisMachine(Protocol):
    """Namespaces that are reached without a wire."""

    def connect(self, depth: int) -> "HostQueue":
        """A queue to them, for one thread."""


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """What an I/O queue needs to know of the controller that it belongs to. Safe to hand to any thread."""

    address: Address
    config: SessionConfig
    """The names of both ends, and what an I/O queue authenticates with."""
    facts: ControllerFacts
    transport: str = "tcp"
    """Which transport leads there: the name of its module here."""
    digests: Digests = NO_DIGESTS
    """TCP: those of I/O queues."""
    verbs: VerbsChoice | None = None
    """RDMA: whose verbs lead there."""
    local: "MediaOfThisMachine | None" = None
    """Present where no wire leads there (local_queue.py)."""

    def queue_depth(self, qid: int, wanted: int) -> int:
        """How deep I/O queue `qid` may be, at most `wanted`. Raises `LocalProtocolError`: no such queue."""
        facts = self.facts
        if not 1 <= qid <= facts.io_queues:
            raise LocalProtocolError(f"queue {qid} of {facts.io_queues}")
        most = facts.capabilities.max_queue_entries
        if facts.identify.maxcmd:
            most = min(most, facts.identify.maxcmd)
        return max(1, min(wanted, most))


class HostQueue(Protocol):
    """One connected I/O queue. All calls come from one thread; `wait` is the only one that blocks.

    A command ends exactly once. When the connection dies, whatever is in flight ends at once, with `lost`;
    the queue is then over (`alive` is False) and its owner connects a new one.
    """

    @property
    def max_transfer(self) -> int:
        """Bytes that one command may move."""

    @property
    def depth(self) -> int:
        """Commands that it takes at once."""

    @property
    def abandoned(self) -> int:
        """Commands that were abandoned and have a place in the queue still."""

    @property
    def alive(self) -> bool:
        """False once the connection is known to be dead."""

    @property
    def needs_reconnect(self) -> bool:
        """We broke its connection ourselves, to have a buffer back; the controller is not to blame.

        The next `submit` would connect it again, and block for that; `reconnect` does so ahead.
        """

    def reconnect(self) -> None:
        """Connect again where it `needs_reconnect`. Blocks; on any thread, while no other uses the queue.

        Raises `ConnectionLost`; the queue is dead then.
        """

    def register(self, buffer: memoryview) -> None:
        """A buffer that many commands will use (any part of it): writable, and there until `close`.

        A hint. RDMA registers it with the device, and moves the data of those commands without a copy.
        """

    def has_room(self, commands: int) -> bool:
        """Whether it takes so many commands now. Takes what has arrived into account."""

    def submit(self, command: Command, *, more: bool = False) -> None:
        """Put it on the wire, without waiting for its answer. Raises `QueueFull`, `ConnectionLost`.

        `more`: another one follows at once, and may take this one along.
        """

    def submit_all(self, commands: Sequence[Command], *, more: bool = False) -> None:
        """As `submit` of each, in their order, by one send where there are sends. Where it raises, those that
        have an id are under way, and the others were not submitted.
        """

    def wait(self, command: Command, deadline: float, at_least: int | None = None) -> bool:
        """Receive, for all commands in flight, until this one is done or has `at_least` bytes: True.

        False at `deadline`, a time of `time.monotonic()`. True also when it ends because the queue dies.
        """

    def abandon(self, command: Command) -> None:
        """Stop caring: its buffers are not touched any more, it counts against the depth until answered."""

    def oldest_abandoned(self) -> float | None:
        """When the oldest abandoned and still unanswered command was submitted (`time.monotonic()`)."""

    def silent_since(self) -> float | None:
        """When the oldest abandoned command was submitted behind which nothing at all has come; None if there
        is none, and where the transport itself notices that bytes were lost on the way."""

    def close(self) -> None:
        """Hang up. Commands in flight end, lost. May be called twice."""


def submit_each(queue: HostQueue, commands: Sequence[Command], more: bool) -> None:
    """`HostQueue.submit_all` of a queue that takes commands one by one."""
    for command in commands:
        queue.submit(command, more=more or command is not commands[-1])
