"""The kernel's NVMe/TCP host against our enclosure: a process of its own, over the guest's loopback."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.jbof.control_client import ask
from tests.support.lab import kernel_host
from tests.support.lab.kernel_host import run
from tests.support.lab.lab_enclosure import (
    DRIVE_BYTES,
    MEBIBYTE,
    RunningEnclosure,
    read_directly,
    start_enclosure,
    write_directly,
)
from tests.support.processes import Processes
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def enclosure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEnclosure]:
    """One enclosure for the tests that leave it as it was: starting it is the slowest step."""
    folder = tmp_path_factory.mktemp("enclosure")
    processes = Processes(folder)
    try:
        yield start_enclosure(processes, folder)
    finally:
        processes.end_all()


@pytest.fixture(autouse=True)
def _disconnected() -> Iterator[None]:
    yield
    kernel_host.disconnect_all()


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        run("umount", "--lazy", folder)


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
    controller = enclosure.connect(digests=digests)
    device = controller.wait_for_namespace(1)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", device)
    run("mount", device, mount_point)
    sums = {}
    for number, size in enumerate((0, 1, 4096, 100_000, 3 * MEBIBYTE)):
        content = os.urandom(size)
        (mount_point / f"file-{number}").write_bytes(content)
        sums[f"file-{number}"] = hashlib.sha256(content).hexdigest()
    run("sync")
    kernel_host.drop_caches()
    assert {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in mount_point.iterdir()
        if file.is_file()
    } == sums
    run("umount", mount_point)
    run("e2fsck", "-f", "-n", device)
    controller.disconnect()
    assert not device.exists()


@pytest.mark.parametrize("digests", [False, True], ids=["plain", "digests"])
def test_large_and_odd_commands(enclosure: RunningEnclosure, digests: bool, tmp_path: Path) -> None:
    controller = enclosure.connect(digests=digests)
    device = controller.wait_for_namespace(1)
    content = os.urandom(2 * MEBIBYTE)
    write_directly(device, content)
    assert read_directly(device, 512) == content
    assert read_directly(device, 3, skip=5) == content[5 * 4096 : 8 * 4096]

    file = tmp_path / "block"
    file.write_bytes(content[:4096])
    compare = ("nvme", "compare", device, "-s", "0", "-c", "0", "-z", "4096", "-d", file)
    run(*compare)
    file.write_bytes(content[:4095] + bytes([content[4095] ^ 1]))
    with pytest.raises(AssertionError, match=r"(?i)compare"):
        run(*compare)

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
    controller = enclosure.connect()
    device = controller.wait_for_namespace(1)
    ask(enclosure.control, "error", status="unrecovered_read_error", operations=["read"], do_not_retry=True)
    try:
        with pytest.raises(AssertionError, match="No data available"):
            read_directly(device, 1)
    finally:
        ask(enclosure.control, "heal")
    assert len(read_directly(device, 1)) == 4096


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
    controller = first.connect("--reconnect-delay=1", "--ctrl-loss-tmo=120", "--keep-alive-tmo=5")
    device = controller.wait_for_namespace(1)
    content = os.urandom(MEBIBYTE)
    write_directly(device, content)
    first.process.stop(how=signal.SIGKILL)
    wait_until(lambda: controller.state != "live", 240, "the kernel to notice")

    second = start_enclosure(processes, tmp_path, *options, "--port", str(first.port))
    assert second.nqn == first.nqn
    controller.wait_for_state("live", 90)
    assert read_directly(controller.wait_for_namespace(1), 256) == content
    controller.disconnect()
