"""The admin side of one connection to one controller, without I/O. Read `procedure.py`, then `bring_up.py`.

Its owner drives it: `start`, `reset`, `shut_down` and `submit`; `ended` for every command that it gave out;
`tick` when `deadline` has come; `connection_lost`. After each of these the owner submits the commands of
`take_commands` to the admin queue, and looks at `take_events`.

It keeps the controller alive (`keep_alive.py`), keeps asynchronous event requests outstanding and acts on
the events. It aborts a command that is not answered in time, and gives the connection up when even that
does not help. It never reconnects: `transport/reconnect.py` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from nvmeof.errors import CommandFailed, ConnectionLost, LocalProtocolError, NvmeofError
from nvmeof.host import commands
from nvmeof.host.bring_up import ControllerFacts, SessionConfig, bring_up, reset, shut_down
from nvmeof.host.command import Command
from nvmeof.host.keep_alive import KeepAlive
from nvmeof.host.namespaces import NO_ACCESS_REPORT, Access, NamespaceInfo, read_access, scan_namespaces
from nvmeof.host.procedure import Procedure, Running, done, unless_lost
from nvmeof.limits import ADMIN_TIMEOUT_S, AUTHENTICATION_ANSWER_S, SHUTDOWN_TIMEOUT_S
from nvmeof.wire import features
from nvmeof.wire.identify import IdentifyController
from nvmeof.wire.log_page import CHANGED_NAMESPACES_BYTES, LogPage

EVENT_REQUESTS = 2
"""Asynchronous event requests that we keep outstanding (or fewer, where AERL says so)."""

FAILED_EVENT_REQUESTS = 3
"""After so many event requests that failed in a row we do without events."""


class SessionState(Enum):
    NEW = "new"
    STARTING = "starting"
    LIVE = "live"
    RESETTING = "resetting"
    SHUTTING_DOWN = "shutting down"
    ENDED = "ended"


LEGAL = {
    SessionState.NEW: {SessionState.STARTING, SessionState.ENDED},
    SessionState.STARTING: {SessionState.LIVE, SessionState.SHUTTING_DOWN, SessionState.ENDED},
    SessionState.LIVE: {SessionState.RESETTING, SessionState.SHUTTING_DOWN, SessionState.ENDED},
    SessionState.RESETTING: {SessionState.ENDED},
    SessionState.SHUTTING_DOWN: {SessionState.ENDED},
    SessionState.ENDED: set(),
}


class Change(Enum):
    """What has become new in the session."""

    LIVE = "live"
    """The controller is up; `facts` and `namespaces` are valid from now on."""
    NAMESPACES = "namespaces"
    ACCESS = "access"
    """The controller reaches namespaces in another way (ANA); `access` has been renewed."""
    DISCOVERY = "discovery"


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over; hang up. `error` is None after a reset or shutdown that we wanted."""

    error: NvmeofError | None


SessionEvent: TypeAlias = Change | Ended


@dataclass(slots=True)
class Watch:
    """When a command has been unanswered for too long, and whether an abort is already on its way."""

    expires: float
    aborted: bool = False


