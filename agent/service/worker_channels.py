"""The channels of threads that share their waits: workers of a door, both ends of links (slot_links.py)."""

from collections.abc import Callable
from typing import Final

from agent.host_os.workers_on_duty import Roster
from agent.remote.channel import WorkerChannel
from agent.remote.long_waits import LongWaits

SHORT_WAIT_SECONDS: Final = 1.0
"""Of a call that is not patient, for an enclosure that answers nobody. On a machine that is busy one that is
well may say nothing for a quarter of that: then all values of a batch were refused."""

TakeChannel = Callable[[int], WorkerChannel]
"""Makes the channel of a thread, by its number."""


def with_waits(
    take: TakeChannel, waits: LongWaits, roster: Roster | None = None, *, may_park: bool = False
) -> TakeChannel:
    """`take`, for threads that share `waits`; `may_park` as of `WorkerChannel.share_waits`. `roster`: of the
    door whose workers they are, each on duty by its number."""

    def taken(number: int) -> WorkerChannel:
        channel = take(number)
        channel.share_waits(waits, may_park=may_park)
        if roster is not None:
            channel.duty = roster.workers[number]
        return channel

    return taken


def with_short_waits(take: TakeChannel, read_deadline: float, roster: Roster | None = None) -> TakeChannel:
    """`take`, for threads at both ends of links: for a call that is not patient they wait shortly."""
    return with_waits(take, LongWaits(0, max(read_deadline, SHORT_WAIT_SECONDS)), roster)
