"""What the kernel's host does with an enclosure of ours, over whichever transport."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from emulator.jbof.control_client import ask
from tests.support.lab.kernel_host import KernelController, drop_caches, run
from tests.support.lab.lab_enclosure import MEBIBYTE, RunningEnclosure, read_directly, write_directly
from tests.support.waiting import wait_until


def keep_files(controller: KernelController, mount_point: Path) -> None:
    """A file system on namespace 1, and files that are read back; then the controller is disconnected."""
    device = controller.wait_for_namespace(1)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", device)
    run("mount", device, mount_point)
    sums = {}
    for number, size in enumerate((0, 1, 4096, 100_000, 3 * MEBIBYTE)):
        content = os.urandom(size)
        (mount_point / f"file-{number}").write_bytes(content)
        sums[f"file-{number}"] = hashlib.sha256(content).hexdigest()
    run("sync")
    drop_caches()
    assert {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in mount_point.iterdir()
        if file.is_file()
    } == sums
    run("umount", mount_point)
    run("e2fsck", "-f", "-n", device)
    controller.disconnect()
    assert not device.exists()


def command_largely_and_oddly(device: Path, folder: Path) -> bytes:
    """Commands of 2 MiB, of odd places, and compares; the 2 MiB that lie there now."""
    content = os.urandom(2 * MEBIBYTE)
    write_directly(device, content)
    assert read_directly(device, 512) == content
    assert read_directly(device, 3, skip=5) == content[5 * 4096 : 8 * 4096]

    file = folder / "block"
    file.write_bytes(content[:4096])
    compare = ("nvme", "compare", device, "-s", "0", "-c", "0", "-z", "4096", "-d", file)
    run(*compare)
    file.write_bytes(content[:4095] + bytes([content[4095] ^ 1]))
    with pytest.raises(AssertionError, match=r"(?i)compare"):
        run(*compare)
    return content


def read_an_error(enclosure: RunningEnclosure) -> None:
    """An error status is an error to who reads the disk, and no more once it is healed."""
    device = enclosure.connect().wait_for_namespace(1)
    ask(enclosure.control, "error", status="unrecovered_read_error", operations=["read"], do_not_retry=True)
    try:
        with pytest.raises(AssertionError, match="No data available"):
            read_directly(device, 1)
    finally:
        ask(enclosure.control, "heal")
    assert len(read_directly(device, 1)) == 4096


def find_again(
    first: RunningEnclosure, how: signal.Signals, start_again: Callable[[], RunningEnclosure]
) -> None:
    """An enclosure ends and is started again: the kernel's controller comes back to it, and what was written
    is there."""
    controller = first.connect("--reconnect-delay=1", "--ctrl-loss-tmo=600", "--keep-alive-tmo=5")
    content = os.urandom(MEBIBYTE)
    write_directly(controller.wait_for_namespace(1), content)
    first.process.stop(60, how)
    wait_until(lambda: controller.state != "live", 240, "the kernel to notice")

    assert start_again().nqn == first.nqn
    controller.wait_for_state("live")
    assert read_directly(controller.wait_for_namespace(1), 256) == content
    controller.disconnect()
