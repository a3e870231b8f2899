"""Directories that may be written: each that a write goes out from is read, and proven whole, here.

A directory whose entries did not all come with a right CRC is in doubt (agent/pool/format/directory.py). An
image of it would take entries from flash that were only damaged on their way, and with them values that are
there. So whoever writes a directory holds its writer and has it from `load_writable`, or asks `prove` before
it uses what is remembered. Both read a directory in doubt again, with some time between, until it comes whole
or its damage is known to be flash's own (agent/pool/volume/directory_cache.py). Where neither is so within
the time that there is, nothing is written: a put takes its other set or is refused, a delete is tried again
later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.steps import Acquire, Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import DAMAGE_LOOK_SECONDS, CachedSet
from agent.pool.volume.volume import Volume

AT_ONCE_SECONDS: Final = 0.02
"""To the first of the reads that follow: what damages some reads mostly spares the next."""
READ_SECONDS: Final = 5.0
_CLOCK_GRAIN: Final = 0.01
_PAUSES: Final[Sequence[float]] = (
    AT_ONCE_SECONDS,
    DAMAGE_LOOK_SECONDS + _CLOCK_GRAIN - AT_ONCE_SECONDS,
    DAMAGE_LOOK_SECONDS + _CLOCK_GRAIN,
)
"""Before each of them. Together they are long enough for the damage of a cache's directory to be proven; that
of a directory of files is, when whoever wants it has come by some times (FILES_DAMAGE_LOOK_SECONDS)."""


def load_writable(
    volume: Volume,
    lanes: Lanes,
    sets: Sequence[CachedSet],
    deadline: float,
    *,
    came: list[CachedSet] | None = None,
) -> Steps[MissCause | None]:
    """Read the directories of `sets`, whose writers the caller holds. None: all may be written.

    Otherwise why not, LATE where one did not prove itself whole by the deadline; those that may be written
    are put into `came`.
    """
    read: list[CachedSet] = []
    trouble = yield from volume.load(lanes, sets, deadline, holds_writers=True, came=read)
    doubt = yield from prove(volume, lanes, read, deadline, holds_writers=True)
    if came is not None:
        came += [cached for cached in read if not cached.in_doubt]
    return trouble if trouble is not None else doubt


def prove(
    volume: Volume, lanes: Lanes, sets: Sequence[CachedSet], deadline: float, *, holds_writers: bool = False
) -> Steps[MissCause | None]:
    """Read those again that are in doubt; None once none is, else why not."""
    for seconds in _PAUSES:
        doubtful = [cached for cached in sets if cached.in_doubt]
        if not doubtful:
            return None
        if lanes.now() + seconds >= deadline:
            return MissCause.LATE
        yield from pause(lanes, seconds)
        trouble = yield from volume.load(lanes, doubtful, deadline, holds_writers=holds_writers)
        if trouble is not None:
            return trouble
    return MissCause.LATE if any(cached.in_doubt for cached in sets) else None


def pause(lanes: Lanes, seconds: float) -> Steps[None]:
    """Let time pass."""
    closed = threading.Lock()
    closed.acquire()
    yield Acquire(closed, lanes.now() + seconds)  # Nobody gives it away.


def is_certain(lanes: Lanes, namespace: int, offset: int, block: memoryview) -> Steps[bool]:
    """Whether a directory that was read into `block` is what flash has; where in doubt, it is read again.

    For those who decide by what all directories name, and write none: a value whose entry came damaged would
    not be counted.
    """
    seen = CachedSet(namespace, offset)
    seen.accept(block, lanes.now(), seen.writes)
    for seconds in _PAUSES:
        if not seen.in_doubt:
            return True
        yield from pause(lanes, seconds)
        reading = lanes.read(namespace, offset, block)
        if (yield from wait_for(lanes, reading, lanes.now() + READ_SECONDS)) is not None:
            return False
        seen.accept(block, lanes.now(), seen.writes)
    return not seen.in_doubt
