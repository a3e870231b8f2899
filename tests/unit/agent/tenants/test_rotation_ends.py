"""The end of a rotation loses nothing that was acknowledged, whoever started or was stopped meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.attach.map_history import MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.pool.errors import PutRefused
from agent.pool.maintenance.rekey import ResealCounts, reseal_set
from agent.pool.map.commit import replace_map
from agent.pool.map.document import PoolMap
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import Acquire, Steps
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.key_transition import GRACE_SECONDS, MAP_AGE_SECONDS, QUIET_SECONDS, SETTLE_SECONDS
from agent.pool.volume.volume import Keys
from agent.pool.write.put import SlotWriter
from agent.remote.fabric import Fabric
from tests.support.pool.memory_pool import key_of
from tests.support.pool.no_seal import EveryCopyCounts
from tests.unit.agent.tenants.test_key_rotation import NUMBERS, ROOT, STEP, Agent, Shelf, value_of


class Watching(Agent):
    """An agent that looks at the pool map as it lies on flash."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.volume.change(files_elsewhere=False)
        self.watch = MapWatch(
            shelf.pool_map,
            [self.volume],
            PrestageCache(0),
            MapHistory(shelf.state),
            ROOT,
            Fabric(()),
            EveryCopyCounts(ROOT),
            self.keys.follow,
        )

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP)):
            self.channel.clock += STEP
            self.channel.run(self.watch.look(self.channel))
            self.channel.run(self.keys.look(self.channel))


def publish(shelf: Shelf, pool_map: PoolMap) -> None:
    channel = Agent(shelf).channel
    assert channel.run(replace_map(channel, pool_map, NUMBERS)) == {}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path, kind="files", share=0.4)
    publish(shelf, shelf.pool_map)
    return shelf


def test_who_starts_amid_a_rotation_never_seals_with_the_earlier_key(shelf: Shelf) -> None:
    publish(shelf, shelf.rotate())
    assert Agent(shelf).left() == 0, "the first count"
    late = Watching(shelf)
    late.put(1)
    assert late.left() == 0
    assert late.row["rotating"]
    publish(shelf, shelf.end())
    late.pass_time(3)
    assert late.has(1)


def test_who_was_stopped_across_a_rotation_acknowledges_nothing_that_is_lost(shelf: Shelf) -> None:
    agent = Watching(shelf)
    agent.put(1)
    agent.pass_time(2)
    before = agent.channel.namespaces[0].reads + agent.channel.namespaces[1].reads
    agent.put(2)
    assert sum(each.reads for each in agent.channel.namespaces) <= before + 2, (
        "no look of its own: it has looked"
    )
    other = Watching(shelf)
    publish(shelf, shelf.rotate())
    other.pass_time(30)
    assert other.left() == 0
    publish(shelf, shelf.end())
    agent.channel.clock += QUIET_SECONDS
    with pytest.raises(PutRefused, match="dropped"):
        agent.put(3)
    agent.pass_time(EVERY_SECONDS + STEP)
    agent.put(3)
    assert agent.has(1, 2, 3)
    assert Agent(shelf).has(1, 2, 3)
    # One whose upkeep is held up looks itself, once in a while, and goes on.
    agent.channel.clock += 10 * MAP_AGE_SECONDS
    agent.put(4)
    assert agent.has(4)


def test_who_was_stopped_while_a_rotation_began_does_not_settle_once_more(shelf: Shelf) -> None:
    agent = Watching(shelf)
    agent.pass_time(2)
    publish(shelf, shelf.rotate())
    agent.channel.clock += MAP_AGE_SECONDS + SETTLE_SECONDS
    agent.pass_time(EVERY_SECONDS)
    agent.put(1)
    assert agent.left() == 0, "it seals with the new key at once"


