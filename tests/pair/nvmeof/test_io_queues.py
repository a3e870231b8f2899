"""I/O between our host and our controller over a link: every command, every flow, and bad weather."""

from __future__ import annotations

import random

import pytest

from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.errors import FatalErrorStatus, QueueFull
from nvmeof.host import commands
from nvmeof.host.bring_up import SessionConfig
from nvmeof.host.command import Command
from nvmeof.host.tcp_queue import QueueState, TcpQueue
from nvmeof.tcp.pdu import Digests
from nvmeof.wire.sqe import DatasetRange
from nvmeof.wire.status import Status
from tests.support.link import Link
from tests.support.nvme import more_commands
from tests.support.nvme.nvme_ends import (
    HOST,
    HOST_ID,
    LBA,
    SUBSYSTEM,
    AdminHost,
    Bench,
    HostEnd,
    io_queue,
    same,
)

CONFIG = SessionConfig(SUBSYSTEM, HOST, HOST_ID, keep_alive_s=0, io_queues=4)
PLAIN, BOTH = Digests(), Digests(True, True)


class Rig:
    """A live controller and one I/O queue."""

    def __init__(self, bench: Bench, digests: Digests = PLAIN, depth: int = 16) -> None:
        self.bench = bench
        self.admin = AdminHost(bench, CONFIG, digests)
        self.admin.start()
        self.queue: TcpQueue
        self.host: HostEnd
        self.link: Link
        self.queue, self.host, self.link = io_queue(bench, self.admin, depth=depth, digests=digests)
        self.storage = bench.storage[1]

    def run(self, command: Command) -> Command:
        self.queue.submit(command, self.bench.now)
        self.bench.settle()
        assert command.done, command
        return command

    def read(self, slba: int, blocks: int) -> Command:
        return self.run(commands.read(1, slba, blocks, memoryview(bytearray(blocks * LBA))))


@pytest.mark.parametrize("digests", [PLAIN, BOTH])
@pytest.mark.parametrize("chunk", [1, 1000, 1 << 20])
@pytest.mark.parametrize("blocks", [1, 4, 5, 40])
def test_write_then_read(blocks: int, chunk: int, digests: Digests) -> None:
    """In the capsule (up to 16 KiB) and by R2T, in several H2CData PDUs where they are short."""
    rig = Rig(Bench(chunk=chunk, tcp=TcpSettings(max_h2c_data=65536)), digests)
    data = random.Random(blocks).randbytes(blocks * LBA)
    parts = [data[:100], memoryview(data)[100:LBA], data[LBA:]]
    assert rig.run(commands.write(1, 3, blocks, [part for part in parts if len(part)])).status == 0
    assert same(rig.storage.memory[3 * LBA : (3 + blocks) * LBA], data)
    command = rig.read(3, blocks)
    assert command.status == 0
    assert command.received == len(data)
    assert same(command.data_in, data)


