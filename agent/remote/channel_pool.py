"""Channels of all workers, made as they are asked for."""

import threading
from collections.abc import Iterator, Mapping

from agent.host_os.cpu_idle import Work
from agent.pool.counters import Tally
from agent.remote.channel import WorkerChannel
from agent.remote.fabric import Fabric


class ChannelPool:
    """All channels of this process, one for each queue id, and closed together."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._made: dict[int, WorkerChannel] = {}
        self._lock = threading.Lock()

    def take(self, queue_id: int) -> WorkerChannel:
        """The channel of a queue id, for a thread to keep. The channel of an earlier thread goes on:
        a second Connect of the same id could reach the enclosure before the end of the first."""
        with self._lock:
            channel = self._made.get(queue_id)
            if channel is not None:
                return channel
            channel = self._made[queue_id] = WorkerChannel(self._fabric, queue_id)
        channel.connect_ahead()
        return channel

    def tallies(self) -> Iterator[Mapping[str, Tally]]:
        """The counters of all channels, each a copy of the table (not of the counts)."""
        for channel in list(self._made.values()):
            yield dict(channel.tallies)

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
        for channel in self._made.values():
            channel.close()
