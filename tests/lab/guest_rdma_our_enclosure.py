"""The kernel's NVMe/RDMA host, on rxe, against our enclosure on the emulator, at the far end of a cable."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

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
    start_at_the_far_end,
    write_directly,
)
from tests.support.lab.rdma_cable import OURS, OURS_TOO, Cable
from tests.support.processes import Processes

pytestmark = pytest.mark.usefixtures("disconnected")


@pytest.fixture(scope="module")
def enclosure(
    cable: Cable, module_processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> RunningEnclosure:
    """One enclosure for the tests that leave it as it was."""
    return start_at_the_far_end(module_processes, tmp_path_factory.mktemp("rdma-enclosure"))


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
    keep_files(enclosure.connect(), mount_point)


def test_large_and_odd_commands(enclosure: RunningEnclosure, tmp_path: Path) -> None:
    controller = enclosure.connect()
    command_largely_and_oddly(controller.wait_for_namespace(1), tmp_path)
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
    read_an_error(enclosure)


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

    def start() -> RunningEnclosure:
        # Nobody at all at that address would cost the kernel a minute for each of its tries.
        return start_at_the_far_end(processes, tmp_path, *options, address=OURS_TOO)

    find_again(start(), how, start)
