"""The salt of one write of a slot: what keeps GCM from sealing two texts under one key and nonce.

Randomness alone is not enough. It is fetched ahead (random_bytes.py), and a virtual machine that is copied
while it runs, or started twice from one snapshot, deals out the same bytes twice. So the time in nanoseconds
and what is written where go into each salt as well. Two copies make one salt only if, besides the same random
bytes, they write the same key, with the same generation, to the same slot, in the same nanosecond.

A hash of 24 random bytes and more is as good as these bytes: two salts are alike by chance as rarely as
before (docs/security.md).
"""

from __future__ import annotations

import hashlib
import struct
import time
from typing import Final

from agent.inline.random_bytes import random_bytes
from agent.inline.suites import SALT_BYTES

_WRITE: Final = struct.Struct("<24sQQQQ16s16s")
"""Random bytes; nanoseconds since the epoch and since the machine was started, which a clock that is set back
does not repeat; generation, slot, key and NGUID."""
_BLANK: Final = hashlib.blake2b(digest_size=SALT_BYTES, person=b"g35 slot salt")


def new_salt(key: bytes, generation: int, nguid: bytes, slot: int) -> bytes:
    """24 bytes for one write of a key (16 bytes) to a slot of a namespace."""
    digest = _BLANK.copy()
    digest.update(
        _WRITE.pack(
            random_bytes(SALT_BYTES), time.time_ns(), time.monotonic_ns(), generation, slot, key, nguid
        )
    )
    return digest.digest()
