"""The processes of one way, and what they count."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.bench.own_pool import OwnPool, own_pool
from agent.bench.processor_time import process_seconds
from agent.bench.redis_site import free_ports
from agent.bench.tiers.folder_store import FolderStore
from agent.bench.tiers.links import Busy, Links
from agent.bench.tiers.ways import AGENT_KEYS, VOLUME, Way
from agent.errors import G35Error
from agent.replay.player import BlockStore
from host_shim.pool import Pool

QUIET_SECONDS = 0.5
QUIET_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.05
NO_COMMANDS = "failed_commands"
"""They are among the others as well."""


@dataclass(slots=True)
class WaySite:
    """One way, up."""

    way: Way
    store: BlockStore
    _below: Path
    _pool: OwnPool
    _status_bytes: int = field(default=0)
    """What was asked of the status so far, which came over the link to the host, too."""

    def look(self) -> Links:
        """What its processes have counted so far."""
        status = self._status()
        (door,), totals = status["doors"].values(), status["totals"]
        drives = self._pool.drives()
        return Links(
            to_host=door["bytes_read"],
            from_host=door["bytes_written"],
            from_enclosures=_sum(drives, "read_bytes", "retrieve_bytes"),
            to_enclosures=_sum(drives, "write_bytes", "store_bytes"),
            from_local=totals["local_bytes_read"],
            to_local=totals["local_bytes_written"],
            from_g4=_volume(status)["bytes_from_g4"],
            to_g4=sum(place["volumes"][VOLUME]["bytes"] for place in status["spill"]),
            drive_commands=_sum(drives, *(name for name in drives[0] if name.endswith("_commands")))
            - _sum(drives, NO_COMMANDS),
        )

    def busy(self) -> Busy:
        """Processor time of its processes so far, and when that is."""
        agent, enclosure = map(process_seconds, (self._pool.agent_pid, self._pool.enclosure_pid))
        return Busy(agent, enclosure, time.monotonic())

    def look_when_quiet(self) -> Links:
        """Once nothing was written for a while: copies may follow late. Raises G35Error where that has no
        end."""
        end = time.monotonic() + QUIET_SECONDS_MAX
        seen, since = self.look(), time.monotonic()
        while time.monotonic() < since + QUIET_SECONDS:
            if time.monotonic() > end:
                raise G35Error(f"{self.way.name}: it writes without end, though nobody stores anything")
            time.sleep(LOOK_SECONDS)
            now = self.look()
            if now.bytes_written() != seen.bytes_written():
                since = time.monotonic()
            seen = now
        return seen

    def volume(self) -> dict[str, Any]:
        """The agent's own counters of the volume that has the blocks."""
        return _volume(self._status())

    def bytes_below(self) -> int:
        """Of the files in G4, as they lie there."""
        return sum(path.stat().st_size for path in self._below.rglob("*") if path.is_file())

    def _status(self) -> dict[str, Any]:
        text = self._pool.status()
        status: dict[str, Any] = json.loads(text)
        for door in status["doors"].values():
            door["bytes_read"] -= self._status_bytes
        self._status_bytes += len(text.encode())
        return status


@contextmanager
def way_site(way: Way, sets: int, value_bytes: int, folder: Path) -> Iterator[WaySite]:
    """A way's processes in a folder that is made, with `sets` sets on each drive."""
    with ExitStack() as stack:
        below = folder.with_name(f"{folder.name}-below")
        local, port = "", 0
        if way.local_first:
            # Memory with a name for as long as this process has it open: nothing of it is left behind.
            memory = os.memfd_create(way.name, os.MFD_CLOEXEC)
            stack.callback(os.close, memory)
            os.ftruncate(memory, way.local_bytes(sets, value_bytes))
            local, (port,) = f"/proc/{os.getpid()}/fd/{memory}", free_ports(1)
        if way.spills:
            below.mkdir()
        tables = way.tables(value_bytes, local, port, below)
        pool = stack.enter_context(own_pool(folder, way.drive_options(sets, value_bytes), tables, AGENT_KEYS))
        store: BlockStore
        if way.kind == "shared":
            store = FolderStore(pool.mount / "shared" / VOLUME)
        else:
            client = stack.enter_context(Pool(pool.mount, sessions=2, parallel=1))
            store = client.volume(VOLUME)
        yield WaySite(way, store, below, pool)


def _volume(status: Mapping[str, Any]) -> dict[str, Any]:
    return next(dict(each) for each in status["volumes"] if each["name"] == VOLUME)


def _sum(drives: list[dict[str, Any]], *names: str) -> int:
    return sum(drive.get(name, 0) for drive in drives for name in names)
