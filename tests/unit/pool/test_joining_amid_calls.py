"""Namespaces join, and the pool is settled, in the middle of puts, deletes and moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.attach.map_history import MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import as_settled, with_namespaces
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.maintenance.migrate import Migration, Outcome
from agent.pool.maintenance.rebalance import VALUE_SECONDS, Rebalancer
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.replicas import write_superblock
from agent.pool.mutable.replace import replace as replace_value
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing, VolumeSettings
from agent.pool.volume.volume import Found, Volume
from agent.pool.write.batch import write_together
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.remote.fabric import Fabric
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, nguid_of, volume_settings
from tests.support.pool.no_seal import EveryCopyCounts
from tests.support.pool.stuck_writes import Driven, StuckWrites

BEFORE, AFTER = (3, 3), (3, 3, 3)
KEYS = 60


class Joining:
    """A pool in memory, and its settings before, amid and after a join."""

    def __init__(self, timing: Timing | None = None, **made: Any) -> None:
        self.pool = MemoryPool(BEFORE, **made)
        self.pool.namespaces += [MemoryNamespace(1 << 40)]
        self.settled = volume_settings(AFTER, **made)
        self.unsettled = replace(self.settled, settled_extents=len(BEFORE))
        self.agent = self.pool.agent(timing=timing)

    def goes_by(self, settings: VolumeSettings) -> None:
        self.agent.volume.change(layout=self.agent.volume.layout(settings))

    def other(self, settings: VolumeSettings) -> PoolAgent:
        return PoolAgent(self.pool.namespaces, settings)

    def at_next_read(self, do: Callable[[], None]) -> None:
        """Once, while the agent's next read is under way."""
        channel = self.agent.channel
        read = channel.read

        def once(*args: Any, **options: Any) -> Any:
            channel.read = read  # type: ignore[method-assign]
            do()
            return read(*args, **options)

        channel.read = once  # type: ignore[method-assign]


def put_by(agent: PoolAgent, how: str, key: bytes, value: bytes) -> None:
    if how == "one":
        agent.put(key, value)
        return
    values = [memoryview(value)]
    ended = agent.channel.run(write_together(agent.volume, agent.channel, [key], values, 5.0))
    assert ended == [True]


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_put_amid_the_settling_goes_to_no_earlier_place(how: str) -> None:
    """Nobody looks there any more: it would be acknowledged and lost, and in /fs it is a block of a file."""
    joining = Joining()
    for number in range(KEYS):
        joining.goes_by(joining.unsettled)
        joining.agent.age_directories()
        joining.at_next_read(lambda: joining.goes_by(joining.settled))
        put_by(joining.agent, how, key_of(number), b"%d" % number)
        assert joining.agent.volume.old_placement is None
    other = joining.other(joining.settled)
    assert [other.get(key_of(number)) for number in range(KEYS)] == [b"%d" % number for number in range(KEYS)]


def misplaced(joining: Joining) -> tuple[bytes, Found]:
    """A key that lies in the last set of those that it belonged to, and belongs to the first still."""
    agent = joining.agent
    for number in range(10_000):
        key = key_of(number)
        agent.put(key, b"%d" % number)
        pseudonym = agent.volume.placement.pseudonym(key)
        new = agent.volume.placement.over(joining.settled.extents).candidates(pseudonym)
        namespace = agent.where(key)[0]
        if namespace == 1 and {each.namespace for each in new} == {0, 2}:
            cached = agent.cache.borrow(1, agent.where(key)[2])
            slot = cached.directory.find(pseudonym) if cached.directory is not None else None
            entry = (
                cached.directory.entry(slot) if cached.directory is not None and slot is not None else None
            )
            assert slot is not None
            assert entry is not None
            return key, Found(cached, slot, entry)
    raise AssertionError


def test_a_move_and_a_delete_of_its_key_do_not_wait_for_each_other() -> None:
    """The delete takes the sets in their order; the move holds one, and goes to one before it."""
    joining = Joining()
    key, old = misplaced(joining)
    agent = joining.agent
    joining.goes_by(joining.unsettled)
    joining.pool.namespaces[2].suspect = True
    channel, volume = StuckWrites(joining.pool.namespaces), agent.volume
    channel.clock = agent.channel.clock
    move = Driven(channel, Migration(volume, channel, old, channel.now() + VALUE_SECONDS).copy())
    writes = joining.pool.namespaces[0].writes
    while joining.pool.namespaces[0].writes == writes:
        assert move.run(0.0001) is None
    assert old.cached.writer.locked()
    deleting = Driven(agent.channel, delete(volume, agent.channel, key, agent.deadline()))
    assert deleting.run(0.001) is None
    assert move.run(0.25) is Outcome.TROUBLE
    assert deleting.run(0.25) is True
    assert isinstance(joining.other(joining.unsettled).get(key), MissCause)
    assert not any(each.reserved or each.writer.locked() for each in agent.cache.snapshot())


ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 32 << 20


