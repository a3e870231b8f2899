"""`g35 up --transport rdma`: addresses of devices, and the configuration that is written for the agent."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from agent.cli.up import rdma_addresses
from agent.cli.up.agent_toml import agent_toml
from agent.cli.up.layout import Layout
from agent.cli.up.rdma_addresses import free_address_from
from agent.cli.up.up_arguments import UpOptions
from agent.config.configuration import parse_configuration
from agent.errors import ConfigError, G35Error
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.verbs_provider import ROCE_PORT, VerbsUnavailable

OPTIONS = UpOptions("rdma", workers=2, read_deadline_ms=50.0)
READY = {"address": "127.9.8.7", "port": 4420, "nqn": "nqn.2026-01.io.g35:jbof-0"}


def test_an_address_is_kept_as_long_as_it_is_free(tmp_path: Path) -> None:
    file = tmp_path / "jbof-0.address"
    first = free_address_from(file)
    assert first.startswith("127.")
    assert free_address_from(file) == first
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((first, ROCE_PORT))
        second = free_address_from(file)
    assert second != first
    assert file.read_text() == f"{second}\n"
    file.write_text("nonsense")
    assert free_address_from(file).startswith("127.")


def test_no_address_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise VerbsUnavailable("taken")

    monkeypatch.setattr(rdma_addresses, "free_loopback_address", none)
    with pytest.raises(G35Error):
        free_address_from(tmp_path / "a")


def test_what_the_agent_is_told(tmp_path: Path) -> None:
    text = agent_toml(Layout(tmp_path), tmp_path, [READY], OPTIONS)
    configuration = parse_configuration(tomllib.loads(text), "up")
    [enclosure] = configuration.enclosures
    assert (enclosure.transport, enclosure.address, enclosure.port) == ("rdma", "127.9.8.7", 4420)
    assert configuration.fabric.choice == VerbsChoice("emulator.roce.pyverbs")


def test_a_provider_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    text = agent_toml(Layout(tmp_path), tmp_path, [READY], OPTIONS)
    document = tomllib.loads(text)
    document["fabric"]["verbs_provider"] = "os"
    with pytest.raises(ConfigError, match=r"fabric\.verbs_provider"):
        parse_configuration(document, "up")
    del document["fabric"]
    assert parse_configuration(document, "up").fabric.choice == VerbsChoice("pyverbs")
