"""Our host role over RDMA: on nvmet-rdma, by the emulator and by pyverbs on the kernel's rxe; and
by pyverbs on our enclosure on the emulator. The text of the transport is the same each time.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio

from nvmeof.errors import ConnectionLost, ConnectRefused
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.procedure import done
from nvmeof.transport.base import HostQueue
from nvmeof.transport.rdma import Controller, VerbsChoice, connect_io_queue, open_controller
from nvmeof.wire.status import Status
from tests.support.lab.kernel_host import kernel_log
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.lab_enclosure import start_enclosure
from tests.support.lab.rdma_cable import KERNEL, OURS, Cable, far_device, inside
from tests.support.nvme.transport_ways import discover
from tests.support.processes import Processes

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:35353535-0000-4000-8000-000000000001"
HOST_ID = uuid.UUID("35353535-0000-4000-8000-000000000001").bytes
PORT = 4421
BLOCK = 4096
# Emulated, everything takes about ten times as long as usual.
DEADLINE_S = 240.0
KEEP_ALIVE_S = 3.0
"""An answer may take half of it: a busy machine may well have the guest stand still for half a second."""


@pytest.fixture(params=["emulator", "rxe"])
def choice(request: pytest.FixtureRequest, cable: Cable) -> Iterator[VerbsChoice]:
    """Whose verbs lead to the target: an emulated device at the far end, or rxe beside it."""
    if request.param == "rxe":
        yield VerbsChoice("pyverbs", KERNEL)
        return
    with far_device():
        yield VerbsChoice("emulator.roce.pyverbs", OURS)


RXE_NIGHTLY = pytest.mark.parametrize(
    "choice", ["emulator", pytest.param("rxe", marks=pytest.mark.nightly)], indirect=True
)
"""For what is a matter of a few capsules: the other tests send such capsules by rxe each time."""


@pytest.fixture
def target(cable: Cable) -> Iterator[KernelTarget]:
    with KernelTarget(port=PORT, address=KERNEL, transport="rdma") as running:
        yield running


def with_controller(
    choice: VerbsChoice,
    where: Any,
    use: Callable[[Controller], Awaitable[None]],
    *,
    subsystem_nqn: str | None = None,
    keep_alive_s: float = 15,
) -> None:
    """Run `use` with a live controller of a target or an enclosure, under a deadline."""

    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            async with open_controller(
                where.address,
                where.port,
                subsystem_nqn or where.nqn,
                HOST_NQN,
                HOST_ID,
                verbs=choice,
                keep_alive_s=keep_alive_s,
                connect_timeout_s=DEADLINE_S,
                admin_timeout_s=DEADLINE_S,
            ) as controller:
                await use(controller)

    trio.run(main)


def with_queue(choice: VerbsChoice, where: Any, use: Callable[[HostQueue], None], depth: int = 16) -> None:
    """Run `use`, in a thread as workers do, with an I/O queue."""

    async def connect_and_use(controller: Controller) -> None:
        def in_thread() -> None:
            queue = connect_io_queue(controller.info, 1, depth, DEADLINE_S)
            try:
                use(queue)
            finally:
                queue.close()

        await trio.to_thread.run_sync(in_thread)

    with_controller(choice, where, connect_and_use)


def finish(queue: HostQueue, *submitted: Command) -> None:
    """Wait for commands, and raise what became of them."""
    deadline = time.monotonic() + DEADLINE_S
    for command in submitted:
        assert queue.wait(command, deadline), f"{command!r} has no answer"
        command.check()


def perform(queue: HostQueue, command: Command) -> None:
    queue.submit(command)
    finish(queue, command)


def write_and_read(queue: HostQueue) -> None:
    """4 KiB to 1 MiB, several at once: from scattered places, into a registered buffer and into others."""
    contents, at = list[tuple[int, bytes]](), 0
    for blocks in (1, 16, 256, 3, 5):
        contents.append((at, os.urandom(blocks * BLOCK)))
        at += blocks + 5
    writes = []
    for start, content in contents:
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
    # Out of the registered buffer, too.
    registered[: 1 << 20] = contents[2][1]
    perform(queue, commands.write(1, 300, 256, [registered[: 1 << 20]]))
    again = bytearray(1 << 20)
    perform(queue, commands.read(1, 300, 256, memoryview(again)))
    assert again == contents[2][1]
    assert queue.in_flight == 0


@RXE_NIGHTLY
def test_identify(choice: VerbsChoice, target: KernelTarget) -> None:
    nguid = target.add_namespace(1, mebibytes=16)
    small = target.add_namespace(7, mebibytes=4, block_bytes=512)

    async def check(controller: Controller) -> None:
        assert [
            (found.nsid, found.nguid, found.size_bytes, found.lba_bytes) for found in controller.namespaces()
        ] == [(1, nguid.bytes, 16 << 20, 4096), (7, small.bytes, 4 << 20, 512)]
        assert controller.facts.cntlid == controller.identify.cntlid

    with_controller(choice, target, check)


@pytest.mark.parametrize("inline_bytes", [None, 0, 16384])
def test_data_survive(choice: VerbsChoice, target: KernelTarget, inline_bytes: int | None) -> None:
    target.close()
    with KernelTarget(port=PORT, address=KERNEL, transport="rdma", inline_bytes=inline_bytes) as chosen:
        chosen.add_namespace(1)
        with_queue(choice, chosen, write_and_read)


def test_refused_commands_end_with_their_status(choice: VerbsChoice, target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        into = memoryview(bytearray(BLOCK))
        for nsid, status in ((9, Status.INVALID_NAMESPACE), (1, Status.INTERNAL_ERROR)):
            command = commands.read(nsid, 16 << 20, 1, into)
            queue.submit(command)
            assert queue.wait(command, time.monotonic() + DEADLINE_S)
            assert command.status == status, command
        for blocks in (1, 16):
            refused = commands.write(9, 0, blocks, [bytes(blocks * BLOCK)])
            queue.submit(refused)
            assert queue.wait(refused, time.monotonic() + DEADLINE_S)
            assert refused.status
            perform(queue, commands.read(1, 0, 1, into))

    with_queue(choice, target, use)


def test_an_abandoned_read_leaves_its_buffer_alone(choice: VerbsChoice, target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        perform(queue, commands.write(1, 0, 64, [b"\x5a" * 64 * BLOCK]))
        mine = memoryview(mmap.mmap(-1, 64 * BLOCK))
        queue.register(mine)
        command = commands.read(1, 0, 64, mine)
        queue.submit(command)
        queue.abandon(command)
        before = bytes(mine)
        into = bytearray(BLOCK)
        perform(queue, commands.read(1, 0, 1, memoryview(into)))
        assert into == b"\x5a" * BLOCK
        assert mine == before

    with_queue(choice, target, use)


@RXE_NIGHTLY
def test_the_controller_is_kept_alive(choice: VerbsChoice, target: KernelTarget) -> None:
    """nvmet ends a controller that it has not heard of for twice the time-out that it was told."""
    target.add_namespace(1)
    before = set(kernel_log().splitlines())

    async def stay(controller: Controller) -> None:
        with trio.move_on_after(2.3 * KEEP_ALIVE_S) as scope:
            await controller.ended.wait()
        assert scope.cancelled_caught, f"lost: {controller.error}"
        await controller.perform(done(commands.identify(1)))

    with_controller(choice, target, stay, keep_alive_s=KEEP_ALIVE_S)
    assert not [line for line in set(kernel_log().splitlines()) - before if "keep-alive timer" in line]


def test_a_reset_and_again(choice: VerbsChoice, target: KernelTarget) -> None:
    target.add_namespace(1)
    content = os.urandom(16 * BLOCK)

    async def write_then_reset(controller: Controller) -> None:
        def in_thread() -> None:
            queue = connect_io_queue(controller.info, 1, 8, DEADLINE_S)
            try:
                perform(queue, commands.write(1, 0, 16, [content]))
            finally:
                queue.close()

        await trio.to_thread.run_sync(in_thread)
        await controller.reset()

    def read_back(queue: HostQueue) -> None:
        into = bytearray(len(content))
        perform(queue, commands.read(1, 0, 16, memoryview(into)))
        assert into == content

    with_controller(choice, target, write_then_reset)
    with_queue(choice, target, read_back)


@RXE_NIGHTLY
def test_namespaces_that_come_and_go_are_told(choice: VerbsChoice, target: KernelTarget) -> None:
    target.add_namespace(1)

    async def watch(controller: Controller) -> None:
        async def told(expected: list[int]) -> None:
            while [found.nsid for found in controller.namespaces()] != expected:
                assert not controller.ended.is_set()
                await controller.events.receive()

        await told([1])
        await trio.to_thread.run_sync(target.add_namespace, 2)
        await told([1, 2])
        await trio.to_thread.run_sync(target.remove_namespace, 1)
        await told([2])

    with_controller(choice, target, watch)


def test_the_end_of_the_target_ends_everything_once(choice: VerbsChoice, target: KernelTarget) -> None:
    target.add_namespace(1)

    async def lose_it(controller: Controller) -> None:
        queue = await trio.to_thread.run_sync(connect_io_queue, controller.info, 1, 8, DEADLINE_S)
        try:
            into = memoryview(bytearray(BLOCK))
            perform(queue, commands.read(1, 0, 1, into))
            await trio.to_thread.run_sync(target.close)
            await controller.ended.wait()
            assert isinstance(controller.error, ConnectionLost)
            command = commands.read(1, 0, 1, into)
            try:
                queue.submit(command)
            except ConnectionLost:
                pass
            else:
                assert queue.wait(command, time.monotonic() + DEADLINE_S)
                assert command.lost
            assert not queue.alive
        finally:
            queue.close()

    with_controller(choice, target, lose_it)


@RXE_NIGHTLY
def test_discovery(choice: VerbsChoice, target: KernelTarget) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            entries = await discover(KERNEL, PORT, HOST_NQN, HOST_ID, verbs=choice, timeout_s=DEADLINE_S)
        found = {entry.subsystem_nqn: entry for entry in entries}
        assert (found[target.nqn].address, found[target.nqn].service) == (KERNEL, str(PORT))

    trio.run(main)


@RXE_NIGHTLY
def test_wrong_names_are_refused(choice: VerbsChoice, cable: Cable) -> None:
    async def nothing(controller: Controller) -> None:
        pytest.fail("connected")

    with KernelTarget(allow_any_host=False, port=PORT, address=KERNEL, transport="rdma") as closed:
        with pytest.raises(ConnectRefused):
            with_controller(choice, closed, nothing)
        closed.allow_host(HOST_NQN)

        async def let_in(controller: Controller) -> None:
            assert controller.namespaces() == []

        with_controller(choice, closed, let_in)
    with pytest.raises(ConnectionLost, match="nobody listens"):
        with_controller(choice, closed, nothing)


def test_rxe_to_our_enclosure(cable: Cable, processes: Processes, tmp_path: Any) -> None:
    with inside():
        enclosure = start_enclosure(processes, tmp_path, "--transport", "rdma", "--address", OURS)
    with_queue(VerbsChoice("pyverbs", KERNEL), enclosure, write_and_read)
    assert enclosure.process.stop(60) == 0, enclosure.process.output
