"""A map's version takes no key. Somebody writes one namespace anew, under a version that no change leads to:
the pool is changed as before, agents follow that, and it is not noted as seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from agent.attach.map_history import FILE, MapHistory
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map import commit
from agent.pool.map.commit import change_map, simply
from agent.pool.map.document import (
    VERSION_MAX,
    VERSIONS_AHEAD_MAX,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
)
from agent.pool.map.inspect import Content, inspect, newest_map
from agent.pool.map.reconcile import agreed, counting
from agent.pool.map.replicas import write_superblock
from agent.pool.map.superblock import BLOCK_BYTES, Superblock, head_of
from agent.pool.map.tenant_changes import next_map, with_limits, without_key
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
TOO_FAR = [VERSION_MAX, VERSION_MAX - 1, 1 << 61, VERSIONS_AHEAD_MAX + 2]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PAUSE_SECONDS", 0.0)


def versioned(pool_map: PoolMap, version: int) -> PoolMap:
    return pool_map.model_copy(update={"version": version})


class Pool:
    """Namespaces in memory, verbs that change the map, and an agent that serves."""

    def __init__(self, state: Path, namespaces: int = 2) -> None:
        wishes = [
            VolumeWish(name=name, tenant=name, value_bytes=1 << 16, share=0.4) for name in ("blue", "red")
        ]
        self.nguids = [nguid_of(number) for number in range(namespaces)]
        self.formatted = plan_pool([(nguid, SIZE) for nguid in self.nguids], wishes, ROOT)
        self.channel = MemoryChannel([MemoryNamespace(SIZE) for _ in self.nguids])
        for number in range(namespaces):
            self.write(number, self.formatted)
        self.state, self.opened = state, [each.volume_id for each in self.formatted.volumes]
        self.serve(self.formatted)

    def serve(self, pool_map: PoolMap) -> None:
        """As an agent that starts with a map."""
        self.seen = MapHistory(self.state)
        self.seen.refuse(pool_map)
        pool_map = self.seen.believed(pool_map)
        cache = DirectoryCache(16 << 20)
        self.volumes = [
            Volume(pool_map.settings(each), pool_map.secret(each, ROOT), cache, Timing())
            for each in pool_map.volumes
            if not pool_map.is_erased(each)
        ]
        self.seen.note(pool_map, self.opened)
        self.watch = MapWatch(
            pool_map, self.volumes, PrestageCache(0), self.seen, ROOT, Fabric(()), EveryCopyCounts(ROOT)
        )

    def write(self, number: int, pool_map: PoolMap) -> None:
        self.channel.run(write_superblock(self.channel, number, self.nguids[number], pool_map))

    def found(self) -> PoolMap:
        return newest_map(
            [
                self.channel.run(inspect(self.channel, number, nguid, SIZE))
                for number, nguid in enumerate(self.nguids)
            ]
        )

    def erase(self, name: str) -> PoolMap:
        """As g35 tenant erase."""
        numbers = {nguid.hex(): number for number, nguid in enumerate(self.nguids)}
        change = simply(lambda it: without_key(it, name))
        done = self.channel.run(change_map(self.channel, self.found(), numbers, change, all_of_them=False))
        assert done.left == {}
        return done.pool_map

    def look(self) -> list[str]:
        """At each namespace; the names of the volumes that are served on."""
        for _ in self.nguids:
            self.channel.clock += 2 * EVERY_SECONDS
            self.channel.run(self.watch.look(self.channel))
        return [each.settings.name for each in self.volumes if not each.erased]


@pytest.mark.expects_log("was erased")
@pytest.mark.expects_log("no change leads to that")
@pytest.mark.parametrize("version", TOO_FAR)
def test_one_superblock_without_a_key_does_not_keep_a_tenant_from_being_erased(
    tmp_path: Path, version: int
) -> None:
    pool = Pool(tmp_path)
    pool.write(1, versioned(pool.formatted, version))
    assert pool.look() == ["blue", "red"]
    assert pool.found() == pool.formatted
    erased = pool.erase("blue")
    assert erased.version == 2
    assert pool.found() == erased, "on all namespaces"
    assert pool.look() == ["red"]
    assert pool.watch.pool_map == erased
    MapHistory(tmp_path).refuse(erased)
    with pytest.raises(G35Error, match="version 1, and this agent has seen 2"):
        MapHistory(tmp_path).refuse(pool.formatted)


@pytest.mark.expects_log("was erased")
@pytest.mark.expects_log("no change leads to that")
def test_where_most_of_the_pool_was_written_so_erasing_goes_on_from_there(tmp_path: Path) -> None:
    pool = Pool(tmp_path, 3)
    for number in (0, 1):
        pool.write(number, versioned(pool.formatted, 1 << 61))
    assert pool.look() == ["blue", "red"]
    assert pool.erase("blue").version == (1 << 61) + 1
    assert pool.look() == ["red"], "what is gone is gone, whatever its version"
    assert pool.watch.pool_map.version == 1
    pool.serve(pool.found())
    assert pool.look() == ["red"]
    assert json.loads((tmp_path / FILE).read_text())["pools"][pool.formatted.pool_id]["version"] == 1


@pytest.mark.expects_log("was erased")
@pytest.mark.expects_log("no change leads to that")
def test_an_agent_that_starts_by_such_a_map_follows_the_pools_own_later(tmp_path: Path) -> None:
    """All that carries the pool's own is away just then."""
    pool = Pool(tmp_path)
    pool.serve(versioned(pool.formatted, VERSION_MAX))
    assert pool.look() == ["blue", "red"]
    pool.erase("red")
    assert pool.look() == ["blue"]


