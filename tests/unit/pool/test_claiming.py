"""Two pools that find the same namespace blank: at every place where one may meet the other, or die of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import Seen, complete_map, join, newcomers_in, numbers_of, why_not
from agent.pool.map import commit, namespace_claims
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.inspect import Content, Inspection, inspect, newest_map
from agent.pool.map.namespace_claims import Taken, claim_head, claimed_by, heads_of, want_unchanged
from agent.pool.map.replicas import write_superblock
from agent.pool.map.superblock import COPY_OFFSETS
from agent.pool.steps import Steps
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of
from tests.support.sim.stepped_programs import Program, SteppedChannel

SIZE = 16 << 20
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SHARED = nguid_of(9)
WISHES = [VolumeWish(name="v", value_bytes=65536, share=0.5)]
FORMATTED = {number: plan_pool([(nguid_of(number), SIZE)], WISHES, ROOT) for number in (1, 2)}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(namespace_claims, "PAUSE_SECONDS", 0.0)


class Pool:
    """A pool of one namespace of its own, and its operator who adds the one that it shares with another."""

    def __init__(self, number: int, shared: MemoryNamespace) -> None:
        self.own = nguid_of(number)
        self.namespaces = [MemoryNamespace(SIZE), shared]
        self.channel = MemoryChannel(self.namespaces)
        self.formatted = FORMATTED[number]
        self.channel.run(write_superblock(self.channel, 0, self.own, self.formatted))

    def look(self) -> Seen:
        return [
            (nguid, SIZE, self.channel.run(inspect(self.channel, number, nguid, SIZE)))
            for number, nguid in enumerate((self.own, SHARED))
        ]

    def found(self) -> PoolMap:
        return newest_map([self.look()[0][2]])

    def joining(self, channel: MemoryChannel) -> Steps[Any]:
        """The part of `g35 pool add` that comes after the look round."""
        return join(channel, self.formatted, [(SHARED, SIZE)], {self.own.hex(): 0, SHARED.hex(): 1})

    def program(self) -> Adding:
        return Adding(self)

    def add(self) -> None:
        """All of it. Raises G35Error where the shared one is not taken."""
        seen = self.look()
        pool_map = self.found()
        newcomers = newcomers_in(pool_map, seen, {SHARED.hex()}, False)
        self.channel.run(complete_map(self.channel, pool_map, seen))
        if newcomers:
            self.channel.run(join(self.channel, pool_map, newcomers, numbers_of(seen)))

    @property
    def has_it(self) -> bool:
        return len(self.found().namespaces) == 2


class Adding(Program):
    """An add that goes on when it is told to, a read or write at a time."""

    def __init__(self, pool: Pool) -> None:
        channel = SteppedChannel(pool.namespaces)
        super().__init__(channel, pool.joining(channel))
        self.pool = pool


def two_pools() -> tuple[Pool, Pool]:
    shared = MemoryNamespace(SIZE)
    return Pool(1, shared), Pool(2, shared)


def places_to_stop() -> list[int]:
    """Every step of the claim, and of the rest those just before every other write."""
    alone = two_pools()[0].program()
    alone.run()
    assert alone.error is None
    return sorted({*range(12), *alone.wrote_at[::2], alone.taken - 1})


def check(*programs: Adding) -> None:
    """At most one has it, who has it can be opened whole, and the others were told."""
    owners = [each.pool for each in programs if each.pool.has_it]
    assert len(owners) <= 1, "two pools have taken one namespace"
    for each in programs:
        assert not each.ended or each.pool in owners or isinstance(each.error, Taken), each.error
    for pool in owners:
        pool.add()
        seen = pool.look()
        assert newest_map([inspection for _, _, inspection in seen]) == pool.found()


def test_at_most_one_of_two_takes_it_wherever_they_meet() -> None:
    """One stops before any step, the other runs to any of its own, and both go on: as if both had been looked
    round at the same moment. Nearly always one gets it."""
    stops = places_to_stop()
    neither = 0
    for first in stops:
        for second in stops:
            ours, theirs = two_pools()
            a, b = ours.program(), theirs.program()
            a.run(first)
            b.run(second)
            a.run()
            b.run()
            assert a.ended
            assert b.ended
            check(a, b)
            neither += not (ours.has_it or theirs.has_it)
    assert neither <= len(stops)


def test_at_most_one_takes_it_where_they_go_step_by_step() -> None:
    rng = random.Random(35)
    taken = 0
    for _ in range(150):
        pools = two_pools()
        programs = [pool.program() for pool in pools]
        while not all(each.ended for each in programs):
            rng.choice(programs).run(rng.randint(1, 5))
        check(*programs)
        taken += any(pool.has_it for pool in pools)
    assert taken > 120


def test_one_that_dies_anywhere_leaves_it_to_its_own_pool_or_is_told_of() -> None:
    for stop in places_to_stop():
        ours, theirs = two_pools()
        dead = ours.program()
        dead.run(stop)
        if any(what_lies_there(ours)):
            assert theirs.look()[1][2].content in (Content.FOREIGN, Content.POOL)
            with pytest.raises(G35Error):
                theirs.add()
            assert not theirs.has_it
        ours.add()
        assert ours.has_it
        assert newest_map([inspection for _, _, inspection in ours.look()]) == ours.found()


def what_lies_there(pool: Pool) -> bytes:
    return b"".join(pool.namespaces[1].blocks.get(offset, b"")[:128] for offset in COPY_OFFSETS)


def test_what_came_between_the_look_and_the_claim_is_not_overwritten() -> None:
    ours, theirs = two_pools()
    theirs.add()
    late = ours.program()
    late.run()
    assert isinstance(late.error, Taken)
    assert theirs.formatted.pool_id in str(late.error)
    assert theirs.look()[1][2].content is Content.POOL
    # By name and force the operator says whose it is.
    channel = ours.channel
    numbers = {ours.own.hex(): 0, SHARED.hex(): 1}
    channel.run(join(channel, ours.formatted, [(SHARED, SIZE)], numbers, overwrite=frozenset({SHARED.hex()})))
    assert ours.has_it


def test_a_format_notices_what_was_written_since_its_look() -> None:
    ours, theirs = two_pools()
    heads = ours.channel.run(heads_of(ours.channel, SHARED, 1))
    ours.channel.run(want_unchanged(ours.channel, SHARED, 1, heads))
    for steps in (8, 1 << 30):
        their_add = theirs.program()
        their_add.run(steps)
        with pytest.raises(Taken):
            ours.channel.run(want_unchanged(ours.channel, SHARED, 1, heads))


def test_a_claim_of_our_own_counts_as_blank_and_one_of_another_does_not() -> None:
    ours, theirs = two_pools()
    dead = ours.program()
    dead.run(6)
    found = ours.look()[1][2]
    assert found.claimants == {ours.formatted.pool_id}
    assert why_not(found, ours.formatted.pool_id) == ""
    assert f"pool {ours.formatted.pool_id} is about to take it in" in why_not(found, theirs.formatted.pool_id)


def test_a_member_with_the_claim_of_another_pool_is_not_overwritten() -> None:
    ours, theirs = two_pools()
    ours.add()
    seen = ours.look()
    foreign = Inspection(1, Content.FOREIGN, claimants=frozenset({theirs.formatted.pool_id}))
    with pytest.raises(G35Error, match="belongs to the pool and carries"):
        ours.channel.run(complete_map(ours.channel, ours.found(), [seen[0], (SHARED, SIZE, foreign)]))


def test_the_layout_of_a_claim() -> None:
    head = claim_head("00112233445566778899aabbccddeeff", bytes(range(16)))
    assert head[:32].hex() == "673335636c61696d" + "0100" + "00" * 6 + "00112233445566778899aabbccddeeff"
    assert head[32:96] == bytes(range(16)) + bytes(48)
    assert len(head) == 128
    assert claimed_by(head.ljust(4096, b"\0"), bytes(range(16))) == "00112233445566778899aabbccddeeff"
    assert claimed_by(head, bytes(16)) == "", "of another namespace: this one is a copy of it"
    for at in range(128):
        damaged = bytearray(head)
        damaged[at] ^= 1
        assert claimed_by(damaged, bytes(range(16))) == ""
    assert claimed_by(b"", bytes(16)) == claimed_by(bytes(128), bytes(16)) == ""
