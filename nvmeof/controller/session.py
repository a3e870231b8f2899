"""One queue pair of a controller, whatever carries it. A transport drives it; see `tcp_queue.py` for one.

The transport's part, for each command that arrives:

    request = session.begin(sqe)            # judged; request.status != 0: refused already
    ... session.open_window(request), data moved as request.direction, length and window say,
        session.accept(request, offset, piece, scratch) for each piece from the host ...
    outcome = session.execute(request, now, scratch)

and whenever it is woken or a deadline passes: `take_completions`, `ready`, `check(now)`.

A session belongs to one thread, that of its connection. Other threads reach it in four ways only, all safe
without a lock on the data path: `abort` (takes a waiting command out of a dictionary: whoever pops it owns
it), `complete_aborted`, `recheck` and `close`, each of which ends in `wake`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple

from nvmeof.authentication.controller_side import ControllerAuthentication
from nvmeof.controller.admin_commands import begin_admin, execute_admin
from nvmeof.controller.authentication_commands import (
    execute_authentication,
    give_up,
    is_authentication,
    not_proven,
)
from nvmeof.controller.controller import Controller
from nvmeof.controller.fabrics_commands import begin_fabrics, execute_fabrics
from nvmeof.controller.io_commands import accept_io, begin_io, execute_io, open_window
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import HELD, Scratch, StorageError
from nvmeof.controller.subsystem import Target
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.sqe import FLAGS_FUSE, FLAGS_PSDT, FLAGS_SGL, AdminOpcode, Sqe
from nvmeof.wire.status import Status

log = logging.getLogger(__name__)


class Completion(NamedTuple):
    """An answer to a command that the transport does not hold (any more)."""

    cid: int
    status: int
    result: int


def _nothing() -> None:
    """The wake hook of a session whose owner looks by itself."""


class QueueSession:
    """See the module's docstring. `wake` is called from any thread when the owner should look again.

    `settings` are the target's unless the transport has narrower bounds (or other capsules).
    """

    def __init__(
        self,
        target: Target,
        wake: Callable[[], None] = _nothing,
        *,
        settings: ControllerSettings | None = None,
        transport: TransportType = TransportType.TCP,
    ) -> None:
        self.peer = ""
        """Where the connection comes from (`crowd.peer_of`)."""
        self.target = target
        self.wake = wake
        self.settings = settings or target.settings
        self.transport = transport
        self.port_id = 1
        """By which port of the target the host came; the listener says so before anything arrives."""
        self.controller: Controller | None = None
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

    def enter(self, peer: str, now: float, *, full_of: Container[QueueSession] | None = None) -> bool:
        """A guest from an address, until it is known to be more; False where it has to go (`Crowd.admit`)."""
        self.peer = peer
        with self.target.lock:
            return self.target.guests.admit(self, now, full_of=full_of)

    def count_overfull(self) -> str:
        """The host has more commands in flight than it may: count that, and say why the connection ends."""
        with self.target.lock:
            self.target.overfull += 1
        return f"more than {self.most_in_flight} commands in flight"

    @property
    def most_in_flight(self) -> int:
        """Commands that the host may have in flight, those that were refused at once included."""
        if self.unproven:
            return min(self.entries, self.settings.unproven_entries)
        return self.entries

    # --- a command, from its arrival to its end -------------------------------------------------------

    def begin(self, sqe: Sqe, now: float) -> Request:
        """Judge a command. A refused one has its status set, direction NONE and no window."""
        request = Request(sqe)
        controller = self.controller
        # What comes after the keep-alive time is carried out no more: its host may have gone to another path.
        expired = controller is not None and self.qid != 0 and now >= controller.expires_at
        if controller is not None and not expired and not (self.unproven and self.qid):
            controller.heard(now)  # not by a stranger who names the host's controller
        try:
            if expired:
                raise Refusal(Status.KEEP_ALIVE_EXPIRED)
            if sqe.flags & FLAGS_FUSE or sqe.flags & FLAGS_PSDT != FLAGS_SGL:
                raise Refusal(Status.INVALID_FIELD)
            if self.unproven and not is_authentication(sqe):
                raise not_proven()
            if sqe.opcode == AdminOpcode.FABRICS:
                with self.target.lock:
                    begin_fabrics(request, self)
            elif controller is None:
                raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
            elif self.qid == 0:
                with self.target.lock:
                    begin_admin(request, controller)
            else:
                begin_io(request, controller)
        except Refusal as refusal:
            self.refuse(request, refusal)
        return request

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Settle a command with a status before any of its data have moved."""
        request.fail(refusal.status, result=refusal.result, do_not_retry=refusal.do_not_retry)
        request.direction = Direction.NONE
        request.window = None

    def open_window(self, request: Request) -> None:
        """The data of the command are about to come: name their place, where the medium has one."""
        if request.window is None:
            open_window(request)

    def accept(self, request: Request, offset: int, data: memoryview, scratch: Scratch) -> None:
        """A piece of data from the host is here. `scratch` may be used to compare it with."""
        if request.operation is not None:
            accept_io(request, offset, data, scratch)

    def execute(self, request: Request, now: float, scratch: Scratch) -> Outcome:
        """Carry the command out, or take it among those that wait; never raises.

        `scratch` may hold `request.data` afterwards.
        """
        if request.status:
            request.let_go()
            self._record_error(request)
            return Outcome.DONE
        try:
            if request.operation is not None:
                assert self.controller is not None
                outcome = execute_io(request, self.controller, now, scratch)
                if outcome is Outcome.LATER:
                    self.waiting[request.sqe.cid] = request
                return outcome
            if is_authentication(request.sqe):
                return execute_authentication(request, self, now)
            with self.target.lock:
                if request.sqe.opcode == AdminOpcode.FABRICS:
                    return execute_fabrics(request, self.target, self, now)
                return execute_admin(request, self.target, self, now)
        except Refusal as refusal:
            request.fail(refusal.status, result=refusal.result, do_not_retry=refusal.do_not_retry)
        except StorageError as error:
            request.fail(error.status, do_not_retry=error.do_not_retry)
        except Exception:
            # The last line of defence: a bug in one command ends that command, not the enclosure.
            log.exception("command with opcode %#04x on queue %d", request.sqe.opcode, self.qid)
            request.fail(Status.INTERNAL_ERROR)
        request.let_go()
        self._record_error(request)
        return Outcome.DONE

    def _record_error(self, request: Request) -> None:
        controller = self.controller
        if controller is None:
            return
        sqe = request.sqe
        lba = sqe.slba if request.operation is not None and request.kv is None else 0
        with self.target.lock:
            controller.record_error(qid=self.qid, cid=sqe.cid, status=request.status, nsid=sqe.nsid, lba=lba)

    # --- what becomes due without a command --------------------------------------------------------------

    def ready(self, now: float) -> list[Request]:
        """Waiting commands to execute again; the caller owns them now."""
        if not self.waiting:
            self._recheck = False
            return []
        recheck, self._recheck = self._recheck, False
        # list() of a dictionary's values is one step for other threads, which may take entries out.
        due = [r for r in list(self.waiting.values()) if r.due <= now or (recheck and r.due == HELD)]
        due.sort(key=lambda request: request.due)
        return [r for r in due if self.waiting.pop(r.sqe.cid, None) is not None]

    def take_completions(self) -> list[Completion]:
        """Answers that became due: asynchronous events, and commands that were aborted."""
        if self.qid == 0 and self.controller is not None:
            with self.target.lock:
                for cid, event in self.controller.due_events():
                    self._completions.append(Completion(cid, 0, event.encode()))
        taken = []
        while self._completions:
            taken.append(self._completions.popleft())
        return taken

    def deadline(self) -> float:
        """When to look again without being woken, for a command or for a silent host; may be infinite."""
        earliest = min((request.due for request in list(self.waiting.values())), default=math.inf)
        if self.qid == 0 and self.controller is not None and not self.unproven:
            earliest = min(earliest, self.controller.expires_at)
        if self.authentication is not None:
            earliest = min(earliest, self.authentication.deadline)
        return earliest

    def check(self, now: float) -> None:
        """Let time pass: a host that was silent for longer than its keep-alive time loses its controller.

        A host that authenticates is silent for as long as its arithmetic takes; that has a time of its own.
        """
        controller = self.controller
        if self.qid != 0 or controller is None or controller.ended is not None or self.unproven:
            return
        if now >= controller.expires_at:
            with self.target.lock:
                controller.end("keep-alive timeout")

    def reason_to_end(self, now: float, connect_by: float) -> str | None:
        """Let time pass; why the connection has to end now, or None. Connect had to come by `connect_by`."""
        if self.controller is not None:
            self.check(now)
        elif now >= connect_by:
            return "no Connect within the time for it"
        authentication = self.authentication
        if authentication is not None and now >= authentication.deadline:
            authentication.expire()
            give_up(self, now)
            self.close("no authentication within the time for it")
        return self.close_reason

    @property
    def authenticating(self) -> bool:
        """An authentication is under way, and has its time."""
        return self.authentication is not None and self.authentication.deadline != math.inf

    def gave_up_event(self, sqe: Sqe, other: Request) -> bool:
        """The id of `other`, an outstanding event request, names a Fabrics command now: it waits no more.

        Ids are not to be used twice, but SPDK's host ends with such a Property Get, and its target bears it.
        """
        controller = self.controller
        if controller is None or self.qid != 0 or sqe.opcode != AdminOpcode.FABRICS:
            return False
        if other.sqe.opcode != AdminOpcode.ASYNC_EVENT_REQUEST:
            return False
        with self.target.lock:
            return controller.abort_event_request(sqe.cid)

    # --- called by commands and by other threads -----------------------------------------------------------

    def attach(self, controller: Controller, qid: int, entries: int, *, no_flow_control: bool) -> None:
        """Connect succeeded."""
        self.controller = controller
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

    def connection_lost(self) -> None:
        """The transport is done with this session. With the admin queue goes its controller."""
        controller = self.controller
        with self.target.lock:
            self.target.guests.leave(self)
            self.target.unproven.leave(self)
            if controller is None:
                return
            if controller.queues.get(self.qid) is self:
                del controller.queues[self.qid]
            if self.qid == 0:
                controller.end("its admin queue was closed")
                self.target.unregister(controller)
