"""Many short values by one request: LOAD_MANY of transfer_wire.py, into memory of any kind.

Values for registered memory come straight into it. Others pass through memory that the pool has registered
for this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from host_shim.control_wire import Outcome
from host_shim.transfer_wire import MANY_MAX, SHORT_BYTES, TOGETHER_BYTES

ALIGNED_BYTES: Final = 4096
IS_LONGER: Final = -1
"""In the place of a length: the value goes on behind its buffer."""
Became: TypeAlias = list[tuple[Outcome, int]]
"""Outcome and length of each value of a request."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of one get: `length` is None for a miss; `outcome` its cause, None where no agent says.

    REFUSED: the value is longer than its buffer, which may hold anything.
    """

    length: int | None
    outcome: Outcome | None


LONGER: Final = Fetched(None, Outcome.REFUSED)


def judged(length: int, outcome: Outcome | None, *, is_sure: bool) -> Fetched:
    if length == IS_LONGER:
        return LONGER
    if length == 0:
        return Fetched(None, None if outcome in (Outcome.HIT, Outcome.UNKNOWN) else outcome)
    if not is_sure and outcome is not Outcome.HIT:
        return Fetched(None, outcome)
    return Fetched(length, Outcome.HIT)


def groups_of(views: Sequence[memoryview]) -> list[slice]:
    """The buffers of each request, in their order; none where they are not many. Each has up to
    SHORT_BYTES."""
    if len(views) < 2:
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


def short_among(views: Sequence[memoryview]) -> Sequence[int]:
    """Which of the buffers move together with others."""
    if max(map(len, views), default=0) <= SHORT_BYTES:
        return range(len(views))
    return [number for number, view in enumerate(views) if len(view) <= SHORT_BYTES]


def move_in_groups(
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    move: Callable[[Sequence[bytes], Sequence[memoryview]], Became | None],
    take: Callable[[Sequence[int], Became], None],
    share: Callable[[Callable[[int], None], int], None],
) -> Sequence[int]:
    """Move the short values by a request for each `groups_of` them, several at a time. Which values nothing
    was done for, long ones included.

    `move`: one group; None where nothing was done for it. `take`: is told what became of its values, by their
    numbers. `share`: runs work for so many numbers.
    """
    every = range(len(keys))
    short = short_among(views)
    if len(short) < len(keys):
        keys, views = [keys[number] for number in short], [views[number] for number in short]
    groups = groups_of(views)
    if not groups:
        return every
    left = [] if len(short) == len(every) else sorted(set(every).difference(short))

    def move_one(number: int) -> None:
        group = groups[number]
        became = move(keys[group], views[group])
        if became is None:
            left.extend(short[group])
        else:
            take(short[group], became)

    share(move_one, len(groups))
    return left


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
