"""The superblock: what tells a namespace of a pool from any other, and carries the pool map.

Layout of the header block, 4,096 bytes, little-endian:
     0  8  magic "g35pool1"
     8  2  version of this layout
    10  6  zero
    16 16  pool id
    32 16  NGUID of the namespace it was written for
    48  8  version of the map, from 1 to 2^62
    56  4  bytes of the map
    60  4  zero
    64 32  SHA-256 of the map
    96 32  SHA-256 of the 96 bytes before
   128  …  zero
The map follows at 4,096. Two copies lie at 0 and at 512 KiB; they are written one after the other, so
that a crash in between leaves one whole, and the greater version that is whole counts.
"""

import hashlib
import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from agent.pool.map.document import DATA_START, VERSION_MAX, PoolMap, decode_pool_map_untrusted

MAP_IO_SECONDS = 10.0
"""For one read or write of a superblock or directory; an operator waits here, no inference engine."""

MAGIC = b"g35pool1"
LAYOUT_VERSION = 2
"""2: keys are wrapped for all that their row of the map says (document.py). 1 was never released."""
COPY_OFFSETS = (0, DATA_START // 2)
COPY_BYTES = DATA_START // 2
BLOCK_BYTES = 4096
WRITTEN_BYTES = COPY_BYTES - BLOCK_BYTES
"""What is written of a copy, its end with zeros: all of its room but the last block."""
MAP_BYTES_MAX = WRITTEN_BYTES - BLOCK_BYTES
PROOF_OFFSET = COPY_OFFSETS[1] + WRITTEN_BYTES
"""Where paths show that they lead to one medium (agent/remote/path_prober.py)."""

_HEADER = struct.Struct("<8sH6s16s16sQII32s32s")
HEAD_BYTES = _HEADER.size
assert HEAD_BYTES == 128


class NoSuperblock(Exception):
    """There is none that is whole; the text says what is there instead."""


ANOTHER_LAYOUT = "a pool of layout"
"""How the text begins where another version of g35 has made what is there."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """One copy, as it was read or is to be written."""

    nguid: bytes
    pool_map: PoolMap

    def encode(self) -> bytes:
        """Header block and map, padded to the block size. Raises ValueError for a map that is too long, or of
        no valid version."""
        if not 1 <= self.pool_map.version <= VERSION_MAX:
            raise ValueError(f"a pool map of version {self.pool_map.version}; {VERSION_MAX} is the most")
        document = self.pool_map.encode()
        if len(document) > MAP_BYTES_MAX:
            raise ValueError(f"a pool map of {len(document)} bytes; {MAP_BYTES_MAX} is the most")
        head = _HEADER.pack(
            MAGIC,
            LAYOUT_VERSION,
            bytes(6),
            bytes.fromhex(self.pool_map.pool_id),
            self.nguid,
            self.pool_map.version,
            len(document),
            0,
            hashlib.sha256(document).digest(),
            bytes(32),
        )
        head = head[:96] + hashlib.sha256(head[:96]).digest()
        padding = -len(document) % BLOCK_BYTES
        return head.ljust(BLOCK_BYTES, b"\0") + document + bytes(padding)


class Head(NamedTuple):
    """What a header block says of the map that follows."""

    pool_id: str
    nguid: bytes
    version: int
    map_bytes: int
    digest: bytes

    @property
    def of_map(self) -> "Head":
        """The same of every copy of one map, for its digest names it."""
        return self._replace(nguid=b"")


def head_of(header: memoryview | bytes) -> Head:
    """The fields of a header block. Raises NoSuperblock where it is none of ours."""
    if bytes(header[:8]) != MAGIC:
        raise NoSuperblock("blank" if not any(header) else "something that is not g35's")
    if hashlib.sha256(header[:96]).digest() != bytes(header[96:128]):
        raise NoSuperblock("a damaged superblock")
    _, layout, _, pool_id, nguid, version, length, _, digest, _ = _HEADER.unpack_from(header)
    if layout != LAYOUT_VERSION:
        raise NoSuperblock(f"{ANOTHER_LAYOUT} {layout}, which this version does not read: format it anew")
    if not 0 < length <= MAP_BYTES_MAX:
        raise NoSuperblock("a damaged superblock")
    return Head(pool_id.hex(), nguid, version, length, digest)


def decode_superblock_untrusted(
    data: memoryview | bytes, known: Mapping[Head, PoolMap] = MappingProxyType({})
) -> Superblock:
    """A copy out of its bytes. Raises NoSuperblock, and nothing else. `known`: maps that have been decoded,
    by what a header block says of them (`Head.of_map`)."""
    if len(data) < BLOCK_BYTES:
        raise NoSuperblock("a namespace shorter than a superblock")
    head = head_of(data[:BLOCK_BYTES])
    if (of_map := head.of_map) in known:
        return Superblock(head.nguid, known[of_map])
    document = bytes(data[BLOCK_BYTES : BLOCK_BYTES + head.map_bytes])
    if not hmac.compare_digest(hashlib.sha256(document).digest(), head.digest):
        raise NoSuperblock("a damaged superblock")
    try:
        pool_map = decode_pool_map_untrusted(document)
    except ValueError as error:
        raise NoSuperblock(str(error)) from None
    if (pool_map.version, pool_map.pool_id) != (head.version, head.pool_id):
        raise NoSuperblock("a damaged superblock")
    return Superblock(head.nguid, pool_map)
