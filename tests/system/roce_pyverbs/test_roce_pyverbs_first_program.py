"""The program of docs/roce.md as it stands there, and what it says where no device is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from emulator.roce.pyverbs.cmid import CMID, AddrInfo
from emulator.roce.pyverbs.device import Context, get_device_list
from emulator.roce.pyverbs.pyverbs_error import PyverbsRDMAError
from emulator.roce.runtime import registry
from tests.support.roce.verbs_pair import addresses

HOW = r'G35_ROCE_DEVICES="roce0=127\.0\.0\.2,roce1=127\.0\.0\.3"'


def _program(repository: Path) -> str:
    """The block of the page that makes use of two devices."""
    blocks = re.findall(r"```python\n(.*?)```", (repository / "docs/roce.md").read_text(), re.DOTALL)
    (program,) = [block for block in blocks if "get_device_list()\n" in block]
    return str(program)


def _run(repository: Path, file: Path, devices: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "G35_ROCE_DEVICES"}
    if devices:
        environment["G35_ROCE_DEVICES"] = devices
    return subprocess.run(
        [sys.executable, str(file)],
        env=environment | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_first_program_of_the_page_runs_as_it_stands_there(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "hello.py"
    file.write_text(_program(repository))
    one, other = addresses(2)
    done = _run(repository, file, f"roce0={one},roce1={other}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "roce1 received hello\n"


def test_without_a_device_the_program_is_told_how_devices_are_named(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "hello.py"
    file.write_text(_program(repository))
    done = _run(repository, file, "")
    assert done.returncode == 1
    assert re.search(f"IndexError: .*known are: none.*{HOW}", done.stderr), done.stderr


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is known: also of those that NVMe-oF made known in this process, whose names stay."""
    monkeypatch.delenv("G35_ROCE_DEVICES", raising=False)
    others = registry.devices()
    for each in others:
        registry.remove_device(each.name)
    yield
    for each in others:
        registry.add_device(**asdict(each))


@pytest.mark.usefixtures("no_device")
def test_every_way_to_a_missing_device_names_the_variable() -> None:
    with pytest.raises(PyverbsRDMAError, match=f"Failed to find device roce7: .*{HOW}"):
        Context(name="roce7")
    with pytest.raises(IndexError, match=HOW):
        get_device_list()[0]
    with pytest.raises(PyverbsRDMAError, match=f"no device has the address 127.0.0.9; .*{HOW}"):
        CMID(creator=AddrInfo(src="127.0.0.9", dst="127.0.0.8", dst_service=7471))
    listener = CMID()
    with pytest.raises(PyverbsRDMAError, match=f"Listen Failed: no device can be opened; .*{HOW}"):
        listener.listen()
    listener.close()
