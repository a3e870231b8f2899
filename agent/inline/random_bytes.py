"""Random bytes from the kernel, fetched in bulk: one system call for a few hundred small takes.

A put needs three dozen random bytes, and each getrandom(2) gives the interpreter's lock away: with several
workers, getting it back cost more than the sealing of 64 KiB. What is fetched ahead is each thread's own,
is handed out once, and does not survive a fork: a child must not deal out its parent's salts.
"""

from __future__ import annotations

import os
import threading
from typing import Final

BULK_BYTES: Final = 4096


class _Bulk(threading.local):
    def __init__(self) -> None:
        self.bytes = b""
        self.taken = 0


_bulk = _Bulk()


def random_bytes(count: int) -> bytes:
    """`count` bytes, at most BULK_BYTES, fit for keys, salts and nonces."""
    bulk = _bulk
    taken = bulk.taken
    found = bulk.bytes[taken : taken + count]
    if len(found) < count:
        bulk.bytes, taken = os.urandom(BULK_BYTES), 0
        found = bulk.bytes[:count]
    bulk.taken = taken + count
    return found


def _forget_in_child() -> None:
    # Only the thread that forked lives on in the child.
    _bulk.bytes, _bulk.taken = b"", 0


os.register_at_fork(after_in_child=_forget_in_child)
