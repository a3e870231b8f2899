"""Agents on one machine, one of which has a local namespace, and their configurations."""

from __future__ import annotations

import json
import random
import socket
import uuid
from pathlib import Path
from typing import Any

from agent.local.device import read_label
from agent.local.export import subsystem_nqn
from host_shim.pool import Pool
from tests.support.processes import Processes, Started

KEYS = [random.Random(f"local key {number}").randbytes(16) for number in range(24)]

AGENT = """
[agent]
mount = "{folder}/mnt-{name}"
state = "{folder}/state-{name}"
key_file = "{folder}/root.key"
read_deadline_ms = 5000
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.9
"""
LOCAL = """
[[local]]
path = "{path}"
size = "48M"
export = "127.0.0.1:{port}"
"""
ENCLOSURE = """
[[enclosures]]
name = "{name}"
address = "127.0.0.1"
port = {port}
nqn = "{nqn}"
"""


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(60_000)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class LocalRig:
    """Agents on one machine, and their configurations."""

    def __init__(self, processes: Processes, folder: Path, **volume: object) -> None:
        """`volume`: further keys of its table."""
        self.processes = processes
        self.folder = folder
        self.ssd = folder / "ssd"
        self.port = free_port()
        self._volume = "".join(f"{key} = {value}\n" for key, value in volume.items())
        assert self.g35("key", "new", folder / "root.key")[0] == 0
        self.configure("one", self.local)

    def configure(self, name: str, *tables: str) -> Path:
        path = self.folder / f"{name}.toml"
        agent = AGENT.format(folder=self.folder, name=name)
        path.write_text(agent + self._volume + "".join(tables))
        return path

    def g35(self, *words: str | Path) -> tuple[int, str]:
        started = self.processes.g35(*words)
        return started.process.wait(60), started.output

    def verb(self, name: str, *words: str) -> tuple[int, str]:
        return self.g35(*words, "--config", self.folder / f"{name}.toml")

    def agent(self, name: str) -> Started:
        started = self.processes.g35("agent", "--config", self.folder / f"{name}.toml")
        started.wait_for_line("ready", 60)
        return started

    def pool(self, name: str) -> Pool:
        return Pool(self.folder / f"mnt-{name}")

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"mnt-{name}/.g35/status.json").read_text())
        return found

    @property
    def as_enclosure(self) -> str:
        return self.enclosure("server", self.port, self.nqn("one", self.ssd))

    def nqn(self, name: str, device: Path) -> str:
        """Under which an agent that ran before serves a device."""
        host = uuid.UUID((self.folder / f"state-{name}/host_id").read_text().strip())
        return subsystem_nqn(host.bytes, read_label(device).nguid)

    def enclosure(self, name: str, port: int, nqn: str) -> str:
        return ENCLOSURE.format(name=name, port=port, nqn=nqn)

    @property
    def local(self) -> str:
        return LOCAL.format(path=self.ssd, port=self.port)
