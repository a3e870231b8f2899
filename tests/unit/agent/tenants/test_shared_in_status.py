"""Shared volumes in a status: of a tenant, of a guest, and in the totals."""

from __future__ import annotations

import dataclasses

import pytest

from agent.pool.access import serve
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.telemetry import snapshot
from agent.tenancy.visibility import Audience
from tests.support.fs.memory_shared import CHUNK, SharedPool

CONTENT = bytes(range(256)) * (3 * CHUNK // 256)


@pytest.mark.parametrize("guest", [False, True])
def test_a_door_that_shows_a_shared_volume_tells_of_it(guest: bool) -> None:
    pool = SharedPool()
    pool.names = dataclasses.replace(pool.names, names_of=pool.chunks.volume_id)
    files = pool.agent()
    files.put("f", CONTENT)
    assert files.get("f") == CONTENT
    volumes = [files.chunks, files.names]
    sources = snapshot.Sources(
        pool_id="pool", map_version=lambda: 1, mount="/mnt", door="fuse", volumes=volumes,
        fabric=Fabric([Enclosure("shelf")]), directories=DirectoryCache(1 << 20), prestage=PrestageCache(0),
        tallies=lambda: [files.channel.tallies], tenants=lambda: [{"name": "t", "volumes": ["v", "v.names"]}],
    )  # fmt: skip
    audience = Audience("agent", volumes=("v",))
    own = audience.in_status([serve(each) for each in volumes])
    said = snapshot.take(audience.sources(sources, own, guest=guest))
    assert [each["name"] for each in said["volumes"]] == ["v", "v.names"]
    (tenant,) = said["tenants"]
    assert tenant["name"] == "t"
    assert tenant["bytes_read"] >= len(CONTENT)
    # Chunks are values that the cache has or has not; a name is asked for by every lookup.
    assert (said["totals"]["gets"], said["totals"]["hits"], said["totals"]["puts"]) == (3, 3, 3)
    assert said["totals"]["bytes_read"] == len(CONTENT)
    assert Audience("agent", volumes=("another",)).in_status([serve(each) for each in volumes]) == []
