"""Which addresses of this process are memory, as get_user_pages(9) finds out for ibv_reg_mr."""

from __future__ import annotations

from emulator.roce.pyverbs.enums_device import ibv_access_flags

_WRITES = (
    ibv_access_flags.IBV_ACCESS_LOCAL_WRITE
    | ibv_access_flags.IBV_ACCESS_REMOTE_WRITE
    | ibv_access_flags.IBV_ACCESS_REMOTE_ATOMIC
    | ibv_access_flags.IBV_ACCESS_MW_BIND
)
"""Of these access flags one is enough for a region to want memory that can be written (ib_access_writable).
"""


def is_memory(address: int, length: int, access: int) -> bool:
    """Whether all of it is mapped, to be read, and to be written where `access` lets anybody write."""
    at, end = address, address + length
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, allowed, _ = line.split(maxsplit=2)
            begin, behind = (int(word, 16) for word in span.split("-"))
            if behind <= at:
                continue
            if begin > at or allowed[0] != "r" or (access & _WRITES and allowed[1] != "w"):
                return False
            at = behind
            if at >= end:
                return True
    return False
