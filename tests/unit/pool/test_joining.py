"""Namespaces that join: the map, what a crash leaves after each step, and values that move and are found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import (
    as_settled,
    complete_map,
    join,
    misplaced_values,
    unsettled,
    with_namespaces,
)
from agent.pool.counters import MissCause
from agent.pool.maintenance.migrate import Migration, Outcome, is_misplaced
from agent.pool.maintenance.rebalance import FOLLOW_SECONDS, GRACE_SECONDS, WALK_AGAIN_SECONDS, Rebalancer
from agent.pool.map.document import DATA_START, PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection, inspect, newest_map
from agent.pool.map.replicas import write_superblock
from agent.pool.volume.volume import Found, Volume
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of, nguid_of, volume_settings

SIZE = 64 << 20
WISHES = [
    VolumeWish(name="kv", value_bytes=65536, share=0.6),
    VolumeWish(name="f", kind="files", value_bytes=65536, share=0.3),
]


def plan(count: int, root: RootKey) -> PoolMap:
    return plan_pool([(nguid_of(number), SIZE) for number in range(count)], WISHES, root)


@pytest.fixture
def root() -> RootKey:
    return RootKey(SecretKey(b"\x11" * 32), "a test")


def test_a_newcomer_gets_the_share_that_the_volumes_have_elsewhere(root: RootKey) -> None:
    before = plan(3, root)
    after = with_namespaces(before, [(nguid_of(7), SIZE), (nguid_of(8), 2 * SIZE)])
    assert after.version == before.version + 1
    assert [each.nguid for each in after.namespaces[:3]] == [each.nguid for each in before.namespaces]
    for old, new in zip(before.volumes, after.volumes, strict=True):
        assert new.extents[:3] == old.extents
        assert new.settled == 3
        assert new.extents[3].sets == old.extents[0].sets
        assert new.extents[4].sets >= 2 * old.extents[0].sets
        assert after.settings(new).settled_extents == 3
    with pytest.raises(ConfigError, match="still have to move"):
        with_namespaces(after, [(nguid_of(9), SIZE)])
    settled = as_settled(after)
    assert unsettled(settled) == []
    with_namespaces(settled, [(nguid_of(9), SIZE)])
    with pytest.raises(ConfigError, match="twice"):
        with_namespaces(before, [(nguid_of(0), SIZE)])
    # What a map of before says is not said any longer, so older agents read a settled map.
    assert b"settled" not in settled.encode()
    assert b"settled" not in before.encode()


class Crash(Exception):
    """The program that changes the map ends here."""


class Media:
    """Namespaces with superblocks, and a program on them that may be cut short after any write."""

    def __init__(self, root: RootKey) -> None:
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(3)]
        self.channel = MemoryChannel(self.namespaces)
        self.pool_map = plan(2, root)
        for number in range(2):
            self.channel.run(write_superblock(self.channel, number, nguid_of(number), self.pool_map))
        # Values of nobody lie where directories of the newcomer are going to be.
        self.namespaces[2].store(DATA_START, [b"\xee" * 4096])

    def look(self) -> list[tuple[bytes, int, Inspection]]:
        return [
            (nguid_of(number), SIZE, self.channel.run(inspect(self.channel, number, nguid_of(number), SIZE)))
            for number in range(3)
        ]

    def add(self, writes: int | None) -> int:
        """`g35 pool add` in short; how many writes it made. It ends in the middle of number `writes`."""
        count = 0
        stores = [namespace.store for namespace in self.namespaces]

        def store(number: int, offset: int, parts: Sequence[bytes]) -> None:
            nonlocal count
            count += 1
            if count == writes:
                data = b"".join(bytes(each) for each in parts)
                stores[number](offset, [data[: len(data) // 2 // 4096 * 4096]])
                raise Crash
            stores[number](offset, parts)

        for number, namespace in enumerate(self.namespaces):
            namespace.store = lambda offset, parts, number=number: store(number, offset, parts)  # type: ignore[method-assign,misc]
        try:
            seen = self.look()
            pool_map = newest_map([each for _, _, each in seen])
            assert {each.nguid for each in pool_map.namespaces} <= {nguid.hex() for nguid, _, _ in seen}
            self.channel.run(complete_map(self.channel, pool_map, seen))
            if len(pool_map.namespaces) == 2:
                numbers = {nguid_of(number).hex(): number for number in range(3)}
                self.channel.run(join(self.channel, pool_map, [(nguid_of(2), SIZE)], numbers))
        finally:
            for namespace, before in zip(self.namespaces, stores, strict=True):
                namespace.store = before  # type: ignore[method-assign]
        return count


def test_an_add_that_is_cut_short_anywhere_is_completed_by_another(root: RootKey) -> None:
    """After each write, and in the middle of it: there is one map in force, it names the newcomer only once
    its directories are clear, and the next add ends where an undisturbed one does."""
    writes = Media(root).add(None)
    assert writes > 10
    for cut in range(1, writes + 1):
        media = Media(root)
        with pytest.raises(Crash):
            media.add(cut)
        seen = media.look()
        found = newest_map([each for _, _, each in seen])
        assert found.version in (1, 2)
        if found.version == 2:
            block = bytearray(4096)
            for volume in found.volumes:
                media.namespaces[2].load(volume.extents[2].offset, memoryview(block))
                assert not any(block)
        else:
            # The one outside of the pool never carries what no member carries.
            assert seen[2][2].content is not Content.POOL
        media.add(None)
        maps = {each.superblock.pool_map.encode() for _, _, each in media.look() if each.superblock}
        assert len(maps) == 1
        assert newest_map([each for _, _, each in media.look()]).version == 2
        assert media.look()[2][2].content is Content.POOL


def test_a_member_that_carries_something_else_is_not_overwritten(root: RootKey) -> None:
    media = Media(root)
    media.add(None)
    seen = media.look()
    pool_map = newest_map([each for _, _, each in seen])
    seen[1] = (seen[1][0], SIZE, Inspection(1, Content.FOREIGN, detail="a damaged superblock"))
    with pytest.raises(G35Error, match="belongs to the pool and carries"):
        media.channel.run(complete_map(media.channel, pool_map, seen))
    # One that agents have written to before it got its superblock is completed.
    seen[1] = (seen[1][0], SIZE, Inspection(1, Content.FOREIGN, detail="it is not blank"))
    assert media.channel.run(complete_map(media.channel, pool_map, seen)) == 1


class Joined:
    """A pool in memory in which namespaces join."""

    def __init__(
        self, before: Sequence[int] = (3, 3), after: Sequence[int] = (3, 3, 3), **made: object
    ) -> None:
        self.pool = MemoryPool(before, **made)
        self.pool.namespaces += [MemoryNamespace(1 << 40) for _ in after[len(before) :]]
        self.before = self.pool.settings
        self.after = replace(volume_settings(after, **made), settled_extents=len(before))  # type: ignore[arg-type]
        self.agent = self.pool.agent()
        self.rng = random.Random(35)
        self.values: dict[bytes, bytes] = {}

    def fill(self, count: int, agent: PoolAgent | None = None) -> None:
        for number in range(len(self.values), len(self.values) + count):
            key, value = key_of(number), self.rng.randbytes(self.rng.randint(1, 16384))
            (agent or self.agent).put(key, value)
            self.values[key] = value

    def other(self, **options: object) -> PoolAgent:
        return PoolAgent(self.pool.namespaces, self.after, **options)  # type: ignore[arg-type]

    def check(self, *agents: PoolAgent) -> None:
        for agent in agents or (self.agent,):
            for key, value in self.values.items():
                assert agent.get(key) == value

    def misplaced(self, agent: PoolAgent) -> list[bytes]:
        return [key for key in self.values if is_misplaced(agent.volume, *self._lies(agent, key))]

    def _lies(self, agent: PoolAgent, key: bytes):  # type: ignore[no-untyped-def]
        pseudonym = agent.volume.placement.pseudonym(key)
        agent.get(key)
        sets = agent.volume.borrow_sets(pseudonym)
        agent.volume.give_back_sets(sets)
        return agent.volume.find(sets, pseudonym)[0].cached, pseudonym

    def move_all(self, agent: PoolAgent, rate: int = 1 << 30) -> Rebalancer:
        mover = Rebalancer([agent.volume], rate)
        for _ in range(400):
            agent.channel.run(mover.turn(agent.channel))
            agent.channel.clock += 0.5
            if mover.moves.left == 0:
                break
        return mover


def test_values_are_found_before_while_and_after_they_move() -> None:
    joined = Joined()
    joined.fill(100)
    agent, other, old = joined.agent, joined.other(), joined.pool.agent()
    agent.volume.change(layout=agent.volume.layout(joined.after))
    joined.check(agent, other, old)
    wrong = joined.misplaced(other)
    assert 15 < len(wrong) < 60
    mover = Rebalancer([agent.volume], 1 << 30)
    for turn in range(60):
        agent.channel.run(mover.turn(agent.channel))
        agent.channel.clock += 0.2
        other.channel.clock += 0.2
        if turn > 20 and turn % 3 == 0:
            joined.check(agent, other)
    agent.channel.clock += WALK_AGAIN_SECONDS
    agent.channel.run(mover.turn(agent.channel))
    assert mover.moves.values == len(wrong)
    assert mover.moves.left == 0
    assert joined.misplaced(joined.other()) == []
    # Settled: the same values, by a map that knows nothing of earlier places.
    final = replace(joined.after, settled_extents=0)
    joined.check(PoolAgent(joined.pool.namespaces, final))
    agent.volume.change(layout=agent.volume.layout(final))
    joined.check(agent)
    tally = agent.tally
    assert tally.evictions == tally.evictions_expired == 0
    assert not any(
        cached.users or cached.reserved or cached.writer.locked() for cached in agent.cache.snapshot()
    )
    # Whoever still goes by the map of before finds what stayed, and a miss for the rest: never a wrong byte.
    for key, value in joined.values.items():
        assert old.get(key) in (value, MissCause.NEVER_STORED, MissCause.EVICTED)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=3)
)
def test_whatever_joins_whatever(before: list[int], more: list[int]) -> None:
    """Also one namespace that was alone, or that held more than half of the sets."""
    joined = Joined(before, [*before, *more], value_bytes=4096, unit_bytes=1 << 16)
    joined.rng = random.Random(1)
    for number in range(30):
        key, value = key_of(number), joined.rng.randbytes(100)
        joined.agent.put(key, value)
        joined.values[key] = value
    agent = joined.agent
    agent.volume.change(layout=agent.volume.layout(joined.after))
    joined.check()
    for number in range(30, 60):
        key, value = key_of(number), joined.rng.randbytes(100)
        agent.put(key, value)
        joined.values[key] = value
    assert joined.move_all(agent).moves.left == 0
    joined.check(
        agent, joined.other(), PoolAgent(joined.pool.namespaces, replace(joined.after, settled_extents=0))
    )


def test_new_values_go_where_they_belong_and_deletes_reach_every_place() -> None:
    joined = Joined()
    joined.fill(60)
    agent = joined.agent
    agent.volume.change(layout=agent.volume.layout(joined.after))
    keys = list(joined.values)
    joined.fill(60)
    for key in list(joined.values)[60:]:
        cached, pseudonym = joined._lies(agent, key)
        assert not is_misplaced(agent.volume, cached, pseudonym)
    # A key that lies at an earlier place is stored: the first write wins, wherever it lies.
    for key in keys:
        agent.age_directories()
        assert agent.channel.run(agent.volume.lookup(agent.channel, [key], agent.deadline())) == [None]
    # Copied and not yet cleared: a delete removes both.
    mover = Rebalancer([agent.volume], 1 << 30)
    agent.channel.run(mover.turn(agent.channel))
    assert mover.moves.values == 0
    agent.channel.clock += FOLLOW_SECONDS
    agent.channel.run(mover.turn(agent.channel))
    assert mover.moves.values > 5
    for key in keys:
        assert agent.delete(key)
    for each in (agent, joined.other()):
        each.age_directories()
        assert all(isinstance(each.get(key), MissCause) for key in keys)


def test_bandwidth_is_bounded_and_none_is_none() -> None:
    joined = Joined()
    joined.fill(150)
    agent = joined.agent
    agent.volume.change(layout=agent.volume.layout(joined.after))
    mover = Rebalancer([agent.volume], 0)
    agent.channel.clock += 10
    agent.channel.run(mover.turn(agent.channel))
    assert mover.moves.values == 0
    mover, began = Rebalancer([agent.volume], 50_000), agent.channel.clock
    written = sum(each.bytes_written for each in joined.pool.namespaces)
    for _ in range(60):
        agent.channel.run(mover.turn(agent.channel))
        agent.channel.clock += 0.25
    seconds = agent.channel.clock - began
    assert 0 < mover.moves.bytes <= 50_000 * (seconds + 1) + 20_480
    moved = sum(each.bytes_written for each in joined.pool.namespaces) - written
    # The copy, two directories, a header of zeros.
    assert moved <= mover.moves.bytes + mover.moves.values * 3 * 4096


def one_misplaced(joined: Joined, agent: PoolAgent) -> tuple[bytes, Found]:
    key = joined.misplaced(agent)[0]
    cached, pseudonym = joined._lies(agent, key)
    slot = cached.directory.find(pseudonym)
    return key, Found(agent.cache.borrow(cached.namespace, cached.offset), slot, cached.directory.entry(slot))


def _volume(joined: Joined) -> tuple[PoolAgent, Volume, MemoryChannel]:
    joined.agent.volume.change(layout=joined.agent.volume.layout(joined.after))
    return joined.agent, joined.agent.volume, joined.agent.channel


@pytest.mark.parametrize("fault", ["down", "broken", "hung"])
def test_a_newcomer_that_fails_leaves_the_value_where_it_is(fault: str) -> None:
    joined = Joined()
    joined.fill(80)
    agent, volume, channel = _volume(joined)
    key, old = one_misplaced(joined, agent)
    setattr(joined.pool.namespaces[2], fault, True)
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.TROUBLE
    assert agent.get(key) == joined.values[key]
    assert not any(cached.reserved or cached.writer.locked() for cached in agent.cache.snapshot())
    setattr(joined.pool.namespaces[2], fault, False)
    channel.clock += 61
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.COPIED
    assert channel.run(Migration(volume, channel, old, agent.deadline()).clear()) is Outcome.GONE
    assert agent.get(key) == joined.values[key]


@pytest.mark.parametrize("keeps", range(0, 5))
def test_a_mover_that_is_killed_leaves_a_value_that_is_found(keeps: int) -> None:
    """After so many writes of one move; another agent finds the value, and moves it again or not at all."""
    joined = Joined()
    joined.fill(80)
    agent, volume, channel = _volume(joined)
    _, old = one_misplaced(joined, agent)
    left = keeps

    def store(namespace: MemoryNamespace, offset: int, parts: Sequence[bytes]) -> None:
        nonlocal left
        if left <= 0:
            raise Crash
        left -= 1
        MemoryNamespace.store(namespace, offset, parts)

    for each in joined.pool.namespaces:
        each.store = lambda offset, parts, each=each: store(each, offset, parts)  # type: ignore[method-assign,misc]
    try:
        channel.run(Migration(volume, channel, old, agent.deadline()).copy())
        channel.run(Migration(volume, channel, old, agent.deadline()).clear())
    except Crash:
        pass
    for each in joined.pool.namespaces:
        del each.store
    fresh = joined.other()
    joined.check(fresh)
    assert joined.move_all(fresh).moves.left == 0
    joined.check(
        fresh, joined.other(), PoolAgent(joined.pool.namespaces, replace(joined.after, settled_extents=0))
    )


def test_what_does_not_prove_itself_is_not_moved() -> None:
    joined = Joined()
    joined.fill(80)
    agent, volume, channel = _volume(joined)
    key, old = one_misplaced(joined, agent)
    joined.pool.namespaces[old.cached.namespace].flip(volume.slot_offset(old.cached, old.slot) + 4096 + 5)
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.TROUBLE
    assert agent.get(key) is MissCause.CORRUPT
    # And one whose slot was given away since is only an entry: it goes.
    joined.pool.namespaces[old.cached.namespace].store(
        volume.slot_offset(old.cached, old.slot), [bytes(4096)]
    )
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.GONE


def test_a_drive_that_brings_another_slots_bytes_once_costs_no_value() -> None:
    joined = Joined()
    joined.fill(40)
    agent, volume, channel = _volume(joined)
    key, old = one_misplaced(joined, agent)
    drive, at = joined.pool.namespaces[old.cached.namespace], volume.slot_offset(old.cached, old.slot)
    directory = old.cached.directory
    assert directory is not None
    other = next(slot for slot, entry in directory if slot != old.slot and entry.length)
    headers = [drive.blocks[volume.slot_offset(old.cached, other)]]

    def load(offset: int, into: memoryview) -> None:
        MemoryNamespace.load(drive, offset, into)
        if offset == at and headers:
            into[:4096] = headers.pop()

    drive.load = load  # type: ignore[method-assign]
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.TROUBLE
    assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.COPIED
    assert agent.get(key) == joined.values[key]


@pytest.mark.parametrize("when", ["before it is copied", "after it was copied"])
def test_a_slot_that_another_agent_has_refilled_is_left_as_it_is(when: str) -> None:
    """Its new value is on flash, and its entry is about to be: the header stays, whatever the entry said."""
    joined = Joined()
    joined.fill(40)
    agent, volume, channel = _volume(joined)
    _, old = one_misplaced(joined, agent)
    at = volume.slot_offset(old.cached, old.slot)
    if when == "after it was copied":
        assert channel.run(Migration(volume, channel, old, agent.deadline()).copy()) is Outcome.COPIED
    sealer = volume.codec.seal(key_of(9999), old.entry.generation + 1, volume.place(old.cached, old.slot))
    sealer.seal(0, memoryview(b"ten bytes!"), memoryview(bytearray(4096)))
    header = bytes(sealer.header(10, expiry=0, stored_us=1))
    joined.pool.namespaces[old.cached.namespace].store(at, [header])
    move = Migration(volume, channel, old, agent.deadline())
    assert channel.run(move.copy() if when == "before it is copied" else move.clear()) is Outcome.GONE
    assert joined.pool.namespaces[old.cached.namespace].blocks[at] == header


def test_nothing_goes_to_make_room_for_what_moves() -> None:
    joined = Joined((3, 3), (3, 3, 1), value_bytes=4096, unit_bytes=1 << 16)
    for number in range(330):
        joined.agent.put(key_of(number), b"x")
        joined.values[key_of(number)] = b"x"
    agent, _, _ = _volume(joined)
    stored, number = 0, 1000
    while stored < 64:
        try:
            writing = agent.put(key_of(number), b"y", may_evict=False)
        except Exception:
            break
        stored += agent.where(key_of(number))[0] == 2
        number += 1
        assert writing.stored
    mover = joined.move_all(agent)
    assert agent.tally.evictions == 0
    assert mover.moves.not_moved > 0
    joined.check(agent, joined.other())


def test_what_is_at_earlier_places_is_counted_from_flash(root: RootKey) -> None:
    before = plan(2, root)
    namespaces = [MemoryNamespace(SIZE) for _ in range(3)]
    entry = before.volumes[0]
    secret = before.secret(entry, root)
    agent = PoolAgent(namespaces, before.settings(entry), secret=secret)
    for number in range(40):
        agent.put(key_of(number), b"value %d" % number)
    after = with_namespaces(before, [(nguid_of(2), SIZE)])
    numbers = {nguid_of(number).hex(): number for number in range(3)}
    channel = agent.channel
    values, wrong = channel.run(misplaced_values(channel, after, after.volumes[0], secret, numbers))
    assert values == 40
    assert 0 < wrong < 40
    agent.volume.change(layout=agent.volume.layout(after.settings(after.volumes[0])))
    mover = Rebalancer([agent.volume], 1 << 30)
    for _ in range(20):
        channel.run(mover.turn(channel))
        channel.clock += GRACE_SECONDS
    assert channel.run(misplaced_values(channel, after, after.volumes[0], secret, numbers)) == (40, 0)
    namespaces[1].down = True
    with pytest.raises(G35Error, match="cannot read a directory"):
        channel.run(misplaced_values(channel, after, after.volumes[0], secret, numbers))


def test_a_volume_takes_its_secret_along() -> None:
    """A tenant that is erased while its volume is unsettled leaves nothing that opens."""
    joined = Joined()
    joined.fill(20)
    agent, volume, _ = _volume(joined)
    volume.change(erased=True)
    assert volume.old_placement is not None
    assert all(isinstance(agent.get(key), MissCause) for key in joined.values)
