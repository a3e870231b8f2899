"""A whole pool for a test: `g35 up` as a user starts it, with ways to break every part of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emulator.jbof.control_client import ask
from host_shim.pool import Pool, Volume
from tests.support.processes import Processes, Started
from tests.support.waiting import wait_until

SHARED_POOL = ("--drive-size", "1G", "--read-deadline-ms", "10000", "--drives", "1", "--shared")
"""Of a pool that another agent is to serve as well, with room for files of /shared."""


class PoolUp:
    """One running `g35 up` and its state folder."""

    def __init__(self, processes: Processes, state: Path, *options: str) -> None:
        self.state = state
        self.mount = state / "mnt"
        self._processes = processes
        self._options = options
        self.process: Started = self._start()

    def _start(self) -> Started:
        started = self._processes.g35("up", "--state", self.state, *self._options)
        started.wait_for_line("ready", 60)
        return started

    def start_again(self) -> None:
        self.process = self._start()

    def down(self) -> int:
        return self.process.stop(60)

    def pool(self) -> Pool:
        return Pool(self.mount)

    def pid(self, name: str) -> int:
        """`agent-process` or `jbof-0`."""
        return int((self.state / f"{name}.pid").read_text())

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, how)
        return pid

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Until `g35 up` has started it again and it serves."""
        wait_until(lambda: self.pid(name) != old_pid, 60, f"{name} to be started again")
        if name == "agent-process":
            wait_until(self.answers, 60, "the mount to answer again")

    def answers(self) -> bool:
        try:
            self.status()
        except (OSError, ValueError):
            return False
        return True

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.mount / ".g35/status.json").read_text())
        return found

    def wait_connected(self, count: int) -> None:
        def connected() -> bool:
            return sum(each["connected"] for each in self.status()["enclosures"]) == count

        wait_until(connected, 60, f"{count} enclosures to be connected")

    def fault(self, enclosure: int, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask an enclosure for a fault, or for its `stats`."""
        return ask(self.state / f"jbof-{enclosure}.sock", verb, **fields)

    def flash_commands(self) -> dict[str, int]:
        """Commands and bytes of all drives so far, by the enclosures' own counters."""
        names = ("read_commands", "read_bytes", "write_commands", "write_bytes")
        drives = [
            drive for socket in self.state.glob("jbof-*.sock") for drive in ask(socket, "stats")["drives"]
        ]
        return {name: sum(drive[name] for drive in drives) for name in names}


def wait_each_served(volume: Volume, stored: Mapping[bytes, bytes]) -> None:
    """Until each value came once, and no wrong byte with any. On a busy machine one get of many may be late,
    or its queue not connected yet: that is a miss, and says nothing of what is stored."""
    left = set(stored)

    def is_each_served() -> bool:
        for key in list(left):
            found = volume.get(key)
            assert found in (None, stored[key]), "a wrong byte"
            if found is not None:
                left.discard(key)
        return not left

    wait_until(is_each_served, 60, "every value to be served")


def second_agent(processes: Processes, pool: PoolUp, folder: Path) -> tuple[Started, Path]:
    """Another agent of the same pool, and its mount. `folder`: for its configuration and state."""
    config, mount = folder / "second.toml", folder / "mnt"
    text = (pool.state / "agent.toml").read_text()
    text = text.replace(str(pool.mount), str(mount))
    config.write_text(text.replace(str(pool.state / "agent"), str(folder / "agent")))
    started = processes.g35("agent", "--config", config)
    started.wait_for_line("ready", 60)
    return started, mount
