"""The salt of one write of a slot, which keeps GCM from sealing two texts under one key and nonce.

Random bytes alone are not enough: they are fetched ahead (random_bytes.py), and a virtual machine that is
copied, or started twice from one snapshot, deals out the same bytes twice. So the time in nanoseconds and the
place of the write go into each salt as well. Two copies make one salt only if they also write the same key,
with the same generation, to the same slot, in the same nanosecond. A hash of 24 random bytes and more is as
good as these bytes: two salts collide by chance as rarely as before (docs/security.md).
"""

import hashlib
import struct
import time
from typing import Final

from agent.inline.cipher_suites import SALT_BYTES
from agent.inline.random_bytes import random_bytes

_WRITE: Final = struct.Struct("<24sQQQQ16s16s")
"""Random bytes; nanoseconds since the epoch and since boot, so a clock that is set back repeats nothing;
generation, slot, key, NGUID."""
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
