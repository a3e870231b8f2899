"""Values that say whose they are: from each byte that is read follows what it has to be.

A value, or a piece of a file, is a head (name, version, length) and bytes that follow from the head alone. So
a reader needs no memory of what was written to tell a whole value from a torn one, a short one, or another's.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_HEAD = struct.Struct("<8s16sQQ")
_MAGIC = b"campaign"
HEAD_BYTES = _HEAD.size


def name_of(*parts: object) -> bytes:
    """Sixteen bytes that stand for a key, or for a piece of a file."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def content(name: bytes, version: int, length: int) -> bytes:
    """The value of a name in a version: `length` bytes, at least `HEAD_BYTES`."""
    head = _HEAD.pack(_MAGIC, name, version, length)
    return head + hashlib.shake_128(head).digest(length - HEAD_BYTES)


@dataclass(frozen=True, slots=True)
class Read:
    """What was read: a whole value in this version, or what is wrong with it."""

    version: int = 0
    wrong: str = ""


def judged(name: bytes, data: bytes | memoryview) -> Read:
    """Look at bytes that were served under a name."""
    if len(data) < HEAD_BYTES:
        return Read(wrong=f"{len(data)} bytes are no value")
    magic, whose, version, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        return Read(wrong="bytes that nobody wrote")
    if whose != name:
        return Read(wrong=f"the value of another name, {whose.hex()}")
    if length != len(data):
        return Read(wrong=f"{len(data)} bytes of a value of {length}")
    if content(name, version, length) != data:
        return Read(wrong=f"damaged bytes in version {version}")
    return Read(version)
