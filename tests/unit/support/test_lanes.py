"""Two lanes take jobs from one list, and none is left running."""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.rungs.lanes import Job, LaneBeside, run_next
from tests.support.waiting import wait_until


@pytest.fixture
def said() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as file:
        yield file


def job(text: str, code: int = 0) -> Job:
    return Job([sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"])


def test_the_lane_beside_runs_its_own_jobs_and_then_what_waits(
    said: BinaryIO, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = deque([job("third"), job("fourth", 4)])
    with LaneBeside([job("first"), job("second", 2)], waiting, said) as beside:
        beside.wait_for_first()
        codes = beside.join()
    assert codes == [0, 2, 0, 4]
    assert not waiting
    assert capfd.readouterr().out.split() == ["first", "second", "third", "fourth"]


def test_each_job_that_waits_is_run_by_one_lane(said: BinaryIO, capfd: pytest.CaptureFixture[str]) -> None:
    waiting = deque(job(f"job{number}") for number in range(6))
    codes = []
    with LaneBeside([], waiting, said) as beside:
        while (code := run_next(waiting)) is not None:
            codes.append(code)
        codes += beside.join()
    assert codes == [0] * 6
    assert sorted(capfd.readouterr().out.split()) == [f"job{number}" for number in range(6)]


def test_a_job_has_the_environment_that_it_names(capfd: pytest.CaptureFixture[str]) -> None:
    says = Job([sys.executable, "-c", "import os; print(os.environ['OF_THE_JOB'])"], {"OF_THE_JOB": "yes"})
    assert says.run() == 0
    assert capfd.readouterr().out.split() == ["yes"]


def test_a_job_that_may_fail_counts_as_good(said: BinaryIO, capfd: pytest.CaptureFixture[str]) -> None:
    fails = job("in vain", 3)._replace(may_fail=True)
    assert fails.run() == 0
    with LaneBeside([fails], deque(), said) as beside:
        assert beside.join() == [0]
    assert capfd.readouterr().out.split() == ["in", "vain"] * 2


def test_leaving_early_ends_the_job_as_ctrl_c_does_and_begins_no_other(
    said: BinaryIO, tmp_path: Path
) -> None:
    begun, tidied, other = (tmp_path / name for name in ("begun", "tidied", "other"))
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "try:\n    Path(sys.argv[1]).touch()\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    Path(sys.argv[2]).touch()\n"
    )
    long = Job([sys.executable, "-c", program, str(begun), str(tidied)])
    touches = Job([sys.executable, "-c", f"open({str(other)!r}, 'w')"])
    with LaneBeside([long], deque([touches]), said):
        wait_until(begun.exists, 60, "the job to begin")
    assert tidied.exists()
    assert not other.exists()