class Serving:
    """An agent that follows the pool map of media in memory, and programs that change the map."""

    def __init__(self, state: Path) -> None:
        self.channel = MemoryChannel([MemoryNamespace(SIZE) for _ in range(3)])
        wishes = [VolumeWish(name="v", value_bytes=1 << 16, share=0.9)]
        self.pool_map = plan_pool([(nguid_of(number), SIZE) for number in range(2)], wishes, ROOT)
        self.write(self.pool_map)
        self.volume = self.opened()
        self.said: list[int] = []
        self.watch = MapWatch(
            self.pool_map, [self.volume], PrestageCache(0), MapHistory(state), ROOT, Fabric(()),
            EveryCopyCounts(ROOT), to_be_followed=lambda newer: self.said.append(newer.version),
        )  # fmt: skip

    def opened(self) -> Volume:
        """The volume by the map in force."""
        entry = self.pool_map.volumes[0]
        settings = self.pool_map.settings(entry)
        return Volume(settings, self.pool_map.secret(entry, ROOT), DirectoryCache(16 << 20), Timing())

    def write(self, pool_map: PoolMap) -> None:
        self.pool_map = pool_map
        for number in range(len(pool_map.namespaces)):
            self.channel.run(write_superblock(self.channel, number, nguid_of(number), pool_map))

    def look(self) -> None:
        for _ in self.pool_map.namespaces:
            self.channel.clock += 2 * EVERY_SECONDS
            self.channel.run(self.watch.look(self.channel))

    def put(self, how: str, number: int) -> bool:
        """Whether it was acknowledged."""
        channel, key, data = self.channel, key_of(number), memoryview(b"%d" % number)
        deadline = channel.now() + 5.0
        try:
            if how == "many":
                return channel.run(write_together(self.volume, channel, [key], [data], 5.0)) == [True]
            if how == "over":
                channel.run(replace_value(self.volume, channel, key, bytes(data), deadline))
            else:
                channel.run(SlotWriter(self.volume, key, length=len(data)).write(channel, 0, data, deadline))
        except PutRefused:
            return False
        return True

    def has(self, volume: Volume, number: int) -> bool:
        into = bytearray(16)
        reading = SlotReader(volume, key_of(number))
        count = self.channel.run(reading.read(self.channel, 0, memoryview(into), self.channel.now() + 5.0))
        return into[:count] == b"%d" % number


@pytest.mark.parametrize("how", ["one", "many", "over"])
def test_an_agent_that_slept_through_join_and_settling_acknowledges_nothing_at_earlier_places(
    how: str, tmp_path: Path
) -> None:
    serving = Serving(tmp_path)
    serving.look()
    assert all(serving.put(how, number) for number in range(KEYS))
    # It is stopped. Others let a namespace in; these values are moved, and the pool is settled.
    joined = with_namespaces(serving.pool_map, [(nguid_of(2), SIZE)])
    serving.write(joined)
    serving.write(as_settled(joined))
    serving.channel.clock += 60
    began = range(KEYS, 2 * KEYS)
    acknowledged = [number for number in began if serving.put(how, number)]
    settled = serving.opened()
    assert [number for number in acknowledged if not serving.has(settled, number)] == []
    serving.look()
    assert all(serving.put(how, number) for number in range(2 * KEYS, 3 * KEYS))
    assert all(serving.has(settled, number) for number in range(2 * KEYS, 3 * KEYS))


def test_an_agent_that_slept_through_a_join_stores_values_that_others_find(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.write(with_namespaces(serving.pool_map, [(nguid_of(2), SIZE)]))
    serving.channel.clock += 60
    assert all(serving.put("one", number) for number in range(KEYS))
    joined = serving.opened()
    assert all(serving.has(joined, number) for number in range(KEYS))


@pytest.mark.expects_log("lists other namespaces")
@pytest.mark.expects_log("does not carry the pool's map any more")
def test_an_agent_that_saw_the_join_that_gave_way_says_so_and_its_readers_do_not_serve(
    tmp_path: Path,
) -> None:
    """Two programs let in a namespace each. A map is in force that this agent's numbers do not fit."""
    serving = Serving(tmp_path)
    serving.look()
    before = serving.pool_map
    loser = with_namespaces(before, [(nguid_of(2), SIZE)])
    serving.channel.run(write_superblock(serving.channel, 0, nguid_of(0), loser))
    serving.look()
    assert serving.watch.pool_map == loser
    winner = with_namespaces(before, [(nguid_of(3), SIZE)])
    both = with_namespaces(as_settled(winner), [(nguid_of(2), SIZE)])
    for number in range(2):
        serving.channel.run(write_superblock(serving.channel, number, nguid_of(number), both))
    assert not serving.watch.is_listed_otherwise
    serving.look()
    assert serving.watch.is_listed_otherwise
    # What it says to its readers is the map by which it finds values.
    assert serving.said == [loser.version]
    assert len(serving.volume.settings.extents) == 3


def test_nothing_moves_while_a_delete_may_be_under_way_that_began_before_the_join() -> None:
    """It looks at no new place. So where the operator lets writes take long, moves begin later."""
    joining = Joining(timing=Timing(write_deadline=30.0))
    key, _ = misplaced(joining)
    agent, volume, channel = joining.agent, joining.agent.volume, joining.agent.channel
    first = volume.borrow_sets(volume.placement.pseudonym(key))[0]
    assert first.writer.acquire(blocking=False), "another write hangs"
    deleting = Driven(channel, delete(volume, channel, key, agent.deadline(30.0)))
    joining.goes_by(joining.unsettled)
    mover = Rebalancer([volume], 1 << 30)
    own = MemoryChannel(joining.pool.namespaces)
    for _ in range(20):
        assert deleting.run(1.0) is None
        own.clock = channel.clock
        own.run(mover.turn(own))
    first.end_write()
    assert deleting.run(1.0) is True
    assert isinstance(joining.other(joining.unsettled).get(key), MissCause)
    for _ in range(60):
        own.clock += 1.0
        own.run(mover.turn(own))
    assert mover.moves.left == 0
