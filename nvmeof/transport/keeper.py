"""A controller that is connected again and again until it is given up. Read `host/reconnect.py` first.

    async with keep_controller(lambda: open_controller(...), policy) as keeper:
        async for event in keeper.events:
            match event:
                case Connected(controller): ...
                case Disconnected(error): ...
                case GivenUp(error): ...
                case NamespacesChanged(): ...

It knows no transport: what is opened is whatever `opener` opens.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import trio

from nvmeof.errors import NvmeofError
from nvmeof.host.controller_session import Ended, Live, SessionEvent
from nvmeof.host.reconnect import History, ReconnectPolicy, next_try
from nvmeof.limits import SESSION_EVENTS

if TYPE_CHECKING:
    from nvmeof.transport.controller import Controller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a live controller; queues may be connected to it."""

    controller: Controller


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost, or a try to make one failed; the next try follows by itself."""

    error: NvmeofError | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No more tries will be made."""

    error: Exception | None


KeeperEvent: TypeAlias = Connected | Disconnected | GivenUp | SessionEvent
Opener: TypeAlias = "Callable[[], AbstractAsyncContextManager[Controller]]"


class Keeper:
    """`controller` is the live one, None while there is none. Made by `keep_controller`."""

    def __init__(self, opener: Opener, policy: ReconnectPolicy) -> None:
        self.controller: Controller | None = None
        self.gave_up = trio.Event()
        self._events_in, self.events = trio.open_memory_channel[KeeperEvent](SESSION_EVENTS)
        self._opener = opener
        self._policy = policy

    async def reset(self) -> None:
        """Reset the controller, if there is one, and connect anew."""
        if self.controller is not None:
            await self.controller.reset()

    def _tell(self, event: KeeperEvent) -> None:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._events_in.send_nowait(event)

    async def run(self) -> None:
        """Keep at it until the policy says that it is enough."""
        history = History(lost_at=trio.current_time())
        while True:
            delay = next_try(self._policy, history, trio.current_time())
            if delay is None:
                log.warning("a controller is given up: %s", history.error)
                self._tell(GivenUp(history.error))
                self._events_in.close()
                self.gave_up.set()
                return
            await trio.sleep(delay)
            tried_at = trio.current_time()
            error: NvmeofError | None
            was_connected = False
            try:
                async with self._opener() as controller:
                    was_connected = True
                    await self._serve(controller)
                    error = controller.error
            except NvmeofError as failure:
                error = failure
            finally:
                self.controller = None
            now = trio.current_time()
            if was_connected:
                history = History(now, 0, True, error)
            else:
                failures, ever_connected = history.failures + 1, history.ever_connected
                history = History(history.lost_at, failures, ever_connected, error, tried_at)
            self._tell(Disconnected(error))

    async def _serve(self, controller: Controller) -> None:
        self.controller = controller
        self._tell(Connected(controller))
        async for event in controller.events:
            if not isinstance(event, Live | Ended):
                self._tell(event)
        await controller.ended.wait()


@asynccontextmanager
async def keep_controller(opener: Opener, policy: ReconnectPolicy | None = None) -> AsyncIterator[Keeper]:
    """Keep a controller connected while the block runs.

    `opener` makes a fresh context each time, such as `lambda: open_controller(...)`. Nothing is raised when
    the controller goes away or is given up; the keeper's events say so.
    """
    keeper = Keeper(opener, ReconnectPolicy() if policy is None else policy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        yield keeper
        nursery.cancel_scope.cancel()
