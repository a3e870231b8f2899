"""The pool map on KV namespaces: the superblock under a reserved key.

Read inspect.py and superblock.py first. A Store is all or nothing, so one copy is enough, and no other value
can take its place: the key is reserved (kv/eviction.py never gives it away).
"""

from collections.abc import Callable

from agent.errors import G35Error
from agent.pool.kv.commands import RESERVED_KEY, KvChannel, kv_channel
from agent.pool.late_answers import wait_for
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import Content, Inspection
from agent.pool.map.superblock import (
    BLOCK_BYTES,
    COPY_BYTES,
    MAP_IO_SECONDS,
    Head,
    NoSuperblock,
    decode_superblock_untrusted,
    head_of,
)
from agent.pool.steps import IoChannel, Steps
from nvmeof.errors import MalformedPdu
from nvmeof.wire.kv import decode_key_list_untrusted

LIST_BYTES = 4096
DELETES_IN_FLIGHT = 32


def inspect_kv(
    channel: IoChannel,
    namespace: int,
    nguid: bytes,
    seconds: float = MAP_IO_SECONDS,
    known: dict[Head, PoolMap] | None = None,
) -> Steps[Inspection]:
    """The superblock of a KV namespace, waited for `seconds`; or else whether it has any keys. `known`: as of
    `inspect`."""
    known = {} if known is None else known
    asking = kv_channel(channel)
    data = memoryview(bytearray(COPY_BYTES))
    pending = asking.kv_retrieve(namespace, RESERVED_KEY, data)
    cause = yield from wait_for(channel, pending, channel.now() + seconds)
    if pending.missing:
        keys = yield from _keys(asking, namespace, b"")
        if keys is None:
            return Inspection(namespace, Content.UNREADABLE, detail="its keys cannot be listed")
        if keys:
            return Inspection(namespace, Content.FOREIGN, detail="it is not blank")
        return Inspection(namespace, Content.BLANK)
    if cause is not None:
        return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
    try:
        copy = data[: pending.received]
        found = decode_superblock_untrusted(copy, known)
    except NoSuperblock as why:
        return Inspection(namespace, Content.FOREIGN, detail=str(why))
    known[head_of(copy[:BLOCK_BYTES]).of_map] = found.pool_map
    if found.nguid != nguid:
        detail = f"a superblock written for namespace {found.nguid.hex()}"
        return Inspection(namespace, Content.FOREIGN, detail=detail)
    return Inspection(namespace, Content.POOL, found, found.pool_map.pool_id)


def _keys(channel: KvChannel, namespace: int, first: bytes) -> Steps[list[bytes] | None]:
    into = memoryview(bytearray(LIST_BYTES))
    pending = channel.kv_list(namespace, first, into)
    if (yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)) is not None:
        return None
    try:
        return decode_key_list_untrusted(into)
    except MalformedPdu:
        return None


def clear_keys(channel: IoChannel, namespace: int, advance: Callable[[int], None]) -> Steps[None]:
    """Delete every key of a namespace. `advance` gets the counts of deleted keys. Raises G35Error."""
    asking = kv_channel(channel)
    while True:
        keys = yield from _keys(asking, namespace, b"")
        if keys is None:
            raise G35Error("the keys of a KV namespace cannot be listed", "look at the enclosure")
        if not keys:
            return
        for start in range(0, len(keys), DELETES_IN_FLIGHT):
            batch = [asking.kv_delete(namespace, key) for key in keys[start : start + DELETES_IN_FLIGHT]]
            for pending in batch:
                cause = yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)
                if cause is not None and not pending.missing:
                    raise G35Error(
                        f"cannot clear a KV namespace: {pending.fault or 'no answer'}",
                        "look at the enclosure and format again",
                    )
            advance(len(batch))
