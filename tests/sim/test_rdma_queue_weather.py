"""NVMe/RDMA queues under seeded weather: slow ends, commands given up, broken queue pairs, reused buffers.

Must be survived, and is checked after every step: what is read is what was written last (or before it,
while a write of unknown fate is about), no buffer changes once it is its owner's again, no SEND finds the
other end without a receive, every command ends once, and all loans and windows come back.
"""

from __future__ import annotations

import mmap
import random

import pytest

from nvmeof.errors import QueueFull
from nvmeof.host import commands
from nvmeof.host.bring_up import connect_command
from nvmeof.host.command import Command
from tests.support.nvme.nvme_ends import LBA
from tests.support.nvme.rdma_ends import CONFIG, RdmaBench, RdmaPair

SPAN = 8
"""Blocks that one command moves; each buffer has as many."""
BUFFERS = 6
QUEUES = 4
STEPS = 250


class Weather:
    """One I/O queue, whose queue pair is made again whenever it is broken."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.bench = RdmaBench(windows=bool(seed % 2), blocks=SPAN * 8)
        self.memory = memoryview(mmap.mmap(-1, BUFFERS * SPAN * LBA))
        self.stored = [{bytes(SPAN * LBA)} for _ in range(8)]
        """What each place may hold: one value, or several while the fate of a write is unknown."""
        self.running: dict[Command, tuple[str, int, int, bytes]] = {}
        self.free: dict[int, bytes] = {number: b"" for number in range(BUFFERS)}
        """Buffers that are their owner's, and what he left in them."""
        self.pairs: list[RdmaPair] = []
        self.connect()

    def connect(self) -> None:
        number = len(self.pairs) % QUEUES + 1
        if len(self.pairs) >= QUEUES:
            # By now the controller has heard that the pair is gone which had this id before.
            self.pairs[-QUEUES].controller.connection_lost()
        inside = self.bench.facts.in_capsule_bytes
        pair = RdmaPair(self.bench, number, 8, windows=self.bench.windows, in_capsule_bytes=inside)
        pair.buffers.register(self.memory)
        self.pairs.append(pair)
        command = pair.run(connect_command(CONFIG, number, 9, self.bench.facts.cntlid))
        assert command.status == 0
        pair.ended.clear()

    @property
    def pair(self) -> RdmaPair:
        return self.pairs[-1]

    def buffer(self, number: int) -> memoryview:
        return self.memory[number * SPAN * LBA : (number + 1) * SPAN * LBA]

    # --- what may happen ------------------------------------------------------------

    def submit(self) -> None:
        if not self.free:
            return
        number = self.dice.choice(list(self.free))
        place = self.dice.randrange(8)
        busy = {other for kind, _, other, _ in self.running.values() if kind == "write"}
        if place in busy:
            return
        data = self.dice.randbytes(64) * (SPAN * LBA // 64)
        if self.dice.random() < 0.5:
            self.buffer(number)[:] = data
            command, kind = commands.write(1, place * SPAN, SPAN, [self.buffer(number)]), "write"
        else:
            if any(place == other for _, _, other, _ in self.running.values()):
                return
            command, kind = commands.read(1, place * SPAN, SPAN, self.buffer(number)), "read"
        try:
            self.pair.submit(command)
        except QueueFull:
            return
        del self.free[number]
        self.running[command] = kind, number, place, data
        if kind == "write":
            self.stored[place].add(data)

    def give_up(self) -> None:
        if not self.running:
            return
        command = self.dice.choice(list(self.running))
        if command.done:
            return
        if self.pair.queue.abandon(command):
            pair = self.pair
            pair.near.flush()  # our end only; the controller goes on until it notices
            pair.ended += pair.queue.fail("given up")
            self.settle_ended()
        self.release(command)
        if self.pair.queue.failed is not None:
            self.connect()

    def release(self, command: Command) -> None:
        """The buffer is its owner's again: he puts something of his own into it, and it must stay."""
        _, number, _, _ = self.running.pop(command)
        mine = self.dice.randbytes(64) * (SPAN * LBA // 64)
        self.buffer(number)[:] = mine
        self.free[number] = mine

    def settle_ended(self) -> None:
        ended, self.pair.ended = self.pair.ended, []
        for command in ended:
            kind, number, place, data = self.running[command]
            if command.status == 0 and kind == "write":
                self.stored[place] = {data}
            elif command.status == 0:
                assert bytes(self.buffer(number)) in self.stored[place]
            self.release(command)

    def step(self) -> None:
        toss = self.dice.random()
        if toss < 0.45:
            self.submit()
        elif toss < 0.55:
            self.give_up()
        elif toss < 0.65:
            self.pair.near.hold = not self.pair.near.hold
        elif toss < 0.75:
            self.pair.far.hold = not self.pair.far.hold
        elif toss < 0.8:
            self.bench.storage[1].held = not self.bench.storage[1].held
            self.bench.target.poke()
        for pair in self.pairs[-QUEUES:]:
            pair.settle()
        self.settle_ended()
        self.check()

    def check(self) -> None:
        for number, mine in self.free.items():
            assert not mine or bytes(self.buffer(number)) == mine, "a buffer changed behind its owner's back"
        for pair in self.pairs:
            assert pair.far.starved == pair.near.starved == 0
            assert pair.error is None

    def finish(self) -> None:
        self.bench.storage[1].held = False
        self.bench.target.poke()
        for pair in self.pairs:
            pair.near.hold = pair.far.hold = False
            pair.settle()
        self.settle_ended()
        self.check()
        assert not self.running
        assert not self.pair.near.bound
        assert self.pair.queue.in_flight == 0
        for place, allowed in enumerate(self.stored):
            into = memoryview(bytearray(SPAN * LBA))
            assert self.pair.run(commands.read(1, place * SPAN, SPAN, into)).status == 0
            self.pair.ended.clear()
            assert bytes(into) in allowed
        for pair in self.pairs:
            pair.controller.connection_lost()
            assert pair.media.lent_bytes == 0
            pair.queue.fail("over")
            assert pair.buffers.lent_bytes == 0


@pytest.mark.parametrize("seed", range(40))
def test_weather(seed: int) -> None:
    weather = Weather(seed)
    for _ in range(STEPS):
        weather.step()
    weather.finish()
    assert len(weather.pairs) > 1, "nothing was ever given up"
