"""A look at a slot: all of it is read and opened as a get would, and nothing is made of it here.

What is found goes with a digest of the bytes that did not prove themselves. Damage that lies on a medium is
the same at each look; what is damaged on its way seldom is twice.
"""

from __future__ import annotations

import enum
import hashlib
from typing import NamedTuple

from agent.pool.counters import MissCause
from agent.pool.format.directory import Entry
from agent.pool.format.slot import HEADER_BYTES, OpenSlot
from agent.pool.steps import Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.volume import Volume

READ_PIECE = 1 << 20
READ_SECONDS = 1.0
"""For one read; who looks has time, and a drive that takes longer is none to be judged by what it brings."""
DIGEST_BYTES = 16


class Finding(enum.Enum):
    """What a look at a slot said."""

    GOOD = "good"
    GONE = "holds something else"
    BAD = "does not prove itself"
    UNREADABLE = "the medium does not give it"
    OTHER_KEY = "is under a key that is not known here"
    UNKNOWN = "nothing can be said"


class Look(NamedTuple):
    """What was found, and a digest of what was wrong; empty where nothing was, or no byte came."""

    finding: Finding
    wrong: bytes
    bytes_read: int


def look_at(volume: Volume, lanes: Lanes, place: SlotAt, entry: Entry) -> Steps[Look]:
    """Read a slot and open all of it. What is opened is overwritten before this ends."""
    if not 0 < entry.length <= volume.settings.value_bytes:
        return Look(Finding.BAD, b"", 0)
    codec, bytes_read = volume.codec, 0
    where = CachedSet(place.namespace, place.offset)
    slot_at, unit = volume.slot_offset(where, place.slot), codec.unit_bytes
    key = volume.placement.key_of(entry.pseudonym)
    piece, padded = max(unit, READ_PIECE // unit * unit), codec.padded(entry.length)
    opened: OpenSlot | None = None
    scratch = volume.unit_buffers.borrow()
    try:
        for at in range(0, padded, piece):
            size, lead = min(piece, padded - at), HEADER_BYTES if opened is None else 0
            buffer = lanes.receive_buffer(lead + size)
            pending = lanes.read(place.namespace, slot_at + HEADER_BYTES + at - lead, buffer)
            cause = yield from wait_for(lanes, pending, lanes.now() + READ_SECONDS)
            bytes_read += len(buffer)
            if cause is not None:
                refused = cause is MissCause.CORRUPT
                return Look(Finding.UNREADABLE if refused else Finding.UNKNOWN, b"", bytes_read)
            if opened is None:
                header = buffer[:HEADER_BYTES]
                found = codec.open(header, key, volume.place(where, place.slot), entry.generation)
                if isinstance(found, MissCause):
                    return Look(_of_header(found), _digest(header), bytes_read)
                opened = found
                if opened.length != entry.length:
                    return Look(Finding.BAD, _digest(header), bytes_read)
            for start in range(0, size, unit):
                sealed = buffer[lead + start : lead + min(start + unit, size)]
                if not opened.open_unit((at + start) // unit, sealed, scratch[: len(sealed)]):
                    return Look(Finding.BAD, _digest(sealed), bytes_read)
        return Look(Finding.GOOD, b"", bytes_read)
    finally:
        used = min(unit, padded)
        scratch[:used] = bytes(used)
        volume.unit_buffers.give_back(scratch)


def _digest(wrong: memoryview) -> bytes:
    return hashlib.blake2b(wrong, digest_size=DIGEST_BYTES).digest()


def _of_header(cause: MissCause) -> Finding:
    if cause is MissCause.EVICTED:
        return Finding.GONE
    if cause is MissCause.WRONG_KEY:
        return Finding.OTHER_KEY
    return Finding.BAD if cause is MissCause.CORRUPT else Finding.UNKNOWN
