"""A shared volume in the pool map: two volumes that belong together, and are changed together."""

from __future__ import annotations

from typing import Any, Final

import pytest

from agent.config.configuration import VolumeSection
from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.membership.join import with_namespaces
from agent.pool.access import serve
from agent.pool.map.document import (
    NAMES,
    NAMES_BYTES_MAX,
    MapVolume,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
    set_size,
)
from agent.pool.map.reconcile import agreed
from agent.pool.map.tenant_changes import with_tenant, without_key
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.tenancy.visibility import Audience, Members
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import key_of, nguid_of

ROOT: Final = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE: Final = 1 << 30
MEMBERS: Final = [(nguid_of(number), SIZE) for number in range(3)]


def shared(**changes: Any) -> VolumeWish:
    return VolumeSection(**{"name": "s", "kind": "shared", "share": 0.5, **changes}).wish()


def planned(*wishes: VolumeWish) -> PoolMap:
    return plan_pool(MEMBERS, wishes or [VolumeSection(name="kv", share=0.4).wish(), shared()], ROOT)


def part(pool_map: PoolMap, name: str) -> MapVolume:
    return next(volume for volume in pool_map.volumes if volume.name == name)


def test_a_shared_volume_is_its_chunks_and_their_names_in_one_share() -> None:
    pool_map = planned()
    assert [(each.name, each.kind) for each in pool_map.volumes] == [
        ("kv", "kv"), ("s", "shared"), ("s.names", NAMES),
    ]  # fmt: skip
    chunks, names = part(pool_map, "s"), part(pool_map, "s.names")
    assert names.names_of == chunks.volume_id
    assert (names.tenant, names.suite, names.ttl_seconds) == (chunks.tenant, chunks.suite, chunks.ttl_seconds)
    assert (names.value_bytes, chunks.unit_bytes) == (NAMES_BYTES_MAX, 1 << 20)
    room = sum(extent.sets for extent in chunks.extents) * set_size(chunks.value_bytes)
    of_names = sum(extent.sets for extent in names.extents) * set_size(names.value_bytes)
    assert room + of_names <= 3 * SIZE * 0.5
    assert 0.02 < of_names / room < 0.06
    per_chunk = sum(each.sets for each in names.extents) / sum(each.sets for each in chunks.extents)
    assert 1.9 < per_chunk < 2.7, "chunks come in larger sets"
    assert decode_pool_map_untrusted(pool_map.encode()) == pool_map
    assert pool_map.settings(names).names_of == pool_map.settings(chunks).volume_id


def test_a_pool_without_one_has_the_map_that_it_had() -> None:
    encoded = planned(VolumeSection(name="kv", share=0.4).wish()).encode()
    assert b"names_of" not in encoded
    assert b"shared" not in encoded


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (NAMES, {"names_of": "00" * 16}),
        (NAMES, {"names_of": ""}),
        (NAMES, {"kind": "kv"}),
        (NAMES, {"kind": "kv", "names_of": ""}),
        (NAMES, {"value_bytes": 1 << 16}),
        ("shared", {"kind": "kv"}),
        ("shared", {"copies": 2}),
        ("shared", {"value_bytes": 1 << 14}),
        ("kv", {"kind": "shared"}),
    ],
)
def test_a_map_whose_parts_do_not_belong_together_is_refused(kind: str, changes: dict[str, Any]) -> None:
    pool_map = planned()
    rows = [each.model_copy(update=changes if each.kind == kind else {}) for each in pool_map.volumes]
    with pytest.raises(ValueError, match="no pool map"):
        decode_pool_map_untrusted(pool_map.model_copy(update={"volumes": tuple(rows)}).encode())


@pytest.mark.parametrize("kind", ["shared", NAMES])
def test_a_map_with_one_part_alone_is_refused(kind: str) -> None:
    pool_map = planned()
    rows = [each for each in pool_map.volumes if each.kind != kind]
    with pytest.raises(ValueError, match="no pool map"):
        decode_pool_map_untrusted(pool_map.model_copy(update={"volumes": tuple(rows)}).encode())


def test_names_of_another_tenants_volume_are_refused_and_of_another_volume_do_not_open() -> None:
    two = planned(shared(share=0.3), shared(name="t", share=0.3))
    changed = decode_pool_map_untrusted(swapped(two).encode())
    with pytest.raises(ConfigError, match="does not open"):
        changed.secret(part(changed, "s.names"), ROOT)
    assert changed.secret(part(changed, "s"), ROOT)
    blue = planned(shared(share=0.3), shared(name="t", share=0.3, tenant="blue"))
    with pytest.raises(ValueError, match="of another tenant"):
        decode_pool_map_untrusted(swapped(blue).encode())


