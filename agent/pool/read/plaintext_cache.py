"""Prestaged values that wait opened: what a get of one costs is then a copy, and no decryption.

An option (`[prestage] waits = "open"`); docs/decisions/0032-sealed-or-open.md says what speaks for either.
Only what was announced is opened: a guess is a pseudonym, and a slot proves itself for a key.

What waits so was proven when it came. A get is served from it where a remembered directory still names that
very write of the key; else it goes the way of any other.
"""

from __future__ import annotations

from agent.inline.suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.slot import HEADER_BYTES
from agent.pool.read.prestage_cache import OpenValue
from agent.pool.volume.volume import Volume


def opened(volume: Volume, key: bytes, place: Place, generation: int, slot: memoryview) -> OpenValue | None:
    """What a whole slot holds, in clear; None where it does not prove itself as this write of this key."""
    header, data = slot[:HEADER_BYTES], slot[HEADER_BYTES:]
    proven = volume.codec.open(header, key, place, generation)
    if isinstance(proven, MissCause) or volume.codec.padded(proven.length) > len(data):
        return None
    clear = memoryview(bytearray(len(data)))
    first, last, from_byte, to_byte = proven.unit_span(0, proven.length)
    for number in range(first, last):
        start = number * volume.codec.unit_bytes - from_byte
        end = min(start + volume.codec.unit_bytes, to_byte - from_byte)
        if not proven.open_unit(number, data[start:end], clear[start:end]):
            return None
    return OpenValue(clear[: proven.length], proven.expiry, len(slot))
