"""An enclosure shows its agent one pool map and a verb another. A version takes no key: what the honest ones
say of keys that are over counts, and a map that nobody carries any more is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.attach.map_history import MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import EPOCHS_AHEAD_MAX, PoolMap, VolumeWish, plan_pool
from agent.pool.map.key_epochs import with_new_data_keys, without_earlier_keys
from agent.pool.map.reconcile import agreed, with_key_ends
from agent.pool.map.replicas import write_superblock
from agent.pool.map.tenant_changes import with_limits, with_tenant, without_key
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.remote.fabric import Fabric
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of
from tests.support.pool.no_seal import EveryCopyCounts

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 32 << 20
NGUIDS = [nguid_of(number) for number in range(3)]


def planned() -> PoolMap:
    wishes = [VolumeWish(name=name, tenant=name, value_bytes=1 << 16, share=0.3) for name in ("blue", "red")]
    return plan_pool([(nguid, SIZE) for nguid in NGUIDS], wishes, ROOT)


def versioned(pool_map: PoolMap, version: int) -> PoolMap:
    return pool_map.model_copy(update={"version": version})


def with_epoch(pool_map: PoolMap, name: str, epoch: int) -> PoolMap:
    """A number that no key vouches for."""
    tenants = [
        each.model_copy(update={"key_epoch": epoch}) if each.name == name else each
        for each in pool_map.tenants
    ]
    return pool_map.model_copy(update={"tenants": tuple(tenants)})


def with_row(pool_map: PoolMap, **fields: object) -> PoolMap:
    """The first volume's row, written by somebody without the key."""
    volumes = (pool_map.volumes[0].model_copy(update=fields), *pool_map.volumes[1:])
    return pool_map.model_copy(update={"volumes": volumes})


class Serving:
    """An agent that serves three namespaces in memory."""

    def __init__(self, state: Path) -> None:
        self.pool_map = planned()
        self.channel = MemoryChannel([MemoryNamespace(SIZE) for _ in NGUIDS])
        self.show(self.pool_map, 0, 1, 2)
        self.seen = MapHistory(state)
        cache = DirectoryCache(16 << 20)
        self.volumes = [
            Volume(self.pool_map.settings(each), self.pool_map.secret(each, ROOT), cache, Timing())
            for each in self.pool_map.volumes
        ]
        self.note(self.pool_map)
        self.followed: list[PoolMap] = []
        self.watch = MapWatch(
            self.pool_map,
            self.volumes,
            PrestageCache(0),
            self.seen,
            ROOT,
            Fabric(()),
            EveryCopyCounts(ROOT),
            self.followed.append,
        )

    def note(self, pool_map: PoolMap, *, is_on_most: bool = True) -> None:
        served = [each.settings.volume_id.hex() for each in self.volumes if not each.erased]
        self.seen.note(pool_map, served, is_on_most=is_on_most)

    def show(self, pool_map: PoolMap, *numbers: int) -> None:
        for number in numbers:
            self.channel.run(write_superblock(self.channel, number, NGUIDS[number], pool_map))

    def look(self) -> list[str]:
        """At each namespace; the names of the volumes that are served on."""
        for _ in NGUIDS:
            self.channel.clock += 2 * EVERY_SECONDS
            self.channel.run(self.watch.look(self.channel))
        return [each.settings.name for each in self.volumes if not each.erased]


