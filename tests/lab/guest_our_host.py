"""Our host role against the kernel's nvmet: over the guest's loopback by TCP, by RDMA on the emulator and on
rxe; and on rxe against our enclosure on the emulator. The text of the transport is the same each time.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from nvmeof.errors import ConnectionLost, ConnectRefused
from nvmeof.host import commands
from nvmeof.host.procedure import done
from nvmeof.tcp.pdu import NO_DIGESTS, Digests
from nvmeof.transport.base import HostQueue
from nvmeof.transport.controller import Controller
from nvmeof.wire.status import Status
from tests.support.lab.host_role import (
    BLOCK,
    DEADLINE_S,
    HOST_NQN,
    HostRole,
    finish,
    perform,
    role_of,
    status_of,
    write_and_read,
)
from tests.support.lab.kernel_host import kernel_log
from tests.support.lab.kernel_target import KernelTarget
from tests.support.lab.lab_enclosure import start_at_the_far_end
from tests.support.lab.rdma_cable import Cable
from tests.support.nvme import more_commands
from tests.support.processes import Processes

KEEP_ALIVE_S = 3.0
"""An answer may take half of it: a busy machine may well have the guest stand still for half a second."""

DIGESTS = pytest.mark.parametrize(
    "digests",
    [NO_DIGESTS, Digests(header=True, data=True), Digests(header=True), Digests(data=True)],
    ids=["plain", "digests", "header-digest", "data-digest"],
)
TCP_ALONE = pytest.mark.parametrize("role", ["tcp"], indirect=True)
RDMA_ALONE = pytest.mark.parametrize("role", ["emulator", "rxe"], indirect=True)
RXE_NIGHTLY = pytest.mark.parametrize(
    "role", ["tcp", "emulator", pytest.param("rxe", marks=pytest.mark.nightly)], indirect=True
)
"""For what is a matter of a few capsules: the other tests send such capsules by rxe each time."""


@pytest.fixture(params=["tcp", "emulator", "rxe"])
def role(request: pytest.FixtureRequest) -> Iterator[HostRole]:
    """Which way leads to the target: loopback, an emulated device at the far end, or rxe beside it."""
    if request.param != "tcp":
        request.getfixturevalue("cable")
    with role_of(request.param) as found:
        yield found


@pytest.fixture
def target(role: HostRole) -> Iterator[KernelTarget]:
    with role.target() as running:
        yield running


@RXE_NIGHTLY
def test_identify(role: HostRole, target: KernelTarget) -> None:
    nguid = target.add_namespace(1, mebibytes=16)
    small = target.add_namespace(7, mebibytes=4, block_bytes=512)

    async def check(controller: Controller) -> None:
        assert [
            (found.nsid, found.nguid, found.size_bytes, found.lba_bytes) for found in controller.namespaces()
        ] == [(1, nguid.bytes, 16 << 20, 4096), (7, small.bytes, 4 << 20, 512)]
        assert controller.facts.cntlid == controller.identify.cntlid
        assert controller.facts.io_queues >= 1

    role.with_controller(target, check)


@TCP_ALONE
@pytest.mark.parametrize("inline_bytes", [None, 4096, 16384])
def test_in_capsule_size_is_honoured(role: HostRole, inline_bytes: int | None) -> None:
    """A write goes into the capsule as far as the target allows and is asked for (R2T) beyond."""
    with role.target(inline_bytes=inline_bytes) as chosen:
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

        role.with_controller(chosen, check_size)
        role.with_queue(chosen, write_around_it)


@DIGESTS
def test_data_survive_with_digests(digests: Digests) -> None:
    with KernelTarget() as target:
        target.add_namespace(1)
        HostRole(digests=digests).with_queue(target, write_and_read)


@RDMA_ALONE
@pytest.mark.parametrize("inline_bytes", [None, 0, 16384])
def test_data_survive_by_rdma(role: HostRole, inline_bytes: int | None) -> None:
    with role.target(inline_bytes=inline_bytes) as target:
        target.add_namespace(1)
        role.with_queue(target, write_and_read)


@TCP_ALONE
def test_write_zeroes(role: HostRole, target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        perform(queue, commands.write(1, 0, 8, [b"\xa5" * 8 * BLOCK]))
        perform(queue, more_commands.write_zeroes(1, 2, 3))
        into = bytearray(8 * BLOCK)
        perform(queue, commands.read(1, 0, 8, memoryview(into)))
        assert into == b"\xa5" * 2 * BLOCK + bytes(3 * BLOCK) + b"\xa5" * 3 * BLOCK

    role.with_queue(target, use)


def test_refused_commands_end_with_their_status(role: HostRole, target: KernelTarget) -> None:
    target.add_namespace(1)

    def use(queue: HostQueue) -> None:
        into = memoryview(bytearray(BLOCK))
        for command, status in (
            # nvmet leaves the range to the block layer, whose error it reports as an internal one.
            (commands.read(1, 16 << 20, 1, into), Status.INTERNAL_ERROR),
            (commands.read(9, 0, 1, into), Status.INVALID_NAMESPACE),
            (more_commands.compare(1, 0, 1, [bytes(BLOCK)]), Status.INVALID_OPCODE),  # nvmet has none
        ):
            assert status_of(queue, command) == status, command
        # A write that the target refuses, with its data under way or not asked for, leaves the queue whole.
        for nsid, blocks in ((1, 1), (9, 1), (9, 16)):
            assert status_of(queue, commands.write(nsid, 16 << 20, blocks, [bytes(blocks * BLOCK)]))
            perform(queue, commands.read(1, 0, 1, into))

    role.with_queue(target, use)


def test_an_abandoned_read_leaves_its_buffer_alone(role: HostRole, target: KernelTarget) -> None:
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

    role.with_queue(target, use)


@DIGESTS
def test_many_answers_come_into_their_places(digests: Digests) -> None:
    """In whatever order nvmet sends them, and beside some that nobody waits for any more."""
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

    with KernelTarget() as target:
        target.add_namespace(1)
        HostRole(digests=digests).with_queue(target, use, depth=64)


@RXE_NIGHTLY
def test_the_controller_is_kept_alive(role: HostRole, target: KernelTarget) -> None:
    """nvmet ends a controller that it has not heard of for twice the time-out that it was told."""
    target.add_namespace(1)
    before = set(kernel_log().splitlines())

    async def stay(controller: Controller) -> None:
        with trio.move_on_after(2.3 * KEEP_ALIVE_S) as scope:
            await controller.ended.wait()
        assert scope.cancelled_caught, f"lost: {controller.error}"
        await controller.perform(done(commands.identify(1)))

    role.with_controller(target, stay, keep_alive_s=KEEP_ALIVE_S)
    assert not [line for line in set(kernel_log().splitlines()) - before if "keep-alive timer" in line]


@RDMA_ALONE
def test_a_reset_and_again(role: HostRole, target: KernelTarget) -> None:
    target.add_namespace(1)
    content = os.urandom(16 * BLOCK)

    async def write_then_reset(controller: Controller) -> None:
        await role.use_queue(
            controller, lambda queue: perform(queue, commands.write(1, 0, 16, [content])), depth=8
        )
        await controller.reset()

    def read_back(queue: HostQueue) -> None:
        into = bytearray(len(content))
        perform(queue, commands.read(1, 0, 16, memoryview(into)))
        assert into == content

    role.with_controller(target, write_then_reset)
    role.with_queue(target, read_back)


@RXE_NIGHTLY
def test_namespaces_that_come_and_go_are_told(role: HostRole, target: KernelTarget) -> None:
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

    role.with_controller(target, watch)


def test_the_end_of_the_target_ends_everything_once(role: HostRole, target: KernelTarget) -> None:
    target.add_namespace(1)

    async def lose_it(controller: Controller) -> None:
        queue = await trio.to_thread.run_sync(role.queue, controller, 8)
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

    role.with_controller(target, lose_it)


@RXE_NIGHTLY
def test_discovery(role: HostRole, target: KernelTarget) -> None:
    found = {entry.subsystem_nqn: entry for entry in role.discovered(target)}
    assert target.nqn in found
    assert (found[target.nqn].address, found[target.nqn].service) == (target.address, str(target.port))


@RXE_NIGHTLY
def test_wrong_names_are_refused(role: HostRole) -> None:
    async def nothing(controller: Controller) -> None:
        pytest.fail("connected")

    async def let_in(controller: Controller) -> None:
        assert controller.namespaces() == []

    with role.target(allow_any_host=False) as closed:
        with pytest.raises(ConnectRefused):
            role.with_controller(closed, nothing)
        closed.allow_host(HOST_NQN)
        role.with_controller(closed, let_in)
        with pytest.raises(ConnectRefused):
            role.with_controller(closed, nothing, subsystem_nqn="nqn.2026-01.lab:another")
    with pytest.raises(ConnectionLost, match=r"nobody listens|cannot connect"):
        role.with_controller(closed, nothing)


def test_rxe_to_our_enclosure(cable: Cable, processes: Processes, tmp_path: Path) -> None:
    enclosure = start_at_the_far_end(processes, tmp_path)
    with role_of("rxe") as role:
        role.with_queue(enclosure, write_and_read)
    assert enclosure.process.stop(60) == 0, enclosure.process.output
