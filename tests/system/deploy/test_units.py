"""systemd's own judgement of the units: they load, and what they leave open is bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.config_verb import unit_text
from tests.support.needs import needs, why_no_program

pytestmark = needs(why_no_program("systemd-analyze", "systemd"))

EXPOSURE_MOST = {
    ("g35-agent.service",): 3.8,
    ("g35-agent.service", "no-mount.conf"): 1.6,
    ("g35-jbof@.service",): 1.2,
}
"""Of 10, of a unit and its drop-ins. The agent's first is for CAP_SYS_ADMIN and for the name space of the
machine's mounts, which a mount for others takes; and a tenth for sched_setaffinity, see the unit."""


@pytest.fixture(params=sorted(EXPOSURE_MOST), ids="+".join)
def most(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], float]:
    names: tuple[str, ...] = request.param
    return names, EXPOSURE_MOST[names]


@pytest.fixture
def unit(most: tuple[tuple[str, ...], float], tmp_path: Path) -> Path:
    """A unit as `g35 config unit` prints it, so that its program exists; drop-ins follow in the same file."""
    names, _ = most
    file = tmp_path / names[0]
    file.write_text("\n".join(unit_text(name, Path(sys.executable).parent) for name in names))
    return file


def _analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_systemd_has_nothing_to_say_against_it(unit: Path) -> None:
    checked = _analyze("verify", "--man=no", "--recursive-errors=no", unit)
    about_it = [line for line in checked.stderr.splitlines() if unit.name.split(".")[0] in line]
    assert (checked.returncode, about_it) == (0, [])


def test_what_it_leaves_open_is_bounded(unit: Path, most: tuple[tuple[str, ...], float]) -> None:
    threshold = round(10 * most[1])
    checked = _analyze("security", "--offline=true", f"--threshold={threshold}", unit)
    assert checked.returncode == 0, checked.stdout


def test_everything_in_the_folder_is_judged(repository: Path) -> None:
    units = {file.name for file in (repository / "agent/deploy").iterdir()} - {"Containerfile"}
    assert units == {name for names in EXPOSURE_MOST for name in names}
