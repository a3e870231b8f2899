"""A real agent with each policy: what is learned is read ahead, what is written back is stored at the end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool
from tests.support.processes import Processes
from tests.support.waiting import wait_until

KEYS = [random.Random(f"policy key {number}").randbytes(16) for number in range(12)]
VALUE_BYTES = 60_000

CONFIGURATION = """
[agent]
mount = "{folder}/mnt"
state = "{folder}/state"
key_file = "{folder}/root.key"
read_deadline_ms = 2000
[prestage]
memory = "16M"
learn = true
[[enclosures]]
name = "one"
address = "127.0.0.1"
port = {port}
nqn = "{nqn}"
[[volumes]]
name = "through"
value_size = "64K"
share = 0.4
[[volumes]]
name = "back"
value_size = "64K"
share = 0.4
[[policies]]
volume = "through"
prefill_tokens_per_s = 1
bytes_per_token = 1
[[policies]]
volume = "back"
write = "back"
write_back_memory = "4M"
"""


def value_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(VALUE_BYTES)


def test_what_is_learned_is_read_ahead_and_what_is_written_back_outlives_an_orderly_end(
    processes: Processes, tmp_path: Path
) -> None:
    config, mount = tmp_path / "agent.toml", tmp_path / "mnt"

    def counters(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((mount / ".g35/status.json").read_text())
        return next(each for each in found["volumes"] if each["name"] == name)

    with Enclosure(EnclosureSettings(name="one", drives=1, drive_bytes=32 << 20)) as one:
        config.write_text(
            CONFIGURATION.format(folder=tmp_path, port=one.port, nqn=one.settings.subsystem_nqn)
        )
        for words in (("key", "new", tmp_path / "root.key"), ("pool", "format", "--config", config)):
            assert processes.g35(*words).process.wait(60) == 0
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        with Pool(mount, sessions=1) as pool:
            kv = pool.volume("through")
            for key in KEYS:
                assert kv.put(key, value_of(key))
            assert all(kv.exists(KEYS))
            for key in KEYS:
                assert kv.get(key) == value_of(key)
                ahead = min(len(KEYS), KEYS.index(key) + 5) - 1  # by now or soon: a client computes meanwhile
                wait_until(
                    lambda wanted=ahead: counters("through")["prestaged_bytes"] >= wanted * VALUE_BYTES, 30
                )
            seen = counters("through")
            assert seen["prestage_hits"] >= len(KEYS) - 3
            assert seen["prestage_useful_bytes"] > seen["prestage_wasted_bytes"]
            assert seen["gets_gated"] == 0, "a token a second is slower than any flash"
            back = pool.volume("back")
            for key in KEYS:
                assert back.put(key, value_of(key))
                assert back.get(key) == value_of(key)
            assert counters("back")["puts_written_back"] == len(KEYS)
        assert agent.stop(30) == 0
        agent = processes.g35("agent", "--config", config)
        agent.wait_for_line("ready", 60)
        with Pool(mount) as pool:
            assert [pool.volume("back").get(key) for key in KEYS] == [value_of(key) for key in KEYS]
        assert agent.stop(30) == 0
