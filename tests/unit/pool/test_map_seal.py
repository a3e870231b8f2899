"""A pool map bears a seal that takes the root key. Copies without it do not count, nor are they handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.attach.map_history import MapHistory, map_seal
from agent.errors import G35Error
from agent.pool.map.commit import ROUNDS_MAX, change_map, simply
from agent.pool.map.document import PoolMap, VolumeWish, decode_pool_map_untrusted, plan_pool
from agent.pool.map.inspect import inspect, newest_map
from agent.pool.map.key_epochs import with_new_data_keys
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.replicas import write_superblock
from agent.pool.map.superblock import COPY_OFFSETS, Superblock, decode_superblock_untrusted
from agent.pool.map.tenant_changes import with_limits, with_tenant, without_key
from tests.support.pool.memory_pool import nguid_of
from tests.support.sim.forgeries import ROOT, STRANGERS_ROOT
from tests.support.sim.two_faced_flash import TwoFacedChannel, TwoFacedNamespace

SIZE = 32 << 20
NGUIDS = [nguid_of(number) for number in range(2)]
NUMBERS = {nguid.hex(): number for number, nguid in enumerate(NGUIDS)}


def planned() -> PoolMap:
    wishes = [VolumeWish(name=name, tenant=name, value_bytes=1 << 16, share=0.3) for name in ("blue", "red")]
    return plan_pool([(nguid, SIZE) for nguid in NGUIDS], wishes, ROOT)


class Flash:
    """Two namespaces of a pool; the attacker writes to one of them."""

    def __init__(self, pool_map: PoolMap) -> None:
        self.namespaces = [TwoFacedNamespace(SIZE) for _ in NGUIDS]
        self.channel = TwoFacedChannel(self.namespaces)
        for number in range(2):
            self.write(number, pool_map)

    def write(self, number: int, pool_map: PoolMap) -> None:
        self.channel.run(write_superblock(self.channel, number, NGUIDS[number], pool_map))

    def found(self, seal: MapSeal) -> PoolMap:
        looks = [inspect(self.channel, number, nguid, SIZE) for number, nguid in enumerate(NGUIDS)]
        return newest_map([self.channel.run(each) for each in looks], seal)

    def change(self, seal: MapSeal, change: Any = lambda base: base, **options: Any) -> Any:
        steps = change_map(self.channel, self.found(seal), NUMBERS, simply(change), seal=seal, **options)
        return self.channel.run(steps)

    def copies(self) -> list[PoolMap]:
        found = []
        for namespace in self.namespaces:
            for offset in COPY_OFFSETS:
                data = bytearray(SIZE // 64)
                TwoFacedNamespace(SIZE, blocks=namespace.blocks).load(offset, memoryview(data))
                found.append(decode_superblock_untrusted(data).pool_map)
        return found


def without_volume(pool_map: PoolMap, number: int) -> PoolMap:
    """The next version, in which a volume is gone, and with it the only copy of its secret."""
    rows = [each for at, each in enumerate(pool_map.volumes) if at != number]
    return pool_map.model_copy(update={"version": pool_map.version + 1, "volumes": tuple(rows)})


def test_a_seal_is_broken_by_every_change_that_does_not_renew_it() -> None:
    seal = MapSeal(ROOT)
    sealed = seal.put(planned())
    assert seal.holds(sealed)
    assert seal.holds(decode_pool_map_untrusted(sealed.encode()))
    assert MapSeal(ROOT).holds(seal.put(seal.put(sealed)))
    changed = (
        with_limits(sealed, "red", quota_slots=1),
        without_key(sealed, "red"),
        without_volume(sealed, 0),
        with_new_data_keys(sealed, "red", ROOT),
        with_tenant(without_key(sealed, "red"), "red", [], ROOT)[0],
        sealed.model_copy(update={"version": 2}),
        sealed.model_copy(update={"pool_id": "00" * 16}),
        sealed.model_copy(update={"namespaces": sealed.namespaces[::-1]}),
        sealed.model_copy(update={"seal": ""}),
        sealed.model_copy(update={"seal": sealed.seal[:-2]}),
        sealed.model_copy(update={"seal": seal.put(planned()).seal}),
        MapSeal(STRANGERS_ROOT).put(sealed),
    )
    for each in changed:
        assert not seal.holds(each)
        assert seal.counting([each, sealed]) == [sealed]
        assert seal.counting([each]) == []


def test_a_pool_from_before_there_were_seals_gets_one_by_its_next_change() -> None:
    old = planned()
    flash, seal = Flash(old), MapSeal(ROOT)
    assert flash.found(seal) == old
    with pytest.raises(G35Error, match="was not made with the root key, a stranger's"):
        flash.found(MapSeal(STRANGERS_ROOT))
    done = flash.change(seal)
    assert seal.holds(done.pool_map)
    assert flash.copies() == [done.pool_map] * 4
    assert flash.change(seal).pool_map == done.pool_map, "once"
    flash.write(1, old.model_copy(update={"version": 9}))
    assert flash.found(MapSeal(ROOT)) == done.pool_map


@pytest.mark.parametrize("all_of_them", [False, True], ids=["an agent's mending", "a verb"])
def test_what_one_enclosure_shows_is_not_written_to_the_others(*, all_of_them: bool) -> None:
    """The secret of a volume lies in the map alone: with a map that lacks it, it would be gone for good."""
    seal = MapSeal(ROOT)
    sealed = seal.put(planned())
    flash = Flash(sealed)
    flash.write(1, without_volume(sealed, 0))
    done = flash.change(seal, all_of_them=all_of_them)
    assert done.pool_map == sealed
    assert flash.copies() == [sealed] * 4


def test_an_enclosure_that_shows_another_map_at_each_look_does_not_keep_a_tenant_from_being_erased() -> None:
    seal = MapSeal(ROOT)
    sealed = seal.put(planned())
    flash = Flash(sealed)
    shown = 0

    class Restless(TwoFacedNamespace):
        def load(self, offset: int, into: memoryview) -> None:
            nonlocal shown
            if offset % COPY_OFFSETS[1] == 0:
                shown += 1
                forged = sealed.model_copy(update={"version": 1000 + shown})
                self.show(offset, Superblock(NGUIDS[0], forged).encode())
            super().load(offset, into)

    flash.namespaces[0] = Restless(SIZE, blocks=flash.namespaces[0].blocks, obeys=False)
    done = flash.change(seal, lambda base: without_key(base, "blue"), all_of_them=False)
    assert shown > ROUNDS_MAX
    assert list(done.left) == [NGUIDS[0].hex()]
    assert done.left[NGUIDS[0].hex()] == "what was written is not read back"
    assert flash.copies()[2:] == [done.pool_map] * 2
    assert done.pool_map.tenants[0].is_erased


def test_what_carries_another_pool_is_named_and_not_written_over() -> None:
    seal = MapSeal(ROOT)
    sealed, other = seal.put(planned()), MapSeal(STRANGERS_ROOT).put(planned())
    flash = Flash(sealed)
    flash.write(1, other)
    done = flash.change(seal, lambda base: without_key(base, "blue"), all_of_them=False)
    assert done.left == {NGUIDS[1].hex(): "it carries another pool"}
    assert flash.copies()[2:] == [other] * 2
    with pytest.raises(G35Error, match="not reached, or carry another pool"):
        flash.change(seal, lambda base: with_limits(base, "red", quota_slots=9))


def test_of_two_pools_the_one_that_was_served_counts(tmp_path: Path) -> None:
    """A copy of a pool with the same root key is as genuine; it may be put on an enclosure of this one."""
    seal = MapSeal(ROOT)
    sealed, other = seal.put(planned()), seal.put(planned())
    flash = Flash(sealed)
    flash.write(1, other)
    with pytest.raises(G35Error, match="2 different pools"):
        flash.found(map_seal(ROOT, tmp_path))
    MapHistory(tmp_path).note(sealed, [each.volume_id for each in sealed.volumes], has_seal=True)
    assert flash.found(map_seal(ROOT, tmp_path)) == sealed


def test_a_pool_that_was_seen_with_a_seal_is_not_served_without(tmp_path: Path) -> None:
    sealed = MapSeal(ROOT).put(planned())
    stripped = sealed.model_copy(update={"seal": "", "version": 5})
    flash = Flash(stripped)
    assert flash.found(map_seal(ROOT, tmp_path)) == stripped
    MapHistory(tmp_path).note(sealed, [each.volume_id for each in sealed.volumes], has_seal=True)
    MapHistory(tmp_path).note(planned(), [])
    with pytest.raises(G35Error, match="was not made with the root key"):
        flash.found(map_seal(ROOT, tmp_path))
