"""Random bytes from the kernel, fetched in bulk: one system call for a few hundred small takes.

A put needs three dozen random bytes, and each getrandom(2) gives the interpreter's lock away: with several
workers, getting it back cost more than sealing 64 KiB. Each thread has its own bytes, hands each out once,
and drops them at a fork: a child must not deal out its parent's.

They survive in a copy of the machine: two starts of one snapshot deal out the same. What must not repeat
there is made of more than this (salts.py), and bytes are used for AHEAD_SECONDS at the most: a kernel that is
told of its copying (VMGENID) has other bytes from then on.
"""

import os
import threading
import time
from typing import Final

BULK_BYTES: Final = 4096
AHEAD_SECONDS: Final = 1.0


class _Bulk(threading.local):
    def __init__(self) -> None:
        self.bytes = b""
        self.taken = 0
        self.fetched_at = 0.0


_bulk = _Bulk()


def random_bytes(count: int) -> bytes:
    """`count` bytes, at most BULK_BYTES, fit for keys, salts and nonces."""
    bulk = _bulk
    taken, now = bulk.taken, time.monotonic()
    found = bulk.bytes[taken : taken + count]
    if len(found) < count or now - bulk.fetched_at > AHEAD_SECONDS:
        bulk.bytes, bulk.fetched_at, taken = os.urandom(BULK_BYTES), now, 0
        found = bulk.bytes[:count]
    bulk.taken = taken + count
    return found


def _forget_in_child() -> None:
    # Only the thread that forked lives on in the child.
    _bulk.bytes, _bulk.taken = b"", 0


os.register_at_fork(after_in_child=_forget_in_child)
