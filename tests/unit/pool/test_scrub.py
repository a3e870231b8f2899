"""Scrub takes out what is bad, sets bad slots aside, and holds nothing against what is merely away."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import (
    DIRECTORY_BYTES,
    QUARANTINED_MAX,
    SLOTS_PER_SET,
    Directory,
    count_quarantined,
    is_quarantined,
)
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.maintenance.bad_slots import release, survey
from agent.pool.maintenance.scrub import (
    NOTHING_OPENS,
    PAUSE_SECONDS,
    WALK_LEAST,
    Pace,
    Scrubber,
    ScrubCounters,
    look_into_reports,
)
from agent.pool.volume.directory_cache import COOLDOWN_SECONDS
from agent.pool.volume.media_errors import STRIKES
from agent.pool.volume.settings import Timing
from agent.pool.write.delete_and_pin import PINNED_SLOTS_MAX, pin
from tests.support.pool.memory_channel import MemoryPending
from tests.support.pool.memory_pool import EXTENT_AT, MemoryPool, PoolAgent, key_of, nguid_of

pytestmark = pytest.mark.expects_log(r"is set aside: its medium is bad", r"nothing was removed there")
LENGTH = 150_000
YOUNG_SECONDS = 2 * Timing().write_deadline


def value_of(number: int) -> bytes:
    return bytes([number]) * LENGTH


def filled(
    keys: int, sets: tuple[int, ...] = (1, 1), suite: str = "aes-256-gcm"
) -> tuple[MemoryPool, PoolAgent]:
    pool = MemoryPool(sets, value_bytes=LENGTH // 4096 * 4096 + 4096, suite=suite)
    agent = pool.agent()
    for number in range(keys):
        agent.put(key_of(number), value_of(number))
    agent.channel.clock += YOUNG_SECONDS + 1
    return pool, agent


def scrub(agent: PoolAgent) -> Scrubber:
    """A whole pass by an agent of the pool."""
    scrubber = Scrubber([agent.volume])
    while not scrubber.counters.passes:
        agent.channel.run(scrubber.advance(agent.channel))
    return scrubber


def look_into(agent: PoolAgent, counters: ScrubCounters) -> None:
    """As the upkeep thread does: what is reported is looked into when it has waited for a while."""
    for _ in range(2):
        agent.channel.run(look_into_reports([agent.volume], agent.channel, counters))
        agent.channel.clock += PAUSE_SECONDS


def slot_number(agent: PoolAgent, number: int) -> int:
    _, slot, directory = agent.where(key_of(number))
    return (slot - directory - DIRECTORY_BYTES) // agent.volume.settings.slot_bytes


def set_aside(pool: MemoryPool) -> int:
    return sum(count_quarantined(directory) for _, _, directory in pool.directories())


@pytest.mark.parametrize("suite", ["aes-256-gcm", "aes-256-xts+crc64", "plain+crc64"])
def test_a_pool_that_is_well_is_left_as_it_is(suite: str) -> None:
    pool, agent = filled(20, suite=suite)
    before = [dict(namespace.blocks) for namespace in pool.namespaces]
    counters = scrub(agent).counters
    assert (counters.slots_checked, counters.slots_bad, counters.sets_skipped) == (20, 0, 0)
    assert counters.bytes_read == 2 * DIRECTORY_BYTES + 20 * (HEADER_BYTES + 151_552)
    assert [namespace.blocks for namespace in pool.namespaces] == before
    assert agent.tally.gets_hit == 0, "a look is no get"


@pytest.mark.parametrize("at", [100, HEADER_BYTES + 7, HEADER_BYTES + 70_000, HEADER_BYTES + LENGTH + 1])
def test_what_has_rotted_goes_and_can_be_stored_again(at: int) -> None:
    pool, agent = filled(6)
    namespace, slot, _ = agent.where(key_of(3))
    pool.namespaces[namespace].flip(slot + at, 3)
    counters = scrub(agent).counters
    assert (counters.slots_bad, counters.slots_quarantined) == (1, 0), "once may be no fault of the medium's"
    agent.age_directories()
    for reader in (agent, pool.agent()):
        assert reader.get(key_of(3)) is MissCause.NEVER_STORED
    assert agent.put(key_of(3), value_of(3)).stored
    for number in range(6):
        assert pool.agent().get(key_of(number)) == value_of(number)


def test_what_the_medium_does_not_give_is_set_aside_at_once_and_for_all_agents() -> None:
    pool, agent = filled(6, sets=(1,))
    _, slot, _ = agent.where(key_of(3))
    number = slot_number(agent, 3)
    pool.namespaces[0].unreadable.add(slot + 4096 * 9)
    assert scrub(agent).counters.slots_quarantined == 1
    [(_, _, directory)] = pool.directories()
    entry = directory.entry(number)
    assert entry is not None
    assert is_quarantined(entry)
    for writer in (agent, pool.agent()):
        for key in range(100, 100 + SLOTS_PER_SET):
            writer.put(key_of(key), b"value")
            assert slot_number(writer, key) != number
    [(_, _, directory)] = pool.directories()
    assert directory.entry(number) == entry, "it survives eviction after eviction"
    assert scrub(pool.agent()).counters.slots_bad == 0


def test_a_slot_whose_values_rot_twice_is_set_aside() -> None:
    pool, agent = filled(1, sets=(1,))
    _, slot, _ = agent.where(key_of(0))
    for _ in range(STRIKES):
        assert set_aside(pool) == 0
        assert agent.where(key_of(0))[1] == slot, "the first free slot of its set"
        pool.namespaces[0].flip(slot + 5000)
        scrub(agent)
        agent.age_directories()
        assert agent.put(key_of(0), value_of(0)).stored
        agent.channel.clock += YOUNG_SECONDS + 1
    assert set_aside(pool) == 1
    assert agent.where(key_of(0))[1] != slot


def test_a_get_that_meets_damage_and_a_refused_write_are_looked_into_without_a_scrub() -> None:
    pool, agent = filled(2, sets=(1,))
    _, slot, _ = agent.where(key_of(0))
    pool.namespaces[0].unreadable.add(slot)
    assert agent.get(key_of(0)) is MissCause.CORRUPT
    counters = Scrubber([agent.volume]).counters
    look_into(agent, counters)
    assert (counters.slots_bad, set_aside(pool)) == (1, 1)

    agent.put(key_of(7), b"value")
    agent.delete(key_of(7))
    free = agent.volume.slot_offset
    sets = agent.volume.borrow_sets(agent.volume.placement.pseudonym(key_of(7)))
    agent.volume.give_back_sets(sets)
    start = agent.volume.placement.pseudonym(key_of(7))[-1] % SLOTS_PER_SET
    assert sets[0].directory is not None
    slot_at = next(
        free(sets[0], (start + step) % SLOTS_PER_SET)
        for step in range(SLOTS_PER_SET)
        if sets[0].directory.entry((start + step) % SLOTS_PER_SET) is None
    )
    pool.namespaces[0].unwritable.add(slot_at)
    for _ in range(STRIKES):
        with pytest.raises(PutRefused):
            agent.put(key_of(7), b"value")
        look_into(agent, counters)
        agent.channel.clock += COOLDOWN_SECONDS + 1
    assert set_aside(pool) == 2
    assert agent.put(key_of(7), b"value").stored


@pytest.mark.parametrize("how", ["down", "hung", "suspect"])
def test_what_is_away_or_under_suspicion_is_skipped(how: str) -> None:
    pool, agent = filled(20)
    for namespace in pool.namespaces:
        namespace.flip(EXTENT_AT + DIRECTORY_BYTES + 100)
    before = [dict(namespace.blocks) for namespace in pool.namespaces]
    setattr(pool.namespaces[0], how, True)
    counters = scrub(agent).counters
    assert counters.sets_skipped == 1
    assert pool.namespaces[0].blocks == before[0]


def test_a_drive_that_gives_nothing_is_no_drive_of_bad_ranges() -> None:
    pool, agent = filled(NOTHING_OPENS, sets=(1,))
    for number in range(NOTHING_OPENS):
        _, slot, _ = agent.where(key_of(number))
        pool.namespaces[0].unreadable.add(slot)
    before = dict(pool.namespaces[0].blocks)
    counters = scrub(agent).counters
    assert (counters.slots_bad, counters.sets_skipped) == (0, 1)
    assert pool.namespaces[0].blocks == before


def test_no_set_loses_more_than_its_share() -> None:
    pool, agent = filled(SLOTS_PER_SET, sets=(1,))
    for number in range(QUARANTINED_MAX + 8):
        _, slot, _ = agent.where(key_of(number))
        pool.namespaces[0].unreadable.add(slot)
    counters = scrub(agent).counters
    assert counters.slots_bad == QUARANTINED_MAX + 8
    assert set_aside(pool) == QUARANTINED_MAX
    pinned = 0
    for number in range(QUARANTINED_MAX + 8, SLOTS_PER_SET):
        until = int(agent.channel.wall()) + 60
        pinned += (
            agent.channel.run(pin(agent.volume, agent.channel, key_of(number), until, agent.deadline()))
            is True
        )
    assert pinned == PINNED_SLOTS_MAX, "what is set aside is no pin of anybody's"
    assert agent.put(key_of(1000), b"value").stored


def test_what_cannot_be_known_stays() -> None:
    """Another key, an entry of a moment ago, and a tenant that was erased while the walk went on."""
    pool, agent = filled(4, sets=(1,))
    before = dict(pool.namespaces[0].blocks)
    from tests.support.pool.memory_pool import fixed_secret

    stranger = pool.agent(secret=fixed_secret(99))
    stranger.channel.clock = agent.channel.clock
    scrub(stranger)
    assert pool.namespaces[0].blocks == before

    agent.put(key_of(9), b"value")
    _, slot, _ = agent.where(key_of(9))
    pool.namespaces[0].flip(slot + 10)
    before = dict(pool.namespaces[0].blocks)
    assert scrub(agent).counters.slots_checked == 4
    assert pool.namespaces[0].blocks == before

    scrubber = Scrubber([agent.volume])
    agent.channel.run(scrubber.advance(agent.channel))
    agent.volume.change(erased=True)
    while not scrubber.counters.passes:
        agent.channel.run(scrubber.advance(agent.channel))
    assert scrubber.counters.slots_bad == 0
    assert pool.namespaces[0].blocks == before


def test_an_entry_whose_slot_holds_something_else_goes_and_nobody_is_blamed() -> None:
    pool, agent = filled(3, sets=(1,))
    _, slot, _ = agent.where(key_of(1))
    pool.namespaces[0].store(slot, [bytes(HEADER_BYTES)])
    counters = scrub(agent).counters
    assert (counters.slots_stale, counters.slots_bad) == (1, 0)


def test_nothing_that_was_opened_is_kept() -> None:
    _, agent = filled(3)
    scrub(agent)
    spare = [agent.volume.unit_buffers.borrow() for _ in range(4)]
    for buffer in spare:
        assert value_of(1)[:64] not in bytes(buffer)


def test_a_new_put_between_the_looks_is_not_taken_out() -> None:
    """The walk has read an old directory; by the time it settles, the slot has a new value."""
    pool, agent = filled(1, sets=(1,))
    _, slot, _ = agent.where(key_of(0))
    scrubber = Scrubber([agent.volume])
    agent.channel.run(scrubber.advance(agent.channel))
    pool.namespaces[0].flip(slot + 100)
    agent.channel.run(scrubber.advance(agent.channel))
    agent.delete(key_of(0))
    agent.age_directories()
    agent.put(key_of(0), b"another value")
    assert agent.where(key_of(0))[1] == slot
    while not scrubber.counters.passes:
        agent.channel.run(scrubber.advance(agent.channel))
    assert scrubber.counters.slots_bad == 0
    assert pool.agent().get(key_of(0)) == b"another value"


def test_the_operator_sees_what_is_set_aside_and_gives_it_back() -> None:
    pool, agent = filled(6)
    places = [agent.where(key_of(number)) for number in (1, 4)]
    for namespace, slot, _ in places:
        pool.namespaces[namespace].unreadable.add(slot)
    scrub(agent)
    volume = map_volume(pool)
    numbers = {nguid_of(number).hex(): number for number in range(2)}
    found = agent.channel.run(survey(agent.channel, volume, numbers))
    assert found.unread == 0
    assert {(each.nguid, each.offset) for each in found.quarantined} == {
        (nguid_of(namespace).hex(), directory) for namespace, _, directory in places
    }
    by_set = {
        (each.nguid, each.offset): frozenset(
            other.slot
            for other in found.quarantined
            if (other.nguid, other.offset) == (each.nguid, each.offset)
        )
        for each in found.quarantined
    }
    assert agent.channel.run(release(agent.channel, by_set, numbers)) == 2
    assert set_aside(pool) == 0
    del numbers[nguid_of(0).hex()]
    assert agent.channel.run(survey(agent.channel, volume, numbers)).unread == 1


def map_volume(pool: MemoryPool):  # type: ignore[no-untyped-def]
    from agent.pool.map.document import MapExtent, MapVolume

    return MapVolume.model_construct(
        name="v",
        value_bytes=pool.settings.value_bytes,
        extents=tuple(
            MapExtent(nguid=extent.nguid.hex(), offset=extent.offset, sets=extent.sets)
            for extent in pool.settings.extents
        ),
    )


def test_a_pace_is_kept_and_halts_for_others() -> None:
    moved = 0

    def others() -> int:
        return moved

    pace: Pace = Pace(1_000_000, others)
    assert pace.spend(100_000, 10.0) == pytest.approx(0.1)
    assert pace.spend(100_000, 10.1) == pytest.approx(0.1)
    assert pace.spend(100_000, 10.1) == pytest.approx(0.2), "what was not waited for is owed"
    moved = 1 << 20
    assert pace.spend(100_000, 20.0) == pytest.approx(0.8)
    assert pace.spend(100_000, 30.0) == pytest.approx(0.1)


def test_a_damaged_directory_forgets_and_is_found_again() -> None:
    pool, agent = filled(2, sets=(1,))
    _, slot, directory_at = agent.where(key_of(0))
    pool.namespaces[0].unreadable.add(slot)
    scrub(agent)
    pool.namespaces[0].flip(directory_at + slot_number_at(agent, slot) * 64 + 20)
    assert set_aside(pool) == 0
    block = bytearray(4096)
    pool.namespaces[0].load(directory_at, memoryview(block))
    assert Directory(block).taken == 1


def slot_number_at(agent: PoolAgent, slot: int) -> int:
    return (slot - EXTENT_AT - DIRECTORY_BYTES) // agent.volume.settings.slot_bytes


def test_a_drive_that_fails_for_a_moment_costs_no_set_of_few_values_its_own() -> None:
    """Fewer values than NOTHING_OPENS in a set: other sets and directories are asked beside them."""
    pool, agent = filled(10, sets=(2,))
    for number in range(10):
        pool.namespaces[0].unreadable.add(agent.where(key_of(number))[1])
    before = dict(pool.namespaces[0].blocks)
    counters = scrub(agent).counters
    for number in range(10):
        assert agent.get(key_of(number)) is MissCause.CORRUPT
    for _ in range(5):
        look_into(agent, counters)
    assert (counters.slots_bad, counters.slots_quarantined) == (0, 0)
    assert counters.sets_skipped >= 2
    assert pool.namespaces[0].blocks == before


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_drive_that_fails_reads_at_random_has_no_bad_slots(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = MemoryPool((8, 8), value_bytes=16384)
    agent = pool.agent()
    for number in range(3 * WALK_LEAST):
        agent.put(key_of(number), b"value")
    agent.channel.clock += YOUNG_SECONDS + 1
    before = [dict(namespace.blocks) for namespace in pool.namespaces]
    chance, read = random.Random(7), agent.channel.read

    def fails_at_times(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        if namespace == 1 and chance.random() < share:
            return MemoryPending(done=True, fault="Unrecovered Read Error")
        return read(namespace, offset, into)

    monkeypatch.setattr(agent.channel, "read", fails_at_times)
    counters = scrub(agent).counters
    assert (counters.slots_bad, counters.slots_quarantined) == (0, 0)
    assert counters.sets_skipped
    assert [namespace.blocks for namespace in pool.namespaces] == before


def test_two_bad_slots_of_a_small_pool_do_not_speak_for_each_other() -> None:
    pool, agent = filled(6)
    for number in (1, 4):
        namespace, slot, _ = agent.where(key_of(number))
        pool.namespaces[namespace].unreadable.add(slot)
    assert scrub(agent).counters.slots_quarantined == 2


def test_a_walk_waits_before_it_looks_again() -> None:
    """A namespace whose data cannot be read for a moment, while its directories can, and with one value."""
    pool, agent = filled(1, sets=(1,))
    _, slot, _ = agent.where(key_of(0))
    pool.namespaces[0].unreadable.add(slot)
    over_at = agent.channel.now() + PAUSE_SECONDS / 2
    scrubber = Scrubber([agent.volume])
    while not scrubber.counters.passes:
        if agent.channel.now() > over_at:
            pool.namespaces[0].unreadable.clear()
        steps = scrubber.advance(agent.channel)
        agent.channel.run(_healing(steps, pool, agent, over_at))
    assert scrubber.counters.slots_bad == 0
    assert agent.get(key_of(0)) == value_of(0)


def _healing(steps: Any, pool: MemoryPool, agent: PoolAgent, over_at: float) -> Any:
    """The same steps; the medium is well again from `over_at` on."""
    try:
        wanted = next(steps)
        while True:
            answer = yield wanted
            if agent.channel.now() >= over_at:
                pool.namespaces[0].unreadable.clear()
            wanted = steps.send(answer)
    except StopIteration as end:
        return end.value


def test_blocks_of_files_that_another_agent_writes_are_read_and_left() -> None:
    """A block that is synced while a scrub of another process looks at its set stays on flash."""
    pool = MemoryPool((1,), value_bytes=65536)
    pool.settings = replace(pool.settings, kind="files")
    owner, visitor = pool.agent(), pool.agent()
    visitor.volume.change(files_elsewhere=True)
    for number in range(6):
        owner.put(key_of(number), bytes([number]) * 60000)
    for each in (owner, visitor):
        each.channel.clock += YOUNG_SECONDS + 1
    _, slot, _ = owner.where(key_of(3))
    pool.namespaces[0].flip(slot + 5000)
    before = dict(pool.namespaces[0].blocks)
    counters = scrub(visitor).counters
    assert (counters.slots_left, counters.slots_bad) == (1, 0)
    assert pool.namespaces[0].blocks == before
    counters = scrub(owner).counters
    assert (counters.slots_left, counters.slots_bad) == (1, 0), "a reader has to meet it first"
    assert pool.namespaces[0].blocks == before


def test_what_was_put_a_moment_ago_is_counted_as_left_out() -> None:
    pool = MemoryPool((1,), value_bytes=65536)
    agent = pool.agent()
    for number in range(5):
        agent.put(key_of(number), b"value")
    counters = scrub(agent).counters
    assert (counters.slots_checked, counters.slots_young) == (0, 5)


def test_a_drive_with_bad_slots_everywhere_is_one_to_replace() -> None:
    """One slot in twenty, for good: the first may be set aside; then the walk has seen enough."""
    pool = MemoryPool((8,), value_bytes=16384)
    agent = pool.agent()
    for number in range(3 * WALK_LEAST):
        agent.put(key_of(number), b"value")
    agent.channel.clock += YOUNG_SECONDS + 1
    for number in range(0, 3 * WALK_LEAST, 20):
        pool.namespaces[0].unreadable.add(agent.where(key_of(number))[1])
    counters = scrub(agent).counters
    assert counters.slots_quarantined <= 3 * WALK_LEAST / 20 / 2
    assert counters.sets_skipped >= 4


@pytest.mark.parametrize("failing", [1, 2])
def test_one_good_look_is_enough(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, agent = filled(1, sets=(1,))
    _, slot, _ = agent.where(key_of(0))
    read, looks = agent.channel.read, 0

    def fails_first(namespace: int, offset: int, into: memoryview, *, more: bool = False) -> MemoryPending:
        nonlocal looks
        looks += offset == slot
        if offset == slot and looks <= failing:
            return MemoryPending(done=True, fault="Unrecovered Read Error")
        return read(namespace, offset, into)

    monkeypatch.setattr(agent.channel, "read", fails_first)
    assert scrub(agent).counters.slots_bad == 0
    assert pool.agent().get(key_of(0)) == value_of(0)


def test_a_report_waits_for_what_troubles_a_drive_to_be_over() -> None:
    pool, agent = filled(2, sets=(1,))
    pool.namespaces[0].unreadable.add(agent.where(key_of(0))[1])
    assert agent.get(key_of(0)) is MissCause.CORRUPT
    counters = ScrubCounters()
    for _ in range(3):
        agent.channel.run(look_into_reports([agent.volume], agent.channel, counters))
    pool.namespaces[0].unreadable.clear()
    look_into(agent, counters)
    assert counters.slots_bad == 0
    assert agent.get(key_of(0)) == value_of(0)
