"""Superblocks and the pool map: frozen bytes, two copies, and maps that contradict themselves."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import (
    DATA_START,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
    set_size,
    tenant_id,
)
from agent.pool.map.inspect import Content, Inspection, inspect, newest_map, with_strangers
from agent.pool.map.replicas import write_superblock
from agent.pool.map.superblock import (
    BLOCK_BYTES,
    COPY_OFFSETS,
    NoSuperblock,
    Superblock,
    decode_superblock_untrusted,
    head_of,
)
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of

VECTORS = Path(__file__).parents[2] / "vectors" / "pool.json"
ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 64 << 20


def document(version: int = 0x0102030405, **changes: Any) -> dict[str, Any]:
    volume = {
        "name": "kv",
        "volume_id": "a1" * 16,
        "tenant": tenant_id("blue"),
        "kind": "files",
        "value_bytes": 1 << 16,
        "unit_bytes": 1 << 17,
        "suite": "aes-256-xts+crc64",
        "ttl_seconds": 77,
        "wrapped_secret": "c3" * 104,
        "extents": [{"nguid": "d4" * 16, "offset": 2 << 20, "sets": 3}],
    }
    return {
        "pool_id": "e5" * 16,
        "version": version,
        "namespaces": [{"nguid": "d4" * 16, "bytes": SIZE}],
        "volumes": [volume],
        "tenants": [{"name": "blue", "tenant_id": tenant_id("blue"), "wrapped_key": "b2" * 40}],
        **changes,
    }


def pool_map(version: int = 0x0102030405) -> PoolMap:
    return PoolMap.model_validate(document(version))


SAMPLE = Superblock(bytes(range(0x61, 0x71)), pool_map())


def test_golden_superblock() -> None:
    golden = json.loads(VECTORS.read_text())["superblock"]
    data = SAMPLE.encode()
    assert data[:160].hex() == golden["head"]
    assert hashlib.sha256(data).hexdigest() == golden["sha256"]
    assert len(data) % BLOCK_BYTES == 0
    assert decode_superblock_untrusted(data) == SAMPLE
    assert head_of(data[:BLOCK_BYTES]).map_bytes == len(SAMPLE.pool_map.encode())


def test_every_flipped_bit_that_counts_is_noticed() -> None:
    data = SAMPLE.encode()
    used = [*range(128), *range(BLOCK_BYTES, BLOCK_BYTES + len(SAMPLE.pool_map.encode()))]
    for at in used:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(NoSuperblock):
            decode_superblock_untrusted(damaged)


@given(st.binary(max_size=200), st.integers(0, 9000), st.integers(0, 9000))
def test_any_bytes_are_a_superblock_or_none(piece: bytes, at: int, end: int) -> None:
    data = SAMPLE.encode()
    damaged = (data[:at] + piece + data[at + len(piece) :])[:end]
    try:
        found = decode_superblock_untrusted(memoryview(damaged))
    except NoSuperblock:
        return
    assert found == SAMPLE


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from([*document(), "name", "extents", "nguid"]), inner)
        ),
    )
)
def test_any_json_is_a_map_or_none(tree: Any) -> None:
    for whole in (tree, {**document(), "volumes": tree}, {**document(), "namespaces": tree}):
        data = json.dumps(whole).encode()
        try:
            found = decode_pool_map_untrusted(data)
        except ValueError:
            continue
        assert json.loads(found.encode()) == whole


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 9000, b"\xff\xfe", b"null", b'{"pool_id": 1}', b"1e999"])
def test_broken_json_is_no_map(data: bytes) -> None:
    with pytest.raises(ValueError, match="no pool map"):
        decode_pool_map_untrusted(data)


def test_a_map_is_what_it_was() -> None:
    assert decode_pool_map_untrusted(pool_map().encode()) == pool_map()


def changed(path: str, value: object) -> dict[str, Any]:
    tree = json.loads(json.dumps(document()))
    node: Any = tree
    *steps, last = path.split("/")
    for step in steps:
        node = node[int(step) if step.isdigit() else step]
    node[last] = value
    return tree  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pool_id", "E5" * 16),
        ("version", 0),
        ("namespaces", []),
        ("namespaces", [{"nguid": "d4" * 16, "bytes": SIZE}] * 2),
        ("volumes/0/name", "../etc"),
        ("volumes/0/name", ""),
        ("volumes/0/kind", "block"),
        ("volumes/0/value_bytes", 65537),
        ("volumes/0/value_bytes", 1 << 25),
        ("volumes/0/unit_bytes", 3 << 15),
        ("volumes/0/unit_bytes", 1 << 12),
        ("volumes/0/suite", "rot13"),
        ("volumes/0/ttl_seconds", -1),
        ("volumes/0/ttl_seconds", 1 << 31),
        ("volumes/0/wrapped_secret", "not hex"),
        ("volumes/0/wrapped_secret", ""),
        ("volumes/0/extents", []),
        ("volumes/0/extents/0/nguid", "00" * 16),
        ("volumes/0/extents/0/offset", 0),
        ("volumes/0/extents/0/offset", (2 << 20) + 512),
        ("volumes/0/extents/0/sets", 0),
        ("volumes/0/extents/0/sets", SIZE // set_size(1 << 16) + 1),
        ("volumes/0/extra", 1),
    ],
)
def test_a_map_that_cannot_be_is_refused(path: str, value: object) -> None:
    with pytest.raises(ValueError, match="no pool map"):
        decode_pool_map_untrusted(json.dumps(changed(path, value)).encode())


def test_volumes_that_collide_are_refused() -> None:
    one = document()["volumes"][0]
    far = {"nguid": "d4" * 16, "offset": 40 << 20, "sets": 1}
    for other in (
        {**one, "volume_id": "00" * 16},
        {**one, "name": "other"},
        {**one, "name": "other", "volume_id": "00" * 16, "extents": [{**far, "offset": 4 << 20}]},
        {**one, "extents": [one["extents"][0], far]},
        {**one, "value_bytes": 1 << 24, "unit_bytes": 1 << 16},
    ):
        volumes = (
            [one, other] if other.get("extents") == one["extents"] or "other" in other["name"] else [other]
        )
        with pytest.raises(ValueError):
            PoolMap.model_validate({**document(), "volumes": volumes})
    good = {**one, "name": "other", "volume_id": "00" * 16, "extents": [far]}
    PoolMap.model_validate({**document(), "volumes": [one, good]})


# -- on flash ---------------------------------------------------------------------------------------


def look(channel: MemoryChannel, size: int = SIZE):  # type: ignore[no-untyped-def]
    return channel.run(inspect(channel, 0, nguid_of(0), size))


def test_blank_foreign_pool_and_unreadable_namespaces_are_told_apart() -> None:
    namespace = MemoryNamespace(SIZE)
    channel = MemoryChannel([namespace])
    assert look(channel).content is Content.BLANK
    for at in (0, 8192, SIZE - 4096):
        namespace.blocks = {at: b"\x01" * 4096}
        assert look(channel).content is Content.FOREIGN
    namespace.blocks = {}
    channel.run(write_superblock(channel, 0, nguid_of(0), pool_map()))
    assert look(channel).content is Content.POOL
    channel.run(write_superblock(channel, 0, nguid_of(7), pool_map()))
    assert look(channel).content is Content.FOREIGN, "a drive copied block by block is not this drive"
    namespace.hung = True
    assert look(channel).content is Content.UNREADABLE


def test_a_crash_between_or_within_the_copies_leaves_one() -> None:
    """The second write of a map, cut off after any number of 4 KiB blocks."""
    old, new = pool_map(1), pool_map(2)
    whole = Superblock(nguid_of(0), new).encode()
    steps = [(offset, at) for offset in COPY_OFFSETS for at in range(0, len(whole), 4096)]
    for done in range(len(steps) + 1):
        namespace = MemoryNamespace(SIZE)
        channel = MemoryChannel([namespace])
        channel.run(write_superblock(channel, 0, nguid_of(0), old))
        for offset, at in steps[:done]:
            namespace.blocks[offset + at] = whole[at : at + 4096]
        found = look(channel)
        assert found.content is Content.POOL
        assert found.superblock is not None
        first_whole = done * 4096 >= len(whole)
        assert found.superblock.pool_map.version == (2 if first_whole else 1)


@pytest.mark.parametrize("copy", [0, 1])
def test_one_rotten_copy_does_no_harm(copy: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        namespace = MemoryNamespace(SIZE)
        channel = MemoryChannel([namespace])
        channel.run(write_superblock(channel, 0, nguid_of(0), pool_map()))
        namespace.flip(COPY_OFFSETS[copy] + rng.randrange(128), rng.randrange(8))
        assert look(channel).superblock.pool_map == pool_map()


def test_a_superblock_that_cannot_be_written_is_an_error() -> None:
    for fault in ("down", "hung", "broken"):
        namespace = MemoryNamespace(SIZE)
        setattr(namespace, fault, True)
        channel = MemoryChannel([namespace])
        with pytest.raises(G35Error, match="cannot write the superblock"):
            channel.run(write_superblock(channel, 0, nguid_of(0), pool_map()))


def test_the_newest_map_of_one_pool_counts() -> None:
    channel = MemoryChannel([MemoryNamespace(SIZE) for _ in range(3)])
    for number, version in enumerate((4, 9, 2)):
        channel.run(write_superblock(channel, number, nguid_of(number), pool_map(version)))
    seen = [channel.run(inspect(channel, number, nguid_of(number), SIZE)) for number in range(3)]
    assert newest_map(seen).version == 9
    with pytest.raises(G35Error, match="no namespace carries a pool"):
        newest_map([])
    other = PoolMap.model_validate({**document(3), "pool_id": "00" * 16})
    channel.run(write_superblock(channel, 0, nguid_of(0), other))
    with pytest.raises(G35Error, match="2 different pools"):
        newest_map([channel.run(inspect(channel, 0, nguid_of(0), SIZE)), *seen[1:]])


def test_what_could_not_be_read_is_not_called_no_pool() -> None:
    """Where a queue is not connected in time, as at a start on a slow machine, nobody is to format."""
    namespaces = [MemoryNamespace(SIZE) for _ in range(2)]
    channel = MemoryChannel(namespaces)
    channel.run(write_superblock(channel, 0, nguid_of(0), pool_map()))
    namespaces[0].down = True
    seen = [channel.run(inspect(channel, number, nguid_of(number), SIZE)) for number in range(2)]
    with pytest.raises(G35Error, match=r"1 namespaces could not be read \(\w+\)") as told:
        newest_map(seen)
    assert "format" not in told.value.advice
    namespaces[0].down = False
    with pytest.raises(G35Error, match="no namespace carries a pool"):
        newest_map(seen[1:])


def test_a_pool_that_only_discovery_brings_is_a_stranger() -> None:
    """By the configured enclosures, or by the pool that this machine remembers."""
    maps = {
        name: PoolMap.model_validate({**document(1), "pool_id": name * 16}) for name in ("aa", "bb", "cc")
    }

    def carrying(name: str, *, by_discovery: bool) -> Inspection:
        block = Superblock(nguid_of(0), maps[name])
        return Inspection(0, Content.POOL, block, by_discovery=by_discovery)

    def found(seen: list[Inspection], remembered: str = "") -> str:
        return newest_map(with_strangers(seen, remembered)).pool_id[:2]

    blank = Inspection(0, Content.BLANK, by_discovery=True)
    listed = [blank, *(carrying(name, by_discovery=True) for name in maps)]
    for name in maps:
        configured = carrying(name, by_discovery=False)
        for remembered in ("", "bb" * 16, "dd" * 16):
            assert found([*listed, configured], remembered) == name
            assert found([configured], remembered) == name
        assert found(listed, name * 16) == name
    assert found(listed[:2]) == "aa", "one pool alone is nobody else's"
    two = [carrying("aa", by_discovery=False), carrying("bb", by_discovery=False)]
    for seen, remembered, advice in ((listed, "", "lists several"), (two, "aa" * 16, "belong to several")):
        with pytest.raises(G35Error, match="different pools") as refused:
            found(seen, remembered)
        assert advice in refused.value.advice


def test_a_pool_that_discovery_lists_does_not_take_the_place_of_one_that_is_away() -> None:
    """The enclosures of the pool that this machine has served come back; what was stored meanwhile in
    another would be lost, and its files would be looked for where they never were."""
    other = PoolMap.model_validate({**document(1), "pool_id": "aa" * 16})
    listed = Inspection(0, Content.POOL, Superblock(nguid_of(0), other), by_discovery=True)
    blank = Inspection(1, Content.BLANK)
    [found, _] = with_strangers([listed, blank], "dd" * 16)
    assert found.stranger
    with pytest.raises(
        G35Error, match=f"of pool {'aa' * 16}, and none of the pool that this machine"
    ) as away:
        newest_map([found, blank])
    assert "bring back the enclosures" in away.value.advice


# -- planning ---------------------------------------------------------------------------------------


def wish(**changes: Any) -> VolumeWish:
    return VolumeWish(**{"name": "kv", "value_bytes": 1 << 16, "share": 1.0, **changes})


def test_shares_are_kept_and_nothing_overlaps() -> None:
    sizes = [256 << 20, 512 << 20, (300 << 20) + 4096]
    members = [(nguid_of(number), size) for number, size in enumerate(sizes)]
    wishes = [wish(name="a", share=0.5), wish(name="b", share=0.3), wish(name="c", share=0.2, kind="files")]
    planned = plan_pool(members, wishes, ROOT)
    for index, size in enumerate(sizes):
        for volume, wanted in zip(planned.volumes, wishes, strict=True):
            extent = volume.extents[index]
            used = extent.sets * set_size(volume.value_bytes)
            assert used <= (size - DATA_START) * wanted.share, "more than its share"
            assert used > (size - DATA_START) * wanted.share - 2 * set_size(volume.value_bytes) - (3 << 20)
            assert extent.offset + used <= size
    assert planned.version == 1
    assert len({volume.wrapped_secret for volume in planned.volumes}) == 3
    assert planned.volumes[0].tenant == tenant_id("default")


def test_secrets_open_with_the_pools_root_key_only() -> None:
    planned = plan_pool([(nguid_of(0), 256 << 20)], [wish()], ROOT)
    assert len(planned.secret(planned.volumes[0], ROOT)) == 96
    with pytest.raises(ConfigError, match="does not open"):
        planned.secret(planned.volumes[0], RootKey(SecretKey(b"\x12" * 32), "another"))
    moved = planned.model_copy(update={"pool_id": "00" * 16})
    with pytest.raises(ConfigError, match="does not open"):
        moved.secret(planned.volumes[0], ROOT)


def test_wishes_that_do_not_fit_are_refused_in_words() -> None:
    members = [(nguid_of(0), 256 << 20)]
    for namespaces, wishes in (
        ([], [wish()]),
        (members, [wish(share=0.6), wish(name="b", share=0.6)]),
        (members, [wish(name="same", share=0.5), wish(name="same", share=0.5)]),
        ([(nguid_of(0), 1 << 20)], [wish()]),
        ([(nguid_of(0), 100)], [wish()]),
        (members, [wish(value_bytes=1 << 24)]),
        (members * 2, [wish()]),
    ):
        with pytest.raises(ConfigError) as caught:
            plan_pool(namespaces, wishes, ROOT)
        assert caught.value.advice


@pytest.mark.parametrize(
    "changes",
    [
        {"unit_bytes": 100_000},
        {"value_bytes": 1 << 24, "unit_bytes": 1 << 16},
        {"ttl_seconds": 1 << 31},
        {"kind": "files", "copies": 2},
    ],
)
def test_a_wish_that_no_pool_could_fulfil_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        wish(**changes)


def test_a_member_too_small_for_a_set_is_left_out() -> None:
    planned = plan_pool([(nguid_of(0), 256 << 20), (nguid_of(1), 2 << 20)], [wish()], ROOT)
    assert [extent.nguid for extent in planned.volumes[0].extents] == [nguid_of(0).hex()]
    assert planned.settings(planned.volumes[0]).extents[0].namespace == 0
