"""Pools on KV namespaces: planning, maps that contradict themselves, and finding and laying out a pool."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.kv.commands import RESERVED_KEY, KvChannel
from agent.pool.map.document import PoolMap, VolumeWish, decode_pool_map_untrusted, plan_pool
from agent.pool.map.inspect import Content
from agent.pool.map.kv_superblock import clear_keys, inspect_kv
from agent.pool.map.replicas import KEY_PLACES, write_superblock
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_pool import nguid_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
BLOCKS = [(nguid_of(0), 256 << 20), (nguid_of(1), 256 << 20)]
KEYS = [(nguid_of(2), 64 << 20), (nguid_of(3), 32 << 20)]


def wish(**changes: Any) -> VolumeWish:
    return VolumeWish(**{"name": "kv", "value_bytes": 1 << 16, "share": 1.0, **changes})


def test_a_volume_goes_where_there_are_namespaces() -> None:
    on_keys = plan_pool([], [wish(share=0.1)], ROOT, KEYS)
    assert [each.kind for each in on_keys.namespaces] == ["kv", "kv"]
    settings = on_keys.settings(on_keys.volumes[0])
    assert settings.extents == ()
    assert [(each.namespace, each.bytes) for each in settings.shares] == [(0, 64 << 20), (1, 32 << 20)]
    on_blocks = plan_pool(BLOCKS, [wish()], ROOT, KEYS)
    assert len(on_blocks.namespaces) == 2, "what no volume wants is left out"
    assert on_blocks.settings(on_blocks.volumes[0]).shares == ()
    both = plan_pool(BLOCKS, [wish(name="a", layout="kv"), wish(name="b")], ROOT, KEYS)
    assert [each.kind for each in both.namespaces] == ["blocks", "blocks", "kv", "kv"]
    assert [bool(each.kv_namespaces) for each in both.volumes] == [True, False]
    assert decode_pool_map_untrusted(both.encode()) == both
    assert len(plan_pool(BLOCKS, [wish(layout="kv")], ROOT, KEYS).namespaces) == 2


@pytest.mark.parametrize(
    ("blocks", "wishes", "keys", "said"),
    [
        ([], [wish(name="a"), wish(name="b")], KEYS, "one volume takes the KV namespaces whole"),
        ([], [wish(kind="files")], KEYS, "blocks of files"),
        (BLOCKS, [wish(layout="kv")], [], "no KV namespace"),
        ([], [wish(layout="sets")], KEYS, "no namespace of blocks"),
        ([], [wish(value_bytes=4 << 20)], KEYS, "do not lie on KV namespaces"),
        ([], [wish()], [], "at least one namespace"),
    ],
)
def test_wishes_that_do_not_fit(blocks: Any, wishes: Any, keys: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_pool(blocks, wishes, ROOT, keys)


@pytest.mark.parametrize("what", ["both", "neither", "blocks as keys", "keys as blocks", "twice", "files"])
def test_a_map_that_cannot_be_is_refused(what: str) -> None:
    planned = plan_pool(BLOCKS, [wish(name="a", layout="kv"), wish(name="b")], ROOT, KEYS)
    document = planned.model_dump()
    on_kv, in_sets = document["volumes"]
    match what:
        case "both":
            on_kv["extents"] = in_sets["extents"]
        case "neither":
            on_kv["kv_namespaces"] = ()
        case "blocks as keys":
            on_kv["kv_namespaces"] = (nguid_of(0).hex(),)
        case "keys as blocks":
            in_sets["extents"][0]["nguid"] = nguid_of(2).hex()
        case "twice":
            document["volumes"] = [on_kv, {**on_kv, "name": "c", "volume_id": "00" * 16}]
        case "files":
            on_kv["kind"] = "files"
    with pytest.raises(ValidationError):
        PoolMap.model_validate(document)


class Flash:
    """One KV namespace and the channel to it."""

    def __init__(self) -> None:
        self.scheduler = StepScheduler(1)
        self.namespace = SimKvNamespace(16 << 20)
        self.channel = SimKvChannel(self.scheduler, [self.namespace], "one")

    def inspect(self, nguid: bytes = KEYS[0][0]) -> Any:
        return self.scheduler.finish(inspect_kv(self.channel, 0, nguid))

    def write(self, pool_map: PoolMap) -> None:
        self.scheduler.finish(write_superblock(self.channel, 0, KEYS[0][0], pool_map, KEY_PLACES))


def test_blank_foreign_pool_and_unreadable_are_told_apart() -> None:
    flash, pool_map = Flash(), plan_pool([], [wish()], ROOT, KEYS)
    assert flash.inspect().content is Content.BLANK
    flash.write(pool_map)
    found = flash.inspect()
    assert (found.content, found.superblock.pool_map) == (Content.POOL, pool_map)
    assert flash.inspect(nguid_of(9)).content is Content.FOREIGN
    damaged = bytearray(flash.namespace.values[RESERVED_KEY])
    damaged[4200] ^= 1
    flash.namespace.values[RESERVED_KEY] = bytes(damaged)
    assert (flash.inspect().content, flash.inspect().detail) == (Content.FOREIGN, "a damaged superblock")
    flash.namespace.values = {b"somebody's": b"value"}
    assert flash.inspect().content is Content.FOREIGN
    flash.namespace.broken = True
    assert flash.inspect().content is Content.UNREADABLE
    with pytest.raises(G35Error, match="cannot write the superblock"):
        flash.write(pool_map)
    with pytest.raises(G35Error, match="cannot be listed"):
        flash.scheduler.finish(clear_keys(flash.channel, 0, lambda more: None))


def test_a_format_leaves_no_key_behind() -> None:
    flash = Flash()
    flash.namespace.values = {b"%d" % number: b"v" for number in range(1000)}
    cleared: list[int] = []
    flash.scheduler.finish(clear_keys(flash.channel, 0, cleared.append))
    assert flash.namespace.values == {}
    assert sum(cleared) == 1000


def test_a_workers_channel_knows_commands_on_keys() -> None:
    fabric = Fabric(())
    fabric.adopt([nguid_of(0)])
    channel: KvChannel = WorkerChannel(fabric, 1)
    for pending in (
        channel.kv_retrieve(0, b"key", memoryview(bytearray(10))),
        channel.kv_store(0, b"key", [b"value"]),
        channel.kv_delete(0, b"key"),
        channel.kv_exists(0, b"key"),
        channel.kv_list(0, b"", memoryview(bytearray(10))),
    ):
        assert pending.done
        assert pending.unreachable
        assert (pending.missing, pending.full, pending.present) == (False, False, False)
    assert channel.kv_used_bytes(0) == 0
