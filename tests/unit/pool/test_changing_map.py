"""Several programs that change the pool map at once: every place where one may meet another, or die of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import join, settle
from agent.pool.kv.commands import RESERVED_KEY
from agent.pool.map import commit
from agent.pool.map.commit import ROUNDS_MAX, change_map, replace_map, simply
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import inspect, newest_map
from agent.pool.map.key_epochs import with_new_data_keys, without_earlier_keys
from agent.pool.map.reconcile import agreed
from agent.pool.map.replicas import write_superblock
from agent.pool.map.tenant_changes import with_limits, with_tenant, without_key
from agent.pool.steps import IoChannel, Steps
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace
from tests.support.sim.stepped_programs import Program, SteppedChannel

SIZE = 64 << 20
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
NUMBERS = {nguid_of(number).hex(): number for number in range(3)}
WISHES = [
    VolumeWish(name="blue", tenant="blue", value_bytes=65536, share=0.3),
    VolumeWish(name="red", tenant="red", value_bytes=65536, share=0.3),
]
GREEN = VolumeWish(name="green", tenant="green", value_bytes=65536, share=0.2)
FORMATTED = plan_pool([(nguid_of(number), SIZE) for number in range(2)], WISHES, ROOT)
BLUE_KEY = FORMATTED.tenants[0].wrapped_key.encode()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PAUSE_SECONDS", 0.0)


class Media:
    """Two namespaces of a pool and a blank one."""

    def __init__(self) -> None:
        self.namespaces = [MemoryNamespace(SIZE) for _ in range(3)]
        self.channel = MemoryChannel(self.namespaces)
        for number in range(2):
            self.channel.run(write_superblock(self.channel, number, nguid_of(number), FORMATTED))

    def program(self, name: str) -> Program:
        channel = SteppedChannel(self.namespaces)
        return Program(channel, PROGRAMS[name](channel))

    def found(self) -> PoolMap:
        return newest_map(
            [
                self.channel.run(inspect(self.channel, number, nguid_of(number), SIZE))
                for number, namespace in enumerate(self.namespaces)
                if 0 in namespace.blocks
            ]
        )

    def copies(self, found: PoolMap | None = None) -> set[bytes]:
        """Different superblocks on the members, without their NGUIDs and what hashes them."""
        heads = set()
        for number in range(len((found or self.found()).namespaces)):
            for offset in (0, 1 << 19):
                heads.add(self.namespaces[number].blocks[offset][48:96])
        return heads

    def holds(self, text: bytes) -> bool:
        return any(text in block for each in self.namespaces for block in each.blocks.values())

    def mend(self) -> PoolMap:
        """What the next program that comes does first."""
        return self.channel.run(
            change_map(self.channel, self.found(), NUMBERS, simply(lambda it: it))
        ).pool_map


def changes(change: Callable[[PoolMap], PoolMap]) -> Callable[[IoChannel], Steps[Any]]:
    return lambda channel: change_map(channel, FORMATTED, NUMBERS, simply(change), all_of_them=False)


def rotated(pool_map: PoolMap) -> PoolMap:
    red = next(each for each in pool_map.volumes if each.name == "red")
    return with_new_data_keys(pool_map, "red", ROOT) if not red.earlier_secret else pool_map


PROGRAMS: dict[str, Callable[[IoChannel], Steps[Any]]] = {
    "erase": changes(lambda it: without_key(it, "blue")),
    "erase red": changes(lambda it: without_key(it, "red")),
    "limit": changes(lambda it: with_limits(it, "red", quota_slots=7)),
    "rotate": changes(rotated),
    "add": changes(lambda it: with_tenant(it, "green", [GREEN], ROOT)[0]),
    "join": lambda channel: join(channel, FORMATTED, [(nguid_of(2), SIZE)], NUMBERS),
    "mend": changes(lambda it: it),
}


def is_done(name: str, pool_map: PoolMap) -> bool:
    tenants = {each.name: each for each in pool_map.tenants}
    red = next(each for each in pool_map.volumes if each.name == "red")
    return {
        "erase": tenants["blue"].is_erased,
        "erase red": tenants["red"].is_erased,
        "limit": tenants["red"].quota_slots == 7,
        "rotate": red.key_epoch == 1,
        "add": "green" in tenants and any(each.name == "green" for each in pool_map.volumes),
        "join": len(pool_map.namespaces) == 3 and all(len(each.extents) >= 2 for each in pool_map.volumes),
        "mend": True,
    }[name]


def steps_of(name: str) -> Iterator[int]:
    """Numbers of steps after which to let somebody else go on: just before every write of an undisturbed run,
    when the copy was looked at, and at its ends."""
    alone = Media().program(name)
    alone.run()
    assert alone.error is None
    return iter(sorted({0, *alone.wrote_at, alone.taken - 1}))


def check(media: Media, *programs: tuple[str, Program]) -> None:
    """All have ended well, and their changes are in the one map that lies in every copy."""
    found = media.found()
    for name, program in programs:
        assert program.ended
        assert program.error is None, (name, program.error)
        assert is_done(name, found), name
    assert len(media.copies(found)) == 1
    if any(name == "erase" for name, _ in programs):
        assert not media.holds(BLUE_KEY)


PAIRS = [("erase", "join"), ("erase", "limit"), ("erase", "add"), ("join", "rotate"), ("erase", "erase red")]


@pytest.mark.parametrize("pair", [*PAIRS, ("join", "join"), ("limit", "add")])
def test_two_that_meet_at_any_write_both_have_their_way(pair: tuple[str, str]) -> None:
    """The one is stopped at each of its writes, the other at each of its own, and then both go on."""
    one, other = pair
    for first, second in itertools.product(steps_of(one), list(steps_of(other))):
        media = Media()
        a, b = media.program(one), media.program(other)
        a.run(first)
        b.run(second)
        a.run()
        b.run()
        check(media, (one, a), (other, b))


@pytest.mark.parametrize("pair", [*PAIRS, *((b, a) for a, b in PAIRS)])
def test_one_that_dies_where_it_meets_another_undoes_nothing(pair: tuple[str, str]) -> None:
    """The first is stopped at any of its writes, the second runs to its end, the first takes one more step or
    a few, and dies. What was reported as done is done once the next has come, and is believed at once."""
    one, other = pair
    for first in steps_of(one):
        for more in (1, 3):
            media = Media()
            a, b = media.program(one), media.program(other)
            a.run(first)
            b.run()
            a.run(more)
            assert b.error is None
            assert is_done(other, media.found()), "also as it lies there"
            mended = media.mend()
            assert is_done(other, mended)
            assert len(media.copies()) == 1
            if other == "erase":
                assert not media.holds(BLUE_KEY)


def test_the_end_of_a_rotation_that_was_waited_for_undoes_nothing_of_what_came_meanwhile() -> None:
    media = Media()
    media.channel.run(PROGRAMS["rotate"](media.channel))
    seen_at_first = media.found()
    for name in ("erase", "limit", "add"):
        media.channel.run(PROGRAMS[name](media.channel))
    ended = {each.volume_id for each in seen_at_first.volumes if each.earlier_secret}
    over = simply(lambda base: without_earlier_keys(base, ended))
    media.channel.run(change_map(media.channel, seen_at_first, NUMBERS, over))
    found = media.found()
    assert all(is_done(name, found) for name in ("erase", "limit", "add", "rotate"))
    assert not any(each.earlier_secret for each in found.volumes)
    assert not media.holds(BLUE_KEY)


def test_whatever_the_order_of_many() -> None:
    """Three or four at once, in an order that a seed gives, and some die."""
    for seed in range(60):
        rng = random.Random(f"programs {seed}")
        media = Media()
        # A tenant that was erased has no keys to rotate.
        names = rng.sample(sorted(PROGRAMS.keys() - {"erase red"}), rng.randint(3, 4))
        programs = [(name, media.program(name)) for name in names]
        dead = rng.choice(programs)[1] if seed % 3 == 0 else None
        dies_after = rng.randint(0, 40)
        while running := [each for _, each in programs if not each.ended]:
            program = rng.choice(running)
            # In runs of different lengths: who is stopped for long misses more.
            program.run(rng.choice((1, 1, 2, 8)))
            if program is dead and program.taken >= dies_after:
                program.ended = True
        media.mend()
        check(media, *(each for each in programs if each[1] is not dead))


def test_who_is_always_overtaken_gives_up_and_says_so() -> None:
    media = Media()
    program = media.program("limit")
    for number in range(1, 40 * ROUNDS_MAX):
        program.step()
        channel = media.channel
        now = media.found().model_copy(update={"version": 1 + number})
        for member in range(2):
            channel.run(write_superblock(channel, member, nguid_of(member), now))
        if program.ended:
            break
    assert program.error is not None
    assert "again and again" in str(program.error)


def test_a_member_that_is_away_is_named_or_waited_for() -> None:
    media = Media()
    reached = {nguid_of(0).hex(): 0}
    channel = media.channel
    with pytest.raises(G35Error, match="not reached"):
        channel.run(change_map(channel, FORMATTED, reached, simply(lambda it: without_key(it, "blue"))))
    assert media.found() == FORMATTED
    change = simply(lambda it: without_key(it, "blue"))
    done = channel.run(change_map(channel, FORMATTED, reached, change, all_of_them=False))
    assert done.left == {nguid_of(1).hex(): "not reached"}
    # Somebody who reaches only the other one erases another tenant: of two maps of version 2 both count.
    away = {nguid_of(1).hex(): 1}
    change = simply(lambda it: without_key(it, "red"))
    done = channel.run(change_map(channel, FORMATTED, away, change, all_of_them=False))
    assert done.pool_map.version == 2
    assert all(each.is_erased for each in media.found().tenants), "an agent that starts now serves neither"
    assert media.mend().version == 3
    assert not media.holds(BLUE_KEY)
    assert len(media.copies()) == 1


def test_a_copy_that_the_medium_does_not_give_is_overwritten() -> None:
    media = Media()
    media.namespaces[0].unreadable |= {0}
    media.namespaces[1].unreadable |= {(1 << 19) + 4096}
    change = simply(lambda it: without_key(it, "blue"))
    done = media.channel.run(change_map(media.channel, FORMATTED, NUMBERS, change))
    assert not done.left
    assert not media.holds(BLUE_KEY)
    assert len(media.copies()) == 1
    media.namespaces[0].hung = True
    change = simply(lambda it: without_key(it, "red"))
    done = media.channel.run(change_map(media.channel, FORMATTED, NUMBERS, change, all_of_them=False))
    assert done.left == {nguid_of(0).hex(): "it does not answer"}
    assert all(each.is_erased for each in done.pool_map.tenants)


def test_on_kv_namespaces() -> None:
    """One copy on each; two of them, and two that change the map in an order that a seed gives."""
    numbers = {nguid_of(number).hex(): number for number in range(2)}
    members = [(nguid_of(number), 16 << 20) for number in range(2)]
    wish = VolumeWish(name="blue", tenant="blue", value_bytes=65536, share=0.5, layout="kv")
    pool_map = plan_pool([], [wish], ROOT, members)
    changes = (lambda it: without_key(it, "blue")), (lambda it: with_limits(it, "blue", bandwidth=5))
    for seed in range(20):
        scheduler = StepScheduler(seed)
        namespaces = [SimKvNamespace(16 << 20) for _ in range(2)]
        channels = [SimKvChannel(scheduler, namespaces, name) for name in ("one", "other")]
        assert scheduler.finish(replace_map(channels[0], pool_map, numbers)) == {}
        for own, change in zip(channels, changes, strict=True):
            scheduler.spawn("a change", change_map(own, pool_map, numbers, simply(change)))
        scheduler.run()
        copies = [bytes(each.values[RESERVED_KEY]) for each in namespaces]
        assert copies[0][48:96] == copies[1][48:96]
        assert not any(pool_map.tenants[0].wrapped_key.encode() in each for each in copies)
        assert all(b'"bandwidth":5' in each for each in copies)


def test_what_several_maps_of_one_version_agree_on() -> None:
    erased, limited = without_key(FORMATTED, "blue"), with_limits(FORMATTED, "red", quota_slots=7)
    added = with_tenant(FORMATTED, "green", [GREEN], ROOT)[0]
    rotating = with_new_data_keys(FORMATTED, "red", ROOT)
    both = agreed([limited, limited, erased])
    assert agreed([erased, limited, limited]) == both
    assert both.version == 2
    assert both.tenants[0].is_erased
    assert both.tenants[1].quota_slots == 7, "the one on most copies goes first"
    for order in itertools.permutations([erased, added, rotating]):
        one = agreed(order)
        assert one == agreed([erased, added, rotating])
        assert one.tenants[0].is_erased
        assert [each.name for each in one.tenants] == ["blue", "red", "green"]
        assert next(each for each in one.volumes if each.name == "red").key_epoch == 1
    ended = without_earlier_keys(rotating, {each.volume_id for each in rotating.volumes})
    late = with_limits(rotating, "red", bandwidth=5)
    assert not any(each.earlier_secret for each in agreed([late, late, ended]).volumes)
    # A greater version is in force whole, also where a tenant has got a fresh key in it.
    back = with_tenant(erased, "blue", [], ROOT)[0]
    assert agreed([erased, back, erased]) is back
    # Two tenants in the same room: one of them waits for its operator to say it again.
    teal = VolumeWish(name="teal", tenant="teal", value_bytes=65536, share=0.39)
    wide = VolumeWish(name="green", tenant="green", value_bytes=65536, share=0.39)
    one, two = (with_tenant(FORMATTED, each.name, [each], ROOT)[0] for each in (wide, teal))
    assert agreed([one, two, two]) == two
    with pytest.raises(ValueError, match="no map"):
        agreed([])


def test_settling_holds_for_what_was_looked_at() -> None:
    media = Media()
    joined = media.channel.run(join(media.channel, FORMATTED, [(nguid_of(2), SIZE)], NUMBERS))
    with pytest.raises(G35Error, match="changed meanwhile"):
        media.channel.run(settle(media.channel, FORMATTED, NUMBERS))
    settled = media.channel.run(settle(media.channel, joined, NUMBERS))
    assert not any(each.settled for each in settled.volumes)
    assert media.channel.run(settle(media.channel, joined, NUMBERS)) == settled
