"""An agent finds another pool than its own: by discovery while its own is away, or by a wrong port."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool
from tests.support.processes import Processes, Started

FILES = {f"file-{number}": random.Random(number).randbytes(5000) for number in range(6)}
KEY = bytes(range(16))

AGENT = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/{state}"
key_file = "{folder}/root.key"
read_deadline_ms = 2000
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.4
[[volumes]]
name = "files"
kind = "files"
value_size = "64K"
share = 0.4
"""
ENCLOSURE = '[[enclosures]]\nname = "shelf"\naddress = "127.0.0.1"\nport = {port}\nnqn = "{nqn}"\n'
DISCOVERY = '[[discovery]]\nname = "pod"\naddress = "127.0.0.1"\nport = {port}\n'
CLOSED_PORT = 9


def enclosure(shelf: Enclosure, port: int = 0) -> str:
    return ENCLOSURE.format(port=port or shelf.port, nqn=shelf.settings.subsystem_nqn)


class Machine:
    """A machine with an agent, whose configuration changes from start to start."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.folder, self.mount = folder, folder / "mnt"
        self._processes, self._config = processes, folder / "agent.toml"
        assert processes.g35("key", "new", folder / "root.key").process.wait(60) == 0

    def g35(self, *words: str, of: str, state: str = "state") -> Started:
        self._config.write_text(AGENT.format(folder=self.folder, state=state) + of)
        return self._processes.g35(*words, "--config", self._config)

    def format(self, shelf: Enclosure, state: str) -> None:
        done = self.g35("pool", "format", of=enclosure(shelf), state=state)
        assert done.process.wait(60) == 0, done.output

    def serve(self, of: str) -> Started:
        agent = self.g35("agent", of=of)
        agent.wait_for_line("ready", 60)
        return agent

    @contextmanager
    def two_pools(self) -> Iterator[tuple[Enclosure, Enclosure]]:
        """Two enclosures, each with a pool of its own; the first is that of the state folder `state`."""
        own, other = (
            Enclosure(EnclosureSettings(name=name, drives=1, drive_bytes=24 << 20))
            for name in ("own", "other")
        )
        with own, other:
            self.format(own, "state")
            self.format(other, "state-of-another")
            yield own, other

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.mount / ".g35/status.json").read_text())
        return found

    def files(self) -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in (self.mount / "fs").iterdir()}


def test_files_outlive_a_meeting_with_another_pool(processes: Processes, tmp_path: Path) -> None:
    machine = Machine(processes, tmp_path)
    with machine.two_pools() as (own, other):
        agent = machine.serve(enclosure(own))
        pool_id = machine.status()["pool"]["id"]
        for name, data in FILES.items():
            with (machine.mount / "fs" / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        assert agent.stop(30) == 0

        away = enclosure(own, CLOSED_PORT) + DISCOVERY.format(port=other.port)
        for verb in (("agent",), ("pool", "show")):
            refused = machine.g35(*verb, of=away)
            assert refused.process.wait(60) == 1
            assert "none of the pool that this machine has served" in " ".join(refused.output.split())

        agent = machine.serve(enclosure(other))
        assert "/fs is not served" in agent.output
        assert pool_id in machine.status()["not_served"]["/fs"]
        assert not (machine.mount / "fs").exists()
        with Pool(machine.mount) as pool:
            assert pool.volume("kv").put(KEY, b"served as ever")
            assert pool.volume("kv").get(KEY) == b"served as ever"
        assert agent.stop(30) == 0

        agent = machine.serve(enclosure(own) + DISCOVERY.format(port=other.port))
        assert (machine.status()["pool"]["id"], machine.status()["not_served"]) == (pool_id, {})
        assert machine.files() == FILES
        assert agent.stop(30) == 0


def test_a_namespace_is_not_added_elsewhere_under_its_agent(processes: Processes, tmp_path: Path) -> None:
    machine = Machine(processes, tmp_path)
    with machine.two_pools() as (own, other):
        agent = machine.serve(enclosure(own))
        add = ("pool", "add", own.drives[0].nguid.hex(), "--force")
        both = enclosure(other) + enclosure(own).replace('"shelf"', '"shelf-2"')
        refused = machine.g35(*add, of=both, state="state-of-another")
        assert refused.process.wait(60) == 1
        assert f"is being served, by process {agent.pid}; it was not touched" in refused.output
        with Pool(machine.mount) as pool:
            assert pool.volume("kv").put(KEY, b"served as ever")
        assert agent.stop(30) == 0
        added = machine.g35(*add, of=both, state="state-of-another")
        assert added.process.wait(60) == 0, added.output
        assert "1 namespace(s) more, 2 in all" in added.output
