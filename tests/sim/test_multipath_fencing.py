"""No stale write lands after a later one was acknowledged: paths fail, and what was under way lands late."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from agent.pool.steps import Pending, Steps, Wait
from agent.remote.channel import WorkerChannel
from agent.remote.fence import LOST_SECONDS, Fence
from nvmeof.wire.status import Status
from tests.support.sim.two_paths import BLOCK, TwoPaths

BLOCKS = 16
SEEDS = range(40)
STEPS = 120


def waited(channel: WorkerChannel, pending: Pending, deadline: float) -> Steps[bool]:
    """As `wait_for` of the pool does; whether it went well."""
    if not pending.done:
        came = yield Wait(pending, deadline)
        if not came:
            channel.abandon(pending)
            return False
    return pending.fault is None


class Trial:
    """Writes and reads of one worker, with paths that come and go; remembers what flash owes it."""

    def __init__(self, two_paths: TwoPaths, seed: int) -> None:
        self.rig = two_paths
        self.dice = random.Random(seed)
        self.owed: dict[int, bytes] = {}
        """Blocks whose last write was acknowledged, with its content."""
        self.stale = self.refused = self.written = 0

    def write(self) -> None:
        rig, block = self.rig, self.dice.randrange(BLOCKS)
        content = self.dice.randbytes(16) + bytes(BLOCK - 16)
        pending = rig.channel.write(0, block * BLOCK, [content])
        if self.dice.random() < 0.08:
            self.dice.choice(rig.paths).lose()
        fate_open = pending.queue is not None
        if rig.channel.run(waited(rig.channel, pending, rig.clock.now + 5.0)):
            self.owed[block] = content
            self.written += 1
        elif fate_open:
            # It may be there, or come; either is right, until a later one is acknowledged.
            self.owed.pop(block, None)
        else:
            self.refused += 1

    def check(self) -> None:
        self.rig.flash.catch_up()
        for block, content in self.owed.items():
            self.stale += self.rig.flash.blocks.get(block) != content

    def step(self) -> None:
        rig, chance = self.rig, self.dice.random()
        if chance < 0.75:
            self.write()
        elif chance < 0.85:
            path = self.dice.choice(rig.paths)
            path.answers = not path.answers
        elif chance < 0.95:
            path = self.dice.choice(rig.paths)
            path.refusal = 0 if path.refusal else Status.ANA_INACCESSIBLE
        rig.clock.now += self.dice.random() * 1.5
        rig.supervise()
        self.check()


@pytest.fixture(params=[1, 2], ids=["one path", "two paths"])
def trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trial]]:
    made = [Trial(TwoPaths(monkeypatch, seed, request.param), seed) for seed in SEEDS]
    yield made
    for trial in made:
        trial.rig.channel.close()


def run_all(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in trials:
        # Each has a clock of its own.
        monkeypatch.setattr("agent.remote.channel.time", trial.rig.clock)
        for _ in range(STEPS):
            trial.step()


def test_an_acknowledged_write_stays(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(trials, monkeypatch)
    assert sum(trial.stale for trial in trials) == 0
    # And the trials were worth something: writes landed late, were refused, and went through.
    assert sum(trial.rig.flash.landed_late for trial in trials) > 100
    assert sum(trial.refused for trial in trials) > 100
    assert sum(trial.written for trial in trials) > 500


def test_without_the_fence_it_would_not(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fence, "stands", lambda *_: False)
    run_all(trials, monkeypatch)
    assert sum(trial.stale for trial in trials) > 0


def test_a_lost_write_is_not_sent_again_and_its_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TwoPaths(monkeypatch, 1)
    channel = rig.channel
    pending = channel.write(0, BLOCK, [b"a" * BLOCK])
    rig.paths[0].lose()
    assert not channel.run(waited(channel, pending, rig.clock.now + 5))
    assert pending.unreachable
    assert [queue.sent for queue in rig.paths[1].queues] in ([], [0])
    refused = channel.write(0, 0, [bytes(2 * BLOCK)])
    assert refused.done
    assert "may still land" in str(refused.fault)
    assert channel.run(waited(channel, channel.write(0, 0, [b"b" * BLOCK]), rig.clock.now + 5)), (
        "its neighbour"
    )
    rig.clock.now += LOST_SECONDS
    assert channel.run(waited(channel, channel.write(0, BLOCK, [b"c" * BLOCK]), rig.clock.now + 5))
    channel.close()


def test_nothing_is_written_where_another_pool_lies_now(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TwoPaths(monkeypatch, 1)
    channel, nguid, into = rig.channel, rig.fabric.nguids[0], memoryview(bytearray(BLOCK))
    assert channel.trusts(0)
    rig.fabric.note_taken(nguid, "ab" * 16)
    refused = channel.write(0, 0, [b"a" * BLOCK])
    assert refused.done
    assert "carries pool abab" in str(refused.fault)
    assert not channel.trusts(0)
    assert channel.run(waited(channel, channel.read(0, 0, into), rig.clock.now + 5))
    rig.fabric.note_taken(nguid, "")
    assert channel.run(waited(channel, channel.write(0, 0, [b"a" * BLOCK]), rig.clock.now + 5))
    assert channel.trusts(0)
    channel.close()


def test_a_write_that_the_path_refuses_goes_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TwoPaths(monkeypatch, 1)
    rig.paths[0].refusal = Status.ANA_INACCESSIBLE
    assert rig.channel.run(waited(rig.channel, rig.channel.write(0, 0, [b"a" * BLOCK]), rig.clock.now + 5))
    assert rig.flash.blocks[0] == b"a" * BLOCK
    assert rig.enclosures[0].sent_elsewhere == 1
    assert not rig.fabric.fence
    rig.channel.close()


def test_a_read_goes_on_by_the_other_path_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TwoPaths(monkeypatch, 1)
    channel = rig.channel
    rig.flash.blocks = {number: bytes([number]) * BLOCK for number in range(4)}
    buffer = channel.receive_buffer(4 * BLOCK)
    for trouble in ("lost", "silent", "refused"):
        began = rig.clock.now
        pending = channel.read(0, 0, buffer)
        if trouble == "lost":
            rig.paths[0].lose()
        elif trouble == "silent":
            rig.paths[0].answers = False
        else:
            rig.paths[0].answers, rig.paths[0].refusal = True, Status.ANA_TRANSITION
        assert channel.run(waited(channel, pending, began + 0.05)), trouble
        assert bytes(buffer) == b"".join(rig.flash.blocks[number] for number in range(4)), trouble
        assert rig.clock.now < began + 0.05
        rig.clock.now += 10.0
        rig.enclosures[0].epoch += 1
        channel.connect_ahead(0.0)
    assert rig.enclosures[0].sent_elsewhere == 3
    # With the second path in the same state there is nowhere to go.
    rig.paths[1].refusal = Status.ANA_INACCESSIBLE
    rig.paths[0].refusal = Status.ANA_INACCESSIBLE
    pending = channel.read(0, 0, buffer)
    assert not channel.run(waited(channel, pending, rig.clock.now + 0.05))
    assert pending.unreachable
    channel.close()


def test_what_has_come_of_a_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TwoPaths(monkeypatch, 1)
    channel = rig.channel
    rig.flash.blocks = {number: bytes([number + 1]) * BLOCK for number in range(4)}
    buffer = channel.receive_buffer(4 * BLOCK)
    pending = channel.read(0, 0, buffer)
    [command] = pending.commands
    buffer[: 2 * BLOCK] = b"x" * 2 * BLOCK
    command.received = 2 * BLOCK + 100
    rig.paths[0].lose()
    assert channel.run(waited(channel, pending, rig.clock.now + 0.05))
    assert bytes(buffer) == b"x" * 2 * BLOCK + rig.flash.blocks[2] + rig.flash.blocks[3]
    assert pending.received == 4 * BLOCK
    channel.close()