@pytest.mark.expects_log("was erased")
def test_an_erasure_counts_although_one_enclosure_shows_a_greater_version(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    agent.show(versioned(agent.pool_map, 1005), 0)
    assert agent.look() == ["blue", "red"]
    assert agent.watch.pool_map.version == 1005
    agent.show(without_key(agent.pool_map, "blue"), 1, 2)  # which the verb reads back from the first as well
    assert agent.look() == ["red"]
    assert MapHistory(tmp_path).over(agent.pool_map) == [agent.pool_map.volumes[0].volume_id]


def test_a_data_key_that_was_rotated_counts_although_one_shows_a_greater_version(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    begun = with_new_data_keys(agent.pool_map, "blue", ROOT)
    ended = without_earlier_keys(begun, {agent.pool_map.volumes[0].volume_id})
    agent.show(versioned(agent.pool_map, 1005), 0)
    agent.look()
    agent.show(begun, 1, 2)
    assert agent.look() == ["blue", "red"]
    row = agent.watch.pool_map.volumes[0]
    assert (row.key_epoch, row.wrapped_secret) == (1, begun.volumes[0].wrapped_secret)
    assert agent.followed[-1] == agent.watch.pool_map, "whoever rotates keys is told"
    agent.show(ended, 1, 2)
    assert agent.look() == ["blue", "red"]
    assert not agent.watch.pool_map.volumes[0].earlier_secret
    assert agent.watch.pool_map.version == 1005


@pytest.mark.expects_log("was erased")
def test_a_tenants_next_life_ends_the_one_before_it_by_a_copy_of_any_version(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    agent.show(versioned(agent.pool_map, 1005), 0)
    agent.look()
    again, _ = with_tenant(without_key(agent.pool_map, "blue"), "blue", [], ROOT)
    agent.show(again, 1, 2)
    assert agent.look() == ["red"]


def test_what_is_merely_old_or_opens_with_no_key_ends_nothing(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    first = agent.pool_map
    gone_before, _ = with_tenant(without_key(first, "blue"), "blue", [], ROOT)
    assert with_key_ends(gone_before, without_key(first, "blue")) is gone_before, "the erasure before that"
    assert with_key_ends(gone_before, first) is gone_before
    begun = with_new_data_keys(first, "blue", ROOT)
    assert with_key_ends(begun, first) is begun
    assert with_key_ends(first, planned()) is first, "another pool"
    newest = with_limits(first, "red", quota_slots=9)
    agent.show(newest, 0, 1, 2)
    agent.look()
    for forged in (
        with_epoch(first, "blue", 7),
        with_row(
            first, key_epoch=1, wrapped_secret="ab" * 104, earlier_secret=first.volumes[0].wrapped_secret
        ),
    ):
        agent.show(versioned(forged, first.version), 2)
        assert agent.look() == ["blue", "red"]
        assert agent.watch.pool_map == newest


def test_copies_that_differ_agree_on_the_keys_that_are_over_whatever_their_versions() -> None:
    first = planned()
    forged = versioned(first, 1005)
    erased = without_key(first, "blue")
    found = agreed([forged, erased, erased])
    assert found.version == 1005
    assert [each.is_erased for each in found.tenants] == [True, False]
    begun = with_new_data_keys(first, "red", ROOT)
    assert agreed([begun, forged]).volumes[1] == begun.volumes[1]
    again, _ = with_tenant(erased, "blue", [], ROOT)
    found = agreed([again, forged])
    assert sorted(each.wrapped_secret for each in found.volumes) == sorted(
        each.wrapped_secret for each in again.volumes
    )
    assert agreed([first, versioned(with_limits(first, "red", quota_slots=3), 9)]).version == 9


def test_an_erasures_epoch_is_no_further_ahead_than_changes_lead_to() -> None:
    """Or the tenant could never be added again: no key vouches for that number."""
    first = planned()
    erased = with_epoch(without_key(first, "blue"), "blue", (1 << 31) - 1)
    found = agreed([versioned(first, 5), erased])
    assert found.tenants[0].is_erased
    assert found.tenants[0].key_epoch == 0
    near = with_epoch(erased, "blue", EPOCHS_AHEAD_MAX)
    assert agreed([versioned(first, 5), near]).tenants[0].key_epoch == EPOCHS_AHEAD_MAX


@pytest.mark.expects_log("no namespace carries pool map")
def test_a_map_that_nobody_carries_any_more_is_left_and_the_pools_own_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Serving(tmp_path)
    agent.show(versioned(agent.pool_map, 1005), 1)
    agent.look()
    assert agent.watch.pool_map.version == 1005
    limited = with_limits(agent.pool_map, "red", quota_slots=7)
    agent.show(limited, 0, 1, 2)
    assert agent.look() == ["blue", "red"]
    agent.look()
    assert agent.watch.pool_map == limited
    again = with_limits(limited, "red", quota_slots=8)
    agent.show(again, 0, 1, 2)
    agent.look()
    assert agent.watch.pool_map == again
    other = versioned(with_limits(limited, "red", quota_slots=9), again.version)
    agent.show(other, 0, 1, 2)
    agent.look()
    agent.look()
    assert agent.watch.pool_map == other
    first, second = (record.message for record in caplog.records)
    assert first.endswith(f"copies lead to, map {limited.version}")
    assert second.endswith("copies lead to, another map of that version")
    MapHistory(tmp_path).refuse(again)


def test_the_version_of_a_map_that_one_enclosure_shows_is_not_noted(tmp_path: Path) -> None:
    """The agent would start with nothing that is older."""
    agent = Serving(tmp_path)
    agent.show(versioned(agent.pool_map, 1005), 1)
    agent.look()
    MapHistory(tmp_path).refuse(agent.pool_map)
    limited = versioned(with_limits(agent.pool_map, "red", quota_slots=7), 1006)
    agent.show(limited, 0, 1, 2)
    agent.look()
    assert agent.watch.pool_map == limited
    with pytest.raises(G35Error, match="has seen 1006"):
        MapHistory(tmp_path).refuse(agent.pool_map)


def test_a_copy_that_says_nothing_new_is_read_once(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    newest = with_limits(agent.pool_map, "red", quota_slots=7)
    agent.show(newest, 0, 1)
    agent.look()
    agent.look()
    before = agent.channel.namespaces[2].reads
    agent.look()
    assert agent.channel.namespaces[2].reads - before == 1, "its first block"
