"""What an agent holds in memory for a pool of 18 PB, which is what docs/operating.md says."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agent.attach.open_volumes import open_volumes
from agent.config.configuration import Configuration, parse_configuration
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.occupancy import Occupancy
from agent.pool.map.document import VolumeWish, decode_pool_map_untrusted, plan_pool
from agent.pool.map.superblock import MAP_BYTES_MAX
from agent.pool.volume.directory_cache import DirectoryCache
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from nvmeof.host.namespaces import NamespaceInfo
from tests.support.pool.memory_pool import nguid_of

DRIVE_BYTES = 15_360_000_000_000
DRIVES, ENCLOSURES = 1_172, 36
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
WISHES = [
    VolumeWish(name="kv", value_bytes=1 << 20, share=0.75),
    VolumeWish(name="files-small", kind="files", value_bytes=1 << 16, share=0.04),
    VolumeWish(name="files-large", kind="files", value_bytes=1 << 20, share=0.18),
]
T = TypeVar("T")


def held_by(make: Callable[[], T]) -> tuple[T, int]:
    """What is made, and the bytes that it holds."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    agent = {"mount": str(tmp_path / "mnt"), "state": str(tmp_path), "key_file": str(tmp_path / "key")}
    enclosure = {"name": "a", "address": "127.0.0.1", "port": 4420, "nqn": "nqn.2014-08.org.nvmexpress:a"}
    return parse_configuration({"agent": agent, "enclosures": [enclosure]}, "a test")


def test_the_map_of_18_petabytes_takes_some_mebibytes(configuration: Configuration) -> None:
    assert DRIVES * DRIVE_BYTES >= 18e15
    nguids = [nguid_of(number) for number in range(DRIVES)]
    document = plan_pool([(nguid, DRIVE_BYTES) for nguid in nguids], WISHES, ROOT).encode()
    assert 300 << 10 < len(document) < 380 << 10 < MAP_BYTES_MAX
    pool_map, of_map = held_by(lambda: decode_pool_map_untrusted(document))
    cache = DirectoryCache(configuration.agent.directory_cache)
    _, of_volumes = held_by(lambda: open_volumes(pool_map, ROOT, configuration, cache))

    def reached() -> Fabric:
        enclosures = [Enclosure(f"jbof-{number}") for number in range(ENCLOSURES)]
        for number, enclosure in enumerate(enclosures):
            enclosure.namespaces = tuple(
                NamespaceInfo(nsid, nguid, DRIVE_BYTES, 4096)
                for nsid, nguid in enumerate(nguids[number::ENCLOSURES], 1)
            )
        fabric = Fabric(enclosures)
        fabric.adopt(nguids)
        return fabric

    _, of_fabric = held_by(reached)
    assert of_map + of_volumes + of_fabric < 6 << 20
    sets = sum(extent.sets for extent in pool_map.volumes[0].extents)
    assert 195e6 < sets < 205e6


def test_remembered_directories_take_what_is_configured_and_a_third_at_most(
    configuration: Configuration,
) -> None:
    budget = configuration.agent.directory_cache

    def full() -> DirectoryCache:
        cache = DirectoryCache(budget)
        for number in range(2 * cache.capacity):
            cached = cache.borrow(0, number << 26)
            cached.accept(memoryview(bytes(4096)), 1.0, cached.writes)
            cache.give_back(cached)
        return cache

    cache, held = held_by(full)
    assert len(cache) == cache.capacity == 13_107
    assert held < budget * 4 / 3


def test_a_quota_counts_each_set_that_is_not_remembered() -> None:
    def counted() -> Occupancy:
        occupancy = Occupancy()
        occupancy.keep_forgotten()
        for number in range(100_000):
            occupancy.note_forgotten((number % DRIVES, number << 26), 1 + number % 64)
        return occupancy

    _, held = held_by(counted)
    assert held / 100_000 < 256
