"""What somebody without the root key puts in the place of a pool map, by chance: see `forgery`."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from agent.inline.secrets import RootKey, SecretKey
from agent.pool.map.document import PoolMap, VolumeWish, plan_pool
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.superblock import LAYOUT_VERSION, MAGIC, Superblock

ROOT = RootKey(SecretKey(b"\x11" * 32), "a test")
STRANGERS_ROOT = RootKey(SecretKey(b"\x66" * 32), "a stranger's")
NUMBERS = (
    0,
    1,
    2,
    3,
    63,
    4096,
    1 << 16,
    1 << 20,
    1 << 31,
    (1 << 31) - 1,
    1 << 40,
    1 << 60,
    1 << 62,
    1 << 128,
)

Edit = Callable[[dict[str, Any], random.Random], None]


def _drop(rows: str) -> Edit:
    def edit(document: dict[str, Any], rng: random.Random) -> None:
        document[rows].pop(rng.randrange(len(document[rows])))

    return edit


def _set(rows: str, **values: Any) -> Edit:
    def edit(document: dict[str, Any], rng: random.Random) -> None:
        rng.choice(document[rows]).update(values)

    return edit


def _swap(rows: str, *names: str) -> Edit:
    def edit(document: dict[str, Any], rng: random.Random) -> None:
        first, second = rng.sample(document[rows], 2)
        for name in names:
            first[name], second[name] = second.get(name), first.get(name)

    return edit


def _drop_tenant(document: dict[str, Any], rng: random.Random) -> None:
    gone = document["tenants"].pop(rng.randrange(len(document["tenants"])))["tenant_id"]
    document["volumes"] = [each for each in document["volumes"] if each["tenant"] != gone]


def _extents(change: Callable[[list[dict[str, Any]], random.Random], None]) -> Edit:
    def edit(document: dict[str, Any], rng: random.Random) -> None:
        change(rng.choice([each for each in document["volumes"] if each.get("extents")])["extents"], rng)

    return edit


def _more_namespaces(document: dict[str, Any], rng: random.Random) -> None:
    """One of the attacker's, with most of the volumes on it: what is stored would be looked for there."""
    nguid = rng.randbytes(16).hex()
    document["namespaces"].append({"nguid": nguid, "bytes": 1 << 60})
    for volume in document["volumes"]:
        if volume.get("extents"):
            extent = {"nguid": nguid, "offset": 1 << 20, "sets": 1 << 30}
            volume["extents"].append(extent)
            volume["settled"] = rng.choice((0, len(volume["extents"]) - 1))


def _anything(document: dict[str, Any], rng: random.Random) -> None:
    node: Any = document
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    node[key] = rng.choice((*NUMBERS, -1, 1.5, True, None, "", "00", "ab" * 104, rng.randbytes(16).hex(), {}))


EDITS: Sequence[Edit] = (
    _drop("volumes"),
    _drop("namespaces"),
    _drop_tenant,
    _set("tenants", wrapped_key=""),
    _set("tenants", wrapped_key="", key_epoch=1),
    _set("tenants", key_epoch=7),
    _set("tenants", quota_slots=1),
    _set("tenants", quota_bytes=1),
    _set("tenants", bandwidth=1),
    _set("volumes", key_epoch=5),
    _set("volumes", earlier_secret=""),
    _set("volumes", wrapped_secret="ab" * 104),
    _set("volumes", ttl_seconds=1),
    _set("volumes", copies=2),
    _set("volumes", settled=1),
    _set("volumes", suite="plain+crc64"),
    _swap("volumes", "name"),
    _swap("volumes", "wrapped_secret"),
    _swap("volumes", "extents"),
    _swap("volumes", "volume_id"),
    _swap("tenants", "wrapped_key"),
    _extents(lambda extents, rng: extents.pop(rng.randrange(len(extents))) and None),
    _extents(lambda extents, rng: rng.choice(extents).update(sets=1)),
    _extents(lambda extents, rng: rng.choice(extents).update(sets=1 << 40)),
    _extents(lambda extents, rng: rng.choice(extents).update(offset=9 << 20)),
    _extents(lambda extents, rng: extents.reverse()),
    _more_namespaces,
    lambda document, rng: document["namespaces"].reverse(),
    _anything,
    _anything,
)


def superblock(nguid: bytes, pool_id: bytes, version: int, document: bytes) -> bytes:
    """As superblock.py, of a document that may be no map."""
    head = struct.pack(
        "<8sH6s16s16sQII32s",
        MAGIC, LAYOUT_VERSION, bytes(6), pool_id, nguid, version, len(document), 0,
        hashlib.sha256(document).digest(),
    )  # fmt: skip
    head += hashlib.sha256(head).digest()
    return head.ljust(4096, b"\0") + document + bytes(-len(document) % 4096)


def forgery(rng: random.Random, maps: Sequence[PoolMap], nguid: bytes) -> tuple[str, bytes]:
    """Some superblock for a namespace, and what it is; `maps`: all that the pool's own writers have made."""
    base = rng.choice(maps[-3:])
    version = rng.choice((base.version, base.version + 1, base.version + rng.randrange(40), 1 << 33, 1 << 62))
    match rng.randrange(12):
        case 0:
            return "replayed", Superblock(nguid, rng.choice(maps)).encode()
        case 1:
            return "another version", Superblock(nguid, _versioned(rng.choice(maps), version)).encode()
        case 2:
            seal = rng.choice(("", "00" * 40, rng.choice(maps).seal, rng.randbytes(40).hex()))
            return "another seal", Superblock(nguid, base.model_copy(update={"seal": seal})).encode()
        case 3:
            found = MapSeal(STRANGERS_ROOT).put(_versioned(base, version))
            return "a stranger's seal", Superblock(nguid, found).encode()
        case 4:
            root = rng.choice((ROOT, STRANGERS_ROOT))
            other = plan_pool([(nguid, 24 << 20)], [VolumeWish(name="o", value_bytes=1 << 16, share=1)], root)
            return "another pool", Superblock(nguid, rng.choice((other, MapSeal(root).put(other)))).encode()
        case 5:
            moved = base.model_copy(update={"pool_id": rng.randbytes(16).hex()})
            return "another pool's id", Superblock(nguid, moved).encode()
        case 6:
            data = bytearray(Superblock(nguid, base).encode())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return "a flipped bit", bytes(data)
        case 7:
            return "noise", rng.choice((bytes(8192), rng.randbytes(8192), MAGIC.ljust(8192, b"\xff")))
        case 8:
            return "of another namespace", Superblock(rng.randbytes(16), base).encode()
    document = json.loads(base.encode())
    edits = rng.choices(EDITS, k=rng.choice((1, 1, 2, 3)))
    for edit in edits:
        try:
            edit(document, rng)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            continue  # an earlier edit took that away
    document["version"] = version
    return "edited", superblock(nguid, bytes.fromhex(base.pool_id), version, json.dumps(document).encode())


def _versioned(pool_map: PoolMap, version: int) -> PoolMap:
    return pool_map.model_copy(update={"version": version})