def swapped(pool_map: PoolMap) -> PoolMap:
    """The map in which s and t have each other's names."""
    one, other = part(pool_map, "s").volume_id, part(pool_map, "t").volume_id
    ids = {one: other, other: one}
    rows = [each.model_copy(update={"names_of": ids.get(each.names_of, "")}) for each in pool_map.volumes]
    return pool_map.model_copy(update={"volumes": tuple(rows)})


@pytest.mark.parametrize("kind", ["kv", "files", "shared"])
def test_only_names_have_short_slots(kind: Any) -> None:
    with pytest.raises(ValueError, match="values of 16384 bytes"):
        VolumeWish(name="v", kind=kind, value_bytes=1 << 14, unit_bytes=1 << 16, share=0.5)


def test_a_tenant_gets_one_and_gets_it_back_empty_after_an_erasure() -> None:
    wishes = [shared(name="blue", tenant="blue", share=0.3)]
    pool_map, fresh = with_tenant(planned(), "blue", wishes, ROOT)
    assert [each.name for each in fresh] == ["blue", "blue.names"]
    assert fresh[1].names_of == fresh[0].volume_id
    assert pool_map.secret(fresh[1], ROOT)
    gone = without_key(pool_map, "blue")
    back, again = with_tenant(gone, "blue", [], ROOT)
    assert again[1].names_of == again[0].volume_id != fresh[0].volume_id
    assert back.secret(again[1], ROOT)
    assert part(back, "s.names") == part(pool_map, "s.names")
    with pytest.raises(ConfigError, match="has a volume s"):
        with_tenant(pool_map, "red", [shared(tenant="red", share=0.01)], ROOT)


def test_a_name_too_long_for_both_and_a_taken_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="for its names") as caught:
        planned(shared(name="n" * 60))
    assert caught.value.advice == "take a shorter name"
    with pytest.raises(ConfigError, match="one name"):
        planned(shared(share=0.3), VolumeSection(name="s.names", share=0.3).wish())


def test_it_lies_in_sets_alone() -> None:
    for layout in ("kv", "auto"):
        with pytest.raises(ConfigError, match="chunks of files, which do not lie on KV namespaces"):
            plan_pool([], [shared(layout=layout)], ROOT, [(nguid_of(9), SIZE)])


def test_namespaces_join_both_parts() -> None:
    joined = with_namespaces(planned(), [(nguid_of(7), SIZE)])
    for name in ("s", "s.names"):
        volume = part(joined, name)
        assert (len(volume.extents), volume.settled) == (4, 3)
        assert volume.extents[3].sets == volume.extents[0].sets


def test_copies_of_a_map_with_one_agree_on_it() -> None:
    before = planned()
    after = with_tenant(before, "blue", [shared(name="blue", tenant="blue", share=0.3)], ROOT)[0]
    assert agreed([before, after]) == after


def test_a_door_shows_a_shared_volume_as_one_by_its_own_name() -> None:
    pool_map, _ = with_tenant(planned(), "blue", [shared(name="blue", tenant="blue", share=0.3)], ROOT)
    cache, timing = DirectoryCache(1 << 20), Timing()
    served = [
        serve(Volume(pool_map.settings(each), pool_map.secret(each, ROOT), cache, timing))
        for each in pool_map.volumes
    ]
    for audience, expected in (
        (Audience("agent"), ["s", "blue"]),
        (Audience("agent", ("blue",)), ["blue"]),
        (Audience("agent", (), ("s",)), ["s"]),
        (Audience("agent", ("blue",), ("s",)), []),
        (Audience("agent", (), ("kv",)), []),
    ):
        audience.check(Members.of(pool_map))
        found = audience.shared(served)
        assert [each.chunks.settings.name for each in found] == expected
        assert [each.names.settings.name for each in found] == [f"{name}.names" for name in expected]
    assert [each.settings.name for each in Audience("agent").key_value(served)] == ["kv"]
    with pytest.raises(ConfigError, match=r"names s\.names"):
        Audience("agent", (), ("s.names",)).check(Members.of(pool_map))


def test_values_of_both_parts_are_stored_and_found() -> None:
    pool_map = planned()
    channel = MemoryChannel([MemoryNamespace(SIZE) for _ in MEMBERS])
    cache = DirectoryCache(1 << 20)
    for name in ("s", "s.names"):
        volume = part(pool_map, name)
        served = serve(Volume(pool_map.settings(volume), pool_map.secret(volume, ROOT), cache, Timing()))
        value = bytes(NAMES_BYTES_MAX - 1) + b"e"
        channel.run(served.replace(channel, key_of(1), value, channel.now() + 5))
        assert channel.run(served.newest(channel, key_of(1), channel.now() + 5)) == value
