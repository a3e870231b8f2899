"""An enclosure appears in a discovery log; its drive joins the pool under a serving agent."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool
from nvmeof.controller.subsystem import Subsystem
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.pool_up import wait_each_served
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KEYS = [random.Random(f"joining key {number}").randbytes(16) for number in range(48)]
DRIVE_BYTES = 24 << 20
SOON = 60.0
"""Seconds, of a busy machine."""

CONFIGURATION = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/state"
key_file = "{folder}/root.key"
read_deadline_ms = 2000
[pool]
rebalance = "64M"
[[discovery]]
name = "pod"
address = "127.0.0.1"
port = {port}
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.9
"""


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(9000)


def test_a_drive_joins_and_values_move_while_they_are_read(processes: Processes, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"

    def g35(*words: str) -> tuple[int, str]:
        started = processes.g35(*words, "--config", config)
        return started.process.wait(60), started.output

    def status(part: str = "pool") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "mnt/.g35/status.json").read_text())
        return found[part]

    def check(pool: Pool) -> None:
        """No wrong byte; and a busy machine may be late with a value, but no value is away."""
        assert all(pool.volume("kv").get(key) in (None, value_of(key)) for key in KEYS)
        assert {cause for cause, count in status("totals")["miss_causes"].items() if count} <= {"late"}

    one = Enclosure(EnclosureSettings(name="one", drives=2, drive_bytes=DRIVE_BYTES))
    two = Enclosure(EnclosureSettings(name="two", drives=1, drive_bytes=DRIVE_BYTES))
    with one, two:
        config.write_text(CONFIGURATION.format(folder=tmp_path, port=one.port))
        assert processes.g35("key", "new", tmp_path / "root.key").process.wait(60) == 0
        code, said = g35("pool", "format")
        assert code == 0, said
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        with Pool(tmp_path / "mnt") as pool:
            for key in KEYS:
                assert pool.volume("kv").put(key, value_of(key))
            assert (status()["namespaces"], status()["newcomers"]) == (2, {})
            nqn = two.settings.subsystem_nqn
            one.target.add_subsystem(Subsystem(nqn, serial="s"))
            one.target.add_port(DiscoveryEntry("127.0.0.1", str(two.port), subsystem_nqn=nqn))
            wait_until(lambda: len(status()["newcomers"]) == 1, SOON, "the agent to see the newcomer")
            assert status()["namespaces"] == 2, "it is not used before somebody says so"
            code, said = g35("pool", "add")
            assert code == 0, said
            assert "1 namespace(s) more, 3 in all" in said
            wait_until(lambda: status()["namespaces"] == 3, SOON, "the agent to follow the map")

            def moved() -> bool:
                check(pool)
                return bool(status()["moves_left"] == 0)

            wait_until(moved, SOON, "the values to move")
            state = status()
            assert state["volumes_unsettled"] == ["kv"]
            assert state["moves_values"] > 0
            code, said = g35("pool", "settle")
            assert code == 0, said
            wait_until(lambda: status()["volumes_unsettled"] == [], SOON, "the agent to follow")
            check(pool)
            wait_each_served(pool.volume("kv"), {key: value_of(key) for key in KEYS})
        assert agent.stop(30) == 0
