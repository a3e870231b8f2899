"""The sessions to the enclosures: one task each keeps its controller connected and publishes what it sees.

It is control work and runs in trio, beside the workers and never in their way. Workers read the result
in `Fabric`; when a worker loses a queue it complains there, and the controller is reset, because a
queue that died under a session that seems alive means that one of the two ends is wrong about it.

An enclosure is tried for ever, also one that refuses us: its operator may be about to give it the
subsystem or to allow this host. What keeps it away is logged when it changes, not with every try.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from agent.config import EnclosureSection
from agent.remote.fabric import Enclosure, Fabric
from agent.remote.secrets_at_hand import SecretFinder, no_secrets
from agent.remote.suspicion import LOOK_SECONDS, Verdict
from nvmeof.authentication.secret_files import SecretFileError
from nvmeof.errors import AuthenticationFailed, ConnectionLost, ConnectRefused
from nvmeof.host.controller_session import NamespacesChanged
from nvmeof.host.reconnect import ReconnectPolicy
from nvmeof.tcp.pdu import Digests
from nvmeof.transport import VerbsChoice, transport_named
from nvmeof.transport.base import DEFAULT_PROVIDER
from nvmeof.transport.keeper import Connected, Disconnected, Keeper, keep_controller

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0
COMPLAINTS_EVERY = 0.25
RECONNECT = ReconnectPolicy(first_s=0.2, most_s=5.0, loss_s=math.inf)
"""An enclosure is part of the pool until an operator says otherwise, so it is never given up."""


class Supervisor:
    """Keeps every enclosure of the configuration connected while `run` runs."""

    def __init__(
        self,
        sections: Sequence[EnclosureSection],
        host_nqn: str,
        host_id: bytes,
        io_queues: int,
        verbs: VerbsChoice | None = None,
        secrets: SecretFinder = no_secrets,
    ) -> None:
        self._sections = sections
        self._secrets = secrets
        self._verbs = verbs or VerbsChoice(DEFAULT_PROVIDER)
        self._host_nqn = host_nqn
        self._host_id = host_id
        self._io_queues = io_queues
        self.queues_in_use = 0
        """Queue ids that the agent went on to use; an enclosure that joins later may grant fewer."""
        self._tried = {section.name: trio.Event() for section in sections}
        self.fabric = Fabric([Enclosure(section.name) for section in sections])

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_around)
            for section, enclosure in zip(self._sections, self.fabric.enclosures, strict=True):
                nursery.start_soon(self._keep, section, enclosure)

    async def _look_around(self) -> None:
        """Look for gray failure; say what was found."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            for change in self.fabric.look(time.monotonic()):
                name = self.fabric.name_of(change.member)
                if change.verdict is Verdict.SUSPECT:
                    log.warning("%s gets no new values for now: %s", name, change.why)
                else:
                    log.info("%s is %s: %s", name, change.verdict.value, change.why)

    async def all_tried(self, seconds: float) -> None:
        """Until every enclosure was connected or has failed to be once, or so many seconds."""
        with trio.move_on_after(seconds):
            for event in self._tried.values():
                await event.wait()

    async def _keep(self, section: EnclosureSection, enclosure: Enclosure) -> None:
        transport = transport_named(section.transport)

        @asynccontextmanager
        async def opener() -> AsyncIterator[Any]:
            try:
                async with transport.open_controller(
                    section.address,
                    section.port,
                    section.nqn,
                    self._host_nqn,
                    self._host_id,
                    **self._options(section),
                    keep_alive_s=KEEP_ALIVE_SECONDS,
                    io_queues=self._io_queues,
                    credentials=self._secrets(section),
                ) as controller:
                    yield controller
            except (ConnectRefused, SecretFileError) as refused:
                enclosure.authentication_failures += isinstance(refused, AuthenticationFailed)
                # A wrong name or secret, a host that is not allowed: a keeper gives up, and we do not.
                raise ConnectionLost(str(refused)) from refused

        async with keep_controller(opener, RECONNECT) as keeper, trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_complaints, enclosure, keeper)
            async for event in keeper.events:
                match event:
                    case Connected(controller):
                        self._connected(enclosure, controller)
                    case Disconnected(error):
                        self._disconnected(enclosure, str(error or "reset"))
                    case NamespacesChanged() if keeper.controller is not None:
                        enclosure.namespaces = tuple(keeper.controller.namespaces())
                        self.fabric.refresh()
                    case _:
                        pass
                self._tried[enclosure.name].set()
            nursery.cancel_scope.cancel()

    def _options(self, section: EnclosureSection) -> dict[str, Any]:
        """What only this enclosure's transport wants to know."""
        if section.transport == "rdma":
            return {"verbs": self._verbs}
        return {"digests": Digests(section.header_digest, section.data_digest)}

    def _connected(self, enclosure: Enclosure, controller: Any) -> None:
        enclosure.namespaces = tuple(controller.namespaces())
        enclosure.complaints = 0
        enclosure.reconnects += enclosure.epoch > 0
        enclosure.epoch += 1
        enclosure.session = controller.info
        enclosure.fault = ""
        self.fabric.refresh()
        log.info("enclosure %s: connected, %d namespaces", enclosure.name, len(enclosure.namespaces))
        granted = controller.info.io_queues
        if granted < self.queues_in_use:
            log.warning(
                "enclosure %s grants %d I/O queues of the %d in use: what the others ask of it misses; "
                "let it grant more, or start the agent again",
                enclosure.name,
                granted,
                self.queues_in_use,
            )

    def _disconnected(self, enclosure: Enclosure, fault: str) -> None:
        if enclosure.session is not None:
            log.info("enclosure %s: lost: %s", enclosure.name, fault)
        elif fault != enclosure.fault:
            log.warning("enclosure %s: not connected, and tried again: %s", enclosure.name, fault)
        enclosure.session = None
        enclosure.fault = fault
        self.fabric.refresh()

    async def _hear_complaints(self, enclosure: Enclosure, keeper: Keeper) -> None:
        while True:
            await trio.sleep(COMPLAINTS_EVERY)
            if enclosure.complaints and keeper.controller is not None:
                enclosure.complaints = 0
                log.info("enclosure %s: a worker lost its queue; resetting the controller", enclosure.name)
                await keeper.reset()
