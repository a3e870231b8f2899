"""How much of its address space (RLIMIT_AS, `ulimit -v`) the agent has left, for what others ask it to map.

What its configuration promises it makes sure of at its start (`agent_need` in agent/cli/agent_verb.py).
"""

from __future__ import annotations

import resource
from typing import Final

RESERVE_BYTES: Final = 256 << 20
"""Address space beside the configured bounds: buffers of a request, threads that connect."""


def address_room() -> int | None:
    """Bytes of address space that this process may still take; None where that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as counts:
        return max(0, limit - int(counts.read().split()[0]) * resource.getpagesize())


def has_room_for(size: int) -> bool:
    """Whether a mapping of `size` bytes leaves enough address space for all else."""
    room = address_room()
    return room is None or room - size >= RESERVE_BYTES
