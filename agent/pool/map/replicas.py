"""The copies of the pool map one by one: the content of each, and a mark that tells whether it has changed.

A namespace of blocks has two (superblock.py), one of keys has one, under its reserved key. The mark is the
head of the superblock, which has the version and the hash of the map in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.errors import G35Error
from agent.pool.counters import MissCause
from agent.pool.kv.commands import RESERVED_KEY, kv_channel
from agent.pool.map.document import MapNamespace, PoolMap
from agent.pool.map.superblock import (
    BLOCK_BYTES,
    COPY_BYTES,
    COPY_OFFSETS,
    HEAD_BYTES,
    MAP_IO_SECONDS,
    NoSuperblock,
    Superblock,
    decode_superblock_untrusted,
    map_bytes_of,
)
from agent.pool.steps import IoChannel, Steps, wait_for


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: its mark, and the map where it is whole and written for this namespace."""

    mark: bytes
    pool_map: PoolMap | None


def name_in(mark: bytes) -> bytes:
    """What of a mark tells which map it is: version, length and hash."""
    return mark[48:96]


def name_of(pool_map: PoolMap) -> bytes:
    """The same of a map."""
    return name_in(Superblock(bytes(16), pool_map).encode())


def read_copies(
    channel: IoChannel, number: int, member: MapNamespace, known: dict[bytes, PoolMap]
) -> Steps[Sequence[Copy]]:
    """The content of each copy of a namespace; none where there is no answer. `known` maps marks of maps,
    without the NGUID, to maps that were read before, and grows."""
    try:
        if member.kind == "kv":
            data = yield from _kv_superblock(channel, number)
            return (Copy(data[:HEAD_BYTES], _decoded(data, member)),)
        copies = []
        for offset in COPY_OFFSETS:
            head = yield from _block(channel, number, offset)
            try:
                size = map_bytes_of(head)
            except NoSuperblock:
                copies.append(Copy(head[:HEAD_BYTES], None))
                continue
            name = head[:32] + name_in(head)
            if name not in known or head[32:48].hex() != member.nguid:
                rest = memoryview(bytearray(size + -size % BLOCK_BYTES))
                reading = channel.read(number, offset + BLOCK_BYTES, rest)
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


def mark_at(channel: IoChannel, number: int, member: MapNamespace, which: int) -> Steps[bytes]:
    """The mark that lies in a copy now. Raises G35Error where it cannot be read."""
    if member.kind == "kv":
        data = yield from _kv_superblock(channel, number)
    else:
        data = yield from _block(channel, number, COPY_OFFSETS[which])
    return data[:HEAD_BYTES]


def kv_copy_is(channel: IoChannel, number: int, nguid: bytes, pool_map: PoolMap) -> Steps[bool]:
    """Whether the copy of a namespace of keys is this map and nothing else."""
    try:
        data = yield from _kv_superblock(channel, number)
    except G35Error:
        return False
    return data == Superblock(nguid, pool_map).encode()


def _block(channel: IoChannel, number: int, offset: int) -> Steps[bytes]:
    """Nothing where the medium is bad: a write may mend it. Raises G35Error where there is no answer."""
    block = memoryview(bytearray(BLOCK_BYTES))
    reading = channel.read(number, offset, block)
    cause = yield from wait_for(channel, reading, channel.now() + MAP_IO_SECONDS)
    if cause is MissCause.CORRUPT:
        return b""
    if cause is not None:
        raise G35Error(f"cannot read a superblock: {reading.fault or 'no answer'}", "look at the enclosure")
    return bytes(block)


def _kv_superblock(channel: IoChannel, number: int) -> Steps[bytes]:
    """All of it; nothing where there is none, or the medium is bad."""
    data = memoryview(bytearray(COPY_BYTES))
    pending = kv_channel(channel).kv_retrieve(number, RESERVED_KEY, data)
    cause = yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)
    if pending.missing or cause is MissCause.CORRUPT:
        return b""
    if cause is not None:
        raise G35Error(f"cannot read a superblock: {pending.fault or 'no answer'}", "look at the enclosure")
    return bytes(data[: pending.received])


def _decoded(data: bytes, member: MapNamespace) -> PoolMap | None:
    try:
        found = decode_superblock_untrusted(data)
    except NoSuperblock:
        return None
    return found.pool_map if found.nguid.hex() == member.nguid else None
