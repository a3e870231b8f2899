"""A state folder that is another user's, cannot be made, or lies on a full disk: the words for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.cli import main as command_line
from agent.cli.up import down_verb, folder_trouble, layout, up_verb  # noqa: F401  (loaded while still root)
from agent.cli.up.folder_trouble import told_of_full_disk, told_of_owner
from agent.errors import G35Error, UserError
from tests.support.needs import needs_root

NOBODY = 65534


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@needs_root
@pytest.mark.parametrize("verb", ["up", "status", "down"])
@pytest.mark.parametrize("below", ["state", "there/is/none"])
def test_the_folder_of_another_user_is_said_to_be_theirs(
    tmp_path: Path, as_nobody: None, capsys: pytest.CaptureFixture[str], verb: str, below: str
) -> None:
    assert command_line.main([verb, "--state", str(tmp_path / below)]) == 1
    said = capsys.readouterr().err
    assert "is a folder of user root" in said
    assert "--state takes another folder" in said


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    home = tmp_path / ".local"
    for number, words in ((errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")):
        with pytest.raises(UserError) as told, told_of_owner(home / "state/g35"):
            raise OSError(number, words, str(home))
        assert str(told.value) == f"cannot make the state folder {home}/state/g35: {home}: {words}"
        assert told.value.advice == "--state takes another folder"


def test_a_user_without_a_home_is_told_of_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert command_line.main(["up"]) == 1
    assert "--state takes the folder" in capsys.readouterr().err


def test_an_error_about_another_place_stays_as_it_is(tmp_path: Path) -> None:
    for name in (None, "/another/place"):
        with pytest.raises(PermissionError), told_of_owner(tmp_path / "state"):
            raise PermissionError(errno.EACCES, "Permission denied", name)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = f"the disk that has {tmp_path} is full"
    with pytest.raises(G35Error) as told, told_of_full_disk(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(told.value) == full
    silent = "enclosure jbof-0 did not start: it ended with status 1: it said nothing"
    with pytest.raises(G35Error) as told, told_of_full_disk(tmp_path):
        raise G35Error(silent)
    assert str(told.value) == silent, "there is room"

    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2, f_frsize=4096))
    with pytest.raises(G35Error) as told, told_of_full_disk(tmp_path), told_of_full_disk(tmp_path):
        raise G35Error(silent)
    assert str(told.value) == f"{full}: {silent}", "once"
    assert "make some room" in told.value.advice
