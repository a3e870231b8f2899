"""A block device of this kernel as a local namespace: a loop device, which only root can make."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.config.local_section import LocalSection
from agent.errors import G35Error, UserError
from agent.local.device import DeviceInUse, open_device, same_device
from agent.local.storage import DeviceStorage
from nvmeof.controller.storage import Scratch, StorageError
from nvmeof.wire.status import Status
from tests.support.needs import why_no_admin, why_no_program

MIB = 1 << 20


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device over a blank file `backing`."""
    if why := why_no_admin() or why_no_program("losetup", "mount"):
        pytest.skip(why)
    with (tmp_path / "backing").open("wb") as file:
        file.truncate(64 * MIB)
    made = subprocess.run(
        ["losetup", "-f", "--show", tmp_path / "backing"], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device ({made.stderr.strip()}): modprobe loop, in a container --privileged")
    path = Path(made.stdout.strip())
    try:
        yield path
    finally:
        subprocess.run(["losetup", "-d", path], check=True)


def test_a_block_device_is_read_and_written_in_place(loop: Path, tmp_path: Path) -> None:
    storage = DeviceStorage(open_device(LocalSection(path=loop)))
    assert storage.device.label.size == 63 * MIB
    payload = os.urandom(MIB)
    storage.write(5 * MIB, memoryview(payload), placed=False)
    storage.write(7 * MIB + 100, memoryview(payload)[:1000], placed=False)
    storage.flush()
    assert storage.read(5 * MIB, MIB, Scratch(MIB)) == payload
    assert bytes(storage.read(7 * MIB, 4096, Scratch(MIB))[100:1100]) == payload[:1000]
    for taken in (loop, tmp_path / "backing"):
        with pytest.raises(DeviceInUse):
            open_device(LocalSection(path=taken))
    storage.close()
    again = open_device(LocalSection(path=loop))
    assert again.label == storage.device.label
    again.close()
    (tmp_path / "alias").symlink_to(loop)
    assert same_device([loop, tmp_path / "alias"]) == (loop, tmp_path / "alias")


def test_a_loop_device_and_its_file_are_one_medium(loop: Path, tmp_path: Path) -> None:
    """By whatever name, and whichever of the two is opened first."""
    (tmp_path / "hard").hardlink_to(tmp_path / "backing")
    device = open_device(LocalSection(path=loop))
    with pytest.raises(DeviceInUse):
        open_device(LocalSection(path=tmp_path / "hard"))
    device.close()
    with pytest.raises(DeviceInUse, match="is the file behind /dev/loop"):
        open_device(LocalSection(path=tmp_path / "hard"))
    with (tmp_path / "backing").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeviceInUse, match="uses the file behind"):
            open_device(LocalSection(path=loop))
    open_device(LocalSection(path=loop)).close()


def test_a_device_without_its_room_is_gone(loop: Path, tmp_path: Path) -> None:
    """As Linux shows one that was pulled."""
    storage = DeviceStorage(open_device(LocalSection(path=loop)))
    assert not storage.is_gone()
    os.truncate(tmp_path / "backing", 0)
    subprocess.run(["losetup", "-c", loop], check=True)
    assert storage.is_gone()
    for action in (
        lambda: storage.read(0, 4096, Scratch(4096)),
        lambda: storage.write(0, memoryview(bytes(4096)), placed=False),
    ):
        with pytest.raises(StorageError) as told:
            action()
        assert told.value.status == Status.NAMESPACE_NOT_READY
    assert storage.close()
    assert not storage.is_gone()


def test_somebodys_data_behind_a_bad_sector_are_left_alone(loop: Path, tmp_path: Path) -> None:
    data = b"somebody's data" * 1000
    with (tmp_path / "backing").open("r+b") as file:
        file.seek(65536)
        file.write(data)
    os.truncate(tmp_path / "backing", 32768)  # from there on, reads of the loop device fail
    with pytest.raises(G35Error, match="Input/output error"):
        open_device(LocalSection(path=loop))
    assert not any((tmp_path / "backing").read_bytes())


def test_a_device_with_a_file_system_is_left_alone_mounted_or_not(loop: Path, tmp_path: Path) -> None:
    if why := why_no_program("mkfs.ext4", "e2fsprogs"):
        pytest.skip(why)
    subprocess.run(["mkfs.ext4", "-q", loop], check=True)
    before = (tmp_path / "backing").read_bytes()
    with pytest.raises(UserError, match="it was not touched"):
        open_device(LocalSection(path=loop))
    assert (tmp_path / "backing").read_bytes() == before
    mount = tmp_path / "mounted"
    mount.mkdir()
    subprocess.run(["mount", loop, mount], check=True)
    try:
        with pytest.raises(DeviceInUse, match="in use: by another agent, mounted"):
            open_device(LocalSection(path=loop))
    finally:
        subprocess.run(["umount", mount], check=True)
