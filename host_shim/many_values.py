"""Many short values by one request: LOAD_MANY of transfer_wire.py, into memory of any kind.

Values for registered memory come straight into it. Others pass through memory that the pool has registered
for this.
"""

from collections.abc import Sequence
from typing import Final

from host_shim.transfer_wire import MANY_MAX, SHORT_BYTES, TOGETHER_BYTES

ALIGNED_BYTES: Final = 4096


def groups_of(views: Sequence[memoryview]) -> list[slice]:
    """The buffers of each request, in their order; none where they are not many and short."""
    if len(views) < 2 or max(map(len, views)) > SHORT_BYTES or not min(map(len, views)):
        return []
    groups: list[slice] = []
    start = taken = 0
    for number, view in enumerate(views):
        size = aligned(len(view))
        if taken + size > TOGETHER_BYTES or number - start == MANY_MAX:
            groups.append(slice(start, number))
            start, taken = number, 0
        taken += size
    groups.append(slice(start, len(views)))
    return groups


def aligned(size: int) -> int:
    """The room for a buffer of this size, up to which the agent opens a value in place."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def cut(memory: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
    """A piece of the memory for each buffer, each at least as long and one behind the other."""
    pieces = []
    at = 0
    for view in views:
        end = at + aligned(len(view))
        pieces.append(memory[at:end])
        at = end
    return pieces
