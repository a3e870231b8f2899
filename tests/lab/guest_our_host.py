"""Our host role against the kernel's nvmet-tcp, over the guest's loopback."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from nvmeof.errors import ConnectionLost, ConnectRefused
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.host.procedure import done
from nvmeof.transport.base import HostQueue
from nvmeof.transport.tcp import NO_DIGESTS, Controller, Digests, connect_io_queue, open_controller
from nvmeof.wire.status import Status
from tests.support.lab.kernel_host import kernel_log
from tests.support.lab.kernel_target import ADDRESS, KernelTarget
from tests.support.nvme import more_commands
from tests.support.nvme.transport_ways import discover

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:35353535-0000-4000-8000-000000000001"
HOST_ID = uuid.UUID("35353535-0000-4000-8000-000000000001").bytes
BLOCK = 4096
# Emulated, everything takes about ten times as long as usual.
DEADLINE_S = 240.0
KEEP_ALIVE_S = 3.0
"""An answer may take half of it: a busy machine may well have the guest stand still for half a second."""

BOTH_WAYS = pytest.mark.parametrize(
    "digests",
    [NO_DIGESTS, Digests(header=True, data=True), Digests(header=True), Digests(data=True)],
    ids=["plain", "digests", "header-digest", "data-digest"],
)


@pytest.fixture
def target() -> Iterator[KernelTarget]:
    with KernelTarget() as running:
        yield running


def with_controller(
    target: KernelTarget,
    use: Callable[[Controller], Awaitable[None]],
    *,
    subsystem_nqn: str | None = None,
    digests: Digests = NO_DIGESTS,
    keep_alive_s: float = 15,
) -> None:
    """Run `use` with a live controller of the target, under a deadline."""

    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            async with open_controller(
                ADDRESS,
                target.port,
                subsystem_nqn or target.nqn,
                HOST_NQN,
                HOST_ID,
                digests=digests,
                keep_alive_s=keep_alive_s,
                connect_timeout_s=DEADLINE_S,
                admin_timeout_s=DEADLINE_S,
            ) as controller:
                await use(controller)

    trio.run(main)


def with_queue(
    target: KernelTarget, use: Callable[[HostQueue], None], depth: int = 16, digests: Digests = NO_DIGESTS
) -> None:
    """Run `use`, in a thread as workers do, with an I/O queue."""

    async def connect_and_use(controller: Controller) -> None:
        def in_thread() -> None:
            queue = connect_io_queue(controller.info, 1, depth, DEADLINE_S)
            try:
                use(queue)
            finally:
                queue.close()

        await trio.to_thread.run_sync(in_thread)

    with_controller(target, connect_and_use, digests=digests)


def finish(queue: HostQueue, *submitted: Command) -> None:
    """Wait for commands, and raise what became of them."""
    deadline = time.monotonic() + DEADLINE_S
    for command in submitted:
        assert queue.wait(command, deadline), f"{command!r} has no answer"
        command.check()


def perform(queue: HostQueue, command: Command) -> Command:
    queue.submit(command)
    finish(queue, command)
    return command


def test_identify(target: KernelTarget) -> None:
    nguid = target.add_namespace(1, mebibytes=16)
    small = target.add_namespace(7, mebibytes=4, block_bytes=512)

    async def check(controller: Controller) -> None:
        assert [
            (found.nsid, found.nguid, found.size_bytes, found.lba_bytes) for found in controller.namespaces()
        ] == [(1, nguid.bytes, 16 << 20, 4096), (7, small.bytes, 4 << 20, 512)]
        assert controller.facts.cntlid == controller.identify.cntlid
        assert controller.facts.io_queues >= 1

    with_controller(target, check)


@pytest.mark.parametrize("inline_bytes", [None, 4096, 16384])
def test_in_capsule_size_is_honoured(target: KernelTarget, inline_bytes: int | None) -> None:
    """A write goes into the capsule as far as the target allows and is asked for (R2T) beyond."""
    target.close()
    with KernelTarget(inline_bytes=inline_bytes) as chosen:
        chosen.add_namespace(1)

        async def check_size(controller: Controller) -> None:
            if inline_bytes is not None:
                assert controller.facts.in_capsule_bytes == inline_bytes

        def write_around_it(queue: HostQueue) -> None:
            for blocks in (1, 2, 4, 5, 8):
                content = os.urandom(blocks * BLOCK)
                perform(queue, commands.write(1, 0, blocks, [content]))
                into = bytearray(len(content))
                perform(queue, commands.read(1, 0, blocks, memoryview(into)))
                assert into == content

        with_controller(chosen, check_size)
        with_queue(chosen, write_around_it)


@BOTH_WAYS
def test_data_survive(target: KernelTarget, digests: Digests) -> None:
    target.add_namespace(1)
    sizes = (1, 16, 256, 3)  # blocks: within a capsule, and 64 KiB, 1 MiB by R2T

    def use(queue: HostQueue) -> None:
        contents, at = list[tuple[int, bytes]](), 0
        for blocks in sizes:
            contents.append((at, os.urandom(blocks * BLOCK)))
            at += blocks + 5
        writes = []
        for start, content in contents:
            # Scattered, at odd places: the parts are sent as they lie.
            view = memoryview(content)
            command = commands.write(
                1, start, len(content) // BLOCK, [view[:100], view[100:1111], view[1111:]]
            )
            queue.submit(command)
            writes.append(command)
        finish(queue, *writes)
        perform(queue, commands.flush(1))

        reads, buffers = [], [bytearray(len(content)) for _, content in contents]
        for (start, content), buffer in zip(contents, buffers, strict=True):
            command = commands.read(1, start, len(content) // BLOCK, memoryview(buffer))
            queue.submit(command)
            reads.append(command)
        finish(queue, *reversed(reads))
        assert buffers == [content for _, content in contents]
        assert all(command.received == len(buffer) for command, buffer in zip(reads, buffers, strict=True))
        assert queue.in_flight == 0

    with_queue(target, use, digests=digests)


def test_write_zeroes(target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        perform(queue, commands.write(1, 0, 8, [b"\xa5" * 8 * BLOCK]))
        perform(queue, more_commands.write_zeroes(1, 2, 3))
        into = bytearray(8 * BLOCK)
        perform(queue, commands.read(1, 0, 8, memoryview(into)))
        assert into == b"\xa5" * 2 * BLOCK + bytes(3 * BLOCK) + b"\xa5" * 3 * BLOCK

    with_queue(target, use)


def test_refused_commands_end_with_their_status(target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        into = memoryview(bytearray(BLOCK))
        for command, status in (
            # nvmet leaves the range to the block layer, whose error it reports as an internal one.
            (commands.read(1, 16 << 20, 1, into), Status.INTERNAL_ERROR),
            (commands.read(9, 0, 1, into), Status.INVALID_NAMESPACE),
            (more_commands.compare(1, 0, 1, [bytes(BLOCK)]), Status.INVALID_OPCODE),  # nvmet has none
        ):
            queue.submit(command)
            assert queue.wait(command, time.monotonic() + DEADLINE_S)
            assert command.status == status, command
        # A write that the target refuses, with its data under way or not asked for, leaves the queue whole.
        for nsid, blocks in ((1, 1), (9, 1), (9, 16)):
            refused = commands.write(nsid, 16 << 20, blocks, [bytes(blocks * BLOCK)])
            queue.submit(refused)
            assert queue.wait(refused, time.monotonic() + DEADLINE_S)
            assert refused.status
            perform(queue, commands.read(1, 0, 1, into))

    with_queue(target, use)


def test_an_abandoned_read_leaves_its_buffer_alone(target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        perform(queue, commands.write(1, 0, 64, [b"\x5a" * 64 * BLOCK]))
        mine = bytearray(64 * BLOCK)
        command = commands.read(1, 0, 64, memoryview(mine))
        queue.submit(command)
        queue.abandon(command)
        before = bytes(mine)
        into = bytearray(BLOCK)
        perform(queue, commands.read(1, 0, 1, memoryview(into)))
        assert into == b"\x5a" * BLOCK
        assert mine == before

    with_queue(target, use)


@BOTH_WAYS
def test_many_answers_come_into_their_places(target: KernelTarget, digests: Digests) -> None:
    """In whatever order nvmet sends them, and beside some that nobody waits for any more."""
    target.add_namespace(1)
    dice = random.Random(35)

    def use(queue: HostQueue) -> None:
        content = dice.randbytes(256 * BLOCK)
        perform(queue, commands.write(1, 0, 256, [content]))
        for _ in range(12):
            asked = []
            for _ in range(30):
                blocks, whole = dice.choice((1, 1, 2, 5, 5, 17)), bytearray(19 * BLOCK)
                at = dice.randrange(256 - blocks)
                into = memoryview(whole)[BLOCK : (1 + blocks) * BLOCK]
                asked.append((commands.read(1, at, blocks, into), whole, at * BLOCK, len(into)))
                queue.submit(asked[-1][0], more=len(asked) < 30)
            left = [dice.random() < 0.1 for _ in asked]
            for (command, *_), is_left in zip(asked, left, strict=True):
                if is_left:
                    queue.abandon(command)
            before = [bytes(whole) for _, whole, _, _ in asked]
            finish(queue, *(each[0] for each, is_left in zip(asked, left, strict=True) if not is_left))
            for (_, whole, at, size), is_left, was in zip(asked, left, before, strict=True):
                came = bytes(BLOCK) + content[at : at + size] + bytes(18 * BLOCK - size)
                assert whole == (was if is_left else came)

    with_queue(target, use, depth=64, digests=digests)


def test_the_controller_is_kept_alive(target: KernelTarget) -> None:
    """nvmet ends a controller that it has not heard of for twice the time-out that it was told."""
    target.add_namespace(1)
    before = set(kernel_log().splitlines())

    async def stay(controller: Controller) -> None:
        with trio.move_on_after(2.3 * KEEP_ALIVE_S) as scope:
            await controller.ended.wait()
        assert scope.cancelled_caught, f"lost: {controller.error}"
        await controller.perform(done(commands.identify(1)))

    with_controller(target, stay, keep_alive_s=KEEP_ALIVE_S)
    assert not [line for line in set(kernel_log().splitlines()) - before if "keep-alive timer" in line]


def test_namespaces_that_come_and_go_are_told(target: KernelTarget) -> None:
    target.add_namespace(1)

    async def watch(controller: Controller) -> None:
        async def told(expected: list[int]) -> None:
            while [found.nsid for found in controller.namespaces()] != expected:
                assert not controller.ended.is_set()
                await controller.events.receive()

        await told([1])
        nguid = await trio.to_thread.run_sync(target.add_namespace, 2)
        await told([1, 2])
        assert controller.namespaces()[1].nguid == nguid.bytes
        await trio.to_thread.run_sync(target.remove_namespace, 1)
        await told([2])

    with_controller(target, watch)


def test_the_end_of_the_target_ends_everything_once(target: KernelTarget) -> None:
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

    with_controller(target, lose_it)


def test_discovery(target: KernelTarget) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE_S):
            entries = await discover(ADDRESS, target.port, HOST_NQN, HOST_ID, timeout_s=DEADLINE_S)
        found = {entry.subsystem_nqn: entry for entry in entries}
        assert target.nqn in found
        assert (found[target.nqn].address, found[target.nqn].service) == (ADDRESS, str(target.port))

    trio.run(main)


def test_wrong_names_are_refused() -> None:
    async def nothing(controller: Controller) -> None:
        pytest.fail("connected")

    with KernelTarget(allow_any_host=False) as closed:
        with pytest.raises(ConnectRefused):
            with_controller(closed, nothing)
        closed.allow_host(HOST_NQN)

        async def let_in(controller: Controller) -> None:
            assert controller.namespaces() == []

        with_controller(closed, let_in)
        with pytest.raises(ConnectRefused):
            with_controller(closed, nothing, subsystem_nqn="nqn.2026-01.lab:another")
