"""Limits of a process (setrlimit(2)): a start works or ends with one error, what is refused later misses."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool_up import PoolUp
from tests.support.processes import Processes
from tests.support.waiting import wait_until

MIB = 1 << 20
UP = (sys.executable, "-P", "-m", "agent.cli", "up", "--workers", "2", "--processes", "1")
SMALL = ("--drives", "1", "--drive-size", "256M", "--read-deadline-ms", "2000")
RAW = re.compile("Traceback|OpenBLAS|memory allocation|Logging error|bug of g35")
LEFT = {"lock", "agent.log", "jbof-0.log", "jbof-1.log"}
TOO_LOW = {
    "--as=67108864": "g35 needs 384 MiB",
    "--as=629145600": "this enclosure needs 768 MiB",
    "--as=1572864000": "its configuration needs 1984 MiB",
    "--nofile=12": "g35 needs 24",
    "--nofile=40": "this enclosure needs 65",
    "--nofile=80": "its configuration needs 100",
}
"""Limits of `g35 up` with two workers, and who says which figure."""


def test_a_start_under_a_limit_that_is_too_low_ends_with_one_error_and_leaves_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    started = {
        limit: processes.start(["prlimit", limit, *UP, "--state", tmp_path / limit, *SMALL])
        for limit in TOO_LOW
    }
    for limit, figure in TOO_LOW.items():
        assert started[limit].process.wait(180) == 1
        said = started[limit].output
        lines = [line.partition(": ")[0] for line in said.splitlines()]
        assert lines == ["error", "hint"], said
        assert figure in said
        assert "ulimit -" in said
        assert not RAW.search(said)
        state = tmp_path / limit
        assert not os.path.ismount(state / "mnt")
        assert {path.name for path in state.iterdir()} <= LEFT if state.exists() else True


@pytest.fixture
def served(processes: Processes, tmp_path: Path) -> Iterator[PoolUp]:
    pool = PoolUp(processes, tmp_path / "state", *SMALL)
    yield pool
    assert pool.down() == 0


def test_what_is_refused_while_it_serves_is_a_miss_and_a_line_of_the_log(served: PoolUp) -> None:
    values = {bytes([number]) * 16: bytes([number]) * 300_000 for number in range(16)}
    agent = served.pid("agent-process")
    with served.pool() as pool:
        volume = pool.volume("kv")

        def hits() -> int:
            got = {key: found for key in values if (found := volume.get(key)) is not None}
            assert all(found == values[key] for key, found in got.items())
            return len(got)

        assert all(volume.put_many(list(values), list(values.values())))
        before = resource.prlimit(agent, resource.RLIMIT_AS, (8 * MIB, resource.RLIM_INFINITY))
        served.wait_restarted("jbof-0", served.kill("jbof-0"))
        assert hits() < len(values), "its queues cannot be connected again"
        for number in range(8):
            with contextlib.suppress(OSError):
                (served.mount / f"fs/{number}").write_bytes(bytes(MIB + 1))
        resource.prlimit(agent, resource.RLIMIT_AS, before)
        wait_until(lambda: hits() == len(values), 30, "all values to be served again")
    assert served.pid("agent-process") == agent
    assert not RAW.search((served.state / "agent.log").read_text())
