"""A map that somebody without the key has edited, in any way: it is refused with one exception, or all that
an agent has to do with maps takes it without any. When it is gone, the agent goes by the pool's own again."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.attach.map_history import MapHistory, opens
from agent.attach.map_watch import EVERY_SECONDS, MapWatch
from agent.errors import ConfigError
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import (
    NAMESPACE_BYTES_MAX,
    SETS_MAX,
    PoolMap,
    VolumeWish,
    decode_pool_map_untrusted,
    plan_pool,
)
from agent.pool.map.reconcile import agreed, with_key_ends
from agent.pool.map.replicas import name_of, write_superblock
from agent.pool.map.superblock import MAP_BYTES_MAX
from agent.pool.map.tenant_changes import with_limits
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.remote.fabric import Fabric
from agent.tenancy.limits import TenantLimits
from agent.tenancy.visibility import Audience, Members
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import nguid_of
from tests.support.pool.no_seal import EveryCopyCounts

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
SIZE = 32 << 20
NGUIDS = [nguid_of(number) for number in range(2)]
NEWCOMER = nguid_of(2).hex()


def planned() -> PoolMap:
    wishes = [
        VolumeWish(name="blue", tenant="blue", value_bytes=1 << 16, share=0.3),
        VolumeWish(name="red", tenant="red", value_bytes=1 << 16, share=0.3, copies=2),
        VolumeWish(name="files", tenant="red", kind="files", value_bytes=1 << 16, share=0.3),
    ]
    return with_limits(plan_pool([(nguid, SIZE) for nguid in NGUIDS], wishes, ROOT), "blue", quota_slots=99)


PLANNED = planned()
DOCUMENT = json.loads(PLANNED.encode())


class Serving:
    """What an agent has to do with pool maps, over memory."""

    def __init__(self, state: Path) -> None:
        self.channel = MemoryChannel([MemoryNamespace(SIZE) for _ in range(3)])
        self.show(PLANNED)
        self.seen = MapHistory(state)
        cache = DirectoryCache(16 << 20)
        self.volumes = [
            Volume(PLANNED.settings(each), PLANNED.secret(each, ROOT), cache, Timing())
            for each in PLANNED.volumes
        ]
        self.tenants = TenantLimits(PLANNED, self.volumes, 2, ROOT, state)
        self.watch = MapWatch(
            PLANNED,
            self.volumes,
            PrestageCache(0),
            self.seen,
            ROOT,
            Fabric(()),
            EveryCopyCounts(ROOT),
            self.tenants.follow,
        )

    def show(self, pool_map: PoolMap, *, first: int = 0) -> None:
        for number, nguid in enumerate(NGUIDS[first:], first):
            self.channel.run(write_superblock(self.channel, number, nguid, pool_map))

    def look(self) -> None:
        for _ in range(2 * len(self.watch.pool_map.namespaces)):
            self.channel.clock += 2 * EVERY_SECONDS
            self.channel.run(self.watch.look(self.channel))
            self.channel.run(self.tenants.look(self.channel))

    def close(self) -> None:
        self.tenants.rotation.close()


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([4096, 1 << 16, 1 << 20, (1 << 20) - 4096, SIZE, SIZE - 1, 1 << 31, (1 << 31) - 1]),
    st.sampled_from([1 << power for power in (32, 40, 53, 60, 61, 62, 63, 64, 128, 1024, 4096)]),
    st.sampled_from([1e3, 1e308, -0.0, True]),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "00" * 16, "00", "ab" * 104, "ab" * 600, "kv", "files", "blocks", "plain+crc64", NEWCOMER]
    ),
    st.sampled_from([each.hex() for each in NGUIDS] + [each.tenant_id for each in PLANNED.tenants]),
    st.text(max_size=70),
)
VALUES = st.one_of(
    NUMBERS, TEXTS, st.none(), st.lists(NUMBERS, max_size=2), st.dictionaries(TEXTS, NUMBERS, max_size=2)
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        found += _places(child, (*path, key))
    return found


OPTIONAL = [("tenants", 0, name) for name in ("key_epoch", "quota_slots", "quota_bytes", "bandwidth")] + [
    ("volumes", 0, name) for name in ("key_epoch", "earlier_secret", "settled", "copies", "kv_namespaces")
]
PLACES = _places(DOCUMENT) + OPTIONAL


class Copied(NamedTuple):
    """The value of another place of the document."""

    path: tuple[Any, ...]


class Removed(NamedTuple):
    """Nothing in that place any more."""


def _at(path: tuple[Any, ...]) -> Any:
    node: Any = DOCUMENT
    for key in path:
        node = node[key]
    return node


def _alike(path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Places whose values may stand there: under the same name, else of the same type."""
    named = [each for each in PLACES if each[-1] == path[-1] and each not in OPTIONAL]
    return named or [each for each in _places(DOCUMENT) if type(_at(each)) is str]


