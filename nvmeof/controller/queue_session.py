"""One queue pair of a controller, whatever carries it. A transport drives it; see `tcp_queue.py` for one.

The transport's part, for each command that arrives:

    request = session.begin(sqe)            # judged; request.status != 0: refused already
    ... session.open_window(request), data moved as request.direction, length and window say,
        session.accept(request, offset, piece, scratch) for each piece from the host ...
    outcome = session.execute(request, now, scratch)

and whenever it is woken or a deadline passes: `take_completions`, `ready`, `reason_to_end(now, connect_by)`.

A session belongs to one thread, that of its connection. Other threads reach it only as a `ServedQueue`.
"""

import logging
import math
from collections.abc import Callable, Container
from typing import Final

from nvmeof.controller import fabrics_commands
from nvmeof.controller.admin_commands import begin_admin, execute_admin
from nvmeof.controller.controller import Controller
from nvmeof.controller.io_commands import accept_io, begin_io, execute_io, open_window
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.served_queue import Completion, ServedQueue
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import HELD, Scratch, StorageError
from nvmeof.controller.target import Target
from nvmeof.wire.fabrics import FabricsType
from nvmeof.wire.log_page import TransportType
from nvmeof.wire.sqe import FLAGS_FUSE, FLAGS_PSDT, FLAGS_SGL, AdminOpcode, Sqe
from nvmeof.wire.status import FabricsStatus, Status

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0
"""Connect, and over TCP ICReq before it, have to come within this many seconds."""

_NO_FLOW_CONTROL: Final = 0xFFFF
"""SQHD of the answer to a Connect that asked for no flow control."""


def is_connect(sqe: Sqe) -> bool:
    return sqe.opcode == AdminOpcode.FABRICS and sqe.fctype == FabricsType.CONNECT


class QueueSession(ServedQueue):
    """See the module's docstring. `wake` is called from any thread when the owner should look again.

    `settings` are the target's unless the transport has narrower bounds (or other capsules).
    """

    def __init__(
        self,
        target: Target,
        wake: Callable[[], None] | None = None,
        *,
        settings: ControllerSettings | None = None,
        transport: TransportType = TransportType.TCP,
    ) -> None:
        super().__init__(wake or (lambda: None), settings or target.settings, transport)
        self.target = target
        self.controller: Controller | None = None
        self._head = 0

    def enter(self, peer: str, now: float, *, full_of: "Container[QueueSession] | None" = None) -> bool:
        """A guest from an address, until proven; False where it has to go (`GuestConnections.admit`)."""
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

    def take_entry(self) -> None:
        """A command has come, so the head of the submission queue goes on."""
        # Connect tells the size of the queue, so until then the head does not come round.
        self._head = (self._head + 1) % (self.entries if self.controller is not None else 0x10000)

    def head_for(self, request: Request | None) -> int:
        if not self.no_flow_control:
            return self._head
        return _NO_FLOW_CONTROL if request is not None and is_connect(request.sqe) else 0

    def begin(self, sqe: Sqe, now: float) -> Request:
        """Judge a command. A refused one has its status set, direction NONE and no window."""
        request = Request(sqe)
        controller = self.controller
        # A command after the keep-alive time is not carried out: its host may have gone to another path.
        expired = controller is not None and self.qid != 0 and now >= controller.expires_at
        if controller is not None and not expired and not (self.unproven and self.qid):
            controller.heard(now)  # not by a stranger who names the host's controller
        try:
            if expired:
                # Nothing is wrong with the command: its host asks again by another connection.
                self.close("keep-alive timeout")
                raise Refusal(Status.KEEP_ALIVE_EXPIRED, do_not_retry=False)
            if sqe.flags & FLAGS_FUSE or sqe.flags & FLAGS_PSDT != FLAGS_SGL:
                raise Refusal(Status.INVALID_FIELD)
            if self.unproven and not fabrics_commands.is_authentication(sqe):
                raise Refusal(FabricsStatus.AUTHENTICATION_REQUIRED)
            if sqe.opcode == AdminOpcode.FABRICS:
                with self.target.lock:
                    fabrics_commands.begin_fabrics(request, self, connected=controller is not None)
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
        """A piece of data from the host is here. `scratch` may be used to compare it with.

        What lay in a socket while a drive hung is not written once the queue has to end: the host has learned
        that its connection is gone, and may have gone on by another one.
        """
        if self.close_reason is not None:
            request.fail(Status.ABORTED_SQ_DELETION)
        elif request.operation is not None:
            accept_io(request, offset, data, scratch)

    def execute(self, request: Request, now: float, scratch: Scratch) -> Outcome:
        """Carry the command out, or take it among those that wait; never raises.

        `scratch` may hold `request.data` afterwards.
        """
        if request.status:
            request.let_go()
            self._record_error(request)
            return Outcome.DONE
        controller = self.controller
        try:
            if controller is None:  # `begin` has let nothing through but Connect.
                with self.target.lock:
                    self.controller = fabrics_commands.connect(request, self.target, self, now)
                return Outcome.DONE
            if request.operation is not None:
                outcome = execute_io(request, controller, now, scratch)
                if outcome is Outcome.LATER:
                    self.waiting[request.sqe.cid] = request
                return outcome
            if fabrics_commands.is_authentication(request.sqe):
                return fabrics_commands.execute_authentication(request, self.target, controller, self, now)
            with self.target.lock:
                if request.sqe.opcode == AdminOpcode.FABRICS:
                    return fabrics_commands.execute_fabrics(request, controller, self)
                return execute_admin(request, self.target, controller, self)
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
                    self._completions.append(Completion(cid, 0, event.to_number()))
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

    def reason_to_end(self, now: float, connect_by: float) -> str | None:
        """Let time pass; why the connection has to end now, or None. Connect had to come by `connect_by`.

        A host that was silent for longer than its keep-alive time loses its controller. One that
        authenticates is silent for as long as its arithmetic takes; that has a time of its own.
        """
        controller = self.controller
        if controller is None:
            return "no Connect within the time for it" if now >= connect_by else self.close_reason
        is_live_admin = self.qid == 0 and controller.ended is None and not self.unproven
        if is_live_admin and now >= controller.expires_at:
            with self.target.lock:
                controller.end("keep-alive timeout")
        authentication = self.authentication
        if authentication is not None and now >= authentication.deadline:
            authentication.expire()
            fabrics_commands.give_up(self.target, controller, self, now)
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
