"""A queue of a controller as its commands and other threads see it; `queue_session.py` serves it.

It knows neither its controller nor its target, because these know their queues.

Other threads reach it in four ways only: `abort`, `complete_aborted`, `recheck` and `close`. Each ends in
`wake`, and none needs a lock on the data path: the thread that pops a waiting command owns it.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nvmeof.authentication.controller_side import ControllerAuthentication
from nvmeof.controller.request import Request
from nvmeof.controller.settings import ControllerSettings
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.status import Status


class Completion(NamedTuple):
    """An answer to a command that the transport does not hold (any more)."""

    cid: int
    status: int
    result: int


class ServedQueue:
    """`wake` is called from any thread when the owner should look again."""

    def __init__(
        self, wake: Callable[[], None], settings: ControllerSettings, transport: TransportType
    ) -> None:
        self.peer = ""
        """Where the connection comes from (`unauthenticated_connections.peer_of`)."""
        self.wake = wake
        self.settings = settings
        self.transport = transport
        self.port_id = 1
        """By which port of the target the host came; the listener says so before anything arrives."""
        self.qid = 0
        self.entries = 1  # Until Connect has told the size of the queue, it holds Connect.
        self.no_flow_control = False
        self.authentication: ControllerAuthentication | None = None
        self.unproven = False
        """The host has to authenticate on this queue before anything else is served."""
        self.close_reason: str | None = None
        self.displaced = False
        """It had proven nothing and gave way to another: nothing more is sent."""
        self.closes_when_answered = False
        self.farewell = "the host disconnected"
        """Why the connection ends where it `closes_when_answered`."""
        self.waiting: dict[int, Request] = {}
        self._completions: deque[Completion] = deque()
        self._recheck = False

    def attach(self, qid: int, entries: int, *, no_flow_control: bool) -> None:
        self.qid = qid
        self.entries = entries
        self.no_flow_control = no_flow_control

    def abort(self, cid: int) -> bool:
        """Stop a command that waits for its drive; False if it does not, and so ends by itself."""
        request = self.waiting.pop(cid, None)
        if request is None:
            return False
        request.let_go()
        self.complete_aborted(cid)
        return True

    def complete_aborted(self, cid: int) -> None:
        """Answer a command with Abort Requested."""
        self._completions.append(Completion(cid, Status.ABORT_REQUESTED, 0))
        self.wake()

    def recheck(self) -> None:
        """Something about drives has changed: commands that are held should ask again."""
        self._recheck = True
        self.wake()

    def close(self, reason: str) -> None:
        """End the connection. Idempotent."""
        if self.close_reason is None:
            self.close_reason = reason
            self.wake()

    def displace(self, reason: str) -> None:
        """End the connection without another word. Called with `Target.lock` held."""
        self.displaced = True
        self.close(reason)

    def close_when_answered(self, reason: str = "the host disconnected") -> None:
        """End the connection once the command under way has been answered."""
        self.farewell = reason
        self.closes_when_answered = True