def _edit(path: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.tuples(
        st.just(path),
        st.one_of(
            st.builds(Copied, st.sampled_from(_alike(path))),
            st.builds(Removed),
            st.integers(0, 3),
            VALUES,
        ),
    )


EDITS = st.sampled_from(PLACES).flatmap(_edit)


def edited(edits: list[tuple[tuple[Any, ...], Any]], join: bool) -> bytes:
    document = json.loads(PLANNED.encode())
    if join:
        document["namespaces"].append({"nguid": NEWCOMER, "bytes": SIZE})
        for volume in document["volumes"]:
            extent = dict(volume["extents"][-1], nguid=NEWCOMER)
            volume["settled"] = len(volume["extents"])
            volume["extents"].append(extent)
    for path, value in edits:
        node = document
        try:
            for key in path[:-1]:
                node = node[key]
            if isinstance(value, Removed):
                del node[path[-1]]
            else:
                node[path[-1]] = _at(value.path) if isinstance(value, Copied) else value
        except (TypeError, KeyError, IndexError):
            continue  # an earlier edit took that away
    if isinstance(document.get("version"), int):
        document["version"] += 1
    return json.dumps(document).encode()


def decoded(data: bytes) -> PoolMap | None:
    try:
        return decode_pool_map_untrusted(data)
    except ValueError:
        return None


GREAT = [(("namespaces", 2, "bytes"), 1 << 4096), (("volumes", 2, "extents", 2, "sets"), 1 << 2000)]


@pytest.mark.expects_log(".*")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, min_size=1, max_size=3), join=st.booleans())
@example(edits=GREAT, join=True)
@example(
    edits=[
        (("namespaces", 2, "bytes"), NAMESPACE_BYTES_MAX),
        (("volumes", 2, "extents", 2, "sets"), 1 << 37),
    ],
    join=True,
)
@example(edits=[(("volumes", 2, "key_epoch"), (1 << 31) - 1)], join=True)
@example(edits=[(("tenants", 0, "bandwidth"), (1 << 63) - 1)], join=False)
def test_an_edited_map_is_refused_or_taken_by_all_that_go_by_maps(
    edits: list[tuple[tuple[Any, ...], Any]], join: bool
) -> None:
    forged = decoded(edited(edits, join))
    if forged is None:
        return
    assert len(forged.encode()) <= MAP_BYTES_MAX
    assert decoded(forged.encode()) == forged
    name_of(forged)
    with contextlib.suppress(ConfigError):
        Audience("agent", ("blue",)).check(Members.of(forged))
    for first, other in ((forged, PLANNED), (PLANNED, forged)):
        agreed([first, other, other])
        with_key_ends(first, other, functools.partial(opens, ROOT))
    if forged.pool_id != PLANNED.pool_id:
        return
    with tempfile.TemporaryDirectory() as folder:
        agent = Serving(Path(folder))
        try:
            agent.show(forged, first=1)
            agent.look()
            for volume in agent.volumes:
                for key in (bytes(16), b"\xff" * 16):
                    volume.places(volume.placement.pseudonym(key))
                agent.channel.run(volume.lookup(agent.channel, [bytes(16)], agent.channel.clock + 1))
            # The forgery is gone; the pool changes as ever.
            own = with_limits(PLANNED, "red", quota_slots=1234)
            agent.show(own)
            agent.look()
            agent.look()
            assert agent.watch.pool_map.version == own.version
            assert agent.watch.pool_map.namespaces == own.namespaces
            limits = {row["name"]: row["slots_max"] for row in agent.tenants.snapshot()}
            assert limits["red"] == 1234
            for volume in agent.volumes:
                if not volume.erased:
                    assert len(volume.settings.extents) == len(NGUIDS)
                    volume.places(volume.placement.pseudonym(bytes(16)))
        finally:
            agent.close()


@pytest.mark.parametrize(
    "edit",
    [
        (("namespaces", 0, "bytes"), NAMESPACE_BYTES_MAX + 1),
        (("volumes", 0, "extents", 0, "sets"), SETS_MAX + 1),
        (("volumes", 0, "extents", 0, "offset"), NAMESPACE_BYTES_MAX + 4096),
        (("volumes", 0, "settled"), 1 << 40),
        (("volumes", 0, "ttl_seconds"), 1 << 31),
        (("tenants", 0, "quota_bytes"), 1 << 63),
        (("namespaces", 0, "bytes"), float(SIZE)),
        (("namespaces", 0, "bytes"), str(SIZE)),
        (("namespaces", 0, "bytes"), True),
    ],
)
def test_a_number_beyond_its_bound_or_in_other_clothes_is_no_map(edit: tuple[tuple[Any, ...], Any]) -> None:
    assert decoded(PLANNED.encode()) == PLANNED
    assert decoded(edited([edit], join=False)) is None


def refuse(*_: object) -> Any:
    raise OverflowError("a bug")


@pytest.mark.parametrize(("part", "name"), [("_history", "distrusted"), ("_fabric", "grow")])
def test_nothing_is_changed_by_a_map_that_is_not_taken(tmp_path: Path, part: str, name: str) -> None:
    """Something of the agent does not take it."""
    agent = Serving(tmp_path)
    before = [(each.settings, each.placement) for each in agent.volumes]
    setattr(agent.watch, part, SimpleNamespace(**{name: refuse}))
    newer = decoded(edited([], join=True))
    assert newer is not None
    agent.show(newer)
    agent.channel.clock += 2 * EVERY_SECONDS
    look: Callable[[], None] = functools.partial(agent.channel.run, agent.watch.look(agent.channel))
    with pytest.raises(OverflowError):
        look()
    assert agent.watch.pool_map == PLANNED
    assert [(each.settings, each.placement) for each in agent.volumes] == before
    agent.close()
