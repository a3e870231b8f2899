"""Our host role before a target in the lab's guest: over TCP, by verbs on rxe, by an emulated NIC afar."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

import trio

from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.transport import rdma, tcp
from nvmeof.transport.base import HostQueue, VerbsChoice
from nvmeof.transport.controller import Controller
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.rdma_cable import KERNEL, OURS, far_device
from tests.support.nvme.transport_ways import discover

HOST_NQN: Final = "nqn.2014-08.org.nvmexpress:uuid:35353535-0000-4000-8000-000000000001"
HOST_ID: Final = uuid.UUID("35353535-0000-4000-8000-000000000001").bytes
BLOCK: Final = 4096
RDMA_PORT: Final = 4421
# Emulated, everything takes about ten times as long as usual.
DEADLINE_S: Final = 240.0


class Place(Protocol):
    """A subsystem of the kernel's or of ours."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def nqn(self) -> str: ...


class HostRole:
    """Our host role over one transport."""

    def __init__(self, **options: Any) -> None:
        """As the transport's `open_controller` takes them: RDMA's has `verbs`."""
        self._options = options
        self._transport: Any = rdma if "verbs" in options else tcp

    def target(self, **options: Any) -> KernelTarget:
        """One of the kernel's that this role can reach."""
        if self._transport is tcp:
            return KernelTarget(**options)
        return KernelTarget(port=RDMA_PORT, address=KERNEL, transport="rdma", **options)

    def with_controller(
        self,
        where: Place,
        use: Callable[[Controller], Awaitable[None]],
        *,
        subsystem_nqn: str | None = None,
        keep_alive_s: float = 15,
    ) -> None:
        """Run `use` with a live controller, under a deadline."""

        async def main() -> None:
            with trio.fail_after(DEADLINE_S):
                async with self._transport.open_controller(
                    where.address,
                    where.port,
                    subsystem_nqn or where.nqn,
                    HOST_NQN,
                    HOST_ID,
                    keep_alive_s=keep_alive_s,
                    connect_timeout_s=DEADLINE_S,
                    admin_timeout_s=DEADLINE_S,
                    **self._options,
                ) as controller:
                    await use(controller)

        trio.run(main)

    def discovered(self, where: Place) -> list[DiscoveryEntry]:
        """The log of the discovery subsystem at its address."""

        async def main() -> list[DiscoveryEntry]:
            with trio.fail_after(DEADLINE_S):
                return await discover(
                    where.address, where.port, HOST_NQN, HOST_ID, timeout_s=DEADLINE_S, **self._options
                )

        return trio.run(main)

    def queue(self, controller: Controller, depth: int) -> HostQueue:
        """An I/O queue, to be closed by who asks for it."""
        queue: HostQueue = self._transport.connect_io_queue(controller.info, 1, depth, DEADLINE_S)
        return queue

    async def use_queue(
        self, controller: Controller, use: Callable[[HostQueue], None], depth: int = 16
    ) -> None:
        """Run `use`, in a thread as workers do, with an I/O queue."""

        def in_thread() -> None:
            with contextlib.closing(self.queue(controller, depth)) as queue:
                use(queue)

        await trio.to_thread.run_sync(in_thread)

    def with_queue(self, where: Place, use: Callable[[HostQueue], None], depth: int = 16) -> None:
        self.with_controller(where, lambda controller: self.use_queue(controller, use, depth))


@contextlib.contextmanager
def role_of(name: str) -> Iterator[HostRole]:
    """`tcp`; `rxe` or `emulator`, which need the cable."""
    if name == "tcp":
        yield HostRole()
    elif name == "rxe":
        yield HostRole(verbs=VerbsChoice("pyverbs", KERNEL))
    else:
        with far_device():
            yield HostRole(verbs=VerbsChoice("emulator.roce.pyverbs", OURS))


def finish(queue: HostQueue, *submitted: Command) -> None:
    """Wait for commands, and raise what became of them."""
    deadline = time.monotonic() + DEADLINE_S
    for command in submitted:
        assert queue.wait(command, deadline), f"{command!r} has no answer"
        command.check()


def perform(queue: HostQueue, command: Command) -> None:
    queue.submit(command)
    finish(queue, command)


def status_of(queue: HostQueue, command: Command) -> int | None:
    """Perform one that may be refused."""
    queue.submit(command)
    assert queue.wait(command, time.monotonic() + DEADLINE_S)
    return command.status


def write_and_read(queue: HostQueue) -> None:
    """4 KiB to 1 MiB, several at once: from scattered places, into a registered buffer and into others."""
    contents, at = list[tuple[int, bytes]](), 0
    for blocks in (1, 16, 256, 3, 5):
        contents.append((at, os.urandom(blocks * BLOCK)))
        at += blocks + 5
    writes = []
    for start, content in contents:
        # Scattered, at odd places: the parts are sent as they lie.
        view = memoryview(content)
        command = commands.write(1, start, len(content) // BLOCK, [view[:100], view[100:1111], view[1111:]])
        queue.submit(command)
        writes.append(command)
    finish(queue, *writes)
    perform(queue, commands.flush(1))

    registered = memoryview(mmap.mmap(-1, 2 << 20))
    queue.register(registered)
    for make in (lambda size: registered[BLOCK : BLOCK + size], lambda size: memoryview(bytearray(size))):
        for start, content in contents:
            into = make(len(content))
            perform(queue, commands.read(1, start, len(content) // BLOCK, into))
            assert into == content
    reads, buffers = [], [bytearray(len(content)) for _, content in contents]
    for (start, content), buffer in zip(contents, buffers, strict=True):
        command = commands.read(1, start, len(content) // BLOCK, memoryview(buffer))
        queue.submit(command)
        reads.append(command)
    finish(queue, *reversed(reads))
    assert buffers == [content for _, content in contents]
    assert all(command.received == len(buffer) for command, buffer in zip(reads, buffers, strict=True))
    # Out of the registered buffer, too.
    registered[: 1 << 20] = contents[2][1]
    perform(queue, commands.write(1, 300, 256, [registered[: 1 << 20]]))
    again = bytearray(1 << 20)
    perform(queue, commands.read(1, 300, 256, memoryview(again)))
    assert again == contents[2][1]
    assert queue.in_flight == 0
