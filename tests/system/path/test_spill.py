"""A real agent with a folder as its place in G4: what is evicted comes up again, and the operator's verbs."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KEYS = [random.Random(f"spilled key {number}").randbytes(16) for number in range(700)]
VALUE_BYTES = 60_000

CONFIGURATION = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/state"
key_file = "{folder}/root.key"
read_deadline_ms = 2000
[[enclosures]]
name = "one"
address = "127.0.0.1"
port = {port}
nqn = "{nqn}"
[[volumes]]
name = "kv"
value_size = "64K"
share = 0.9
marks = 340
[[spill]]
folder = "{folder}/below"
max_bytes = "1G"
bundle = "8M"
values = "all"
deadline_ms = 5000
"""


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(VALUE_BYTES)


def test_what_is_evicted_comes_up_and_the_verbs_tell_of_it(processes: Processes, tmp_path: Path) -> None:
    config, mount, below = tmp_path / "agent.toml", tmp_path / "mnt", tmp_path / "below"

    def verb(*words: str) -> Any:
        found = processes.g35("spill", *words, "--config", config)
        assert found.process.wait(60) == 0, found.output
        return found.output

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((mount / ".g35/status.json").read_text())
        return found

    def volume() -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in status()["volumes"] if each["name"] == "kv")
        return found

    with Enclosure(EnclosureSettings(name="one", drives=1, drive_bytes=32 << 20)) as one:
        config.write_text(
            CONFIGURATION.format(folder=tmp_path, port=one.port, nqn=one.settings.subsystem_nqn)
        )
        for words in (("key", "new", tmp_path / "root.key"), ("pool", "format", "--config", config)):
            assert processes.g35(*words).process.wait(60) == 0
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        agent.wait_for_line("cannot be used", 60)
        assert "cannot be used" in status()["spill"][0]["error"]
        assert "Traceback" not in agent.output
        below.mkdir()
        wait_until(lambda: not status()["spill"][0]["error"], 60)
        with Pool(mount, sessions=1) as pool:
            kv = pool.volume("kv")
            keys, fresh, asked, hits = list[bytes](), KEYS, 0, 0
            # A victim leaves a mark only if it was copied in time; how many do depends on the machine.
            for _ in range(20):
                keys += fresh
                for key in fresh:
                    assert kv.put(key, value_of(key))
                asked, hits = asked + len(keys), hits + sum(kv.get(key) == value_of(key) for key in keys)
                seen = volume()
                fresh = [random.Random(key).randbytes(16) for key in keys[-100:]]
                if seen["gets_from_g4"] > 10 and status()["spill"][0]["volumes"]["kv"]["bundles"] > 1:
                    break
            else:
                raise AssertionError(f"too few values came up from G4: {status()}")
            assert (seen["hits"], seen["misses"]) == (hits, asked - hits)
            for key in keys:
                # What comes back to flash may evict values that have no copy yet. A miss after the look-up is
                # an empty file.
                with contextlib.suppress(FileNotFoundError):
                    assert (mount / "kv/kv" / key.hex()).read_bytes() in (b"", value_of(key))
            # How many depends on which of them are back on flash by then.
            assert volume()["gets_from_g4"] > seen["gets_from_g4"], "a path finds values in G4, too"
        assert agent.stop(30) == 0

        (row,) = json.loads(verb("status", "--json"))
        assert (row["volume"], row["bundles"] > 0) == ("kv", True)
        (first, *_) = [path for path in below.rglob("*") if path.is_file()]
        first.write_bytes(first.read_bytes()[:5000])
        left = first.parent / ".part-left"
        left.write_bytes(b"left by a crash")
        os.utime(left, (0, 0))
        (found,) = json.loads(verb("scrub", "--json"))
        assert (found["bad_count"], found["leftovers"]) == (1, 1)
        assert found["bad_values"] > 0, "those of the bundle that was cut before its first value's end"
        assert found["values"] > 0

        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        with Pool(mount, sessions=1) as pool:
            kv = pool.volume("kv")
            assert [key for key in keys if kv.get(key) == value_of(key)]
            assert all(kv.get(key) in (None, value_of(key)) for key in keys), (
                "a cut bundle serves nothing more"
            )
            assert "bundles deleted" in verb("drop", "--all")
            assert not [path for path in below.rglob("*") if path.is_file()]
            assert all(kv.get(key) in (None, value_of(key)) for key in keys)
            assert volume()["miss_causes"]["g4_lost"] > 0
        assert agent.stop(30) == 0
