"""Directories that may be written: each is read, and proven whole, before a write goes out from it.

An image of a directory in doubt (agent/pool/format/directory.py) would take entries from flash that were only
damaged on their way, and with them values that are there. So a writer holds the directory's `writer` and
reads it by `load_writable`, or asks `prove` before it uses a remembered one. Both read a directory in doubt
again, with some time between, until it comes whole or its damage is known to be flash's own
(directory_cache.py). Where neither happens in time, nothing is written: a put takes its other set or is
refused, a delete is tried again later.
"""

import threading
from collections.abc import Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.steps import Acquire, IoChannel, Steps
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
"""Before each read. Together they suffice to prove damage of a cache's directory; a directory of files takes
several callers (FILES_DAMAGE_LOOK_SECONDS)."""


def load_writable(
    volume: Volume,
    channel: IoChannel,
    sets: Sequence[CachedSet],
    deadline: float,
    *,
    came: list[CachedSet] | None = None,
) -> Steps[MissCause | None]:
    """Read the directories of `sets`, whose writers the caller holds. None: all may be written.

    Otherwise why not: LATE for one that was not whole by the deadline. Those that may be written are put into
    `came`.
    """
    read: list[CachedSet] = []
    trouble = yield from volume.load(channel, sets, deadline, holds_writers=True, came=read)
    doubt = yield from prove(volume, channel, read, deadline, holds_writers=True)
    if came is not None:
        came += [cached for cached in read if not cached.in_doubt]
    return trouble if trouble is not None else doubt


def read_once(
    volume: Volume,
    channel: IoChannel,
    sets: Sequence[CachedSet],
    deadline: float,
    *,
    came: list[CachedSet],
    in_flight: int,
) -> Steps[MissCause | None]:
    """As `load_writable`, with one read of each. One in doubt is among those that `came`, and the caller
    writes nothing from it."""
    return (
        yield from volume.load(channel, sets, deadline, holds_writers=True, came=came, in_flight=in_flight)
    )


def prove(
    volume: Volume,
    channel: IoChannel,
    sets: Sequence[CachedSet],
    deadline: float,
    *,
    holds_writers: bool = False,
) -> Steps[MissCause | None]:
    """Read those again that are in doubt; None once none is, else why not."""
    for seconds in _PAUSES:
        doubtful = [cached for cached in sets if cached.in_doubt]
        if not doubtful:
            return None
        if channel.now() + seconds >= deadline:
            return MissCause.LATE
        yield from pause(channel, seconds)
        trouble = yield from volume.load(channel, doubtful, deadline, holds_writers=holds_writers)
        if trouble is not None:
            return trouble
    return MissCause.LATE if any(cached.in_doubt for cached in sets) else None


def pause(channel: IoChannel, seconds: float) -> Steps[None]:
    closed = threading.Lock()
    closed.acquire()
    yield Acquire(closed, channel.now() + seconds)  # Nobody gives it away.


def is_certain(channel: IoChannel, namespace: int, offset: int, block: memoryview) -> Steps[bool]:
    """Whether a directory in `block` is what flash has; one in doubt is read again. For callers that count
    entries and write none: a damaged entry would not be counted."""
    seen = CachedSet(namespace, offset)
    seen.accept(block, channel.now(), seen.writes)
    for seconds in _PAUSES:
        if not seen.in_doubt:
            return True
        yield from pause(channel, seconds)
        reading = channel.read(namespace, offset, block)
        if (yield from wait_for(channel, reading, channel.now() + READ_SECONDS)) is not None:
            return False
        seen.accept(block, channel.now(), seen.writes)
    return not seen.in_doubt
