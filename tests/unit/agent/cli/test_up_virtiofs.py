"""`g35 up --virtiofs` and `g35 host`, which do not import each other, agree where the device listens."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from agent.cli.up.agent_toml import agent_toml
from agent.cli.up.layout import Layout, default_state
from agent.cli.up.up_arguments import UpOptions
from agent.config.configuration import parse_configuration
from emulator.lab.host_cli import default_socket, socket_of

OPTIONS = UpOptions(virtiofs=True)
READY = {"address": "127.0.0.1", "port": 4420, "nqn": "nqn.2026-01.io.g35:jbof-0"}


def test_the_socket_that_is_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.configuration.write_text(agent_toml(layout, tmp_path / "mnt", [READY], OPTIONS))
    configuration = parse_configuration(tomllib.loads(layout.configuration.read_text()), "up")
    assert [device.socket for device in configuration.virtiofs] == [layout.virtiofs_socket]
    assert socket_of(layout.configuration) == layout.virtiofs_socket
    none = agent_toml(layout, tmp_path / "mnt", [READY], replace(OPTIONS, virtiofs=False))
    assert not parse_configuration(tomllib.loads(none), "up").virtiofs


@pytest.mark.parametrize("base", ["/somewhere/else", ""])
def test_the_default_is_the_same(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", base)
    assert default_socket() == Layout(default_state()).virtiofs_socket


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[agent]", "names no socket"),
        ("virtiofs = 3", "names no socket"),
        ("not toml", "is no TOML"),
        ('[[virtiofs]]\nsocket = "/a"\n[[virtiofs]]\nsocket = "/b"', "has /a, /b: choose one by --socket"),
    ],
)
def test_a_configuration_that_does_not_say_which(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(text)
    with pytest.raises(typer.BadParameter, match=why):
        socket_of(file)
    with pytest.raises(typer.BadParameter, match="No such file"):
        socket_of(tmp_path / "none")
