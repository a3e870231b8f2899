"""What a bench measures, while it runs: processes and mounts, started when first asked for.

All of it lies in one temporary folder and hangs on one exit stack; when that is closed, nothing is left.
Processes of a bench that is killed itself are killed by the kernel (agent/cli/up/children.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.bench.client_process import ClientProcess, LineClient
from agent.bench.peer_site import started
from agent.bench.redis_site import RedisSite
from agent.cli.up.children import Child
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount
from host_shim.pool import Pool, Volume

IN_FLIGHT = 4
SESSIONS = IN_FLIGHT + 1
READ_DEADLINE_MS = 2000
"""Far above what a read takes: a bench measures speed, and a hiccup of the scheduler is no miss."""
MEMORY_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool to measure: one volume `kv` of slots of `value_bytes`, on prefaulted drives in memory."""

    value_bytes: int
    drive_bytes: int
    drives: int = 1
    door: str = "fuse"
    transport: str = "tcp"
    virtiofs: bool = False
    """Served by a virtio-fs device as well as by its mount."""
    prestaged: bool = False
    """Values are served from the agent's memory, and may be read ahead in vain."""
    learn: bool = False
    """The agent reads ahead what it has learned."""
    stay_awake: str = "auto"
    """While what requests come the agent keeps processors from sleeping."""