def test_after_the_last_version_there_is_no_change_and_the_error_says_whose_fault_that_is(
    tmp_path: Path,
) -> None:
    pool = Pool(tmp_path)
    last = versioned(pool.formatted, VERSION_MAX)
    for number in range(2):
        pool.write(number, last)
    for change in (lambda: pool.erase("blue"), lambda: next_map(last)):
        with pytest.raises(G35Error, match="somebody without the root key has written it") as refused:
            change()
        assert "bring back the namespaces" in refused.value.advice
    assert pool.found() == last, "nothing was written"


@pytest.mark.expects_log("does not carry the pool's map any more .*version")
def test_a_version_beyond_the_last_is_no_superblock(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    whole = Superblock(pool.nguids[0], versioned(pool.formatted, VERSION_MAX)).encode()
    assert head_of(whole[:BLOCK_BYTES]).version == VERSION_MAX
    for version in (0, VERSION_MAX + 1, (1 << 64) - 1):
        with pytest.raises(ValueError, match="a pool map of version"):
            Superblock(pool.nguids[0], versioned(pool.formatted, version)).encode()
        document = versioned(pool.formatted, version).encode()
        with pytest.raises(ValueError, match="no pool map: version"):
            decode_pool_map_untrusted(document)
        head = bytearray(whole[:BLOCK_BYTES])
        head[48:56] = version.to_bytes(8, "little")
        head[56:60] = len(document).to_bytes(4, "little")
        head[64:96] = hashlib.sha256(document).digest()
        head[96:128] = hashlib.sha256(head[:96]).digest()
        for offset in (0, 1 << 19):
            pool.channel.namespaces[1].store(offset, [bytes(head), document.ljust(1 << 14, b"\0")])
        found = pool.channel.run(inspect(pool.channel, 1, pool.nguids[1], SIZE))
        assert found.content is Content.FOREIGN
        assert pool.found() == pool.formatted
        assert pool.look() == ["blue", "red"]


def test_versions_count_by_how_many_copies_have_them(tmp_path: Path) -> None:
    base = Pool(tmp_path).formatted
    far, limited = versioned(base, VERSION_MAX), with_limits(base, "red", quota_slots=7)
    assert counting([]) == []
    assert counting([far]) == [far], "there is nothing else"
    assert counting([far, base]) == [base]
    assert counting([far, far, base]) == [far, far, base]
    assert counting([base, base, limited, far]) == [base, base, limited]
    assert agreed([base, base, limited, far]) == limited, "the changes of this pool are followed as ever"
    near = versioned(base, base.version + VERSIONS_AHEAD_MAX)
    assert agreed([base, near]) == near


def test_what_an_earlier_g35_noted_without_a_bound_is_dropped(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    document = json.loads((tmp_path / FILE).read_text())
    document["pools"][pool.formatted.pool_id]["version"] = (1 << 64) - 1
    (tmp_path / FILE).write_text(json.dumps(document))
    MapHistory(tmp_path).refuse(pool.formatted)
