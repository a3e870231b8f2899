"""The kernel's NVMe/RDMA host, on rxe, against our enclosure on the emulator, at the far end of a cable."""

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
from tests.support.lab.rdma_cable import OURS, OURS_TOO, Cable, inside
from tests.support.processes import Processes
from tests.support.waiting import wait_until


def start_at_the_far_end(
    processes: Processes, folder: Path, *options: str | Path, address: str = OURS
) -> RunningEnclosure:
    with inside():
        return start_enclosure(processes, folder, "--transport", "rdma", "--address", address, *options)


@pytest.fixture(scope="module")
def enclosure(cable: Cable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEnclosure]:
    """One enclosure for the tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("rdma-enclosure")
    processes = Processes(folder)
    try:
        yield start_at_the_far_end(processes, folder)
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
    records = kernel_host.discover(enclosure.port, OURS, "rdma")
    found = {record["subnqn"]: record for record in records}[enclosure.nqn]
    assert (found["trtype"], found["subtype"]) == ("rdma", "nvme subsystem")
    assert (found["traddr"], found["trsvcid"]) == (OURS, str(enclosure.port))
    assert (found["rdma_qptype"], found["rdma_prtype"], found["rdma_cms"]) == (
        "connected",
        "roce-v2",
        "rdma-cm",
    )


def test_identify(enclosure: RunningEnclosure) -> None:
    controller = enclosure.connect()
    fields = controller.identify()
    assert fields["subnqn"] == enclosure.nqn
    assert fields["sgls"] & 0x4, "keyed SGLs"
    device = controller.wait_for_namespace(1)
    assert controller.identify_namespace(1)["nsze"] * 4096 == DRIVE_BYTES
    assert int(run("blockdev", "--getsize64", device)) == DRIVE_BYTES
    assert json.loads(run("nvme", "smart-log", controller.device, "-o", "json"))["critical_warning"] == 0
    controller.disconnect()


def test_a_file_system(enclosure: RunningEnclosure, mount_point: Path) -> None:
    controller = enclosure.connect()
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


def test_large_and_odd_commands(enclosure: RunningEnclosure, tmp_path: Path) -> None:
    controller = enclosure.connect()
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
    controller.disconnect()


def test_over_a_cable_that_loses(cable: Cable, enclosure: RunningEnclosure) -> None:
    # The kernel sends what was lost again after some 2 s. Two losses in turn nearly fill its usual 5 s of
    # keep-alive, and how it connects anew is for other tests.
    controller = enclosure.connect("--keep-alive-tmo=60")
    device = controller.wait_for_namespace(1)
    content = os.urandom(MEBIBYTE)
    with cable.weather("loss", "0.3%"):
        for _ in range(2):
            write_directly(device, content)
            assert read_directly(device, 256) == content
    assert controller.state == "live"
    controller.disconnect()


def test_a_reset_brings_the_controller_back(enclosure: RunningEnclosure) -> None:
    controller = enclosure.connect("--keep-alive-tmo=2")
    device = controller.wait_for_namespace(1)
    content = os.urandom(MEBIBYTE)
    write_directly(device, content)
    run("nvme", "reset", controller.device)
    controller.wait_for_state("live")
    assert read_directly(device, 256) == content
    controller.disconnect()


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


def test_wrong_names_are_refused(enclosure: RunningEnclosure) -> None:
    with pytest.raises(AssertionError, match="connect"):
        kernel_host.connect("nqn.2026-01.lab:another", enclosure.port, address=OURS, transport="rdma")
    with pytest.raises(AssertionError, match="connect"):
        kernel_host.connect(enclosure.nqn, enclosure.port + 1, address=OURS, transport="rdma")
    enclosure.connect().disconnect()


@pytest.mark.parametrize(
    "how",
    [
        # To the kernel a killed enclosure is the harder case: nothing tells it.
        pytest.param(signal.SIGTERM, id="asked to end", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_the_kernel_finds_an_enclosure_again(
    cable: Cable, processes: Processes, tmp_path: Path, how: signal.Signals
) -> None:
    options = ("--folder", tmp_path / "drives", "--name", "mortal")
    first = start_at_the_far_end(processes, tmp_path, *options, address=OURS_TOO)
    controller = first.connect("--reconnect-delay=1", "--ctrl-loss-tmo=120", "--keep-alive-tmo=5")
    device = controller.wait_for_namespace(1)
    content = os.urandom(MEBIBYTE)
    write_directly(device, content)
    first.process.stop(60, how)
    wait_until(lambda: controller.state != "live", 240, "the kernel to notice")

    # Nobody at all at that address would cost the kernel a minute for each of its tries.
    second = start_at_the_far_end(processes, tmp_path, *options, address=OURS_TOO)
    assert second.nqn == first.nqn
    controller.wait_for_state("live", 90)
    assert read_directly(controller.wait_for_namespace(1), 256) == content
    controller.disconnect()
