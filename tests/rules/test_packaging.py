"""Both wheels carry what they should and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.rungs.tree import tracked_files


@pytest.fixture(scope="module")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both wheels, built from a copy: a build leaves folders behind where it runs."""
    folder = tmp_path_factory.mktemp("wheels")
    for path in tracked_files(repository):
        copy = folder / "tree" / path.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (folder / "tree" / "README.md").touch()
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
            "-w", str(folder), str(folder / "tree"), str(folder / "tree" / "host_shim"),
        ],
        check=True,
        timeout=240,
        capture_output=True,
    )  # fmt: skip
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}


def _tops(wheel: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}


def _metadata(wheel: zipfile.ZipFile) -> list[str]:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []


def test_there_are_two(wheels: dict[str, zipfile.ZipFile]) -> None:
    assert sorted(wheels) == ["g35", "g35_host_shim"]


def test_the_program_is_the_four_rooms(wheels: dict[str, zipfile.ZipFile]) -> None:
    wheel = wheels["g35"]
    assert _tops(wheel) == {"agent", "emulator", "host_shim", "nvmeof"}
    assert "agent/replay/sample_trace.jsonl" in wheel.namelist()
    assert "agent/figures/figures.toml" in wheel.namelist()
    assert "emulator/lab/init.sh" in wheel.namelist()
    assert "agent/deploy/g35-agent.service" in wheel.namelist()
    scripts = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "g35 = agent.cli.main:main" in wheel.read(scripts).decode()


def test_every_program_file_is_in_the_wheel(repository: Path, wheels: dict[str, zipfile.ZipFile]) -> None:
    inside = set(wheels["g35"].namelist())
    rooms = ("agent/", "emulator/", "host_shim/", "nvmeof/")
    ours = {str(path.relative_to(repository)) for path in tracked_files(repository) if path.suffix == ".py"}
    assert not {name for name in ours if name.startswith(rooms)} - inside


def test_the_shim_is_one_room_and_asks_for_nothing(wheels: dict[str, zipfile.ZipFile]) -> None:
    wheel = wheels["g35_host_shim"]
    assert _tops(wheel) == {"host_shim"}
    assert not [wish for wish in _metadata(wheel) if "extra ==" not in wish]


def test_what_is_pinned_is_what_is_wished_for(repository: Path, wheels: dict[str, zipfile.ZipFile]) -> None:
    from packaging.requirements import Requirement

    pinned = {}
    for line in (repository / "requirements.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[name] = version
    for wish in _metadata(wheels["g35"]):
        wanted = Requirement(wish)
        name = wanted.name.lower().replace("_", "-")
        assert name in pinned, f"{name} is not in requirements.lock; run .ci/setup lock"
        assert wanted.specifier.contains(pinned[name])
