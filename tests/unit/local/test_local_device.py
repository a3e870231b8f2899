"""Which devices become local namespaces, and which are left alone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from agent.config.local_section import LocalSection
from agent.errors import G35Error, UserError
from agent.local import device as device_module
from agent.local.device import DeviceInUse, open_device, read_label, same_device
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
    assert device_module._loop_device(tmp_path / "ssd", tmp_path) == "/dev/loop3"
    assert device_module._loop_device(tmp_path / "other", tmp_path) is None


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
