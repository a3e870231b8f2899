"""The admin queue of a controller, driven by trio, whatever carries it.

Read `host/controller_session.py` first.

    async with open_controller("10.0.0.7", 4420, subsystem, host, host_id) as controller:
        for namespace in controller.namespaces(): ...
        queue = await trio.to_thread.run_sync(connect_io_queue, controller.info, 1, 32)

The `open_controller` of a transport is `opened` with a function that connects the transport's `AdminLink`.
Two tasks run behind it: one receives, one keeps the session's deadlines. After each change to the session,
`_transmit` submits the commands of the session, sends, hands events out and re-arms the timer.
"""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

import trio

from nvmeof import limits
from nvmeof.authentication.secret import Credentials
from nvmeof.errors import ConnectionLost, LocalProtocolError, NvmeofError
from nvmeof.host.bring_up import ControllerFacts, SessionConfig
from nvmeof.host.command import Command
from nvmeof.host.controller_session import Change, ControllerSession, Ended, SessionEvent, SessionState
from nvmeof.host.namespaces import Access, NamespaceInfo
from nvmeof.host.procedure import Pause, Procedure
from nvmeof.transport.base import Address, ControllerInfo
from nvmeof.wire.identify import IdentifyController

T = TypeVar("T")


class AdminLink(Protocol):
    """An admin queue and what carries it. Made connected; used in one trio run."""

    @property
    def ready(self) -> bool:
        """Commands may be submitted."""

    def submit(self, command: Command, now: float) -> None:
        """Take a command. It goes out with the next `send`."""

    async def send(self) -> None:
        """Send what there is. Called by one task at a time. Raises `NvmeofError` when the link is dead."""

    async def receive(self) -> list[Command]:
        """Wait for something; the commands that ended by it. Raises `NvmeofError` when the link is dead."""

    def fail(self, reason: str) -> list[Command]:
        """The link is over; the commands that end by it."""

    def complete(self, info: ControllerInfo) -> ControllerInfo:
        """`info` with what an I/O queue has to know of this transport."""

    async def close(self) -> None:
        """Let go of everything. Not cancelled."""


class Controller:
    """A live controller. Made by a transport's `open_controller`; used in its trio run."""

    def __init__(self, address: Address, config: SessionConfig, admin_timeout_s: float) -> None:
        if len(config.host_id) != 16:
            raise LocalProtocolError(f"a host id has 16 bytes, not {len(config.host_id)}")
        self.address = address
        self.ended = trio.Event()
        """Set when the session is over, for whatever reason."""
        self.error: NvmeofError | None = None
        """Why it ended; None after a reset or shutdown of ours."""
        self._events_in, self.events = trio.open_memory_channel[SessionEvent](limits.SESSION_EVENTS)
        """Each `Change`, and `Ended`, in order."""
        self.answer_timeout_s = admin_timeout_s
        self._session = ControllerSession(config, admin_timeout_s=admin_timeout_s)
        self._link: AdminLink | None = None
        self._live = trio.Event()
        self._wake = trio.Event()
        self._sending = trio.Lock()
        self._room = trio.Semaphore(limits.ADMIN_COMMANDS)
        self._waiters: dict[Command, trio.Event] = {}

    @property
    def facts(self) -> ControllerFacts:
        assert self._session.facts is not None, "the session was never live"
        return self._session.facts

    @property
    def identify(self) -> IdentifyController:
        return self.facts.identify

    @property
    def info(self) -> ControllerInfo:
        """What `connect_io_queue` needs."""
        assert self._link is not None
        return self._link.complete(ControllerInfo(self.address, self._session.config, self.facts))

    def namespaces(self) -> list[NamespaceInfo]:
        """The active namespaces as last seen, by id. Renewed by itself when the controller tells."""
        return [self._session.namespaces[nsid] for nsid in sorted(self._session.namespaces)]

    @property
    def access(self) -> Access:
        """How it reaches each ANA group; renewed by itself when the controller tells."""
        return self._session.access

    async def perform(self, procedure: Procedure[T]) -> T:
        """Run a procedure of admin commands to its result. Raises `CommandFailed` and `ConnectionLost`.

        A single one is `procedure.done(command)`.
        """
        while True:
            try:
                step = next(procedure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(step, Pause):
                await trio.sleep(step.seconds)
            else:
                await self._until_done(step)

    async def reset(self) -> None:
        """Reset the controller. The session ends, and every queue of it; open the controller anew."""
        await self._finish(self._session.reset)

    async def shut_down(self) -> None:
        """Say goodbye. The end of the block does this by itself."""
        await self._finish(self._session.shut_down)

    async def _until_done(self, command: Command) -> None:
        """Submit and wait. When the waiting is cancelled the command stays in flight, and keeps its place."""
        await self._room.acquire()
        if self._session.state is not SessionState.LIVE:
            self._room.release()
            raise ConnectionLost(f"{command.name}: {self.error or 'the session has ended'}")
        event = self._waiters[command] = trio.Event()
        self._session.submit(command, trio.current_time())
        await self._transmit()
        await event.wait()

    async def _finish(self, end: Callable[[float], None]) -> None:
        if self._session.state is SessionState.LIVE:
            end(trio.current_time())
            await self._transmit()
        await self.ended.wait()

    async def run(self, link: AdminLink) -> None:
        """Drive the session over a connected link until it ends; closes the link."""
        self._link = link
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_time)
                nursery.start_soon(self._receive, link)
                await self.ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await link.close()

    async def _receive(self, link: AdminLink) -> None:
        with trio.move_on_after(self.answer_timeout_s) as limit:
            while not link.ready and not self.ended.is_set():
                await self._take(link)
        if limit.cancelled_caught:
            self._lost(ConnectionLost(f"{self.address} did not answer the first words"))
        if self.ended.is_set():
            return
        self._session.start(trio.current_time())
        while not self.ended.is_set():
            await self._take(link)

    async def _take(self, link: AdminLink) -> None:
        """Send the output, and take the next input."""
        await self._transmit()
        try:
            ended = await link.receive()
        except NvmeofError as error:
            self._lost(error)
            return
        self._settle(ended)

    def _settle(self, ended: list[Command]) -> None:
        now = trio.current_time()
        for command in ended:
            self._session.ended(command, now)
            self._release(command)

    def _release(self, command: Command) -> None:
        waiter = self._waiters.pop(command, None)
        if waiter is not None:
            waiter.set()
            self._room.release()

    async def _keep_time(self) -> None:
        while not self.ended.is_set():
            deadline = self._session.deadline
            self._wake = trio.Event()
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._wake.wait()
                continue
            self._session.tick(trio.current_time())
            await self._transmit()

    async def _transmit(self) -> None:
        """Submit what the session wants, send it, and tell what happened."""
        link = self._link
        assert link is not None
        try:
            for command in self._session.take_commands():
                link.submit(command, trio.current_time())
        except NvmeofError as error:
            # Over RDMA the controller says how many commands it takes, which may be fewer than we send.
            self._lost(error)
            return
        for event in self._session.take_events():
            self._tell(event)
        self._wake.set()
        if self.ended.is_set():
            return
        async with self._sending:
            try:
                await link.send()
            except NvmeofError as error:
                self._lost(error)

    def _tell(self, event: SessionEvent) -> None:
        if event is Change.LIVE:
            self._live.set()
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._events_in.send_nowait(event)
        if isinstance(event, Ended):
            self.error = event.error
            why = str(event.error or "the session has ended")
            assert self._link is not None
            self._settle(self._link.fail(why))
            # Commands that were never submitted end here.
            for command in list(self._waiters):
                if not command.done:
                    command.lose(why)
                self._release(command)
            self._events_in.close()
            self._live.set()
            self.ended.set()
            self._wake.set()

    def _lost(self, error: NvmeofError) -> None:
        self._session.connection_lost(error)
        for event in self._session.take_events():
            self._tell(event)

    def given_up(self, reason: str) -> NvmeofError:
        """It did not come up in time: end the session. A procedure under way may know a better reason."""
        error: NvmeofError = ConnectionLost(reason)
        if self._link is not None and not self.ended.is_set():
            self._lost(error)
        return self.error or error

    async def wait_live(self) -> None:
        """Until the controller is up; raises what prevented it."""
        await self._live.wait()
        if self.ended.is_set():
            raise self.error or ConnectionLost(f"{self.address}: the session ended before it began")


