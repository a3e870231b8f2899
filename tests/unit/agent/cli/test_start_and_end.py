"""What a verb says where it cannot start an agent, or may not end one."""

from __future__ import annotations

import dataclasses
import os
import pwd
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.cli import main as command_line
from agent.cli import mount_verb, run_demo
from agent.cli.status_document import DeadMount
from agent.cli.up import up_verb
from agent.cli.up.layout import Layout
from agent.cli.up.up_arguments import UpOptions
from tests.support.verbs_here import status_of


def test_a_state_folder_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for state in (file, file / "below"):
        assert command_line.main(["up", "--state", str(state)]) == 1
        said = capsys.readouterr().err
        assert f"--state {state}: " in said
        assert "is a file, not a folder" in said


def test_the_mount_of_another_user_is_said_to_be_theirs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_pid: int, _signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mount_verb, "read_status", lambda _mount: {"pid": os.getpid()})
    monkeypatch.setattr(os, "kill", kill)
    assert command_line.main(["unmount", "/mnt/a pool"]) == 1
    said = capsys.readouterr().err
    owner = pwd.getpwuid(os.geteuid()).pw_name
    assert f"user {owner} runs the agent behind /mnt/a pool" in said
    assert "sudo g35 unmount '/mnt/a pool'" in said
    for name, who in (("root", "root"), ("somebody", "somebody or as root")):
        monkeypatch.setattr(mount_verb, "user_name", lambda _uid, name=name: name)
        assert command_line.main(["unmount", "/mnt/a pool"]) == 1
        assert f"run this as {who}: sudo" in capsys.readouterr().err


def test_a_dead_mount_is_unmounted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(mount: Path) -> None:
        raise DeadMount(f"{mount} is dead", "umount -l")

    cleared: list[Path] = []
    monkeypatch.setattr(mount_verb, "read_status", read)
    monkeypatch.setattr(mount_verb, "clear_dead_mount", cleared.append)
    assert status_of("unmount", "/mnt/pool") == 0
    assert cleared == [Path("/mnt/pool")]
    assert capsys.readouterr().out == "unmounted /mnt/pool, whose agent had ended already\n"


class _Starting:
    """A process that is not ready yet."""

    pid, returncode = 1, None

    def __init__(self) -> None:
        self.ended = False

    def poll(self) -> None:
        return None


def test_a_mount_that_is_interrupted_leaves_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _Starting()

    def press_ctrl_c(_seconds: float) -> None:
        raise KeyboardInterrupt

    def end(process: _Starting, _seconds: float) -> None:
        process.ended = True

    agent = SimpleNamespace(mount=tmp_path / "mnt", state=tmp_path / "state")
    monkeypatch.setattr(mount_verb, "load_configuration", lambda _path: SimpleNamespace(agent=agent))
    monkeypatch.setattr(mount_verb, "detach", lambda *_words: started)
    monkeypatch.setattr(mount_verb, "end_process", end)
    monkeypatch.setattr(mount_verb.time, "sleep", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        mount_verb.mount(tmp_path / "agent.toml")
    assert started.ended


def test_the_logs_of_a_run_that_did_not_come_up_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; open(sys.argv[1] + '/agent.log', 'w').write('no room')"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_demo, "_g35", lambda *words: [sys.executable, "-c", program, str(words[2])])
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")  # Nothing is mounted: a pool that fails
    assert command_line.main(["run"]) == 1
    said = capsys.readouterr().err
    (log,) = tmp_path.glob("g35-run-*/agent.log")
    assert f"logs stay in {log.parent}" in said
    assert log.read_text() == "no room"


def test_a_run_that_began_no_log_speaks_of_none_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")  # Nothing is mounted: `g35 up` refuses
    assert command_line.main(["run", "--drive-size", "1M"]) == 1
    said = capfd.readouterr().err
    assert "drives of 1M have no room" in said
    assert "logs" not in said
    assert not list(tmp_path.iterdir())


def test_a_detached_pool_gets_every_folder_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts in the root folder, where a path as it was typed names another place."""
    started: list[list[str]] = []

    def detach(command: list[str], log: Path, _keep: tuple[int, ...]) -> object:
        log.write_text("ready\n")
        started.append(command)
        return object()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(up_verb, "detach", detach)
    monkeypatch.setattr(sys, "argv", ["g35", "up", "--detach", "--pcap", "packets", "--state=here"])
    monkeypatch.setenv("G35_UP_LOCK", "")
    monkeypatch.setenv("G35_UP_COMMAND", "")
    layout = Layout(tmp_path / "here")
    layout.make_folder()
    up_verb._detached(layout, layout.take_lock(), {"--pcap": Path("packets")}, threading.Event())
    assert started[0][-3:] == ["--state=here", "--pcap", str(tmp_path / "packets")]


def test_every_option_that_is_a_path_is_among_them(tmp_path: Path) -> None:
    is_path = {field.name for field in dataclasses.fields(UpOptions) if "Path" in str(field.type)}
    assert is_path >= {"mount", "state", "local", "spill", "pcap"}
    options = UpOptions(**{name: Path(name) for name in is_path})
    layout = Layout(tmp_path)
    paths = {f"--{name}": Path(name) for name in is_path} | {"--state": layout.state}
    assert up_verb._paths_of(options, layout) == paths
