"""The pod of a campaign: two enclosures, a relay before each, and two agents of one pool.

The first agent has every door: mount, session, registered memory, S3, virtio-fs. The second shares its
key-value volumes. Every process can be killed and started again at the same place.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET
from agent.pool.format.sealed_slot import HEADER_BYTES
from emulator.jbof.control_client import ControlError, ask
from host_shim.pool import Pool
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

ENCLOSURES = 2
DRIVES = 3
"""Of each: two of blocks, and the last one of keys and values."""
DIGESTED = 0
"""The enclosure whose I/O queues have digests. Before the other one the relay changes no byte of a write:
without digests a flipped address destroys what lies there, and nobody promises otherwise."""
AGENTS = ("one", "two")
"""The second one's wall clock can be set (shifted_agent.py)."""
REPOSITORY = Path(__file__).resolve().parents[3]
S3_TENANT = "objects"
BUCKET = "campaign"
TTL_SECONDS = 4
VALUE_BYTES_MAX = 256 << 10
READ_DEADLINE_MS = 500.0
WRITE_DEADLINE_MS = 5000.0
START_SECONDS = 40.0

VOLUMES = """
[[volumes]]
name = "through"
value_size = "256K"
share = 0.2
[[volumes]]
name = "back"
value_size = "256K"
share = 0.1
[[volumes]]
name = "second"
value_size = "64K"
share = 0.05
[[volumes]]
name = "twice"
value_size = "256K"
share = 0.15
copies = 2
[[volumes]]
name = "short"
value_size = "64K"
share = 0.05
ttl_seconds = {ttl}
[[volumes]]
name = "keys"
value_size = "256K"
share = 1.0
layout = "kv"
[[volumes]]
name = "files"
kind = "files"
value_size = "256K"
share = 0.25
[[volumes]]
name = "objects"
kind = "files"
value_size = "256K"
share = 0.15
tenant = "{tenant}"
[[policies]]
volume = "back"
write = "back"
[[policies]]
volume = "second"
write = "second-use"
"""
KV_VOLUMES = ("through", "back", "second", "twice", "short", "keys")


