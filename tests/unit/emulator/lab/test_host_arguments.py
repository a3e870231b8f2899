"""What `g35 host` is asked for and cannot be: said before anything boots."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import typer

from emulator.lab.cli import FOLDER_HELP, OF_THE_GUEST, checked_folder, hiding_folder, start_folder
from emulator.lab.device_socket import NoDeviceError, cannot_connect, require_socket
from emulator.lab.host_cli import socket_of

REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("path", "checkout", "hidden_by"),
    [
        ("/tmp/x", "/work/main", "/tmp"),
        ("/var/tmp/x/y", "/work/main", "/var/tmp"),
        ("/run/user/0", "/work/main", "/run"),
        ("/tmp", "/work/main", ""),
        ("/tmpx/y", "/work/main", ""),
        ("/home/x", "/work/main", ""),
        ("/tmp/checkout/docs", "/tmp/checkout", ""),
        ("/tmp/other", "/tmp/checkout", "/tmp"),
        ("/run/checkout", "/run/checkout", "/run"),
    ],
)
def test_what_the_guest_sees(path: str, checkout: str, hidden_by: str) -> None:
    assert hiding_folder(Path(path), Path(checkout)) == hidden_by


def test_a_folder_to_start_in(tmp_path: Path) -> None:
    assert start_folder(REPOSITORY / "docs") == REPOSITORY / "docs"
    with pytest.raises(ValueError, match="No such file"):
        start_folder(Path("/nonexistent"))
    with pytest.raises(ValueError, match="is no folder"):
        start_folder(REPOSITORY / "README.md")
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(ValueError, match="ring"):
        start_folder(tmp_path / "ring")


def test_a_link_below_tmp_is_as_hidden_as_what_it_leads_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own/inner").mkdir(parents=True)
    (tmp_path / "seen").mkdir()
    monkeypatch.setattr("emulator.lab.cli.OF_THE_GUEST", (str(tmp_path / "own"),))
    (tmp_path / "own/out").symlink_to(tmp_path / "seen")
    (tmp_path / "in").symlink_to(tmp_path / "own/inner")
    assert start_folder(tmp_path / "seen") == tmp_path / "seen"
    for name in ("own/inner", "own/out", "in"):
        with pytest.raises(ValueError, match="not visible in the guest"):
            start_folder(tmp_path / name)


def test_the_folders_of_the_guest_are_those_that_its_first_process_mounts() -> None:
    script = (REPOSITORY / "emulator/lab/init.sh").read_text()
    for own in OF_THE_GUEST:
        assert f" /root{own}\n" in script


def test_a_wrong_folder_is_a_wrong_argument() -> None:
    with pytest.raises(typer.BadParameter, match="/nonexistent"):
        checked_folder(Path("/nonexistent"))
    assert "/tmp" in FOLDER_HELP


def test_what_is_no_socket(tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with pytest.raises(NoDeviceError, match=r"there is no such socket\n.*g35 up --virtiofs"):
        require_socket(place)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NoDeviceError, match=r"that is no socket\n.*--socket"):
        require_socket(file)
    with pytest.raises(NoDeviceError, match="Not a directory"):
        require_socket(file / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
    require_socket(place)


def test_a_socket_of_somebody_else() -> None:
    said = str(cannot_connect(Path("/s"), PermissionError(13, "Permission denied")))
    assert "Permission denied" in said
    assert "as that user" in said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"# Read me\nno TOML", "is no TOML: "),
        (b"\xff\xfe", "is no TOML: "),
        (b"[pool]\n", "names no socket"),
        (b"virtiofs = 3\n", "names no socket"),
        (b"[virtiofs]\nsocket = 3\n", "names no socket"),
        (b'[[virtiofs]]\nsocket = "/a"\n[[virtiofs]]\nsocket = "/b"\n', "has /a, /b: choose one"),
    ],
)
def test_a_configuration_without_one_socket(tmp_path: Path, content: bytes, why: str) -> None:
    config = tmp_path / "agent.toml"
    config.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=why):
        socket_of(config)