def test_the_other_commands() -> None:
    rig = Rig(Bench())
    data = random.Random(1).randbytes(8 * LBA)
    rig.run(commands.write(1, 0, 8, [data]))
    assert rig.run(commands.flush(1)).status == 0
    assert rig.storage.flushes >= 1
    assert rig.run(more_commands.compare(1, 0, 8, [data])).status == 0
    assert rig.run(more_commands.compare(1, 0, 1, [data[:LBA]])).status == 0
    assert rig.run(more_commands.compare(1, 1, 1, [data[:LBA]])).status == Status.COMPARE_FAILURE
    assert rig.run(more_commands.compare(1, 0, 8, [data[:-1], b"?"])).status == Status.COMPARE_FAILURE
    assert rig.run(more_commands.write_zeroes(1, 2, 2)).status == 0
    assert same(rig.storage.memory[: 8 * LBA], data[: 2 * LBA] + bytes(2 * LBA) + data[4 * LBA :])
    ranges = [DatasetRange(0, 1), DatasetRange(6, 2)]
    assert rig.run(more_commands.dataset_management(1, ranges)).status == 0
    assert same(rig.storage.memory[: 2 * LBA], bytes(LBA) + data[LBA : 2 * LBA])
    assert rig.run(more_commands.write_zeroes(1, 0, 4, deallocate=True)).status == 0


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (commands.read(1, 1024, 1, memoryview(bytearray(LBA))), Status.LBA_OUT_OF_RANGE),
        (commands.read(1, 1023, 2, memoryview(bytearray(2 * LBA))), Status.LBA_OUT_OF_RANGE),
        (commands.read(1, (1 << 64) - 1, 1, memoryview(bytearray(LBA))), Status.LBA_OUT_OF_RANGE),
        (commands.write(1, 1024, 1, [bytes(LBA)]), Status.LBA_OUT_OF_RANGE),
        (commands.write(1, 1024, 64, [bytes(64 * LBA)]), Status.LBA_OUT_OF_RANGE),
        (commands.read(9, 0, 1, memoryview(bytearray(LBA))), Status.INVALID_NAMESPACE),
        (commands.flush(9), Status.INVALID_NAMESPACE),
        (Command("odd", 0x7E, 1), Status.INVALID_OPCODE),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else None,
)
def test_wrong_input_has_its_status(command: Command, status: Status) -> None:
    rig = Rig(Bench())
    fresh = Command(
        command.name, command.opcode, command.nsid, command.cdw10, command.cdw11, command.cdw12,
        data_in=command.data_in, data_out=command.data_out,
    )  # fmt: skip
    assert rig.run(fresh).status == status
    assert rig.read(0, 1).status == 0


def test_many_at_once_and_no_more_than_the_depth() -> None:
    rig = Rig(Bench(chunk=5000), depth=8)
    rig.storage.held = True
    running = [commands.read(1, n, 1, memoryview(bytearray(LBA))) for n in range(8)]
    for command in running:
        rig.queue.submit(command, 0.0)
    rig.bench.settle()
    with pytest.raises(QueueFull):
        rig.queue.submit(commands.flush(1), 0.0)
    assert not any(command.done for command in running)
    rig.storage.held = False
    rig.bench.target.poke()
    rig.bench.settle(1.0)
    assert all(command.status == 0 for command in running)


def test_a_hung_command_is_aborted_through_the_admin_queue() -> None:
    rig = Rig(Bench())
    rig.storage.held = True
    command = commands.read(1, 0, 1, memoryview(bytearray(LBA)))
    rig.queue.submit(command, 0.0)
    rig.bench.settle()
    assert not command.done
    assert rig.admin.run(commands.abort(1, command.cid)).result & 1 == 0
    rig.bench.settle()
    assert command.status == Status.ABORT_REQUESTED


def test_the_namespace_goes_away_under_io() -> None:
    rig = Rig(Bench())
    rig.storage.held = True
    command = commands.read(1, 0, 1, memoryview(bytearray(LBA)))
    rig.queue.submit(command, 0.0)
    rig.bench.settle()
    rig.bench.target.remove_namespace(rig.bench.subsystem, 1)
    rig.bench.settle()
    rig.bench.settle(1.0)
    assert command.done
    assert command.status
    assert rig.read(0, 1).status == Status.INVALID_NAMESPACE
    rig.admin.pump()
    assert rig.admin.session.namespaces == {}


def test_a_reset_ends_the_io_queues() -> None:
    rig = Rig(Bench())
    rig.storage.held = True
    command = commands.read(1, 0, 1, memoryview(bytearray(LBA)))
    rig.queue.submit(command, 0.0)
    rig.bench.settle()
    rig.admin.session.reset(0.0)
    rig.admin.pump()
    rig.bench.settle()
    assert command.lost
    assert rig.queue.state is QueueState.FAILED


