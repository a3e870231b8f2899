"""Which room may import which. The contracts proper stand in pyproject.toml; here are the finer ones."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.rungs.tree import ROOMS, Program, programs, tracked_files

TOP_LEVEL = {
    "agent", "host_shim", "nvmeof", "tests", "emulator", "docs", ".ci", "Makefile", "pyproject.toml",
    "README.md", "CHANGELOG.md", "LICENSE", ".gitignore", "requirements.lock",
}  # fmt: skip

WIRE_FORMATS = ("host_shim.control_wire", "host_shim.transfer_wire")
CLIENTS = ("agent/bench/", "agent/cli/", "agent/replay/")
"""Programs that play the GPU host's side; everything else of the agent knows only the wire format."""

CONNECTORS = {
    "host_shim/lmcache_l2.py": "lmcache",
    "host_shim/lmcache_storage.py": "lmcache",
    "host_shim/sglang_hicache.py": "sglang",
    "host_shim/vllm_tier.py": "vllm",
}
"""Modules of host_shim that an engine loads, and that import this engine; no other module imports them."""


def _imports(program: Program) -> Iterator[str]:
    for each in program.nodes(ast.Import):
        yield from (alias.name for alias in each.names)
    for one in program.nodes(ast.ImportFrom):
        if one.module and not one.level:
            yield one.module


INITIALIZERS = {
    "agent/__init__.py": {"nvmeof"},
    "emulator/__init__.py": {"nvmeof"},
    "nvmeof/__init__.py": {"nvmeof"},
    "nvmeof/transport/__init__.py": {
        "nvmeof.errors", "nvmeof.host.namespaces", "nvmeof.limits", "nvmeof.transport.base",
    },
    "emulator/roce/runtime/__init__.py": {"emulator.roce.runtime.registry"},
}  # fmt: skip
"""What a package may import of the tree as it is imported. Any other would bind its files to one another."""


def _programs(repository: Path, room: str) -> dict[str, Program]:
    return {name: program for name, program in programs(repository).items() if name.split("/")[0] == room}


def _tests(repository: Path) -> list[Path]:
    tracked = tracked_files(repository)
    return [path for path in tracked if path.suffix == ".py" and path.is_relative_to(repository / "tests")]


def test_the_contracts_hold(repository: Path) -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_agent_proper_uses_nothing_of_host_shim_but_the_wire_format(repository: Path) -> None:
    wrong = [
        f"{path}: {name}"
        for path, program in _programs(repository, "agent").items()
        if not path.startswith(CLIENTS)
        for name in _imports(program)
        if name.split(".")[0] == "host_shim" and name not in WIRE_FORMATS
    ]
    assert not wrong


def test_host_shim_imports_the_standard_library_alone(repository: Path) -> None:
    wrong = [
        f"{path}: {name}"
        for path, program in _programs(repository, "host_shim").items()
        for name in _imports(program)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "host_shim", CONNECTORS.get(path)}
    ]
    assert not wrong


def test_nothing_imports_a_connector_but_its_engine(repository: Path) -> None:
    modules = {name.removesuffix(".py").replace("/", ".") for name in CONNECTORS}
    wrong = [
        f"{path}: {name}"
        for path, program in programs(repository).items()
        for name in _imports(program)
        if name in modules
    ]
    assert not wrong


def test_a_gpu_host_gets_by_without_anything_of_ours_but_host_shim(repository: Path) -> None:
    found = subprocess.run(
        [
            sys.executable, "-I", "-S", "-c",
            f"import sys; sys.path.insert(0, {str(repository)!r})\n"
            "import host_shim.pool\n"
            "print([name for name in ('agent', 'nvmeof', 'emulator', 'numpy') if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_that_it_is_typed(repository: Path, room: str) -> None:
    assert (repository / room / "py.typed").exists()


def test_the_top_of_the_tree_is_as_it_is_named(repository: Path) -> None:
    found = {path.relative_to(repository).parts[0] for path in tracked_files(repository)}
    assert found <= TOP_LEVEL


def test_no_test_folder_is_a_package(repository: Path) -> None:
    assert not [path for path in _tests(repository) if path.name == "__init__.py"]


def test_the_picture_of_the_rooms_is_the_contract(repository: Path) -> None:
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["agent"])
    page = (repository / "docs/architecture.md").read_text()
    picture = page.partition("## Rooms of the agent\n")[2].split("```")[1].strip("\n")
    drawn = [
        set(floor.split()) for row in picture.splitlines() for floor in re.split(" {4,}", row)[0].split("►")
    ]
    assert drawn == [set(layer.split(" | ")) for layer in layers]


def test_a_package_imports_nothing_of_the_tree_but_what_is_named_here(repository: Path) -> None:
    found = {
        path: {name for name in _imports(program) if name.split(".")[0] in (*ROOMS, "tests")}
        for path, program in programs(repository).items()
        if path.endswith("/__init__.py")
    }
    assert {path: names for path, names in found.items() if names} == INITIALIZERS


def test_no_file_imports_a_package_that_imports_it(repository: Path) -> None:
    """The import contracts look at siblings, so they see no circle of a package and what lies in it."""
    wrong = [
        f"{file}: {package}"
        for initializer, names in INITIALIZERS.items()
        for package in [initializer.removesuffix("/__init__.py").replace("/", ".")]
        for name in names
        if name.startswith(f"{package}.")
        for file in [f"{name.replace('.', '/')}.py"]
        if package in _imports(programs(repository)[file])
    ]
    assert not wrong


def _support_arrows(repository: Path) -> dict[str, set[str]]:
    """Which rooms of tests/support each room imports. A file beside the rooms is a room by itself."""
    support = repository / "tests/support"
    arrows: dict[str, set[str]] = {}
    for path in _tests(repository):
        if path.is_relative_to(support):
            room = path.relative_to(support).parts[0].removesuffix(".py")
            names = _imports(Program(path.read_text(encoding="utf-8")))
            used = {name.split(".")[2] for name in names if name.startswith("tests.support.")}
            arrows.setdefault(room, set()).update(used - {room})
    return arrows


def test_the_rooms_of_the_tests_support_import_in_no_circle(repository: Path) -> None:
    assert list(TopologicalSorter(_support_arrows(repository)).static_order())
    with pytest.raises(CycleError):
        TopologicalSorter({"nvme": {"pool"}, "pool": {"nvme"}}).prepare()


def test_no_two_tests_share_a_name(repository: Path) -> None:
    names = [path.name for path in _tests(repository) if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
