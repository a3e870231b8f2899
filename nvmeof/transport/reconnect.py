"""A controller that is connected again and again until it is given up: the times of the tries, and the task.

    async with keep_controller(lambda: open_controller(...), policy) as keeper:
        async for event in keeper.events:
            match event:
                case Connected(controller): ...
                case Disconnected(error): ...
                case GivenUp(error): ...
                case Change.NAMESPACES: ...

It knows no transport: `opener` opens the controller.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import trio

from nvmeof.errors import ConnectRefused, NvmeofError
from nvmeof.host.controller_session import Change, Ended, SessionEvent
from nvmeof.limits import CONTROLLER_LOSS_S, RECONNECT_FIRST_S, RECONNECT_MOST_S, SESSION_EVENTS
from nvmeof.transport.controller import Controller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """Back-off from `first_s`, doubled up to `most_s`; `loss_s` without a connection is the end."""

    first_s: float = RECONNECT_FIRST_S
    most_s: float = RECONNECT_MOST_S
    loss_s: float = CONTROLLER_LOSS_S


@dataclass(frozen=True, slots=True)
class History:
    """What happened since the connection was last good.

    `lost_at` is when it was lost (or first wanted); `failures` counts the tries since then;
    `ever_connected` tells a controller that has gone from one that never was; `tried_at` is when the last try
    began.
    """

    lost_at: float
    failures: int = 0
    ever_connected: bool = False
    error: Exception | None = None
    tried_at: float | None = None


def next_try(policy: ReconnectPolicy, history: History, now: float) -> float | None:
    """Seconds from now until the next try; None when the controller is to be given up.

    The first try after a loss is made at once. The others are so far apart from begin to begin: a try that
    hangs does not make the next one later. A refusal that will not change (a wrong name, a host that is not
    allowed) ends it only when we were never in: an enclosure that is being set up again refuses too.
    """
    refused = isinstance(history.error, ConnectRefused) and history.error.retry_is_useless
    if refused and not history.ever_connected:
        return None
    left = policy.loss_s - (now - history.lost_at)
    if left <= 0:
        return None
    if history.failures == 0:
        return 0.0
    # The exponent is bounded too: an enclosure may be away for days.
    delay = min(policy.first_s * 2.0 ** min(history.failures - 1, 30), policy.most_s)
    if history.tried_at is not None:
        delay = max(0.0, delay - (now - history.tried_at))
    return min(delay, left)


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
Opener: TypeAlias = Callable[[], AbstractAsyncContextManager[Controller]]


class Keeper:
    """`controller` is the live one, None while there is none. Made by `keep_controller`."""

    def __init__(self, opener: Opener, policy: ReconnectPolicy) -> None:
        self.controller: Controller | None = None
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
            if event is not Change.LIVE and not isinstance(event, Ended):
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