def _the_one_in(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a group stands for, where it is a single one.

    The tasks in the nursery of `opened` raise nothing, so its exception is the one of the caller's block.
    """
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def opened(
    connect: Callable[[Address, float], Awaitable[AdminLink]],
    address: str,
    port: int,
    subsystem_nqn: str,
    host_nqn: str,
    host_id: bytes,
    *,
    keep_alive_s: float = limits.KEEP_ALIVE_S,
    io_queues: int = 1,
    admin_timeout_s: float = limits.ADMIN_TIMEOUT_S,
    connect_timeout_s: float = limits.CONNECT_TIMEOUT_S,
    credentials: Credentials | None = None,
) -> AsyncIterator[Controller]:
    """Connect a controller and bring it up; shut it down at the end of the block.

    `connect` makes the link to an address by a time of `time.monotonic()`. `io_queues` are asked for;
    `facts.io_queues` are granted. `credentials` serve where the controller asks the host to authenticate.

    Raises `ConnectionLost`, `ConnectRefused`, `RemoteProtocolError` when it cannot be brought up. When the
    connection is lost later, nothing is raised in the block: `controller.ended` is set, `controller.error`
    says why, and `perform` raises `ConnectionLost`.
    """
    where = Address(address, port)
    config = SessionConfig(subsystem_nqn, host_nqn, host_id, keep_alive_s, io_queues, credentials)
    controller = Controller(where, config, admin_timeout_s)
    connect_by = time.monotonic() + connect_timeout_s
    # Shielded, so that also when we are being cancelled the controller hears that this host has gone.
    running = trio.CancelScope(shield=True)

    async def run(link: AdminLink) -> None:
        with running:
            await controller.run(link)

    try:
        async with trio.open_nursery() as nursery:
            try:
                with trio.move_on_after(connect_timeout_s) as limit:
                    with trio.move_on_after(admin_timeout_s) as answer:
                        link = await connect(where, connect_by)
                    if answer.cancelled_caught:
                        raise ConnectionLost(f"{where} did not answer within {admin_timeout_s:g} s")
                    nursery.start_soon(run, link)
                    await controller.wait_live()
                if limit.cancelled_caught:
                    raise controller.given_up(f"{where} was not up within {connect_timeout_s:g} s")
                try:
                    yield controller
                finally:
                    with trio.CancelScope(
                        shield=True, deadline=trio.current_time() + limits.SHUTDOWN_TIMEOUT_S
                    ):
                        await controller.shut_down()
            finally:
                running.cancel()
    except BaseExceptionGroup as group:
        raise _the_one_in(group) from None
