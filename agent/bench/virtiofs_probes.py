"""The virtio-fs device beside the mount of the same agent: speed, cost of clients, and copies.

Each client is a process of its own (pool_client.py), for its cost is measured. Its gets and puts are booked
on the pool's site, whose counters must agree with the agent's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.client_process import LineClient, cost, speed
from agent.bench.contents import Contents
from agent.bench.pool_probes import shape_for, store, values_got
from agent.bench.rounds import Sample
from agent.bench.single_probes import Counted
from agent.bench.sites import PoolShape, PoolSite, Sites
from agent.errors import G35Error

MOUNT, VIRTIOFS, FILE = "mount", "virtiofs", "file"
COPIES_SECONDS = 0.5
"""How long gets are counted; what is wanted is a ratio."""


def shape_of(value_bytes: int) -> PoolShape:
    """The pool of all names here: as those of kv_get and kv_put, with a device beside the mount."""
    usual = shape_for(value_bytes)
    return PoolShape(value_bytes, usual.drive_bytes, virtiofs=True)


@dataclass
class ClientProbe:
    """Gets or puts by one way into the pool: their speed, or the client's CPU seconds for each GiB."""

    sites: Sites
    way: str
    value_bytes: int
    verb: str
    figure: Callable[[dict[str, Any]], Sample]

    def prepare(self) -> None:
        """Start what is needed, store the values, and have the client compare each byte of them."""
        self.site = self.sites.pool(shape_of(self.value_bytes))
        store(self.site, Contents(self.value_bytes), "get", values_got(self.value_bytes))
        path = self.site.mount if self.way == MOUNT else self.site.virtiofs_socket
        self._client = self.sites.client(self.way, path, self.value_bytes)
        self.ask("compare")

    def ask(self, verb: str, seconds: float = 0.0) -> dict[str, Any]:
        answer = self._client.ask(verb, seconds)
        self.site.bytes_got += answer["bytes_got"]
        self.site.bytes_put += answer["bytes_put"]
        self.site.misses += answer["misses"]
        return answer

    def round(self, seconds: float) -> Sample:
        return self.figure(self.ask(self.verb, seconds))


class FileCpuProbe:
    """The same of an ordinary file, which the kernel copies out of its page cache."""

    def __init__(self, sites: Sites, value_bytes: int) -> None:
        self._sites, self._value_bytes = sites, value_bytes
        self._client: LineClient

    def prepare(self) -> None:
        path: Path = self._sites.folder / "local-file"
        if not path.exists():
            contents = Contents(self._value_bytes)
            with open(path, "wb") as file:
                for number in range(values_got(self._value_bytes)):
                    file.write(contents.value(number))
        self._client = self._sites.client(FILE, path, self._value_bytes)
        self._client.ask("compare")

    def round(self, seconds: float) -> Sample:
        return cost(self._client.ask("get", seconds))


def copies_per_byte(sites: Sites, value_bytes: int, way: str) -> Counted:
    """Bytes that the agent, and the kernel for it, copied for each byte that gets by this way brought.

    Opening a sealed unit is no copy: what is counted is what was moved once more than that.
    """
    pool = ClientProbe(sites, way, value_bytes, "get", speed)
    pool.prepare()
    before = _door_counters(pool.site, way)
    asked = pool.ask("get", COPIES_SECONDS)
    after = _door_counters(pool.site, way)
    copied, served = (after[name] - before[name] for name in ("bytes_copied", "bytes_read"))
    if served < asked["bytes"]:
        raise G35Error(f"the door counts {served} bytes read, its client {asked['bytes']}")
    return Counted(copied / served, {"bytes_copied": copied, "bytes_read": served})


def _door_counters(site: PoolSite, way: str) -> dict[str, int]:
    doors: dict[str, dict[str, int]] = site.status()["doors"]
    return doors["fuse" if way == MOUNT else "virtiofs-0"]
