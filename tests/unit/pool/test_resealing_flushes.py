"""Blocks of files that are sealed anew survive a loss of power at any moment, whatever flash has kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from agent.inline.scatter import Buffer
from agent.inline.secrets import SecretKey
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.maintenance.rekey import ResealCounts, reseal_set
from agent.pool.volume.volume import Keys
from agent.pool.write.flush_tracking import flush_written
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace, MemoryPending
from tests.support.pool.memory_pool import EXTENT_AT, MemoryPool, PoolAgent, fixed_secret, key_of

SECRET = fixed_secret()
NEXT_SECRET = SecretKey(SECRET.reveal()[:32] + fixed_secret(36).reveal()[32:])
BLOCKS = 12
SET = (0, EXTENT_AT)


class PowerLost(Exception):
    pass


@dataclass
class Volatile(MemoryNamespace):
    """A drive with a cache: a block that was written since the last flush may be lost, whichever it is."""

    settled: dict[int, bytes] = field(default_factory=dict)
    cached: list[tuple[int, bytes]] = field(default_factory=list)
    writes_left: int = 1 << 30

    def store(self, offset: int, parts: Sequence[Buffer]) -> None:
        if self.writes_left <= 0:
            raise PowerLost
        self.writes_left -= 1
        super().store(offset, parts)
        size = sum(map(len, parts))
        self.cached += [(at, self.blocks[at]) for at in range(offset, offset + size, 4096)]

    def settle(self) -> None:
        self.settled, self.cached = dict(self.blocks), []

    def after_power_loss(self, seed: int) -> MemoryNamespace:
        kept = random.Random(seed)
        blocks = dict(self.settled)
        blocks.update(entry for entry in self.cached if kept.random() < 0.5)
        return MemoryNamespace(self.size, blocks)


class FlushingChannel(MemoryChannel):
    before_flush: Callable[[], None] = staticmethod(lambda: None)

    def flush(self, namespace: int) -> MemoryPending:
        self.before_flush()
        target = self.namespaces[namespace]
        assert isinstance(target, Volatile)
        pending = super().flush(namespace)
        if pending.done and pending.fault is None:
            target.settle()
        return pending


class Rotation:
    """An agent with synced blocks in one set, whose volume has a new data key."""

    def __init__(self) -> None:
        self.pool = MemoryPool((1,))
        self.pool.settings = replace(self.pool.settings, kind="files")
        self.drive = Volatile(1 << 40)
        self.pool.namespaces = [self.drive]
        self.agent = self.pool.agent()
        self.agent.channel = self.channel = FlushingChannel([self.drive])
        for number in range(BLOCKS):
            self.agent.put(key_of(number), content(number), may_evict=False)
        assert not self.channel.run(flush_written(self.channel, {0}))
        turn(self.agent)
        self.counts = ResealCounts()

    def reseal(self) -> None:
        self.channel.run(reseal_set(self.agent.volume, self.channel, SET, self.counts))

    def fill_up(self) -> None:
        """Store blocks that nobody syncs wherever there is room."""
        number = 1000
        while True:
            try:
                self.agent.put(key_of(number), b"new" * 1000, may_evict=False)
            except PutRefused:
                return
            number += 1

    def check_what_is_left(self, seed: int) -> None:
        self.pool.namespaces = [self.drive.after_power_loss(seed)]
        agent = self.pool.agent()
        turn(agent)
        for number in range(BLOCKS):
            assert agent.get(key_of(number)) == content(number)


def content(number: int) -> bytes:
    return bytes([number + 1]) * (1000 * number + 500)


def turn(agent: PoolAgent) -> None:
    volume = agent.volume
    volume.change(keys=Keys(volume.codec_of(NEXT_SECRET, 1, [volume.codec_of(SECRET)])))


@pytest.mark.parametrize("seed", range(3))
def test_power_that_is_lost_while_blocks_are_sealed_anew_costs_none(seed: int) -> None:
    lost = 0
    for writes in range(1, 2 * BLOCKS + 1):
        rotation = Rotation()
        rotation.drive.writes_left = writes
        try:
            rotation.reseal()
        except PowerLost:
            lost += 1
        rotation.check_what_is_left(1000 * seed + writes)
    assert lost == 2 * BLOCKS - 1, "each block is a write of its slot, and one of the directory"
    assert rotation.counts.resealed == BLOCKS


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_stored_in_an_old_slot_before_the_directory_is_durable(seed: int) -> None:
    rotation = Rotation()
    flushes = 0

    def lose_power_at_the_second() -> None:
        nonlocal flushes
        flushes += 1
        if flushes == 2:
            rotation.fill_up()
            raise PowerLost

    rotation.channel.before_flush = lose_power_at_the_second
    with pytest.raises(PowerLost):
        rotation.reseal()
    rotation.check_what_is_left(seed)


def test_old_slots_are_free_again_at_the_end() -> None:
    rotation = Rotation()
    rotation.reseal()
    assert (rotation.counts.resealed, rotation.counts.left) == (BLOCKS, 0)
    cached = rotation.agent.volume.cache.borrow(*SET)
    assert not cached.unavailable(rotation.channel.now())
    rotation.fill_up()
    assert [directory.taken for _, _, directory in rotation.pool.directories()] == [SLOTS_PER_SET]


@pytest.mark.parametrize("at", [1, 2])
def test_blocks_stay_where_they_are_while_nothing_is_flushed(at: int) -> None:
    rotation = Rotation()
    flushes = 0

    def fail() -> None:
        nonlocal flushes
        flushes += 1
        rotation.drive.unflushable = flushes >= at

    rotation.channel.before_flush = fail
    rotation.reseal()
    rotation.check_what_is_left(at)
    assert rotation.counts.resealed + rotation.counts.left == BLOCKS
    rotation.fill_up()
    rotation.check_what_is_left(at)
    rotation.channel.before_flush = lambda: None
    rotation.drive.unflushable = False


def test_a_set_with_one_free_slot_is_sealed_anew_as_well() -> None:
    rotation = Rotation()
    rotation.fill_up()
    rotation.agent.channel.run(flush_written(rotation.channel, {0}))
    assert rotation.agent.delete(key_of(1000))
    rotation.reseal()
    assert rotation.counts.left == 0
    assert rotation.counts.resealed == BLOCKS
    rotation.check_what_is_left(1)