def test_what_was_begun_under_the_earlier_key_has_a_moment_and_no_more(shelf: Shelf) -> None:
    agent = Watching(shelf)
    agent.pass_time(2)
    slow, quick = (SlotWriter(agent.volume, key_of(number)) for number in (1, 2))
    for writing in (slow, quick):
        agent.channel.run(writing.write(agent.channel, 0, memoryview(b"half"), agent.channel.now() + 5))
    publish(shelf, shelf.rotate())
    agent.pass_time(EVERY_SECONDS + SETTLE_SECONDS)
    agent.channel.run(quick.finish(agent.channel, agent.channel.now() + 5))
    agent.pass_time(GRACE_SECONDS + STEP)
    with pytest.raises(PutRefused, match="dropped"):
        agent.channel.run(slow.finish(agent.channel, agent.channel.now() + 5))
    agent.pass_time(10)
    assert agent.left() == 0


def test_the_new_key_seals_in_time_though_upkeep_is_held_up(shelf: Shelf) -> None:
    agent = Watching(shelf)
    agent.pass_time(2)
    publish(shelf, shelf.rotate())
    agent.pass_time(EVERY_SECONDS)
    agent.channel.clock += SETTLE_SECONDS + GRACE_SECONDS
    agent.put(1)
    assert agent.left() == 0


def test_an_erased_volume_keeps_no_key_of_a_rotation(shelf: Shelf) -> None:
    agent = Watching(shelf)
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    turn = agent.volume.key_transition
    assert turn is not None
    agent.volume.change(erased=True)
    assert agent.volume.key_transition is None
    assert not agent.volume.takes(turn.codec, agent.channel.now())


def _after(steps: Steps[int]) -> Steps[int]:
    """The rest of steps that wait for a lock, which is given now."""
    answer: object = True
    while True:
        try:
            wait = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            found: int = end.value
            return found
        answer = yield wait


# -- sealing anew ---------------------------------------------------------------------------------------


def test_a_reseal_that_failed_leaves_its_slot_to_cool_down_and_holds_it_until_it_is_named(
    shelf: Shelf,
) -> None:
    agent = Agent(shelf)
    agent.put(1)
    shelf.rotate()
    agent.keys.follow(shelf.pool_map)
    agent.channel.clock += SETTLE_SECONDS
    newest = agent.volume.sealing_codec(agent.channel.now())
    agent.volume.change(keys=Keys(newest, agent.volume.key_transition))
    cached = next(each for each in agent.volume.cache.snapshot() if each.directory and each.directory.taken)
    place, counts = (cached.namespace, cached.offset), ResealCounts()
    assert cached.directory is not None
    target = min(cached.directory.free_slots())
    shelf.namespaces[cached.namespace].unwritable.add(agent.volume.slot_offset(cached, target) + 4096)
    agent.channel.run(reseal_set(agent.volume, agent.channel, place, counts))
    assert (counts.resealed, counts.left) == (0, 1)
    assert cached.cooldown_until[target] == agent.channel.now() + COOLDOWN_SECONDS
    assert target in cached.unavailable(agent.channel.now())

    # The next one waits for the directory's writer: its slot is nobody else's meanwhile.
    steps = reseal_set(agent.volume, agent.channel, place, counts)
    assert cached.writer.acquire(blocking=False)
    wait = next(steps)
    while not isinstance(wait, Acquire):
        wait = steps.send(True)
    assert len(cached.reserved) == 1
    held = next(iter(cached.reserved))
    assert held != target
    # A write of that slot failed: what is in it now, or will be, nobody knows.
    cached.cooldown_until[held] = agent.channel.now() + COOLDOWN_SECONDS
    agent.channel.run(_after(steps))
    assert (counts.resealed, counts.left) == (0, 2)
    assert not cached.reserved
    assert agent.has(1), "the good slot is not freed"
    agent.channel.run(reseal_set(agent.volume, agent.channel, place, counts))
    assert counts.resealed == 1
    assert agent.get(1) == value_of(1)
