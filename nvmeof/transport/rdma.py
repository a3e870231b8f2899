"""NVMe/RDMA, host role: the admin queue of a controller. Read `controller.py` and `rdma_queue.py` first.

trio waits for the descriptors of the connection manager and of the completion channel.
"""

import time
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from typing import Any

import trio

from nvmeof.errors import ConnectionLost
from nvmeof.host.command import Command
from nvmeof.limits import ADMIN_QUEUE_DEPTH
from nvmeof.transport.base import Address, ControllerInfo, VerbsChoice
from nvmeof.transport.controller import Controller, opened
from nvmeof.transport.rdma_connect import ANSWER_S, RdmaLink
from nvmeof.transport.rdma_queue import Linked, link_up
from nvmeof.transport.rdma_queue import connect_io_queue as connect_io_queue  # of the transport
from nvmeof.transport.verbs_provider import load_verbs


class RdmaAdminLink:
    """`controller.AdminLink` over a connected queue pair, which it owns."""

    ready = True

    def __init__(self, choice: VerbsChoice, address: Address, linked: Linked) -> None:
        self._choice = choice
        self._address = address
        self._linked = linked
        self._over = trio.Event()

    def submit(self, command: Command, now: float) -> None:
        self._linked.queue.submit(command, now)

    async def send(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._over.is_set():
            raise ConnectionLost(f"{self._address}: closed by us")
        self._linked.post()

    async def receive(self) -> list[Command]:
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
            # Only now: a completion from before the end may tell why it came.
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
        self._over.set()
        self._linked.link.break_off()
        return self._linked.queue.fail(reason)

    def complete(self, info: ControllerInfo) -> ControllerInfo:
        return replace(info, transport="rdma", verbs=self._choice)

    async def close(self) -> None:
        self._over.set()
        self._linked.end("closed by us")
        await trio.lowlevel.checkpoint()


def open_controller(
    address: str, port: int, *names: Any, verbs: VerbsChoice, **options: Any
) -> AbstractAsyncContextManager[Controller]:
    """See `controller.opened`, which takes the other arguments. Also raises `VerbsUnavailable`."""
    # Here, before any deadline runs: the first import of a provider takes a slow machine seconds.
    provider = load_verbs(verbs.provider)

    async def connect(where: Address, deadline: float) -> RdmaAdminLink:
        link = RdmaLink(verbs, provider)
        with closing(link_up(link, where, 0, 0, ADMIN_QUEUE_DEPTH - 1, 0, deadline)) as steps:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return RdmaAdminLink(verbs, where, end.value)
                with trio.move_on_after(min(ANSWER_S, max(0.0, deadline - time.monotonic()))):
                    await trio.lowlevel.wait_readable(link.fd)

    return opened(connect, address, port, *names, **options)
