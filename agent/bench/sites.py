"""Processes and mounts that a bench measures, started when first asked for.

All lie in one temporary folder and on one exit stack. They die with the bench (agent/cli/up/children.py).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import agent
import nvmeof
from agent.bench.client_process import LineClient
from agent.bench.redis_site import NotHere, RedisSite
from agent.cli.up.children import Child, run_child
from agent.cli.up.layout import Layout
from agent.errors import G35Error
from agent.fs.doors.mounting import clear_dead_mount
from host_shim.pool import Pool, Volume

T = TypeVar("T")

IN_FLIGHT = 4
SESSIONS = IN_FLIGHT + 1
READ_DEADLINE_MS = 2000
"""Far above what a read takes: a bench measures speed, and a hiccup of the scheduler is no miss."""
SETTLED_SECONDS = 2.0
"""Several times as long as processes of an agent take to tell the first one what they served."""
MEMORY_FILE_BYTES = 64 << 20
LONG_MEMORY_FILE_BYTES = 1 << 30
PACKAGE = Path(agent.__file__).resolve().parent
ENVIRONMENTS = PACKAGE.parent / ".cache" / "engines"
ENGINE_OF = {"mooncake": "mooncake", "lm": "lmcache"}
"""Which environment of `make engines` has a store's client."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool to measure: one volume `kv` of slots of `value_bytes`, on prefaulted drives in memory."""

    value_bytes: int
    drive_bytes: int
    drives: int = 1
    door: str = "fuse"
    transport: str = "tcp"
    """To the drives; `local`: none, they are a file in memory that the agent reads in place (agent/local)."""
    virtiofs: bool = False
    """Served by a virtio-fs device as well as by its mount."""
    prestaged: bool = False
    """Values are served from the agent's memory, and may be read ahead in vain."""
    learn: bool = False
    """The agent reads ahead what it has learned."""
    stay_awake: str = "auto"
    """While what requests come the agent keeps processors from sleeping."""
    files: bool = False
    """With /fs and /shared beside /kv."""
    chunk_bytes: int = 1 << 20
    """Of files of /shared."""


