"""Two copies, the first on a server's own SSD: what reads cost, and what the loss of the server costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from host_shim.pool import Pool
from tests.support.local_rig import KEYS, LocalRig, value_of
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.processes import Processes
from tests.support.waiting import wait_until


def test_reads_on_the_server_need_no_fabric_and_its_loss_costs_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    rig = LocalRig(processes, tmp_path, copies=2, local_first="true")
    with Enclosure(EnclosureSettings(name="shelf", drives=1, drive_bytes=48 << 20)) as shelf:
        there = rig.enclosure("shelf", shelf.port, shelf.settings.subsystem_nqn)
        rig.configure("one", rig.local, there)
        assert rig.verb("one", "pool", "format")[0] == 0
        rig.configure("two", there, rig.as_enclosure)
        one, two = rig.agent("one"), rig.agent("two")
        with rig.pool("one") as beside, rig.pool("two") as away:
            for key in KEYS:
                assert beside.volume("kv").put(key, value_of(key))
            wait_until(lambda: rig.status("one")["totals"]["copies_made"] >= len(KEYS), 60, "second copies")
            before = rig.status("one")["totals"]
            assert [beside.volume("kv").get(key) for key in KEYS] == [value_of(key) for key in KEYS]
            totals = rig.status("one")["totals"]
            local, flash, hedged = (
                totals[each] - before[each]
                for each in ("local_bytes_read", "flash_bytes_read", "hedge_bytes")
            )
            # Every slot comes from this machine. Over the fabric go directories at the most, and a hedge
            # where this machine is slow.
            assert local >= len(KEYS) * (1 << 16)
            assert flash - local - hedged <= 2 * len(KEYS) * 4096

            stored = {key: value_of(key) for key in KEYS}
            wait_each_served(away.volume("kv"), stored)
            one.kill()
            wait_until(lambda: _connected(rig.status("two")) == ["shelf"], 60, "the loss to be seen")
            wait_each_served(away.volume("kv"), stored)
            # Puts go on in the enclosure, and their second copies are owed.
            fresh = [key[::-1] for key in KEYS]
            assert all(away.volume("kv").put(key, value_of(key)) for key in fresh)
            wait_each_served(away.volume("kv"), {key: value_of(key) for key in fresh})
        assert two.stop(60) == 0
        assert rig.g35("unmount", tmp_path / "mnt-one")[0] == 0
    assert "Traceback" not in one.output + two.output


def _connected(status: dict[str, Any]) -> list[str]:
    return [each["name"] for each in status["enclosures"] if each["connected"]]


def test_up_takes_a_file_of_this_machine_into_the_pool(processes: Processes, tmp_path: Path) -> None:
    ssd, state = tmp_path / "ssd", tmp_path / "state"
    options = ("--enclosures", "1", "--drives", "1", "--drive-size", "256M", "--local", str(ssd))
    pool = PoolUp(processes, state, *options, "--read-deadline-ms", "5000")
    rows = {each["name"]: each for each in pool.status()["enclosures"]}
    assert (rows["local:ssd"]["local"], rows["jbof-0"]["local"]) == (True, False)
    assert pool.status()["pool"]["namespaces"] == 2
    shown = processes.g35("status", "--state", state)
    assert shown.process.wait(60) == 0
    assert "on this machine" in shown.output
    with Pool(pool.mount) as client:
        assert all(client.volume("kv").put(key, value_of(key)) for key in KEYS)
    assert pool.down() == 0
    pool.start_again()
    pool.wait_connected(2)
    with Pool(pool.mount) as client:
        wait_each_served(client.volume("kv"), {key: value_of(key) for key in KEYS})
    assert pool.status()["totals"]["local_bytes_read"] > 0
    assert pool.down() == 0


def test_up_does_with_a_file_alone_and_says_what_it_cannot(processes: Processes, tmp_path: Path) -> None:
    for words, why in (
        (("--enclosures", "0"), "it wants --local"),
        (("--local", str(tmp_path / "ssd"), "--media", "memory"), "it wants --media files"),
    ):
        refused = processes.g35("up", "--state", tmp_path / "none", *words)
        assert refused.process.wait(60) == 2
        assert why in " ".join(refused.output.split())
    ssd = tmp_path / "ssd"
    ssd.touch()  # as a start leaves it that is killed at once
    pool = PoolUp(
        processes, tmp_path / "state", "--enclosures", "0", "--drive-size", "256M", "--local", str(ssd)
    )
    assert [each["name"] for each in pool.status()["enclosures"]] == ["local:ssd"]
    assert pool.down() == 0
    pool.start_again()
    assert pool.status()["pool"]["namespaces_away"] == 0
    assert pool.down() == 0
    shown = processes.g35("pool", "show", "--config", tmp_path / "state/agent.toml", "--json")
    assert shown.process.wait(60) == 0
    assert len(json.loads(shown.output)["namespaces"]) == 1