class ControllerSession:
    """See the top of this file. `take_commands` gives what to submit; each must come back through `ended`."""

    def __init__(self, config: SessionConfig, *, admin_timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        self.config = config
        self.state = SessionState.NEW
        self.facts: ControllerFacts | None = None
        self.namespaces: dict[int, NamespaceInfo] = {}
        self.access: Access = NO_ACCESS_REPORT
        """How the controller reaches each ANA group."""
        self._timeout = admin_timeout_s
        self._now = 0.0
        self._commands: list[Command] = []
        self._events: list[SessionEvent] = []
        self._running: list[Running] = []
        self._watched: dict[Command, Watch] = {}
        self._event_requests: set[Command] = set()
        self._failed_event_requests = 0
        self._keep_alive = KeepAlive(config.keep_alive_s)
        self._rescanning = False
        self._rescan_again = False

    def start(self, now: float) -> None:
        """The admin queue is ready: connect and bring the controller up."""
        self._become(SessionState.STARTING)
        self._run(bring_up(self.config), self._brought_up, now)

    def submit(self, command: Command, now: float) -> None:
        """Give a command of the owner out, under the same time limit as our own."""
        if self.state is not SessionState.LIVE:
            raise LocalProtocolError(f"a session that is {self.state.value} takes no command")
        self._issue(command, now)

    def reset(self, now: float) -> None:
        self._become(SessionState.RESETTING)
        self._stop_everything()
        self._run(reset(self._timeout), lambda _: self._end(None), now)

    def shut_down(self, now: float) -> None:
        """Say goodbye; ends the session, within `SHUTDOWN_TIMEOUT_S` in any case."""
        if self.state is SessionState.STARTING:
            self._end(None)
            return
        self._become(SessionState.SHUTTING_DOWN)
        self._stop_everything()
        assert self.facts is not None, "only a live session is shut down"
        goodbye = shut_down(self.facts.capabilities, SHUTDOWN_TIMEOUT_S)
        self._run(goodbye, lambda _: self._end(None), now)

    def connection_lost(self, error: NvmeofError) -> None:
        """The transport has failed, or is given up. Ends the session; the queue ends its commands."""
        for running in self._running:
            error = running.lose(error)
        self._end(error)

    def take_commands(self) -> list[Command]:
        """Commands to submit now, in order. They fit: we keep well below the depth of an admin queue."""
        taken, self._commands = self._commands, []
        return taken

    def take_events(self) -> list[SessionEvent]:
        """What happened since the last time."""
        taken, self._events = self._events, []
        return taken

    @property
    def deadline(self) -> float | None:
        """When `tick` is wanted next."""
        times = [watch.expires for watch in self._watched.values()]
        times += [running.wake_at for running in self._running if running.wake_at is not None]
        if self._keep_alive.due_at is not None:
            times.append(self._keep_alive.due_at)
        return min(times, default=None)

    def ended(self, command: Command, now: float) -> None:
        self._watched.pop(command, None)
        if self.state is SessionState.ENDED:
            return
        if command in self._event_requests:
            self._event_requests.discard(command)
            self._event(command, now)
        elif self._keep_alive.is_under_way(command):
            lost = self._keep_alive.answered(command)
            if lost is not None:
                self._end(lost)
        else:
            for running in self._running:
                if running.waiting_for is command:
                    self._go_on(running, now)
                    break

    def tick(self, now: float) -> None:
        for running in [r for r in self._running if r.wake_at is not None and r.wake_at <= now]:
            # An earlier one may have ended the session, and this one with it.
            if running in self._running:
                self._go_on(running, now)
        keep_alive = self._keep_alive.send(now)
        if keep_alive is not None:
            self._issue(keep_alive, now, timeout=self._keep_alive.period_s)
        for command, watch in [(c, w) for c, w in self._watched.items() if w.expires <= now]:
            self._overdue(command, watch, now)

    def _become(self, state: SessionState) -> None:
        if state not in LEGAL[self.state]:
            raise LocalProtocolError(f"a session cannot go from {self.state.value} to {state.value}")
        self.state = state

    def _end(self, error: NvmeofError | None) -> None:
        if self.state is SessionState.ENDED:
            return
        self._become(SessionState.ENDED)
        self._stop_everything()
        self._events.append(Ended(error))

    def _stop_everything(self) -> None:
        for running in self._running:
            running.cancel()
        self._running.clear()
        self._watched.clear()
        self._commands.clear()
        self._keep_alive.stop()

    def _issue(self, command: Command, now: float, *, timeout: float | None = None) -> None:
        self._commands.append(command)
        self._watched[command] = Watch(now + (self._timeout if timeout is None else timeout))

    def _run(self, procedure: Procedure[Any], succeeded: Callable[[Any], None], now: float) -> None:
        running = Running(procedure, succeeded, self._end)
        self._running.append(running)
        self._go_on(running, now)

    def _go_on(self, running: Running, now: float) -> None:
        self._now = now
        command = running.step(now)
        if command is not None:
            slow = command.name in (commands.AUTHENTICATION_SEND, commands.AUTHENTICATION_RECEIVE)
            self._issue(command, now, timeout=AUTHENTICATION_ANSWER_S if slow else None)
        elif running.wake_at is None and running in self._running:
            self._running.remove(running)

    def _brought_up(self, result: tuple[ControllerFacts, dict[int, NamespaceInfo]]) -> None:
        self.facts, self.namespaces = result
        self.access = self.facts.access
        self._become(SessionState.LIVE)
        self._keep_alive.start(self._now)
        for _ in range(min(EVENT_REQUESTS, self.facts.identify.aerl + 1)):
            self._request_event()
        self._events.append(Change.LIVE)

    def _overdue(self, command: Command, watch: Watch, now: float) -> None:
        """Not answered in time: first an abort, which ends the command; if that does not, the connection."""
        if self.state is SessionState.ENDED:
            return
        impatient = self.state is not SessionState.LIVE or self._keep_alive.is_under_way(command)
        if watch.aborted or impatient or command.name == "abort" or command.cid < 0:
            # A procedure under way may know better why: a farewell need not be answered.
            self.connection_lost(ConnectionLost(f"{command.name} was not answered"))
            return
        watch.aborted = True
        watch.expires = now + self._timeout
        self._issue(commands.abort(0, command.cid), now)

    def _request_event(self) -> None:
        command = commands.async_event_request()
        self._event_requests.add(command)
        # Not watched: it is answered when something happens, which may be never.
        self._commands.append(command)

    def _event(self, command: Command, now: float) -> None:
        if self.state is not SessionState.LIVE:
            return
        if command.status or command.lost:
            self._failed_event_requests += 1
            if self._failed_event_requests < FAILED_EVENT_REQUESTS:
                self._request_event()
            return
        self._failed_event_requests = 0
        self._request_event()
        event = features.AsyncEvent.of_number(command.result)
        if event.kind != features.EVENT_NOTICE:
            return
        if event.information == features.NOTICE_NAMESPACE_CHANGED:
            self._rescan(now)
        elif event.information == features.NOTICE_ANA_CHANGED:
            assert self.facts is not None
            self._run(_access_or_nothing(self.facts.identify), self._access_read, now)
        elif event.information == features.NOTICE_DISCOVERY_CHANGED:
            self._events.append(Change.DISCOVERY)

    def _access_read(self, access: Access | None) -> None:
        # Several readings may be under way, each after an event; the last one to end began after the last.
        if access is not None and access != self.access:
            self.access = access
            self._events.append(Change.ACCESS)

    def _rescan(self, now: float) -> None:
        if self._rescanning:
            # Something changed while we looked: look once more when we are through.
            self._rescan_again = True
            return
        self._rescanning = True
        self._run(_read_changes(), self._rescanned, now)

    def _rescanned(self, found: dict[int, NamespaceInfo]) -> None:
        self._rescanning = False
        if found != self.namespaces:
            self.namespaces = found
            self._events.append(Change.NAMESPACES)
        if self._rescan_again:
            self._rescan_again = False
            self._rescan(self._now)


def _access_or_nothing(identify: IdentifyController) -> Procedure[Access | None]:
    """A controller that refuses the log keeps the states that it told before."""
    try:
        return (yield from read_access(identify))
    except CommandFailed as failure:
        unless_lost(failure)
        return None


def _read_changes() -> Procedure[dict[int, NamespaceInfo]]:
    """Read the changed-namespace log, which arms the event anew, then look at everything again.

    The log says which ids changed, but reading it and Identify are not atomic; a whole scan is right
    whatever happened in between, and a subsystem has few namespaces.
    """
    try:
        yield from done(commands.get_log_page(LogPage.CHANGED_NAMESPACES, CHANGED_NAMESPACES_BYTES))
    except CommandFailed as failure:
        # A controller that refuses the log has still told us that something changed. One whose answer is lost
        # may take the event for read or not: only a new session tells.
        unless_lost(failure)
    return (yield from scan_namespaces())
