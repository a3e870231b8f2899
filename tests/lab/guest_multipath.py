"""The kernel's native multipath over two ports of our enclosure: ANA states, and a port that is cut off."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from emulator.jbof.control_client import ask
from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import KernelController, run
from tests.support.lab.lab_enclosure import (
    MEBIBYTE,
    RunningEnclosure,
    read_directly,
    start_enclosure,
    write_directly,
)
from tests.support.processes import Processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("disconnected")
_MULTIPATH = Path("/sys/module/nvme_core/parameters/multipath")


def ana_states(subsystem_nqn: str) -> dict[str, str]:
    """The kernel's view of each path to namespace 1: its controller's name and ANA state."""
    said: Any = json.loads(run("nvme", "list-subsys", "-o", "json"))
    hosts = said if isinstance(said, list) else [said]
    paths = [
        path["Name"]
        for host in hosts
        for subsystem in host["Subsystems"]
        if subsystem["NQN"] == subsystem_nqn
        for path in subsystem["Paths"]
    ]
    found = {}
    for name in paths:
        [state] = [
            file.read_text().strip() for file in Path("/sys/class/nvme", name).glob("nvme*c*n*/ana_state")
        ] or [""]
        found[name] = state
    return found


class Reader(threading.Thread):
    """Reads the disk past the cache until it is stopped, and compares."""

    def __init__(self, device: Path, content: bytes) -> None:
        super().__init__(daemon=True)
        self._device, self._content = device, content
        self._stop_asked = threading.Event()
        self.reads = 0
        self.trouble: str | None = None

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                if read_directly(self._device, len(self._content) // 4096) != self._content:
                    raise AssertionError("other bytes than were written")
                self.reads += 1
        except Exception as error:
            self.trouble = str(error)

    def goes_on(self) -> None:
        before = self.reads
        wait_until(lambda: self.trouble or self.reads >= before + 3, 240, "three more reads")
        assert self.trouble is None

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_asked.set()
        self.join(60)


def connect_both(enclosure: RunningEnclosure, ports: list[int]) -> list[KernelController]:
    return [
        kernel_host.connect(
            enclosure.nqn, port, "--reconnect-delay=1", "--ctrl-loss-tmo=600", "--keep-alive-tmo=2"
        )
        for port in ports
    ]


def test_the_kernel_follows_the_states_and_outlives_a_path(processes: Processes, tmp_path: Path) -> None:
    assert _MULTIPATH.read_text().strip() == "Y", "this kernel has no native multipath"
    enclosure = start_enclosure(processes, tmp_path, "--ports", "2")
    said = enclosure.process.wait_for_line("ready ")
    ports = json.loads(said.removeprefix("ready "))["ports"]
    first, second = connect_both(enclosure, ports)
    device = first.wait_for_namespace(1)
    assert second.wait_for_namespace(1) == device, "two paths, one disk"
    fields = first.identify()
    assert fields["cmic"] & 8
    assert fields["anagrpmax"] == fields["nanagrpid"] == 1
    log = json.loads(run("nvme", "ana-log", first.device, "-o", "json"))
    assert "optimized" in json.dumps(log).lower(), log

    def states_are(*wanted: str) -> None:
        expected = dict(zip((first.name, second.name), wanted, strict=True))
        wait_until(lambda: ana_states(enclosure.nqn) == expected, 120, f"the states {expected}")

    states_are("optimized", "optimized")
    content = os.urandom(MEBIBYTE)
    write_directly(device, content)
    with Reader(device, content) as reader:
        reader.goes_on()
        ask(enclosure.control, "access", number=1, state="inaccessible")
        states_are("inaccessible", "optimized")
        reader.goes_on()
        write_directly(device, content, seek=1)
        ask(enclosure.control, "access", number=1, state="non-optimized")
        states_are("non-optimized", "optimized")
        ask(enclosure.control, "port", number=2, up=False)
        wait_until(lambda: second.state != "live", 240, "the kernel to notice that the port is cut off")
        reader.goes_on()
        write_directly(device, content, seek=2)
        ask(enclosure.control, "port", number=2, up=True)
        second.wait_for_state("live")
        ask(enclosure.control, "access", number=1, state="optimized")
        states_are("optimized", "optimized")
        reader.goes_on()
    assert read_directly(device, 768) == 3 * content