class Pod:
    """Brought up by `start`; `Processes` ends it. Its processes: `jbof-0`, `relay-0`, `agent-one` ..."""

    def __init__(self, processes: Processes, folder: Path, seed: int, drive_bytes: int = 192 << 20) -> None:
        self.folder = folder
        self.running: dict[str, Started] = {}
        self._processes = processes
        self._seed = seed
        self._drive_bytes = drive_bytes
        self._ports = {name: _free_port() for name in self._place_names()}

    @staticmethod
    def _place_names() -> list[str]:
        return [f"{kind}-{at}" for kind in ("jbof", "relay") for at in range(ENCLOSURES)] + ["s3"]

    def start(self) -> None:
        """Enclosures, relays, a formatted pool, both agents. Takes some seconds."""
        for at in range(ENCLOSURES):
            self.start_again(f"jbof-{at}")
            self.start_again(f"relay-{at}")
        self.seconds_ahead.write_text("0")
        for agent in AGENTS:
            self.config(agent).write_text(self._config(agent))
        self.g35("key", "new", str(self.folder / "root.key"))
        self.g35("key", "make-s3", str(self.credentials))
        self.g35("pool", "format", "--config", str(self.config(AGENTS[0])))
        for agent in AGENTS:
            self.start_again(f"agent-{agent}")

    # -- places ---------------------------------------------------------------------------------

    def mount(self, agent: str) -> Path:
        """Where the agent serves."""
        return self.folder / f"mnt-{agent}"

    def config(self, agent: str) -> Path:
        """The configuration of an agent."""
        return self.folder / f"{agent}.toml"

    @property
    def seconds_ahead(self) -> Path:
        """How far the wall clock of the second agent is ahead, in seconds."""
        return self.folder / "seconds-ahead"

    def set_clock(self, seconds: float) -> None:
        """Let the wall clock of the second agent jump."""
        self.seconds_ahead.write_text(str(seconds))
        started = self.running[f"agent-{AGENTS[1]}"]
        if started.running:
            os.kill(started.pid, signal.SIGUSR1)

    @property
    def s3_url(self) -> str:
        """The S3 door of the first agent."""
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def credentials(self) -> Path:
        """The access key of the S3 door."""
        return self.folder / "s3.credentials"

    @property
    def virtiofs_socket(self) -> Path:
        """The virtio-fs device of the first agent."""
        return self.folder / "virtiofs.sock"

    @property
    def names(self) -> list[str]:
        """Every process, in the order in which they are started."""
        return [*self._place_names()[:-1], *(f"agent-{agent}" for agent in AGENTS)]

    def pool(self, agent: str, **options: Any) -> Pool:
        """A client's sessions with an agent."""
        return Pool(self.mount(agent), **options)

    # -- processes ------------------------------------------------------------------------------

    def start_again(self, name: str) -> None:
        """Start a process that does not run, and wait until it serves."""
        kind, _, which = name.partition("-")
        match kind:
            case "jbof":
                self._start_enclosure(int(which))
            case "relay":
                self._start_relay(int(which))
            case _:
                self._start_agent(which)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        started = self.running[name]
        os.kill(started.pid, signal.SIGKILL)
        started.process.wait(20)

    def _start_enclosure(self, at: int) -> None:
        ready = self.folder / f"jbof-{at}.ready"
        ready.unlink(missing_ok=True)
        started = self._processes.python(
            "-m", "emulator.jbof", "--name", f"jbof-{at}", "--drives", "2", "--kv-drives", "1",
            "--drive-size", str(self._drive_bytes), "--folder", self.folder / f"drives-{at}",
            "--port", str(self._ports[f"jbof-{at}"]), "--control", self.control(f"jbof-{at}"),
            "--ready-file", ready,
        )  # fmt: skip
        self._note(f"jbof-{at}", started)
        wait_until(lambda: ready.exists() or not started.running, START_SECONDS, f"enclosure {at}")
        if not started.running:
            raise AssertionError(f"enclosure {at} did not start:\n{started.output}")

    def _start_relay(self, at: int) -> None:
        started = self._processes.python(
            "-m", "tests.support.campaign.relay", "--listen", str(self._ports[f"relay-{at}"]),
            "--to", str(self._ports[f"jbof-{at}"]), "--control", self.control(f"relay-{at}"),
            "--seed", str(self._seed), *(() if at == DIGESTED else ("--spare-writes",)),
        )  # fmt: skip
        self._note(f"relay-{at}", started)
        started.wait_for_line('"port"', START_SECONDS)

    def _start_agent(self, agent: str) -> None:
        words = ("agent", "--config", self.config(agent))
        if agent == AGENTS[1]:
            started = self._processes.python(
                "-P", "-m", "tests.support.campaign.shifted_agent", self.seconds_ahead, *words,
                environment={"PYTHONPATH": str(REPOSITORY)},
            )  # fmt: skip
        else:
            started = self._processes.g35(*words)
        self._note(f"agent-{agent}", started)
        started.wait_for_line("ready", START_SECONDS)

    def _note(self, name: str, started: Started) -> None:
        self.running[name] = started
        (self.folder / f"{name}.pid").write_text(str(started.pid))

    def g35(self, *words: str) -> str:
        """Run a verb to its end; what it printed."""
        command = [sys.executable, "-P", "-m", "agent.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise AssertionError(f"g35 {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    # -- asking ---------------------------------------------------------------------------------

    def control(self, name: str) -> Path:
        """The control socket of an enclosure or a relay."""
        return self.folder / f"{name}.sock"

    def ask(self, name: str, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask an enclosure or a relay something; ControlError where it does not answer."""
        return ask(self.control(name), verb, **fields)

    def weather(self, at: int, **rates: float) -> None:
        """Set the faults of a relay, none for a clean one. A relay that is gone has no weather."""
        try:
            self.ask(f"relay-{at}", "set", **rates)
        except ControlError:
            if self.running[f"relay-{at}"].running:
                raise

    def status(self, agent: str) -> dict[str, Any]:
        """`status.json` of an agent; OSError while it does not answer."""
        raw = (self.mount(agent) / ".g35/status.json").read_bytes().rstrip(b"\0")
        found: dict[str, Any] = json.loads(raw)
        return found

    def is_whole(self, agent: str) -> bool:
        """Whether an agent has sessions to all enclosures, with all their namespaces."""
        try:
            found = self.status(agent)["enclosures"]
        except (OSError, ValueError):
            return False
        return [each["namespaces"] for each in found] == [DRIVES] * ENCLOSURES

    def key_value_extents(self) -> list[tuple[int, int, int, int]]:
        """Where values of /kv lie on drives of blocks: enclosure, drive, first byte, bytes."""
        shown = json.loads(self.g35("pool", "show", "--json", "--config", str(self.config(AGENTS[0]))))
        places = {}
        for at in range(ENCLOSURES):
            ready = json.loads((self.folder / f"jbof-{at}.ready").read_text())
            places |= {each["nguid"]: (at, drive) for drive, each in enumerate(ready["namespaces"])}
        found = []
        for volume in shown["pool"]["volumes"]:
            if volume["kind"] == "kv":
                found += [_extent(places, each, volume) for each in volume["extents"]]
        return found

    def _config(self, agent: str) -> str:
        lines = [
            "[agent]",
            f'mount = "{self.mount(agent)}"',
            f'state = "{self.folder / f"state-{agent}"}"',
            f'key_file = "{self.folder / "root.key"}"',
            f"read_deadline_ms = {READ_DEADLINE_MS}",
            f"write_deadline_ms = {WRITE_DEADLINE_MS}",
            'stay_awake = "never"',
            "workers = 2",
        ]
        for at in range(ENCLOSURES):
            nqn = json.loads((self.folder / f"jbof-{at}.ready").read_text())["nqn"]
            lines += [
                "[[enclosures]]",
                f'name = "jbof-{at}"',
                'address = "127.0.0.1"',
                f"port = {self._ports[f'relay-{at}']}",
                f'nqn = "{nqn}"',
                f"header_digest = {str(at == DIGESTED).lower()}",
                f"data_digest = {str(at == DIGESTED).lower()}",
            ]
        text = "\n".join(lines) + VOLUMES.format(ttl=TTL_SECONDS, tenant=S3_TENANT)
        if agent == AGENTS[0]:
            text += (
                f'[virtiofs]\nsocket = "{self.virtiofs_socket}"\nqueues = 1\n'
                f'[s3]\nlisten = ["127.0.0.1:{self._ports["s3"]}"]\nworkers = 1\n[[s3.tenants]]\n'
                f'tenant = "{S3_TENANT}"\ncredentials = "{self.credentials}"\nbuckets = ["{BUCKET}"]\n'
            )
        return text


def _free_port() -> int:
    """A port of loopback that nobody has just now, below those that the kernel gives to clients."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = 10_000 + int.from_bytes(os.urandom(2), "little") % max(1, low - 10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port of loopback")


def _extent(
    places: dict[str, tuple[int, int]], extent: dict[str, Any], volume: dict[str, Any]
) -> tuple[int, int, int, int]:
    """Enclosure, drive, first byte and bytes of an extent, which has sets of a directory and 64 slots."""
    set_bytes = DIRECTORY_BYTES + SLOTS_PER_SET * (HEADER_BYTES + volume["value_bytes"])
    return (*places[extent["nguid"]], extent["offset"], extent["sets"] * set_bytes)
