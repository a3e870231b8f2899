"""Whoever writes to the flash writes another pool map. He has no key: what he changes opens nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.attach.map_history import FILE, MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.commit import replace_map
from agent.pool.map.document import (
    MapVolume,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
    tenant_context,
    volume_context,
)
from agent.pool.map.inspect import inspect, newest_map
from agent.pool.map.key_epochs import with_new_data_keys, without_earlier_keys
from agent.pool.map.superblock import Superblock
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
MEMBERS = [(nguid_of(number), SIZE) for number in range(2)]
NUMBERS = {nguid.hex(): number for number, (nguid, _) in enumerate(MEMBERS)}


def planned() -> PoolMap:
    wishes = [
        VolumeWish(name=name, tenant=tenant, value_bytes=1 << 16, share=0.25)
        for name, tenant in (("model-a", "blue"), ("model-b", "blue"), ("model-c", "red"))
    ]
    return plan_pool(MEMBERS, wishes, ROOT)


def forged(pool_map: PoolMap, change: Callable[[dict[str, Any]], None]) -> PoolMap:
    """The next version of a map, edited as a document."""
    document = pool_map.model_dump(mode="json")
    document["version"] += 1
    change(document)
    return decode_pool_map_untrusted(json.dumps(document).encode())


def opens(pool_map: PoolMap) -> list[str]:
    """The names of the volumes whose secrets open."""
    found = []
    for volume in pool_map.volumes:
        try:
            pool_map.secret(volume, ROOT)
            pool_map.earlier_secret(volume, ROOT)
        except ConfigError:
            continue
        found.append(volume.name)
    return found


def swap(row: str, *fields: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        first, second = document[row][0], document[row][1]
        for each in fields:
            first[each], second[each] = second[each], first[each]

    return change


def set_first(row: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document[row][0].update(fields)


EDITS = {
    "names swapped": (swap("volumes", "name"), ["model-c"]),
    "ids swapped": (swap("volumes", "volume_id"), ["model-c"]),
    "secrets swapped": (swap("volumes", "wrapped_secret"), ["model-c"]),
    "name": (set_first("volumes", name="model-x"), ["model-b", "model-c"]),
    "tenant": (lambda d: d["volumes"][0].update(tenant=d["volumes"][2]["tenant"]), ["model-b", "model-c"]),
    "kind": (set_first("volumes", kind="files"), ["model-b", "model-c"]),
    "suite": (set_first("volumes", suite="aes-256-xts+crc64"), ["model-b", "model-c"]),
    "plain": (set_first("volumes", suite="plain+crc64"), ["model-b", "model-c"]),
    "smaller values": (set_first("volumes", value_bytes=(1 << 16) - 4096), None),
    "unit": (set_first("volumes", unit_bytes=1 << 17), ["model-b", "model-c"]),
    "ttl": (set_first("volumes", ttl_seconds=1), ["model-b", "model-c"]),
    "epoch": (set_first("volumes", key_epoch=1), ["model-b", "model-c"]),
    "tenant's epoch": (set_first("tenants", key_epoch=1), ["model-c"]),
    "tenants' keys swapped": (swap("tenants", "wrapped_key"), []),
    "tenants' names swapped": (swap("tenants", "name"), None),
    "tenants' ids swapped": (swap("tenants", "tenant_id"), None),
    "tenant's name": (set_first("tenants", name="green"), None),
    "nobody's": (lambda d: d.update(tenants=[]), None),
    "earlier key of the first epoch": (set_first("volumes", earlier_secret="ab" * 104), None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_map_edited_without_the_key_opens_nothing_under_another_name_or_setting(edit: str) -> None:
    """None: it is no pool map at all."""
    change, left = EDITS[edit]
    pool_map = planned()
    assert opens(pool_map) == ["model-a", "model-b", "model-c"]
    if left is None:
        with pytest.raises(ValueError, match="no pool map"):
            forged(pool_map, change)
        return
    assert opens(forged(pool_map, change)) == left


def test_each_field_of_a_context_counts() -> None:
    pool_map = planned()
    volume, tenant = pool_map.volumes[0], pool_map.tenants[0]
    contexts = {volume_context(pool_map.pool_id, volume, 0), volume_context("00" * 16, volume, 0)}
    contexts |= {volume_context(pool_map.pool_id, volume, 1), tenant_context("00" * 16, tenant)}
    others: dict[str, Any] = {
        "name": "x", "volume_id": "00" * 16, "tenant": "00" * 16, "kind": "files", "suite": "plain+crc64",
        "value_bytes": 4096, "unit_bytes": 1, "ttl_seconds": 3,
    }  # fmt: skip
    for key, value in others.items():
        contexts.add(volume_context(pool_map.pool_id, volume.model_copy(update={key: value}), 0))
    for key, value in {"name": "x", "tenant_id": "00" * 16, "key_epoch": 3}.items():
        contexts.add(tenant_context(pool_map.pool_id, tenant.model_copy(update={key: value})))
    contexts.add(tenant_context(pool_map.pool_id, tenant))
    assert len(contexts) == 3 + 1 + len(others) + 3 + 1


def test_a_key_of_one_epoch_does_not_open_in_another() -> None:
    old = planned()
    begun = with_new_data_keys(old, "blue", ROOT)
    ended = without_earlier_keys(begun, {each.volume_id for each in old.volumes})
    earlier = old.volumes[0].wrapped_secret
    assert opens(begun) == opens(ended) == ["model-a", "model-b", "model-c"]
    for epoch in (1, 2):
        back = forged(ended, set_first("volumes", wrapped_secret=earlier, key_epoch=epoch))
        assert opens(back) == ["model-b", "model-c"]
    twice = with_new_data_keys(ended, "blue", ROOT)
    assert opens(forged(twice, set_first("volumes", earlier_secret=earlier))) == ["model-b", "model-c"]


def test_what_verbs_do_without_the_root_key_leaves_the_keys_as_they_are() -> None:
    pool_map = planned()
    limited = with_limits(pool_map, "blue", quota_slots=64, bandwidth=1 << 20)
    assert opens(limited) == opens(pool_map)
    erased = without_key(limited, "blue")
    assert opens(erased) == ["model-c"]
    again, fresh = with_tenant(erased, "blue", [], ROOT)
    assert opens(again) == opens(pool_map)
    assert (again.tenants[0].key_epoch, again.tenants[0].quota_slots) == (1, 64)
    assert not {each.volume_id for each in fresh} & {each.volume_id for each in pool_map.volumes}


class Serving:
    """An agent that serves a pool in memory."""

    def __init__(self, state: Path) -> None:
        self.pool_map = planned()
        self.channel = MemoryChannel([MemoryNamespace(SIZE) for _ in MEMBERS])
        self.replace(self.pool_map)
        self.seen = MapHistory(state)
        cache = DirectoryCache(16 << 20)
        self.volumes = {each.name: self._open(each, cache) for each in self.pool_map.volumes}
        opened = [each.volume_id for each in self.pool_map.volumes]
        self.seen.note(self.pool_map, opened)
        self.watch = MapWatch(
            self.pool_map,
            list(self.volumes.values()),
            PrestageCache(0),
            self.seen,
            ROOT,
            Fabric(()),
            EveryCopyCounts(ROOT),
        )

    def _open(self, volume: MapVolume, cache: DirectoryCache) -> Volume:
        return Volume(self.pool_map.settings(volume), self.pool_map.secret(volume, ROOT), cache, Timing())

    def replace(self, pool_map: PoolMap) -> None:
        assert not self.channel.run(replace_map(self.channel, pool_map, NUMBERS))

    def look(self) -> list[str]:
        """The names of the volumes that are served on."""
        self.channel.clock += 2 * EVERY_SECONDS
        self.channel.run(self.watch.look(self.channel))
        return [name for name, volume in self.volumes.items() if not volume.erased]


@pytest.mark.expects_log("it is not followed")
@pytest.mark.parametrize("edit", [name for name, (_, left) in EDITS.items() if left is not None])
def test_a_serving_agent_follows_no_map_that_somebody_without_the_key_has_changed(
    tmp_path: Path, edit: str
) -> None:
    """It serves on by the one that it knows, and follows the next that is the pool's own."""
    change, _ = EDITS[edit]
    agent = Serving(tmp_path)
    settings = {name: volume.settings for name, volume in agent.volumes.items()}
    agent.replace(forged(agent.pool_map, change))
    assert agent.look() == [*settings]
    assert {name: volume.settings for name, volume in agent.volumes.items()} == settings
    assert agent.watch.pool_map is agent.pool_map
    limited = with_limits(agent.pool_map, "red", bandwidth=1 << 20)
    agent.replace(limited)
    assert agent.look() == [*settings]
    assert agent.watch.pool_map == limited


