"""A pool with two tenants of a volume each, over two enclosures whose drives are files, and its verbs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import COPY_BYTES
from agent.pool.map.superblock import decode_superblock_untrusted
from tests.support.nvme.enclosure_process import EnclosureProcess
from tests.support.processes import Processes, Started

TENANTS = ("blue", "red")
KEYS = [random.Random(f"tenant key {number}").randbytes(16) for number in range(12)]


class TwoTenants:
    """Two enclosures whose drives are files, a pool with a volume for each tenant, and an agent."""

    def __init__(self, processes: Processes, folder: Path, stack: ExitStack) -> None:
        self.folder, self.mount, self.config = folder, folder / "mnt", folder / "agent.toml"
        self._processes = processes
        self.enclosures: list[EnclosureProcess] = []
        for number in range(2):
            self.enclosures.append(self._start(number))
            stack.callback(lambda number=number: self.enclosures[number].stop())
        self.configure()
        assert self.g35("key", "new", str(folder / "root.key"))[0] == 0
        assert self.g35("pool", "format", "--config", str(self.config))[0] == 0

    def _start(self, number: int, *options: str) -> EnclosureProcess:
        folder = self.folder / f"d{number}"
        words = ["--drives=1", "--drive-size=24M", f"--folder={folder}", "--address=127.0.0.1", *options]
        return EnclosureProcess.start(words, self.folder, name=f"jbof-{number}")

    def restart(self, number: int) -> None:
        port = self.enclosures[number].ready["port"]
        self.enclosures[number].stop()
        self.enclosures[number] = self._start(number, f"--port={port}")

    def configure(self, *of_the_mount: str, more: str = "") -> None:
        lines = [
            "[agent]", f'mount = "{self.mount}"', f'state = "{self.folder / "state"}"',
            f'key_file = "{self.folder / "root.key"}"', "read_deadline_ms = 10000", *of_the_mount,
        ]  # fmt: skip
        for each in self.enclosures:
            name = each.ready["nqn"].rpartition(":")[2]
            lines += [
                "[[enclosures]]", f'name = "{name}"', 'address = "127.0.0.1"',
                f"port = {each.ready['port']}", f'nqn = "{each.ready["nqn"]}"',
            ]  # fmt: skip
        for name in TENANTS:
            lines += [
                "[[volumes]]", f'name = "{name}"', f'tenant = "{name}"', 'value_size = "64K"', "share = 0.3",
            ]  # fmt: skip
        for name in ("green", more):
            if name:
                lines += ["[[volumes]]", f'name = "{name}"', f'tenant = "{name}"', 'value_size = "64K"']
                lines.append("share = 0.2")
        self.config.write_text("\n".join(lines) + "\n")

    def g35(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "agent.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        return done.returncode, done.stdout + done.stderr

    def tenant(self, verb: str, *words: str) -> tuple[int, str]:
        return self.g35("tenant", verb, *words, "--config", str(self.config))

    def listed(self) -> dict[str, str]:
        code, text = self.tenant("list", "--json")
        assert code == 0, text
        return {row["name"]: row["key"] for row in json.loads(text)}

    def serve(self) -> Started:
        agent = self._processes.g35("agent", "--config", self.config)
        agent.wait_for_line("ready", 60)
        return agent

    def drives(self) -> list[bytes]:
        """The media, byte for byte."""
        return [
            file.read_bytes() for file in sorted(self.folder.glob("d*/*")) if file.stat().st_size > 1 << 20
        ]

    def pool_map(self) -> PoolMap:
        return decode_superblock_untrusted(self.drives()[0][:COPY_BYTES]).pool_map


def value_of(name: str, key: bytes) -> bytes:
    return name.encode() + random.Random(key).randbytes(9000)
