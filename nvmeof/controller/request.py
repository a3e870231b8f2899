"""One command on its way through a controller, from its capsule to its completion.

`QueueSession.begin` makes it and judges it; the transport then moves data as `direction` and `length` say;
`QueueSession.execute` carries it out and says with an `Outcome` what is to be done next. Nothing in here
knows the transport.
"""

import enum

from nvmeof.controller.storage import Operation, Staged
from nvmeof.controller.subsystem import KvNamespace, Namespace
from nvmeof.wire.sqe import Sqe


class Direction(enum.Enum):
    """Which way the data of a command go."""

    NONE = "none"
    FROM_HOST = "from host"
    TO_HOST = "to host"


class Outcome(enum.Enum):
    """What `execute` did."""

    DONE = "done"
    """`status`, `result` and, for TO_HOST with status 0, `data` are final: answer now."""
    LATER = "later"
    """Execute again at `due` (seconds), or, where that is HELD, when told that something has changed."""
    PARKED = "parked"
    """The controller keeps it and gives the completion by itself (an Asynchronous Event Request)."""


class Refusal(Exception):
    """A command ends with this status; raised while it is judged or carried out, never beyond a session."""

    def __init__(self, status: int, *, result: int = 0, do_not_retry: bool = True) -> None:
        super().__init__(f"status {status:#05x}")
        self.status = status
        self.result = result
        self.do_not_retry = do_not_retry


class Request:
    """A command and what has become of it.

    `length`: bytes of data that move, as the command says (the SGL has been checked against it).
    `window`: where data from the host are to be received, or None: the transport receives each piece into a
    buffer of its own and hands it to `QueueSession.accept`.
    `namespace` is that of a command on logical blocks, `kv` that of one on keys.
    """

    def __init__(self, sqe: Sqe) -> None:
        self.sqe = sqe
        self.direction = Direction.NONE
        self.length = 0
        self.window: memoryview | None = None
        self.namespace: Namespace | None = None
        self.kv: KvNamespace | None = None
        self.key = b""
        self.staged: Staged | None = None
        self.operation: Operation | None = None
        self.offset = 0
        self.admitted = False
        self.due = 0.0
        self.status = 0
        self.result = 0
        self.do_not_retry = False
        self.data: memoryview | None = None

    def let_go(self) -> None:
        """The command is over, or will never be: whatever was set aside for it is free. Idempotent."""
        staged, self.staged = self.staged, None
        if staged is not None:
            staged.discard()

    def fail(self, status: int, *, result: int = 0, do_not_retry: bool = False) -> None:
        """Settle the command as failed. The first failure stands: later ones are its consequences."""
        if self.status == 0:
            self.status, self.result, self.do_not_retry = status, result, do_not_retry
