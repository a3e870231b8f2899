"""Repair of stored values: scrub, second copies, and slots whose medium is bad.

The upkeep thread looks into what gets and puts have met, always. The thread `keeper`, with a channel of its
own, runs where the configuration asks for a scrub, or a volume keeps two copies, whose second ones it makes.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent.config.configuration import ScrubSection
from agent.host_os.worker_thread import OwnThread
from agent.pool.counters import Tally
from agent.pool.maintenance.replication import work_off
from agent.pool.maintenance.scrub import Pace, Scrubber, ScrubCounters, look_into_reports
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.volume import PoolVolume, Volume, in_sets
from agent.remote.channel import WorkerChannel

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class Repair(OwnThread):
    """Made once for an agent. `take_channel` gives the keeper its channel, which nobody else uses.

    It sleeps until a put owes a copy, a doubted copy is due, or the scrub's own pace lets the scrub go on.
    It ends after the read or the copy in hand; the copies that are owed are left to a scrub.
    """

    def __init__(
        self,
        scrub: ScrubSection,
        volumes: Sequence[PoolVolume],
        take_channel: Callable[[], WorkerChannel],
        tallies: Callable[[], Iterable[Mapping[str, Tally]]],
        has_files: Callable[[Volume], bool],
    ) -> None:
        """`has_files` tells whether this agent has files in a volume of blocks: then that is its own."""
        super().__init__("keeper", STOP_SECONDS, "the keeper, which is still reading,")
        self._section = scrub
        self._has_files = has_files
        self._volumes = in_sets(volumes)
        self._take_channel = take_channel
        self._tallies = tallies
        self._reported = ScrubCounters()
        """Of what gets and puts have met; the upkeep thread's."""
        self._scrubber = Scrubber(self._volumes)
        self._next_pass = 0.0
        self._wakes = threading.Event()
        """Set by what owes a copy, and by `stop`."""

    def look(self, channel: IoChannel) -> Steps[None]:
        """Look into what gets and puts have met. For the upkeep thread."""
        self._leave_files_to_others()
        yield from look_into_reports(self._volumes, channel, self._reported)

    def snapshot(self) -> dict[str, Any]:
        """Counts since the start, and how far the pass under way is."""
        counts, reported = asdict(self._scrubber.counters), asdict(self._reported)
        summed = {name: count + reported[name] for name, count in counts.items()}
        return {
            "bandwidth": self._section.bandwidth,
            **summed,
            "sets_done": self._scrubber.sets_done,
            "sets": self._scrubber.sets,
            "copies_owed": sum(len(volume.replication_backlog) for volume in self._volumes),
            "copies_not_noted": sum(volume.replication_backlog.dropped for volume in self._volumes),
            "copies_not_made": sum(volume.replication_backlog.not_made for volume in self._volumes),
            "copies_in_doubt": sum(volume.replication_backlog.doubtful for volume in self._volumes),
        }

    def _leave_files_to_others(self) -> None:
        """One agent of a pool uses a volume of blocks; the others remove nothing there and seal nothing
        anew."""
        for volume in self._volumes:
            if volume.files_elsewhere and self._has_files(volume):
                volume.change(files_elsewhere=False)

    def start(self) -> None:
        if self._section.bandwidth or any(volume.settings.copies > 1 for volume in self._volumes):
            super().start()

    def stop(self) -> None:
        # In this order: the keeper clears the second, and looks at the first behind that.
        self.stopping.set()
        self._wakes.set()
        super().stop()

    def _work(self) -> None:
        channel, stopping = self._take_channel(), self.stopping
        pace = Pace(self._section.bandwidth, lambda: self._moved_by_others(channel))
        copies = [volume for volume in self._volumes if volume.settings.copies > 1]
        for volume in copies:
            volume.replication_backlog.wake_by(self._wakes)
        free_at = 0.0
        while not stopping.is_set():
            # Before the look: what is owed from here on sets it again.
            self._wakes.clear()
            try:
                if channel.run(work_off(copies, channel)):
                    continue
                now = channel.now()
                if self._section.bandwidth and now >= max(free_at, self._next_pass):
                    free_at = now + self._scrub_on(channel, pace)
                    continue
                until = [due for volume in copies if (due := volume.replication_backlog.due()) is not None]
                if self._section.bandwidth:
                    until.append(max(free_at, self._next_pass))
                if not stopping.is_set():
                    self._wakes.wait(max(0.0, min(until) - now) if until else None)
            except Exception:
                log.exception("keeping what is stored good failed; it is tried again")
                stopping.wait(1.0)

    def _scrub_on(self, channel: WorkerChannel, pace: Pace) -> float:
        """One step of the scrub; how many seconds to wait before the next."""
        if self._scrubber.is_between_passes:
            self._next_pass = 0.0
        began = self._scrubber.counters.passes
        read = channel.run(self._scrubber.advance(channel))
        now = channel.now()
        if self._scrubber.counters.passes != began:
            self._next_pass = now + self._section.every_hours * 3600
            counters = self._scrubber.counters
            log.info(
                "scrub has read all: %d bad slots so far, %d set aside",
                counters.slots_bad, counters.slots_quarantined,
            )  # fmt: skip
        return pace.spend(read, now)

    def _moved_by_others(self, own: WorkerChannel) -> int:
        moved = sum(
            each[""].flash_bytes_read + each[""].flash_bytes_written for each in self._tallies() if "" in each
        )
        mine = own.tallies[""]
        return moved - mine.flash_bytes_read - mine.flash_bytes_written
