"""Our host queue and our controller queue, with real drives behind it: what was written is what is read.

Random commands from a seed, compared with a plain bytearray, whatever the pieces in which bytes arrive, with
digests and without, for drives in memory and in files, while drives are slow, full or pulled out.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from emulator.jbof.drive import Drive
from emulator.jbof.faults import ErrorFault, FlipFault
from emulator.jbof.medium import FileMedium, Medium, MemoryMedium
from nvmeof.controller.settings import ControllerSettings
from nvmeof.controller.storage import Operation
from nvmeof.controller.subsystem import Namespace
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.host import commands
from nvmeof.host.bring_up import SessionConfig
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import TcpQueue
from nvmeof.tcp.pdu import NO_DIGESTS, Digests
from nvmeof.wire.sqe import DatasetRange
from nvmeof.wire.status import Status
from tests.support.nvme import more_commands
from tests.support.nvme.nvme_ends import HOST, HOST_ID, LBA, SUBSYSTEM, AdminHost, Bench, io_queue

BLOCKS = 64
BOTH = Digests(header=True, data=True)


class World:
    """A bench whose namespace 1 is a drive of the emulator, one admin and one I/O queue."""

    def __init__(
        self, medium: Medium, *, chunk: int = 1 << 16, dice: random.Random | None = None, digests: Digests
    ) -> None:
        self.bench = Bench(
            namespaces=0,
            chunk=chunk,
            dice=dice,
            settings=ControllerSettings(in_capsule_bytes=8192),
            tcp=TcpSettings(max_h2c_data=12288),
        )
        self.drive = Drive(0, medium, nguid=b"\7" * 16, seed=35)
        self.bench.target.attach(self.bench.subsystem, Namespace(1, self.drive))
        self.admin = AdminHost(self.bench, SessionConfig(SUBSYSTEM, HOST, HOST_ID, 0.0, 4), digests)
        self.admin.start()
        self.queue: TcpQueue
        self.queue, self.host, self.link = io_queue(self.bench, self.admin, digests=digests)

    def submit(self, command: Command) -> Command:
        self.queue.submit(command, self.bench.now)
        self.bench.settle()
        return command

    def run(self, command: Command) -> Command:
        assert self.submit(command).done, command
        return command

    def read(self, slba: int, blocks: int) -> bytes:
        into = bytearray(blocks * LBA)
        self.run(commands.read(1, slba, blocks, memoryview(into))).check()
        return bytes(into)


@pytest.fixture(params=["memory", "file"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param == "memory":
        return MemoryMedium(BLOCKS * LBA)
    return FileMedium(tmp_path / "drive.img", BLOCKS * LBA)


@pytest.mark.parametrize("digests", [NO_DIGESTS, BOTH, Digests(header=True)], ids=["plain", "both", "header"])
@pytest.mark.parametrize(("chunk", "seed", "rounds"), [(1, None, 6), (1 << 16, None, 60), (5000, 35, 40)])
def test_what_is_written_is_read(
    medium: Medium, digests: Digests, chunk: int, seed: int | None, rounds: int
) -> None:
    world = World(medium, chunk=chunk, dice=None if seed is None else random.Random(seed), digests=digests)
    shadow = bytearray(BLOCKS * LBA)
    dice = random.Random(3500 + rounds)
    for _ in range(rounds):
        blocks = dice.choice([1, 2, 3, 7])
        slba = dice.randrange(BLOCKS - blocks)
        where = slice(slba * LBA, (slba + blocks) * LBA)
        match dice.randrange(6):
            case 0 | 1 | 2:
                data = dice.randbytes(blocks * LBA)
                cut = dice.randrange(1, len(data))
                world.run(commands.write(1, slba, blocks, [data[:cut], data[cut:]])).check()
                shadow[where] = data
            case 3:
                world.run(more_commands.write_zeroes(1, slba, blocks, deallocate=dice.random() < 0.5)).check()
                shadow[where] = bytes(blocks * LBA)
            case 4:
                ranges = [DatasetRange(slba, blocks)]
                world.run(more_commands.dataset_management(1, ranges)).check()
                shadow[where] = bytes(blocks * LBA)
            case _:
                same = bytes(shadow[where])
                world.run(more_commands.compare(1, slba, blocks, [same])).check()
                other = same[:-1] + bytes([same[-1] ^ 1])
                wrong = world.run(more_commands.compare(1, slba, blocks, [other]))
                assert wrong.status == Status.COMPARE_FAILURE
        assert world.read(slba, blocks) == shadow[where]
    if chunk > 1:
        for slba in range(0, BLOCKS, 8):
            assert world.read(slba, 8) == shadow[slba * LBA : (slba + 8) * LBA]
    world.drive.close()


def test_many_in_flight_on_a_slow_drive_each_end_once(medium: Medium) -> None:
    world = World(medium, digests=BOTH)
    for slba in range(8):
        world.run(commands.write(1, slba, 1, [bytes([slba + 1]) * LBA])).check()
    world.drive.set_faults(extra_latency_s=0.25)
    buffers = [bytearray(LBA) for _ in range(8)]
    flying = [commands.read(1, slba, 1, memoryview(buffers[slba])) for slba in range(8)]
    for command in flying:
        world.submit(command)
    assert not any(command.done for command in flying)
    world.bench.settle(0.2)
    assert not any(command.done for command in flying)
    world.bench.settle(0.25)
    assert [command.status for command in flying] == [0] * 8
    assert [buffer[0] for buffer in buffers] == list(range(1, 9))
    assert world.drive.counters.faults_injected == {"slow": 8}
    world.drive.close()


def test_faults_of_a_drive(medium: Medium) -> None:
    world = World(medium, digests=NO_DIGESTS)
    first = b"1" * LBA
    world.run(commands.write(1, 0, 1, [first])).check()

    world.drive.set_faults(full=True)
    refused = world.run(commands.write(1, 0, 1, [b"2" * LBA]))
    assert refused.status == Status.CAPACITY_EXCEEDED
    assert world.read(0, 1) == first, "a refused write changes nothing"

    world.drive.heal()
    world.drive.set_faults(lose_writes=1.0)
    world.run(commands.write(1, 0, 1, [b"3" * LBA])).check()
    assert world.read(0, 1) == first

    world.drive.heal()
    world.drive.set_faults(flip_on_read=FlipFault(0, LBA, bits=3))
    flipped = world.read(0, 1)
    assert sum((a ^ b).bit_count() for a, b in zip(flipped, first, strict=True)) == 3
    assert world.read(1, 1) == bytes(LBA), "outside of the range nothing is flipped"
    world.drive.heal()
    assert world.read(0, 1) == first, "what is stored was right all the time"

    world.drive.set_faults(
        error=ErrorFault(Status.UNRECOVERED_READ_ERROR, operations=frozenset({Operation.READ}))
    )
    into = memoryview(bytearray(LBA))
    assert world.run(commands.read(1, 0, 1, into)).status == Status.UNRECOVERED_READ_ERROR
    world.run(commands.write(1, 0, 1, [b"4" * LBA])).check()
    world.drive.heal()
    assert world.read(0, 1) == b"4" * LBA

    world.drive.set_faults(hung=True)
    hung = world.submit(commands.read(1, 0, 1, into))
    world.bench.settle(1000.0)
    assert not hung.done
    assert world.admin.run(commands.abort(1, hung.cid)).result == 0
    world.bench.settle()
    assert hung.status == Status.ABORT_REQUESTED
    again = world.submit(commands.read(1, 0, 1, into))
    world.drive.heal()
    world.bench.target.poke()
    world.bench.settle()
    assert again.status == 0
    assert world.drive.counters.faults_injected == {
        "full": 1,
        "lose_writes": 1,
        "flip_on_read": 1,
        "error": 1,
        "hang": 2,
    }
    world.drive.close()


def test_a_hung_queue_that_is_lost_ends_every_command_once(medium: Medium) -> None:
    world = World(medium, digests=NO_DIGESTS)
    world.drive.set_faults(hung=True)
    flying = [commands.read(1, slba, 1, memoryview(bytearray(LBA))) for slba in range(5)]
    for command in flying:
        world.submit(command)
    world.link.cut()
    assert all(command.lost for command in flying)
    world.drive.heal()
    world.bench.target.poke()
    world.queue, world.host, world.link = io_queue(world.bench, world.admin)
    assert world.read(0, 1) == bytes(LBA)
    world.drive.close()
