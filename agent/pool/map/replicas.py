"""The copies of the pool map one by one: the content of each, and a mark that tells whether it has changed.

A namespace of blocks has two (superblock.py), one of keys has one, under its reserved key. A copy lies at a
place: an offset, or that key. The mark is the head of the superblock, which has the version and the hash of
the map in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent.errors import G35Error
from agent.pool.counters import MissCause
from agent.pool.kv.commands import RESERVED_KEY, kv_channel
from agent.pool.late_answers import wait_for
from agent.pool.map.document import MapNamespace, PoolMap
from agent.pool.map.superblock import (
    BLOCK_BYTES,
    COPY_BYTES,
    COPY_OFFSETS,
    HEAD_BYTES,
    MAP_IO_SECONDS,
    WRITTEN_BYTES,
    NoSuperblock,
    Superblock,
    decode_superblock_untrusted,
    head_of,
)
from agent.pool.steps import IoChannel, Pending, Steps
from agent.pool.write.flush_tracking import until_flushed

CopyPlace: TypeAlias = int | bytes
KEY_PLACES: Sequence[CopyPlace] = (RESERVED_KEY,)


def places_on(member: MapNamespace) -> Sequence[CopyPlace]:
    return KEY_PLACES if member.kind == "kv" else COPY_OFFSETS


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: its mark, and the map where it is whole and written for this namespace."""

    mark: bytes
    pool_map: PoolMap | None


def name_in(mark: bytes) -> bytes:
    """The part of a mark that tells maps apart: version, length and hash."""
    return mark[48:96]


def name_of(pool_map: PoolMap) -> bytes:
    return name_in(Superblock(bytes(16), pool_map).encode())


def read_copies(
    channel: IoChannel, number: int, member: MapNamespace, known: dict[bytes, PoolMap]
) -> Steps[Sequence[Copy]]:
    """The content of each copy of a namespace; none where there is no answer. `known` maps marks of maps,
    without the NGUID, to maps that were read before, and grows."""
    try:
        copies = []
        for place in places_on(member):
            head = yield from _read(channel, number, place)
            if isinstance(place, bytes):
                copies.append(Copy(head[:HEAD_BYTES], _decoded(head, member)))
                continue
            try:
                size = head_of(head).map_bytes
            except NoSuperblock:
                copies.append(Copy(head[:HEAD_BYTES], None))
                continue
            name = head[:32] + name_in(head)
            if name not in known or head[32:48].hex() != member.nguid:
                rest = memoryview(bytearray(size + -size % BLOCK_BYTES))
                reading = channel.read(number, place + BLOCK_BYTES, rest)
                cause = yield from wait_for(channel, reading, channel.now() + MAP_IO_SECONDS)
                if cause not in (None, MissCause.CORRUPT):
                    return ()
                found = _decoded(head + bytes(rest), member) if cause is None else None
                if found is None:
                    copies.append(Copy(head[:HEAD_BYTES], None))
                    continue
                known[name] = found
            copies.append(Copy(head[:HEAD_BYTES], known[name]))
    except G35Error:
        return ()
    return tuple(copies)


def mark_at(channel: IoChannel, number: int, place: CopyPlace) -> Steps[bytes]:
    """The mark that lies in a copy now. Raises G35Error where it cannot be read."""
    return (yield from _read(channel, number, place))[:HEAD_BYTES]


def write_superblock(
    channel: IoChannel,
    number: int,
    nguid: bytes,
    pool_map: PoolMap,
    places: Sequence[CopyPlace] = COPY_OFFSETS,
) -> Steps[None]:
    """Write the copies at `places`, each after the one before is on flash. Raises G35Error."""
    for place in places:
        data = _encoded(nguid, pool_map, place)
        if isinstance(place, bytes):
            pending: Pending = kv_channel(channel).kv_store(number, place, [data])
        else:
            pending = channel.write(number, place, [data])
        fault = yield from until_flushed(channel, number, pending, MAP_IO_SECONDS)
        if fault is not None:
            raise G35Error(
                f"cannot write the superblock of namespace {nguid.hex()}: {fault}",
                "look at the enclosure; the pool is not usable until every namespace has its superblock",
            )


def superblock_copies_are(
    channel: IoChannel,
    number: int,
    nguid: bytes,
    pool_map: PoolMap,
    places: Sequence[CopyPlace] = COPY_OFFSETS,
) -> Steps[bool]:
    """Whether the copies at `places`, read back to their ends, are this map and nothing else."""
    for place in places:
        try:
            data = yield from _read(channel, number, place, WRITTEN_BYTES)
        except G35Error:
            return False
        if data != _encoded(nguid, pool_map, place):
            return False
    return True


def _encoded(nguid: bytes, pool_map: PoolMap, place: CopyPlace) -> bytes:
    """The bytes of a copy. They fill its whole place, so no erased key of a longer earlier map stays."""
    data = Superblock(nguid, pool_map).encode()
    return data if isinstance(place, bytes) else data.ljust(WRITTEN_BYTES, b"\0")


def _read(channel: IoChannel, number: int, place: CopyPlace, size: int = BLOCK_BYTES) -> Steps[bytes]:
    """The first `size` bytes of a copy, all of one under a key; nothing where there is none, or the medium is
    bad, which a write may mend. Raises G35Error where there is no answer."""
    data = memoryview(bytearray(COPY_BYTES if isinstance(place, bytes) else size))
    if isinstance(place, bytes):
        pending: Pending = kv_channel(channel).kv_retrieve(number, place, data)
    else:
        pending = channel.read(number, place, data)
    cause = yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)
    if cause is MissCause.CORRUPT:
        return b""
    if cause is not None:
        raise G35Error(f"cannot read a superblock: {pending.fault or 'no answer'}", "look at the enclosure")
    return bytes(data[: pending.received] if isinstance(place, bytes) else data)


def _decoded(data: bytes, member: MapNamespace) -> PoolMap | None:
    try:
        found = decode_superblock_untrusted(data)
    except NoSuperblock:
        return None
    return found.pool_map if found.nguid.hex() == member.nguid else None
