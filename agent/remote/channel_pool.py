"""Channels of all workers, made as they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from agent.host_os.cpu_idle import Work
from agent.pool.counters import Tally
from agent.remote.channel import WorkerLanes
from agent.remote.fabric import Fabric


class ChannelPool:
    """All lanes of this process, one for each queue id, and closed together."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._made: dict[int, WorkerLanes] = {}
        self._lock = threading.Lock()

    def take(self, queue_id: int) -> WorkerLanes:
        """The lanes of a queue id, for a thread to keep. Those that an earlier thread is done with go on:
        a second Connect of the same id could reach the enclosure before the end of the first."""
        with self._lock:
            lanes = self._made.get(queue_id)
            if lanes is not None:
                return lanes
            lanes = self._made[queue_id] = WorkerLanes(self._fabric, queue_id)
        lanes.connect_ahead()
        return lanes

    def tallies(self) -> Iterator[Mapping[str, Tally]]:
        """The counters of all lanes, each a copy of the table (not of the counts)."""
        for lanes in list(self._made.values()):
            yield dict(lanes.tallies)

    def work_done(self) -> Work:
        """What the volumes were asked for so far."""
        requests = transfers = moved = 0
        for each in self.tallies():
            for volume, tally in each.items():
                if volume:
                    done = tally.gets_hit + tally.puts
                    transfers += done
                    requests += done + tally.gets_missed + tally.lookups
                    moved += tally.bytes_read + tally.bytes_written
        return Work(requests, transfers, moved)

    def close(self) -> None:
        """Hang up all queues; no thread may use them any more."""
        for lanes in self._made.values():
            lanes.close()
