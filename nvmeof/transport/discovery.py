"""A discovery controller that stays connected: its log is read again whenever it says that it has changed.

Read `keeper.py` and `host/discovery.py` first.

    await follow_discovery(opener, listener, policy)

The session has a keep-alive timer, which makes the connection to the discovery controller a persistent one
(NVMe-oF 1.1, 1.5.7), and asks for the Discovery Log Page Change event (NVMe Base 2.0, 5.2). What happens
between a reading and the next event is not lost: reading the log arms the event anew, and a change that the
reading has missed raises it at once. A controller that knows no such event is asked from time to time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import trio

from nvmeof.errors import NvmeofError
from nvmeof.host.controller_session import DiscoveryChanged
from nvmeof.host.discovery import read_discovery_log
from nvmeof.host.reconnect import ReconnectPolicy
from nvmeof.transport.keeper import Connected, Disconnected, GivenUp, Keeper, Opener, keep_controller
from nvmeof.wire.identify import OAES_DISCOVERY_CHANGED
from nvmeof.wire.log_page import DiscoveryEntry

log = logging.getLogger(__name__)

ASK_ANYWAY_S = 60.0
"""How often a controller is asked that does not tell of changes by itself."""
READ_AGAIN_S = 1.0
"""After a reading that failed although the controller is there."""


class DiscoveryListener(Protocol):
    """Who wants to know. Called in the trio run of `follow_discovery`; must not block."""

    def listed(self, entries: Sequence[DiscoveryEntry]) -> None:
        """What the log says: after each connect, and whenever it says something else."""

    def unreachable(self, error: NvmeofError | None) -> None:
        """The controller went away, or was not reached; it is tried again. What it listed last counts."""


async def follow_discovery(
    opener: Opener, listener: DiscoveryListener, policy: ReconnectPolicy, ask_anyway_s: float = ASK_ANYWAY_S
) -> None:
    """Until cancelled, or until the policy gives the controller up. Raises nothing of the fabric's."""
    async with keep_controller(opener, policy) as keeper:
        told: tuple[int, list[DiscoveryEntry]] | None = None
        due = False
        wait_s = ask_anyway_s
        while True:
            if due and keeper.controller is not None:
                found = await _read(keeper)
                due = found is None
                wait_s = READ_AGAIN_S if found is None else _patience(keeper, ask_anyway_s)
                if found is not None and found != told:
                    told = found
                    listener.listed(found[1])
            with trio.move_on_after(wait_s) as waiting:
                match await keeper.events.receive():
                    case Connected():
                        due, told = True, None
                    case DiscoveryChanged():
                        due = True
                    case Disconnected(error):
                        due = False
                        listener.unreachable(error)
                    case GivenUp():
                        return
                    case _:
                        pass
            if waiting.cancelled_caught and keeper.controller is not None:
                due = True


def _patience(keeper: Keeper, ask_anyway_s: float) -> float:
    controller = keeper.controller
    tells = controller is not None and controller.identify.oaes & OAES_DISCOVERY_CHANGED
    return math.inf if tells else ask_anyway_s


async def _read(keeper: Keeper) -> tuple[int, list[DiscoveryEntry]] | None:
    """(generation, entries); None where that failed, which the log says once a try."""
    assert keeper.controller is not None
    try:
        found = await keeper.controller.perform(read_discovery_log())
    except NvmeofError as error:
        log.info("a discovery log was not read, and is read again: %s", error)
        return None
    return found.generation, list(found.entries)
