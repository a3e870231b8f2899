"""Which devices become local namespaces, and which are left alone."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.local_section import LocalSection
from agent.errors import G35Error, UserError
from agent.host_os.block_devices import is_device_folder, loop_over
from agent.local import device as device_module
from agent.local.device import (
    Device,
    DeviceInUse,
    DeviceMissing,
    NotMade,
    open_device,
    read_label,
    same_device,
)
from agent.local.label import NAMESPACE_START

MIB = 1 << 20


def section(path: Path, **keys: object) -> LocalSection:
    return LocalSection.model_validate({"path": path, **keys})


def blank(path: Path, size: int = 8 * MIB) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_blank_file_gets_a_name_and_keeps_it(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd")
    first = open_device(section(path))
    first.close()
    again = open_device(section(path))
    assert (again.label, again.label.size) == (first.label, 7 * MIB)
    again.close()
    assert read_label(path) == first.label
    path.rename(tmp_path / "moved")
    assert read_label(tmp_path / "moved") == first.label


def test_a_file_is_made_where_a_size_says_how_large(tmp_path: Path) -> None:
    device = open_device(section(tmp_path / "new", size="16M"))
    assert device.label.size == 15 * MIB
    device.close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="does not exist"):
        open_device(section(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_part_of_a_file_is_used_and_stays_that_part(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd", 32 * MIB)
    open_device(section(path, size="8M")).close()
    device = open_device(section(path))
    assert device.label.size == 7 * MIB
    device.close()
    with pytest.raises(UserError, match="was made with size"):
        open_device(section(path, size="16M"))


@pytest.mark.parametrize("head", [b"\x7fELF", b"g35local" + bytes(100) + b"x"])
def test_other_data_are_left_as_they_are(tmp_path: Path, head: bytes) -> None:
    path = blank(tmp_path / "ssd")
    with path.open("r+b") as file:
        file.write(head)
    before = path.read_bytes()
    with pytest.raises(UserError, match="it was not touched"):
        open_device(section(path))
    assert path.read_bytes() == before


def test_data_behind_a_blank_first_block_are_found(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd")
    with path.open("r+b") as file:
        file.seek(NAMESPACE_START - 1)
        file.write(b"x")
    with pytest.raises(UserError, match="not blank"):
        open_device(section(path))


def test_what_is_no_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        open_device(section(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a block device nor a file"):
        open_device(section(tmp_path / "pipe"))
    with pytest.raises(UserError, match="too few"):
        open_device(section(blank(tmp_path / "small", 2 * MIB)))
    with pytest.raises(UserError, match="`size` says"):
        open_device(section(blank(tmp_path / "short", 4 * MIB), size="8M"))
    assert not any((tmp_path / "short").read_bytes())


def test_a_device_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd")
    open_device(section(path)).close()
    os.truncate(path, 4 * MIB)
    with pytest.raises(UserError, match="cut short"):
        open_device(section(path))


def test_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd")
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeviceInUse, match="another process uses"):
            open_device(section(path))
    first = open_device(section(path))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DeviceInUse):
        open_device(section(tmp_path / "link"))
    first.close()


def test_the_file_behind_a_loop_device_is_in_use(tmp_path: Path) -> None:
    backing = tmp_path / "block/loop3/loop/backing_file"
    backing.parent.mkdir(parents=True)
    backing.write_text(f"{tmp_path}/ssd\n")
    found = blank(tmp_path / "ssd").stat()
    assert loop_over(tmp_path / "ssd", found, tmp_path, tmp_path) == "/dev/loop3"
    assert loop_over(tmp_path / "other", found, tmp_path, tmp_path) is None


def test_one_device_by_two_names_is_noticed(tmp_path: Path) -> None:
    path = blank(tmp_path / "ssd")
    (tmp_path / "hard").hardlink_to(path)
    (tmp_path / "soft").symlink_to(path)
    other = blank(tmp_path / "other")
    assert same_device([path, other, tmp_path / "none"]) is None
    assert same_device([path, other, tmp_path / "hard"]) == (path, tmp_path / "hard")
    assert same_device([tmp_path / "soft", path]) == (tmp_path / "soft", path)


def test_without_direct_io_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = blank(tmp_path / "ssd"), os.open

    def refuse(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(str(path), flags, *mode)

    monkeypatch.setattr(device_module.os, "open", refuse)
    device = open_device(section(path))
    assert not device.is_direct
    device.close()


def test_a_label_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(G35Error, match="no local namespace"):
        read_label(blank(tmp_path / "ssd"))
    with pytest.raises(G35Error, match="No such file"):
        read_label(tmp_path / "none")


def test_what_cannot_be_read_is_not_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = blank(tmp_path / "ssd"), os.pread
    with path.open("r+b") as file:
        file.seek(65536)
        file.write(b"somebody's data")
    before = path.read_bytes()

    def short(descriptor: int, length: int, offset: int) -> bytes:
        """As Linux reads a device with a bad sector: what lies before it, and then an error."""
        if offset >= 32768:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, min(length, 32768 - offset), offset)

    monkeypatch.setattr(device_module.os, "pread", short)
    with pytest.raises(G35Error, match="Input/output error"):
        open_device(section(path))
    monkeypatch.setattr(
        device_module.os, "pread", lambda fd, length, at: real(fd, min(length, 32768), 0)[at:]
    )
    with pytest.raises(G35Error, match="no more than 32768 are read"):
        open_device(section(path))
    assert path.read_bytes() == before


def test_no_file_is_made_among_devices(tmp_path: Path) -> None:
    assert is_device_folder(tmp_path / "dev/mapper", devices=tmp_path / "dev")
    assert not is_device_folder(tmp_path, devices=tmp_path / "dev")
    number = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    line = f"21 1 {os.major(number)}:{os.minor(number)} / /x rw shared:2 - devtmpfs udev rw\n"
    mounts.write_text(line)
    assert is_device_folder(tmp_path, mounts=mounts)
    mounts.write_text(line.replace("devtmpfs", "ext4"))
    assert not is_device_folder(tmp_path, mounts=mounts)


def test_a_device_that_is_away_is_replaced_by_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "is_device_folder", lambda folder: folder == tmp_path)
    with pytest.raises(DeviceMissing, match="does not exist"):
        open_device(section(tmp_path / "nvme9n1", size="8M"))
    assert not any(tmp_path.iterdir())


def test_a_namespace_that_is_gone_is_replaced_by_no_new_one(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    device = open_device(section(path, size="8M"))
    device.close()
    had = device.label.nguid.hex()
    os.truncate(path, 0)
    with pytest.raises(UserError, match=f"had local namespace {had}: it is empty") as said:
        open_device(section(path, size="8M"), had)
    assert "local_labels.json" in said.value.advice
    path.unlink()
    with pytest.raises(DeviceMissing, match="it is gone"):
        open_device(section(path, size="8M"), had)
    assert not path.exists()
    other = open_device(section(path, size="8M"))
    other.close()
    open_device(section(path, size="8M"), had).close()  # another SSD that has a label of its own


def test_a_start_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few"):
        open_device(section(tmp_path / "new", size="2M"))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(DeviceMissing, match="a link to nothing"):
        open_device(section(tmp_path / "link", size="8M"))
    assert [each.name for each in tmp_path.iterdir()] == ["link"]


def test_a_verb_makes_and_labels_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotMade, match="not made yet"):
        open_device(section(tmp_path / "new", size="8M"), make=False)
    path = blank(tmp_path / "ssd")
    with pytest.raises(NotMade, match="no namespace yet"):
        open_device(section(path), make=False)
    assert not any(path.read_bytes())
    assert [each.name for each in tmp_path.iterdir()] == ["ssd"]


class Race:
    """What others do between our open and our lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        real, self.descriptors = fcntl.flock, list[int]()

        def flock(descriptor: int, how: int) -> None:
            self.descriptors.append(descriptor)
            if len(self.descriptors) == 1:
                meanwhile()
            real(descriptor, how)

        monkeypatch.setattr(device_module.fcntl, "flock", flock)


def test_a_file_that_another_agent_has_by_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents begin with one path. One makes the file, and the other one has its lock."""
    path, others = tmp_path / "ssd", list[Device]()
    Race(monkeypatch, lambda: others.append(open_device(section(path, size="8M"))))
    with pytest.raises(DeviceInUse):
        open_device(section(path, size="8M"))
    assert read_label(path) == others[0].label
    others[0].close()


def test_a_file_without_a_name_gets_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values would be gone with the agent."""
    path = blank(tmp_path / "ssd")
    with path.open("rb") as before:
        Race(monkeypatch, path.unlink)
        with pytest.raises(G35Error, match="was replaced while it was opened"):
            open_device(section(path))
        assert not any(before.read())
    assert not path.exists()

    def replace() -> None:
        path.unlink()
        blank(path)

    blank(path)
    Race(monkeypatch, replace)
    with pytest.raises(G35Error, match="was replaced while it was opened"):
        open_device(section(path))
    assert not any(path.read_bytes())
