"""The kernel's NVMe/TCP host against our enclosure: a process of its own, over the guest's loopback."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from emulator.jbof.control_client import ask
from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import run
from tests.support.lab.kernel_on_enclosure import (
    command_largely_and_oddly,
    find_again,
    keep_files,
    read_an_error,
)
from tests.support.lab.lab_enclosure import (
    DRIVE_BYTES,
    MEBIBYTE,
    RunningEnclosure,
    read_directly,
    start_enclosure,
    write_directly,
)
from tests.support.processes import Processes

pytestmark = pytest.mark.usefixtures("disconnected")


@pytest.fixture(scope="module")
def enclosure(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> RunningEnclosure:
    """One enclosure for the tests that leave it as it was."""
    return start_enclosure(module_processes, tmp_path_factory.mktemp("enclosure"))


def test_discover(enclosure: RunningEnclosure) -> None:
    records = kernel_host.discover(enclosure.port)
    found = {record["subnqn"]: record for record in records}
    assert found[enclosure.nqn]["trtype"] == "tcp"
    assert found[enclosure.nqn]["subtype"] == "nvme subsystem"
    assert (found[enclosure.nqn]["traddr"], found[enclosure.nqn]["trsvcid"]) == (
        "127.0.0.1",
        str(enclosure.port),
    )


@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_identify_and_log_pages(enclosure: RunningEnclosure, digests: bool) -> None:
    controller = enclosure.connect(digests=digests)
    fields = controller.identify()
    assert fields["subnqn"] == enclosure.nqn
    assert fields["mdts"] == 9, "2 MiB in pages of 4 KiB"
    assert fields["ioccsz"] == (64 + (1056 << 10)) // 16
    assert fields["cntlid"] == int(controller.attribute("cntlid"))
    device = controller.wait_for_namespace(1)
    namespace = controller.identify_namespace(1)
    assert namespace["nguid"] == enclosure.namespaces[0]["nguid"]
    assert namespace["nsze"] * 4096 == DRIVE_BYTES == int(run("blockdev", "--getsize64", device))
    assert run("blockdev", "--getss", device).strip() == "4096"
    assert json.loads(run("nvme", "list-ns", controller.device, "-o", "json"))["nsid_list"] == [{"nsid": 1}]
    assert json.loads(run("nvme", "smart-log", controller.device, "-o", "json"))["critical_warning"] == 0
    run("nvme", "error-log", controller.device)
    run("nvme", "ns-descs", controller.device, "-n", "1")
    run("nvme", "get-feature", controller.device, "-f", "7")
    controller.disconnect()


@pytest.mark.parametrize(
    "digests",
    [
        pytest.param(False, id="plain"),
        # The next test has large commands with digests each time.
        pytest.param(True, id="digests", marks=pytest.mark.nightly),
    ],
)
def test_a_file_system(enclosure: RunningEnclosure, digests: bool, mount_point: Path) -> None:
    keep_files(enclosure.connect(digests=digests), mount_point)


@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_large_and_odd_commands(enclosure: RunningEnclosure, digests: bool, tmp_path: Path) -> None:
    controller = enclosure.connect(digests=digests)
    device = controller.wait_for_namespace(1)
    content = command_largely_and_oddly(device, tmp_path)
    run("blkdiscard", "--zeroout", "--offset", "8192", "--length", "65536", device)
    assert read_directly(device, 24) == content[:8192] + bytes(65536) + content[8192 + 65536 : 24 * 4096]
    run("blkdiscard", "--force", "--offset", "0", "--length", str(MEBIBYTE), device)
    run("blockdev", "--flushbufs", device)
    assert read_directly(device, 1, skip=256) == content[MEBIBYTE : MEBIBYTE + 4096]
    controller.disconnect()


def test_drives_come_and_go(enclosure: RunningEnclosure) -> None:
    controller = enclosure.connect()
    first = controller.wait_for_namespace(1)
    fresh = ask(enclosure.control, "add", size=8 * MEBIBYTE)
    second = controller.wait_for_namespace(2)
    content = os.urandom(4096)
    write_directly(second, content)
    assert read_directly(second, 1) == content, fresh
    ask(enclosure.control, "remove", drive=1)
    controller.wait_for_no_namespace(2)
    assert controller.state == "live"
    assert len(read_directly(first, 1)) == 4096
    ask(enclosure.control, "add", drive=1)
    assert read_directly(controller.wait_for_namespace(2), 1) == content
    ask(enclosure.control, "remove", drive=1)
    controller.wait_for_no_namespace(2)


def test_a_reset_brings_the_controller_back(enclosure: RunningEnclosure) -> None:
    controller = enclosure.connect("--keep-alive-tmo=2")
    device = controller.wait_for_namespace(1)
    before = read_directly(device, 4)
    run("nvme", "reset", controller.device)
    controller.wait_for_state("live")
    assert read_directly(device, 4) == before


def test_an_error_status_is_an_error_to_the_reader(enclosure: RunningEnclosure) -> None:
    read_an_error(enclosure)


def test_wrong_names_are_refused(enclosure: RunningEnclosure, processes: Processes, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="connect"):
        kernel_host.connect("nqn.2026-01.lab:another", enclosure.port)
    closed = start_enclosure(processes, tmp_path, "--name", "closed", "--allow-host", kernel_host.HOST_NQN)
    with pytest.raises(AssertionError, match="connect"):
        kernel_host.connect(closed.nqn, closed.port, host_nqn="nqn.2026-01.lab:stranger")
    closed.connect().disconnect()


def test_the_kernel_finds_a_killed_enclosure_again(processes: Processes, tmp_path: Path) -> None:
    options = ("--folder", tmp_path / "drives", "--name", "mortal")
    first = start_enclosure(processes, tmp_path, *options)
    again = ("--port", str(first.port))
    find_again(first, signal.SIGKILL, lambda: start_enclosure(processes, tmp_path, *options, *again))