class PoolSite:
    """A pool that `g35 up` holds, and what the bench has done with it, to be compared with the agent's
    own counters at the end."""

    def __init__(self, name: str, shape: PoolShape, folder: Path) -> None:
        self.shape = shape
        self.bytes_got = 0
        self.bytes_put = 0
        self.misses = 0
        self._registers = False
        self._layout = Layout(folder / name)
        log = folder / f"{name}.log"
        command = [
            sys.executable, "-P", "-m", "agent.cli", "up", "--state", str(self._layout.state),
            "--enclosures", "1", "--drives", str(shape.drives), "--drive-size", str(shape.drive_bytes),
            "--media", "memory", "--prefault", "--no-files", "--value-size", str(shape.value_bytes),
            "--door", shape.door, "--transport", shape.transport,
            "--read-deadline-ms", str(READ_DEADLINE_MS), "--no-restart", "--stay-awake", shape.stay_awake,
            *(["--virtiofs"] if shape.virtiofs else []),
            *(["--learn"] if shape.learn else []),
        ]  # fmt: skip
        self._child = Child(f"the pool {name}", command, log, lambda: says_ready(log), folder / f"{name}.pid")

    @property
    def mount(self) -> Path:
        return self._layout.default_mount()

    @property
    def virtiofs_socket(self) -> Path:
        return self._layout.virtiofs_socket

    def start(self) -> None:
        self._child.start()
        self._child.wait_ready(seconds=120.0)
        self.client = Pool(self.mount, sessions=SESSIONS, parallel=1)
        suite = self.counters()["suite"]
        if suite != "aes-256-gcm":
            raise G35Error(f"the pool seals with {suite}; the bench is about aes-256-gcm")

    def stop(self) -> None:
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        self._child.stop()
        clear_dead_mount(self.mount)

    @property
    def volume(self) -> Volume:
        return self.client.volume("kv")

    def memory(self, size: int) -> memoryview:
        """A buffer that the agent is to map too; `complaints` says where it did not."""
        self._registers = True
        return self.client.memory(size)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.mount / ".g35/status.json").read_text())
        return found

    def counters(self) -> dict[str, Any]:
        """The agent's counters of the volume `kv`."""
        return next(dict(volume) for volume in self.status()["volumes"] if volume["name"] == "kv")

    def drive_counters(self) -> list[dict[str, Any]]:
        """The enclosure's own counters, drive by drive."""
        asked = subprocess.run(
            [
                sys.executable, "-P", "-m", "emulator.jbof", "stats",
                "--control", str(self._layout.enclosure(0, "sock")),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if asked.returncode:
            raise G35Error(f"the enclosure does not tell its counters: {asked.stderr.strip()}")
        found: list[dict[str, Any]] = json.loads(asked.stdout)["drives"]
        return found

    def complaints(self) -> list[str]:
        """Where the agent's counters contradict what the bench says it did."""
        counted, found = self.counters(), []
        if self.misses or counted["misses"]:
            found.append(f"{self.misses} gets missed (the agent: {counted['miss_causes']})")
        for what, own, theirs in (
            ("got", self.bytes_got, counted["bytes_read"]),
            ("put", self.bytes_put, counted["bytes_written"]),
        ):
            if own != theirs:
                found.append(f"{own} bytes were {what}, the agent counts {theirs}")
        if self._registers and not self.status()["memory"]["registered_bytes"]:
            found.append("the agent did not map the memory that was to be registered")
        if self.shape.prestaged:
            return [f"{self._layout.state.name}: {line}" for line in found]
        if self.status()["totals"]["flash_bytes_read"] < self.bytes_got:
            found.append("values came from somewhere else than the enclosure")
        for what in ("evictions", "puts_already_there", "puts_refused", "prestage_hits"):
            if counted[what]:
                found.append(f"{what} is {counted[what]}, not 0")
        return [f"{self._layout.state.name}: {line}" for line in found]


def says_ready(log: Path) -> bool:
    try:
        return "ready" in log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False


class Sites:
    """Everything that runs for the bench; `close` ends it in the opposite order of its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._raw_tcp_port: int | None = None
        self._memory_file: Path | None = None
        self._redis: RedisSite | None = None
        self.pools: dict[PoolShape, PoolSite] = {}
        self._clients: dict[tuple[str, Path], ClientProcess] = {}
        self._peers: dict[str, LineClient] = {}

    def close(self) -> None:
        self._stack.close()

    def raw_tcp_port(self) -> int:
        if self._raw_tcp_port is None:
            ready = self.folder / "raw-tcp.port"
            self._start("the raw TCP server", "raw_tcp_server", [str(ready)], ready.exists)
            self._raw_tcp_port = int(ready.read_text())
        return self._raw_tcp_port

    def memory_file(self) -> Path:
        """A file of MEMORY_FILE_BYTES bytes (`Contents` of that size, number 0) behind our door."""
        if self._memory_file is None:
            mount, ready = self.folder / "memory-mount", self.folder / "memory-mount.ready"
            mount.mkdir()
            self._stack.callback(clear_dead_mount, mount)
            words = [str(mount), str(MEMORY_FILE_BYTES), str(ready)]
            self._start("the mount from memory", "memory_mount", words, ready.exists)
            self._memory_file = mount / "block"
        return self._memory_file

    def redis(self) -> RedisSite:
        if self._redis is None:
            site = RedisSite(self.folder)
            self._stack.callback(site.stop)
            site.start()
            self._redis = site
        return self._redis

    def pool(self, shape: PoolShape) -> PoolSite:
        site = self.pools.get(shape)
        if site is None:
            site = PoolSite(f"pool-{len(self.pools)}", shape, self.folder)
            self._stack.callback(site.stop)
            site.start()
            self.pools[shape] = site
        return site

    def client(self, way: str, path: Path, value_bytes: int) -> ClientProcess:
        """A process that gets values by the named way (pool_client.py)."""
        client = self._clients.get((way, path))
        if client is None:
            log = self.folder / f"client-{len(self._clients)}.log"
            client = self._clients[way, path] = ClientProcess(way, path, value_bytes, log)
            self._stack.callback(client.stop)
        return client

    def peer(self, name: str) -> LineClient:
        """Another store's client, with its servers behind it (peer_site.py)."""
        client = self._peers.get(name)
        if client is None:
            client = self._peers[name] = started(name, self.folder)
            self._stack.callback(client.stop)
        return client

    def _start(self, name: str, module: str, words: list[str], ready: Callable[[], bool]) -> None:
        command = [sys.executable, "-P", "-m", f"agent.bench.{module}", *words]
        child = Child(name, command, self.folder / f"{module}.log", ready, self.folder / f"{module}.pid")
        self._stack.callback(child.stop)
        child.start()
        child.wait_ready()
