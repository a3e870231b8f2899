"""What `g35 run` and `g35 bench` work in: gone at the end, and after a `kill -9` with the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.temporary_folder import KeptFolder, temporary_folder
from agent.fs.doors.mounting import is_mounted
from tests.support.fs.mounted import mounted
from tests.support.needs import needs_mount_as_root

OWNER = """
import sys, threading
from agent.cli.temporary_folder import temporary_folder
from tests.support.fs.mounted import mounted
with temporary_folder(sys.argv[1]) as folder, mounted("dev_fuse", folder / "mnt"):
    (folder / "file").write_text("left behind")
    print(folder, flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return "g35-test-"


def test_the_folder_is_there_and_then_gone(prefix: str) -> None:
    with temporary_folder(prefix) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_a_folder_whose_logs_explain_an_error_stays_until_the_next_start(prefix: str) -> None:
    def fail(folder: Path) -> None:
        (folder / "agent.log").write_text("error: no room")
        kept.append(folder)
        raise KeptFolder("it did not start")

    kept: list[Path] = []
    with pytest.raises(KeptFolder), temporary_folder(prefix) as folder:
        fail(folder)
    (folder,) = kept
    assert (folder / "agent.log").read_text() == "error: no room"
    with temporary_folder(prefix):
        assert not folder.exists()


def test_a_folder_in_use_is_left_alone(prefix: str) -> None:
    with temporary_folder(prefix) as first:
        with temporary_folder(prefix) as second:
            assert first.is_dir()
            assert second != first
        assert first.is_dir()


def test_what_is_not_ours_is_left_alone(prefix: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    (tmp_path / f"{prefix}link").symlink_to(elsewhere)
    (tmp_path / f"{prefix}unlocked").mkdir()
    with temporary_folder(prefix):
        pass
    assert (elsewhere / "owner").exists()
    assert (tmp_path / f"{prefix}unlocked").is_dir(), "without a lock file nobody can say whose it is"


@pytest.mark.expects_log("whose agent is dead")
@needs_mount_as_root
def test_after_a_kill_the_next_start_clears_the_mount_and_the_folder_away(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, prefix], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        left = Path(owner.stdout.readline().strip())
        assert is_mounted(left / "mnt")
        owner.kill()
        owner.wait()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(left / "mnt")
    with temporary_folder(prefix) as folder:
        assert not os.path.lexists(left)
        assert not is_mounted(left / "mnt")
        assert folder.is_dir()
    assert "whose agent is dead" in caplog.text


@pytest.mark.expects_log("stays: .* already mounted")
@needs_mount_as_root
def test_a_mount_that_is_alive_stays_with_its_folder(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / f"{prefix}left"
    left.mkdir()
    (left / "owner").touch()
    with mounted("dev_fuse", left / "mnt"):
        with temporary_folder(prefix):
            assert is_mounted(left / "mnt")
        assert "stays" in caplog.text
    with temporary_folder(prefix):
        assert not left.exists()
