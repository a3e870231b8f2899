"""A path that discovery lists, and that answers so slowly that it is not told for long what it is: an agent
follows the erasure of tenants meanwhile as soon as ever."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool, UnknownVolume
from nvmeof.wire.log_page import DiscoveryEntry
from tests.support.processes import Processes
from tests.support.waiting import wait_until

TENANTS = ("blue", "red", "green")
DRIVES = 6
DRIVE_BYTES = 24 << 20
ANSWER_SECONDS = 0.9
PROMISED_SECONDS = 2.0
SLACK_SECONDS = 2.5
"""For the machine."""

COMMON = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/{state}"
key_file = "{folder}/root.key"
read_deadline_ms = 2000
[[enclosures]]
name = "own"
address = "127.0.0.1"
port = {port}
nqn = "{nqn}"
"""
VOLUME = '[[volumes]]\nname = "{0}"\ntenant = "{0}"\nvalue_size = "64K"\nshare = 0.3\n'
DISCOVERY = '[[discovery]]\nname = "pod"\naddress = "127.0.0.1"\nport = {port}\n'


def is_gone(pool: Pool, name: str) -> bool:
    """To a client that has used the volume, one that is gone has no counters."""
    try:
        return not pool.volume(name).stats()
    except UnknownVolume:
        return True


def test_erased_tenants_are_dropped_in_time_while_a_slow_copy_is_looked_into(
    processes: Processes, tmp_path: Path
) -> None:
    with Enclosure(
        EnclosureSettings(name="own", folder=tmp_path / "own", drives=DRIVES, drive_bytes=DRIVE_BYTES)
    ) as own:
        shutil.copytree(tmp_path / "own", tmp_path / "copy", ignore=shutil.ignore_patterns("*.lock"))
        nqn = own.settings.subsystem_nqn
        configurations = {}
        for state in ("serving", "erasing"):
            text = COMMON.format(folder=tmp_path, state=state, port=own.port, nqn=nqn)
            text += "".join(map(VOLUME.format, TENANTS))
            text += DISCOVERY.format(port=own.port) if state == "serving" else ""
            configurations[state] = tmp_path / f"{state}.toml"
            configurations[state].write_text(text)
        assert processes.g35("key", "new", tmp_path / "root.key").process.wait(60) == 0
        formatted = processes.g35("pool", "format", "--config", configurations["erasing"])
        assert formatted.process.wait(60) == 0, formatted.output
        agent = processes.g35("agent", "--config", configurations["serving"])
        agent.wait_for_line("ready", 60)
        like_it = EnclosureSettings(
            name="own", folder=tmp_path / "copy", drives=DRIVES, drive_bytes=DRIVE_BYTES
        )
        with Enclosure(like_it) as copy, Pool(tmp_path / "mnt") as pool:
            for drive in copy.drives:
                drive.set_faults(extra_latency_s=ANSWER_SECONDS)
            own.target.add_port(DiscoveryEntry("127.0.0.1", str(copy.port), subsystem_nqn=nqn))
            wait_until(lambda: any(each.stats().get("read_commands", 0) for each in copy.drives), 60)
            for name in TENANTS:
                erased = processes.g35(
                    "tenant", "erase", name, "--yes", "--config", configurations["erasing"]
                )
                assert erased.process.wait(60) == 0, erased.output
                ended = time.monotonic()
                wait_until(lambda name=name: is_gone(pool, name), 20, f"the end of {name}")  # type: ignore[misc]
                assert time.monotonic() - ended < PROMISED_SECONDS + SLACK_SECONDS
        assert agent.stop(30) == 0
        assert "and is another: left out" in agent.output
