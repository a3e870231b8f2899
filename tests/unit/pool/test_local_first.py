"""A server's own SSDs: which copy is written and read first, and where every agent finds both."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agent.config.configuration import VolumeSection
from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.maintenance.replication import work_off
from agent.pool.map.document import PoolMap, VolumeWish, decode_pool_map_untrusted, plan_pool
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.placement import Placement
from agent.pool.volume.settings import VolumeExtent
from tests.support.pool.memory_pool import (
    MemoryPool,
    PoolAgent,
    key_of,
    local_nguid_of,
    nguid_of,
)

KEY = SecretKey(bytes(range(32)))
ROOT = RootKey(SecretKey(bytes(32)), "a test's")
SET_BYTES = 1 << 20
LENGTH = 9000


def extents(near: tuple[int, ...], far: tuple[int, ...]) -> list[VolumeExtent]:
    """The local ones behind the others, as after a join."""
    names = [nguid_of(number) for number in range(len(far))]
    names += [local_nguid_of(number) for number in range(len(near))]
    return [
        VolumeExtent(number, nguid, (number + 1) << 30, sets)
        for number, (nguid, sets) in enumerate(zip(names, far + near, strict=True))
    ]


def pseudonyms(count: int) -> list[bytes]:
    dice = random.Random(35)
    return [dice.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("near", [(4,), (3, 9), tuple(range(1, 16))])
@pytest.mark.parametrize("far", [(1,), (500, 3), tuple(range(1, 16))])
def test_each_key_has_one_place_of_each_kind(near: tuple[int, ...], far: tuple[int, ...]) -> None:
    lie = extents(near, far)
    placement = Placement(KEY, lie, apart=True, local_first=True)
    both = [placement.candidates(each) for each in pseudonyms(500)]
    assert all(lie[first.namespace].is_local and not lie[second.namespace].is_local for first, second in both)
    assert placement.places(b"".join(pseudonyms(500)), SET_BYTES) == [
        (
            [two[rank].namespace for two in both],
            [lie[two[rank].namespace].offset + two[rank].set_number * SET_BYTES for two in both],
        )
        for rank in (0, 1)
    ]


def test_servers_get_keys_by_their_room_and_a_new_one_moves_its_share_alone() -> None:
    before = Placement(KEY, extents((8, 8), (4, 4)), apart=True, local_first=True)
    after = Placement(KEY, extents((8, 8, 16), (4, 4)), apart=True, local_first=True)
    firsts = Counter(after.candidates(each)[0].namespace for each in pseudonyms(4000))
    assert 1800 < firsts[4] < 2200
    for each in pseudonyms(2000):
        old, new = before.candidates(each), after.candidates(each)
        assert new[0] == old[0] or new[0].namespace == 4
        assert new[1] == old[1]


@pytest.mark.parametrize(("near", "far"), [((), (3, 5)), ((3, 5), ())])
def test_with_one_kind_alone_it_is_as_ever(near: tuple[int, ...], far: tuple[int, ...]) -> None:
    lie = extents(near, far)
    one, other = (Placement(KEY, lie, apart=True, local_first=each) for each in (True, False))
    assert all(one.candidates(each) == other.candidates(each) for each in pseudonyms(300))
    assert one.over(lie).candidates(bytes(16)) == one.candidates(bytes(16))


def two_kinds(sets: tuple[int, int] = (2, 2)) -> tuple[MemoryPool, PoolAgent]:
    """Namespace 0 in an enclosure, 1 on the server of the agent."""
    pool = MemoryPool(sets, copies=2, local=(1,), value_bytes=12288)
    pool.namespaces[1].is_local = True
    return pool, pool.agent()


def named_in(pool: MemoryPool) -> dict[int, int]:
    """Entries of the directories on flash, by namespace."""
    return Counter(namespace for namespace, _, directory in pool.directories() for _ in directory)


def value_of(number: int) -> bytes:
    return bytes([number % 251]) * LENGTH


def test_the_first_copy_goes_to_the_own_ssd_and_reads_come_from_there() -> None:
    pool, agent = two_kinds()
    for number in range(20):
        agent.put(key_of(number), value_of(number))
    named = named_in(pool)
    assert named == {1: 20}
    while agent.channel.run(work_off([agent.volume], agent.channel)):
        pass
    named = named_in(pool)
    assert named == {0: 20, 1: 20}
    pool.namespaces[0].down = True
    assert all(agent.get(key_of(number)) == value_of(number) for number in range(20))
    pool.namespaces[0].down = False

    # Both are there: no slot is read in the enclosure.
    reader = pool.agent()
    assert all(reader.get(key_of(number)) == value_of(number) for number in range(20))
    assert reader.tally.other_copy_reads == 0

    # The server is lost, and another agent has no local namespace: the second copies serve.
    pool.namespaces[1].is_local, pool.namespaces[1].down = False, True
    away = pool.agent()
    assert all(away.get(key_of(number)) == value_of(number) for number in range(20))


def test_reads_go_to_the_own_ssd_although_the_other_copy_is_as_new() -> None:
    pool, agent = two_kinds()
    agent.put(key_of(0), value_of(0))
    while agent.channel.run(work_off([agent.volume], agent.channel)):
        pass
    for local in (0, 1):
        for number, namespace in enumerate(pool.namespaces):
            namespace.is_local = number == local
        reader = pool.agent()
        assert reader.get(key_of(0)) == value_of(0)  # the directories of both are known now
        pool.namespaces[1 - local].unreadable = set()
        slots = [
            (place.namespace, reader.volume.slot_offset(place, slot))
            for place, slot in _found(reader, key_of(0))
        ]
        pool.namespaces[1 - local].unreadable = {
            offset for namespace, offset in slots if namespace == 1 - local
        }
        assert reader.get(key_of(0)) == value_of(0)
        assert reader.tally.other_copy_reads == 0
        pool.namespaces[1 - local].unreadable = set()


@pytest.mark.parametrize("near", [True, False])
def test_an_older_value_on_the_own_ssd_is_never_read_ahead_of_a_newer_one(near: bool) -> None:
    """The SSD was away while another agent put the key anew. A wish to read nearby changes no value."""
    pool, agent = two_kinds()
    agent.put(key_of(0), value_of(1))
    pool.namespaces[1].is_local, pool.namespaces[1].down = False, True
    elsewhere = pool.agent()
    elsewhere.channel.clock = agent.channel.clock + 100
    elsewhere.put(key_of(0), value_of(2))
    pool.namespaces[1].is_local, pool.namespaces[1].down = near, False
    assert named_in(pool) == {0: 1, 1: 1}
    reader = pool.agent()
    reader.channel.clock = elsewhere.channel.clock + 100
    assert [reader.get(key_of(0)) for _ in range(3)] == [value_of(2)] * 3


def _found(agent: PoolAgent, key: bytes) -> list[tuple[CachedSet, int]]:
    pseudonym = agent.volume.placement.pseudonym(key)
    sets = agent.volume.borrow_sets(pseudonym)
    try:
        return [(each.cached, each.slot) for each in agent.volume.find(sets, pseudonym)]
    finally:
        agent.volume.give_back_sets(sets)


def test_a_full_ssd_evicts_nothing_while_the_enclosure_has_room() -> None:
    pool, agent = two_kinds((4, 1))
    for number in range(SLOTS_PER_SET + 20):
        agent.put(key_of(number), value_of(number))
    assert agent.tally.evictions == 0
    named = named_in(pool)
    assert named == {0: 20, 1: SLOTS_PER_SET}
    assert all(agent.get(key_of(number)) == value_of(number) for number in range(SLOTS_PER_SET + 20))


def test_an_ssd_that_is_suspect_or_away_does_not_stop_puts() -> None:
    pool, agent = two_kinds()
    pool.namespaces[1].suspect = True
    agent.put(key_of(0), value_of(0))
    pool.namespaces[1].suspect, pool.namespaces[1].down = False, True
    agent = pool.agent()
    agent.put(key_of(1), value_of(1))
    assert [agent.get(key_of(number)) for number in (0, 1)] == [value_of(0), value_of(1)]


def wish(**keys: object) -> VolumeWish:
    given = {"name": "v", "value_bytes": 1 << 16, "share": 0.5, "copies": 2, "local_first": True, **keys}
    return VolumeWish.model_validate(given)


def test_the_map_says_it_and_older_maps_do_not() -> None:
    members = [(nguid_of(0), 64 << 20), (local_nguid_of(1), 64 << 20)]
    planned = plan_pool(members, [wish()], ROOT)
    again: PoolMap = decode_pool_map_untrusted(planned.encode())
    assert again.settings(again.volumes[0]).local_first
    plain = plan_pool(members, [wish(local_first=False)], ROOT)
    assert b"local_first" not in plain.encode()
    assert not plain.settings(plain.volumes[0]).local_first


def test_a_volume_that_cannot_be_so_is_refused() -> None:
    for members in ([nguid_of(0), nguid_of(1)], [local_nguid_of(0), local_nguid_of(1)]):
        with pytest.raises(ConfigError, match="does not lie on both"):
            plan_pool([(nguid, 64 << 20) for nguid in members], [wish()], ROOT)
    with pytest.raises(ValueError, match="wants copies = 2"):
        VolumeSection.model_validate({"name": "v", "share": 0.5, "local_first": True})
