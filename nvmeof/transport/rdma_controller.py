"""The admin queue of a controller over RDMA. Read `controller.py`, then `rdma_queue.py` first.

What trio waits for are the descriptors of the connection manager and of the completion channel.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace

import trio

from nvmeof.authentication.credentials import Credentials
from nvmeof.errors import ConnectionLost
from nvmeof.host.bring_up import SessionConfig
from nvmeof.host.command import Command
from nvmeof.limits import ADMIN_QUEUE_DEPTH, ADMIN_TIMEOUT_S, CONNECT_TIMEOUT_S, KEEP_ALIVE_S
from nvmeof.transport.base import Address, ControllerInfo, VerbsChoice
from nvmeof.transport.controller import Controller, held, read_discovery
from nvmeof.transport.rdma_connect import ANSWER_S, RdmaLink
from nvmeof.transport.rdma_queue import Linked, link_up
from nvmeof.transport.verbs_provider import load_verbs
from nvmeof.wire.log_page import DiscoveryEntry


class RdmaAdminLink:
    """`controller.AdminLink` over a connected queue pair, which it owns."""

    ready = True

    def __init__(self, choice: VerbsChoice, address: Address, linked: Linked) -> None:
        self._choice = choice
        self._address = address
        self._linked = linked
        self._over = trio.Event()

    def submit(self, command: Command, now: float) -> None:
        """See `AdminLink.submit`."""
        self._linked.queue.submit(command, now)

    async def send(self) -> None:
        """See `AdminLink.send`. Posting does not wait."""
        await trio.lowlevel.checkpoint()
        if self._over.is_set():
            raise ConnectionLost(f"{self._address}: closed by us")
        self._linked.post()

    async def receive(self) -> list[Command]:
        """See `AdminLink.receive`."""
        linked = self._linked
        completions = linked.link.completions
        assert completions is not None
        await trio.lowlevel.checkpoint()
        while True:
            gone = linked.link.gone
            if gone is None:
                # Armed first and looked at afterwards, so that no completion falls in between.
                completions.arm()
            if self._over.is_set():
                raise ConnectionLost(f"{self._address}: closed by us")
            ended = linked.pump()
            if ended:
                return ended
            # Only now: what came before the end, and was not looked at yet, may say why it came.
            if gone is not None:
                raise ConnectionLost(f"{self._address}: {gone}")
            await self._wait(completions.fd, linked.link.fd)
            completions.consume()
            if linked.link.event_waits():
                linked.link.look_at_events()

    @staticmethod
    async def _wait(*descriptors: int) -> None:
        """Until one of them is readable."""
        async with trio.open_nursery() as nursery:

            async def readable(descriptor: int) -> None:
                await trio.lowlevel.wait_readable(descriptor)
                nursery.cancel_scope.cancel()

            for descriptor in descriptors:
                nursery.start_soon(readable, descriptor)

    def fail(self, reason: str) -> list[Command]:
        """See `AdminLink.fail`."""
        self._over.set()
        self._linked.link.break_off()
        return self._linked.queue.fail(reason)

    def complete(self, info: ControllerInfo) -> ControllerInfo:
        """See `AdminLink.complete`."""
        return replace(info, transport="rdma", verbs=self._choice)

    async def close(self) -> None:
        """Break the queue pair and say goodbye."""
        self._over.set()
        self._linked.end("closed by us")
        await trio.lowlevel.checkpoint()


def open_controller(
    address: str,
    port: int,
    subsystem_nqn: str,
    host_nqn: str,
    host_id: bytes,
    *,
    verbs: VerbsChoice,
    keep_alive_s: float = KEEP_ALIVE_S,
    io_queues: int = 1,
    admin_timeout_s: float = ADMIN_TIMEOUT_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    credentials: Credentials | None = None,
) -> AbstractAsyncContextManager[Controller]:
    """Connect to a controller and bring it up; see `controller.held` for what the block is told.

    `io_queues` are asked for; `info.io_queues` are granted. `credentials` serve where the controller asks
    the host to authenticate. Also raises `VerbsUnavailable`.
    """
    where = Address(address, port)
    config = SessionConfig(subsystem_nqn, host_nqn, host_id, keep_alive_s, io_queues, credentials)
    controller = Controller(where, config, admin_timeout_s)
    deadline = time.monotonic() + connect_timeout_s

    async def connect() -> RdmaAdminLink:
        link = RdmaLink(verbs, load_verbs(verbs.provider))
        with closing(link_up(link, where, 0, 0, ADMIN_QUEUE_DEPTH - 1, 0, deadline)) as steps:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return RdmaAdminLink(verbs, where, end.value)
                with trio.move_on_after(min(ANSWER_S, max(0.0, deadline - time.monotonic()))):
                    await trio.lowlevel.wait_readable(link.fd)

    return held(controller, connect, connect_timeout_s)


async def discover(
    address: str,
    port: int,
    host_nqn: str,
    host_id: bytes,
    *,
    verbs: VerbsChoice,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> list[DiscoveryEntry]:
    """What the discovery subsystem at an address tells this host. Raises as `open_controller` does."""
    return await read_discovery(
        open_controller, address, port, host_nqn, host_id, timeout_s=timeout_s, verbs=verbs
    )