@pytest.mark.parametrize("way", [0, 1])
def test_a_spoiled_header_ends_the_connection_with_the_right_word(way: int) -> None:
    """With a header digest: FES 3, from whichever side sees it."""
    rig = Rig(Bench(), BOTH)
    rig.link.ways[way].spoil_at = rig.link.ways[way].moved + 9
    command = commands.read(1, 0, 1, memoryview(bytearray(LBA)))
    rig.queue.submit(command, 0.0)
    rig.bench.settle()
    assert command.lost
    if way == 1:
        assert rig.host.error is not None
        assert rig.host.error.fatal_error_status == FatalErrorStatus.HEADER_DIGEST_ERROR
    else:
        assert "header digest error" in command.why_lost
    # The target goes on serving others.
    assert Rig(rig.bench, BOTH).read(0, 1).status == 0


def test_spoiled_data_are_a_transient_error_and_never_stored_as_good() -> None:
    for blocks in (1, 16):
        rig = Rig(Bench(), BOTH)
        rig.link.ways[0].spoil_at = rig.link.ways[0].moved + (76 if blocks == 1 else 76 + 28) + 500
        command = rig.run(commands.write(1, 0, blocks, [b"w" * (blocks * LBA)]))
        assert command.status == Status.TRANSIENT_TRANSPORT_ERROR
        rig.link.ways[1].spoil_at = rig.link.ways[1].moved + 28 + 500
        command = rig.read(0, blocks)
        assert command.status == Status.TRANSIENT_TRANSPORT_ERROR
        assert rig.read(0, blocks).status == 0


@pytest.mark.parametrize("digests", [PLAIN, BOTH])
def test_weather(digests: Digests, seed: int) -> None:
    """Random I/O on connections that break: each command ends once; what is read is what was written.

    A write that was lost may or may not have happened; its blocks count as unknown until written again.
    """
    dice = random.Random(seed)
    bench = Bench(blocks=256, chunk=9000, dice=dice, tcp=TcpSettings(max_h2c_data=8192))
    truth: dict[int, bytes | None] = dict.fromkeys(range(256), bytes(LBA))
    cuts = checked = lost = 0
    for _ in range(40):
        rig = Rig(bench, digests, depth=8)
        if dice.random() < 0.8:
            way = rig.link.ways[dice.randrange(2)]
            way.cut_after = way.moved + dice.randrange(400_000)
        # Each block belongs to one command at a time, so that the order of completion does not matter.
        free = list(range(0, 256, 16))
        dice.shuffle(free)
        started: list[tuple[Command, int, int, bytes | None]] = []
        while free:
            slba, blocks = free.pop(), dice.randint(1, 16)
            data = dice.randbytes(blocks * LBA) if dice.random() < 0.5 else None
            command = (
                commands.read(1, slba, blocks, memoryview(bytearray(blocks * LBA)))
                if data is None
                else commands.write(1, slba, blocks, [data[:LBA], data[LBA:]] if blocks > 1 else [data])
            )
            if rig.queue.state is not QueueState.READY or rig.queue.in_flight == rig.queue.depth:
                bench.settle()
            if rig.queue.state is not QueueState.READY:
                break
            rig.queue.submit(command, 0.0)
            started.append((command, slba, blocks, data))
            for _ in range(dice.randrange(4)):
                rig.link.step()
        bench.settle()
        cuts += rig.link.broken
        assert sorted(map(id, rig.host.ended)) == sorted(id(command) for command, *_ in started)
        for command, slba, blocks, data in started:
            assert command.done
            lost += command.lost
            for index in range(blocks):
                block = slice(index * LBA, index * LBA + LBA)
                if data is not None:
                    truth[slba + index] = None if command.lost else data[block]
                    continue
                known = truth[slba + index]
                if not command.lost and known is not None:
                    assert command.data_in is not None
                    assert same(command.data_in[block], known)
                    checked += 1
        rig.link.cut()
        rig.admin.link.cut()
    assert cuts > 5
    assert lost > 5
    assert checked > 100