@pytest.mark.expects_log("it is not followed")
def test_a_serving_agent_seals_with_no_key_that_it_saw_rotated_away(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    old = agent.pool_map
    ended = without_earlier_keys(
        with_new_data_keys(old, "blue", ROOT), {each.volume_id for each in old.volumes}
    )
    agent.replace(ended)
    assert agent.look() == ["model-a", "model-b", "model-c"]
    agent.replace(old.model_copy(update={"version": ended.version + 1}))
    assert agent.look() == ["model-a", "model-b", "model-c"]
    assert agent.watch.pool_map == ended


@pytest.mark.expects_log("cannot be written")
@pytest.mark.expects_log("was erased")
def test_maps_are_followed_while_the_disk_of_the_state_folder_is_full(tmp_path: Path) -> None:
    agent = Serving(tmp_path)
    (tmp_path / f"{FILE}.part").mkdir()  # nothing can be written under that name
    limited = with_limits(agent.pool_map, "red", bandwidth=1 << 20)
    for newer in (limited, with_new_data_keys(limited, "blue", ROOT)):
        agent.replace(newer)
        assert agent.look() == ["model-a", "model-b", "model-c"]
        assert agent.watch.pool_map == newer
    agent.replace(without_key(agent.watch.pool_map, "blue"))
    assert agent.look() == ["model-c"]


def test_a_pool_of_the_earlier_layout_is_refused_by_name() -> None:
    channel = MemoryChannel([MemoryNamespace(SIZE)])
    block = bytearray(Superblock(nguid_of(0), planned()).encode())
    block[8] = 1
    block[96:128] = hashlib.sha256(block[:96]).digest()
    channel.namespaces[0].store(0, [bytes(block)])
    found = channel.run(inspect(channel, 0, nguid_of(0), SIZE))
    assert found.detail == "a pool of layout 1, which this version does not read: format it anew"
    with pytest.raises(G35Error, match="1 namespaces carry a pool of layout 1") as refused:
        newest_map([found])
    assert "pool format --force" in refused.value.advice
