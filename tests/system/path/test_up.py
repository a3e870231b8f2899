"""`g35 up` itself: one to a folder, ends as it should, and says what is missing."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli.up.layout import is_alive
from host_shim.control_wire import key_of_name
from tests.support.pool_up import PoolUp, wait_each_served
from tests.support.processes import Processes
from tests.support.waiting import wait_until

HELD_UP = """
import signal, sys
if "jbof-1" in sys.orig_argv:
    signal.pause()
"""
"""As sitecustomize.py it keeps the second enclosure from ever being ready."""


@pytest.fixture
def held_up(tmp_path: Path) -> dict[str, str]:
    """The environment of a `g35 up` that comes up until somebody ends it, however fast the machine is."""
    folder = tmp_path / "held-up"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HELD_UP)
    return {"PYTHONPATH": str(folder)}


def test_a_second_up_of_one_folder_is_refused_and_harms_nothing(
    make_pool: Callable[..., PoolUp], processes: Processes
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    for options in ((), ("--detach",)):
        second = processes.g35("up", "--state", pool_up.state, *options)
        assert second.process.wait(60) == 1
        assert "a pool is up already" in second.output
    assert pool_up.answers()
    assert pool_up.down() == 0


def test_several_at_once_one_comes_up(processes: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    started = [
        processes.g35("up", "--state", state, "--drives", "1", "--drive-size", "256M", "--detach")
        for _ in range(3)
    ]
    statuses = sorted(each.process.wait(90) for each in started)
    assert statuses == [0, 1, 1]
    assert processes.g35("down", "--state", state).process.wait(60) == 0
    assert not os.path.ismount(state / "mnt")


def test_an_unmount_by_somebody_ends_all_of_it(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1", "--processes", "1")
    subprocess.run(["umount", pool_up.mount], check=True)
    assert pool_up.process.process.wait(60) == 0


def test_a_ctrl_c_while_it_comes_up_leaves_nothing(
    processes: Processes, tmp_path: Path, held_up: dict[str, str]
) -> None:
    state = tmp_path / "state"
    words = ("up", "--state", state, "--drives", "1", "--drive-size", "256M")
    starting = processes.g35(*words, environment=held_up)
    wait_until(lambda: (state / "jbof-0.json").exists(), 30, "the first enclosure to be ready")
    starting.process.send_signal(signal.SIGINT)
    assert starting.process.wait(60) == 130
    assert starting.output == "interrupted before the pool was up; nothing of it runs\n"
    assert not os.path.ismount(state / "mnt")


def test_a_ctrl_c_of_a_detached_start_ends_the_start(
    processes: Processes, tmp_path: Path, held_up: dict[str, str]
) -> None:
    state = tmp_path / "state"
    words = ("up", "--state", state, "--drives", "1", "--drive-size", "256M", "--detach")
    starting = processes.g35(*words, environment=held_up)
    wait_until(lambda: (state / "jbof-0.json").exists(), 30, "the first enclosure to be ready")
    enclosure = int((state / "jbof-0.pid").read_text())
    os.killpg(starting.pid, signal.SIGINT)
    assert starting.process.wait(60) == 130
    assert starting.output == "interrupted before the pool was up; nothing of it runs\n"
    assert not is_alive(enclosure)
    assert not os.path.ismount(state / "mnt")
    down = processes.g35("down", "--state", state)
    assert down.process.wait(60) == 0
    assert down.output == "nothing was up\n"


def test_a_folder_with_something_in_it_is_not_covered(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("not to be hidden")
    up = processes.g35(
        "up", "--state", tmp_path / "state", "--mount", tmp_path / "precious",
        "--drives", "1", "--drive-size", "256M",
    )  # fmt: skip
    assert up.process.wait(60) == 1
    assert "is not empty" in up.output
    assert (tmp_path / "precious/file").read_text() == "not to be hidden"
    # It was the first start there, so all that it made goes, the pool on fresh drives included.
    left = {path.name for path in (tmp_path / "state").iterdir()}
    assert left == {"lock", "agent.log", "jbof-0.log", "jbof-1.log"}


def test_a_start_that_fails_takes_away_only_what_it_made(
    make_pool: Callable[..., PoolUp], processes: Processes, tmp_path: Path
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    (pool_up.mount / "fs/file").write_bytes(b"stays")
    assert pool_up.down() == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    failing = processes.g35(
        "up", "--state", pool_up.state, "--mount", tmp_path / "full", "--enclosures", "2", "--drives", "1",
        "--drive-size", "256M",
    )  # fmt: skip
    assert failing.process.wait(60) == 1
    assert (pool_up.state / "root.key").exists()
    assert (pool_up.state / "drives-0").exists()
    assert not (pool_up.state / "drives-1").exists()
    pool_up.start_again()
    assert (pool_up.mount / "fs/file").read_bytes() == b"stays"


def test_down_clears_away_what_a_killed_up_has_left(
    make_pool: Callable[..., PoolUp], processes: Processes
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    (pool_up.mount / "fs/file").write_bytes(b"stays")
    pool_up.process.process.kill()
    pool_up.process.process.wait(20)
    wait_until(lambda: not pool_up.answers(), 20, "the end of the agent")
    status = processes.g35("status", "--state", pool_up.state)
    assert status.process.wait(60) == 1
    assert f"{pool_up.mount} is dead: its agent has ended" in status.output
    down = processes.g35("down", "--state", pool_up.state)
    assert down.process.wait(60) == 0, down.output
    assert "cleared away" in down.output
    assert not os.path.ismount(pool_up.mount)
    left = {
        path.name for path in pool_up.state.iterdir() if path.suffix in (".pid", ".json", ".sock", ".part")
    }
    assert left == {"made_with.json"}, "which stays, as the drives do"
    again = processes.g35("down", "--state", pool_up.state)
    assert again.process.wait(60) == 0
    assert again.output == "nothing was up\n"
    pool_up.start_again()
    assert (pool_up.mount / "fs/file").read_bytes() == b"stays"


def test_down_ends_a_pool_that_is_still_coming_up(
    processes: Processes, tmp_path: Path, held_up: dict[str, str]
) -> None:
    state = tmp_path / "state"
    words = ("up", "--state", state, "--drives", "1", "--drive-size", "256M", "--detach")
    starting = processes.g35(*words, environment=held_up)
    wait_until(lambda: (state / "jbof-0.json").exists(), 30, "the first enclosure to be ready")
    assert list(state.glob("drives-*"))
    down = processes.g35("down", "--state", state)
    assert down.process.wait(60) == 0, down.output
    assert down.output == "down\n"
    assert starting.process.wait(60) == 1
    assert not os.path.ismount(state / "mnt")
    assert not list(state.glob("drives-*"))


def test_fewer_drives_than_the_pool_has_are_said(
    make_pool: Callable[..., PoolUp], processes: Processes
) -> None:
    pool_up = make_pool("--drives", "2", "--enclosures", "1")
    assert pool_up.status()["pool"]["namespaces_away"] == 0
    assert pool_up.down() == 0
    options = ("--drives", "1", "--enclosures", "1", "--drive-size", "256M")
    again = PoolUp(processes, pool_up.state, *options)
    assert "1 of the pool's 2 namespaces is away" in " ".join(again.process.output.split())
    assert again.status()["pool"]["namespaces_away"] == 1
    assert again.down() == 0


def test_drives_that_come_later_join_by_the_commands_that_up_prints(
    make_pool: Callable[..., PoolUp], processes: Processes
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    for number in range(20):
        (pool_up.mount / f"kv/kv/{number}").write_bytes(bytes([number]) * 70_000)
    assert pool_up.down() == 0
    again = PoolUp(processes, pool_up.state, "--drives", "3", "--enclosures", "1", "--drive-size", "256M")
    add, settle = (
        shlex.split(line)[1:] for line in again.process.output.splitlines() if line.startswith("  g35 pool ")
    )
    joining = processes.g35(*add)
    assert joining.process.wait(60) == 0, joining.output
    assert "2 namespace(s) more" in joining.output

    def settled() -> bool:
        settling = processes.g35(*settle)
        return settling.process.wait(60) == 0 and "settled: " in settling.output

    wait_until(settled, 60, "the values to have moved")
    assert again.status()["pool"]["moves_values"] > 0
    with again.pool() as pool:
        values = {key_of_name(f"{number}".encode()): bytes([number]) * 70_000 for number in range(20)}
        wait_each_served(pool.volume("kv"), values)
    assert again.down() == 0


def test_a_new_pool_in_memory_serves_fs_and_keeps_the_names_of_the_dead_one(
    make_pool: Callable[..., PoolUp], processes: Processes, tmp_path: Path
) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1", "--media", "memory")
    (pool_up.mount / "fs/file").write_bytes(b"dies with the pool")
    pool = pool_up.status()["pool"]["id"]
    assert pool_up.down() == 0
    names = pool_up.state / "agent/files.sqlite"
    aside = names.with_name(f"files.sqlite.of-{pool}")
    said = f"{names} names files of a pool that is gone: it is set aside as {aside.name}"

    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    words = ("--media", "memory", "--drives", "1", "--enclosures", "1", "--drive-size", "256M")
    failing = processes.g35("up", "--state", pool_up.state, "--mount", tmp_path / "full", *words)
    assert failing.process.wait(60) == 1
    assert said in failing.output.splitlines()
    assert aside.exists(), "a start that failed takes only away what it made"

    pool_up.start_again()
    assert not list((pool_up.mount / "fs").iterdir())
    (pool_up.mount / "fs/file").write_bytes(b"of the new one")
    assert aside.exists()
    assert pool_up.down() == 0


def test_a_value_that_is_too_long_leaves_nothing(make_pool: Callable[..., PoolUp]) -> None:
    pool_up = make_pool("--drives", "1", "--enclosures", "1")
    name = pool_up.mount / "kv/kv/too-long"
    with pytest.raises(OSError) as refused:
        name.write_bytes(bytes(1_800_000))
    assert refused.value.errno == errno.EFBIG
    assert not name.exists()
    name.write_bytes(b"the right one")
    assert name.read_bytes() == b"the right one"