class PoolSite:
    """A pool that `g35 up` holds, and what the bench has done with it, to be compared with the agent's
    own counters at the end."""

    def __init__(self, name: str, shape: PoolShape, folder: Path) -> None:
        self.shape = shape
        self.bytes_got = 0
        self.bytes_put = 0
        self.misses = 0
        self._registers = False
        self._memory = -1
        self._layout = Layout(folder / name)
        self._child = pool_process(
            f"the pool {name}", self._layout, folder / f"{name}.log", shape.value_bytes, READ_DEADLINE_MS,
            *self._drives(name),
            "--drive-size", str(shape.drive_bytes), "--prefault", "--door", shape.door,
            "--stay-awake", shape.stay_awake,
            *(["--virtiofs"] if shape.virtiofs else []),
            *(["--learn"] if shape.learn else []),
            *(["--chunk-size", str(shape.chunk_bytes)] if shape.files else ["--no-files"]),
        )  # fmt: skip

    def _drives(self, name: str) -> list[str]:
        """The options for the drives of its shape."""
        if self.shape.transport != "local":
            drives = str(self.shape.drives)
            return ["--enclosures", "1", "--drives", drives, "--transport", self.shape.transport]
        # Memory with a name for as long as this process has it open: nothing of it is left behind.
        self._memory = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._memory, self.shape.drive_bytes)
        return ["--enclosures", "0", "--media", "files", "--local", f"/proc/{os.getpid()}/fd/{self._memory}"]

    @property
    def mount(self) -> Path:
        return self._layout.default_mount

    @property
    def virtiofs_socket(self) -> Path:
        return self._layout.virtiofs_socket

    def processes(self) -> dict[str, int]:
        """The numbers of the processes that serve values: the agent, and the enclosure where there is one."""
        files = {"agent": self._layout.agent_process, "enclosure": self._layout.enclosure(0, "pid")}
        return {name: int(file.read_text()) for name, file in files.items() if file.exists()}

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
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

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
        return next(dict(volume) for volume in self.status()["volumes"] if volume["name"] == "kv")

    def _settled_counters(self) -> dict[str, Any]:
        """The counters once every process of the agent has told its part, or they stay wrong."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            counted = self.counters()
            agrees = (counted["bytes_read"], counted["bytes_written"]) == (self.bytes_got, self.bytes_put)
            if agrees or time.monotonic() > deadline:
                return counted
            time.sleep(SETTLED_SECONDS / 20)

    def drive_counters(self) -> list[dict[str, Any]]:
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
        counted, found = self._settled_counters(), []
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


def pool_process(
    name: str, layout: Layout, log: Path, value_bytes: int, deadline_ms: float, *options: str
) -> Child:
    """`g35 up` with drives in memory; ready once its log says so."""
    command = [
        sys.executable, "-P", "-m", "agent.cli", "up", "--state", str(layout.state), "--media", "memory",
        "--value-size", str(value_bytes), "--read-deadline-ms", str(deadline_ms),
        "--no-restart", "--processes", "1", *options,
    ]  # fmt: skip

    def says_ready() -> bool:
        return log.exists() and "ready" in log.read_text(errors="replace").splitlines()

    return Child(name, command, log, says_ready, log.with_suffix(".pid"))


@contextmanager
def pool_up(
    folder: Path, value_bytes: int, deadline_ms: float, *options: str, seconds: float = 120.0
) -> Iterator[Layout]:
    """Such a pool in a folder that is made, ready within so many seconds, for as long as the block runs."""
    folder.mkdir()
    layout, log = Layout(folder / "up"), folder / "pool.log"
    child = pool_process("the pool", layout, log, value_bytes, deadline_ms, *options)
    with ExitStack() as undo:
        undo.callback(clear_dead_mount, layout.default_mount)
        undo.callback(child.stop)
        child.start()
        child.wait_ready(seconds=seconds)
        yield layout


class Sites:
    """Everything that runs for the bench; its block ends it in the opposite order of its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.pools: dict[PoolShape, PoolSite] = {}
        self._clients: dict[tuple[str, Path], LineClient] = {}
        self._peers: dict[str, LineClient] = {}
        self._kept: dict[str, object] = {}

    def __enter__(self) -> "Sites":
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def at_end(self, end: Callable[[], object]) -> None:
        """Have `end` called when the block ends."""
        self._stack.callback(end)

    def kept(self, name: str, make: Callable[[Path], AbstractContextManager[T]]) -> T:
        """What a context gives, entered when first asked for by its name, in a folder that it makes."""
        if name not in self._kept:
            self._kept[name] = self._stack.enter_context(make(self.folder / name))
        return cast(T, self._kept[name])

    @cached_property
    def raw_tcp_port(self) -> int:
        ready = self.folder / "raw-tcp.port"
        self._run("the raw TCP server", "raw_tcp_server", ready)
        return int(ready.read_text())

    @property
    def raw_tcp_pid(self) -> int:
        return int((self.folder / "raw_tcp_server.pid").read_text())

    @cached_property
    def memory_file(self) -> Path:
        """A file of MEMORY_FILE_BYTES bytes (`Contents` of that size, number 0) behind our door."""
        mount = self.folder / "memory-mount"
        mount.mkdir()
        self._stack.callback(clear_dead_mount, mount)
        ready = self.folder / "memory-mount.ready"
        sizes = (str(MEMORY_FILE_BYTES), str(LONG_MEMORY_FILE_BYTES))
        self._run("the mount from memory", "memory_mount", ready, str(mount), *sizes)
        return mount / "block"

    @property
    def memory_mount_pid(self) -> int:
        return int((self.folder / "memory_mount.pid").read_text())

    @cached_property
    def redis(self) -> RedisSite:
        return RedisSite(self.folder / "redis", self._stack)

    def pool(self, shape: PoolShape) -> PoolSite:
        if shape not in self.pools:
            site = PoolSite(f"pool-{len(self.pools)}", shape, self.folder)
            self._stack.callback(site.stop)
            site.start()
            self.pools[shape] = site
        return self.pools[shape]

    def client(self, way: str, path: Path, value_bytes: int) -> LineClient:
        """A process that gets values by the named way (pool_client.py)."""
        if (way, path) not in self._clients:
            words = (way, str(path), str(value_bytes))
            command = [sys.executable, "-P", "-m", "agent.bench.pool_client", *words]
            log = self.folder / f"client-{len(self._clients)}.log"
            client = self._clients[way, path] = LineClient(f"the client by {way}", command, log)
            self._stack.callback(client.stop)
        return self._clients[way, path]

    def peer(self, name: str) -> LineClient:
        """Another store's client, with its servers behind it."""
        if name not in self._peers:
            client = self._peers[name] = started_peer(name, self.folder)
            self._stack.callback(client.stop)
        return self._peers[name]

    def _run(self, name: str, module: str, ready: Path, *words: str) -> None:
        command = [sys.executable, "-P", "-m", f"agent.bench.{module}", *words, str(ready)]
        run_child(self._stack, name, command, self.folder / module, ready.exists)


def interpreter(peer: str) -> Path:
    """The interpreter that has a store's client. Raises NotHere where there is none."""
    engine = ENGINE_OF[peer]
    python = ENVIRONMENTS / engine / "bin" / "python"
    if not (ENVIRONMENTS / engine / ".g35-engine").exists() or not python.exists():
        raise NotHere(f"its client is not installed: make engines ENGINES={engine}")
    return python


def started_peer(peer: str, folder: Path) -> LineClient:
    """A store's servers and its client, all of whose files lie below `folder`."""
    python = interpreter(peer)
    home = folder / peer
    command = [
        "env", f"PYTHONPATH={linked_packages(home)}",
        sys.executable, "-P", "-m", "agent.bench.peers.servers", peer, str(python), str(home),
    ]  # fmt: skip
    return LineClient(f"{peer}'s client", command, home / "client.log")


def linked_packages(home: Path) -> Path:
    """A folder by which an engine's interpreter finds our packages: it holds links to them and nothing else,
    for beside the packages themselves may lie whatever else is installed with us."""
    path = home / "path"
    path.mkdir(parents=True, exist_ok=True)
    for package in (PACKAGE, Path(nvmeof.__file__).resolve().parent):
        link = path / package.name
        if not link.exists():
            link.symlink_to(package)
    return path
