"""The provider of verbs is imported before enclosures are waited for: a slow machine takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from agent.attach import connect
from agent.config.configuration import Configuration
from agent.remote.supervisor import Supervisor
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.rdma import open_controller
from nvmeof.transport.verbs_provider import VerbsUnavailable

PROVIDER = "emulator.roce.pyverbs"
PATH = {"name": "a", "address": "127.0.0.1", "port": 4420}


def configured(state: Path, table: str, transport: str) -> Configuration:
    way = PATH | {"transport": transport}
    if table == "enclosures":
        way["nqn"] = "nqn.2014-08.org.nvmexpress:a"
    return Configuration.model_validate(
        {
            "fabric": {"verbs_provider": PROVIDER},
            "agent": {"mount": str(state / "mount"), "state": str(state), "key_file": str(state / "key")},
            table: [way],
        }
    )


def what_is_done(configuration: Configuration, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def load(name: str) -> None:
        done.append(f"load {name}")
        raise VerbsUnavailable("no such thing")  # said when the enclosure is tried

    async def run(self: Supervisor) -> None:
        done.append("run")

    async def all_tried(self: Supervisor, seconds: float) -> None:
        done.append("wait")

    monkeypatch.setattr(connect, "load_verbs", load)
    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(Supervisor, "all_tried", all_tried)

    async def main() -> None:
        async with connect.connected(configuration, 1):
            done.append("connected")

    trio.run(main)
    return done


@pytest.mark.parametrize("table", ["enclosures", "discovery"])
@pytest.mark.parametrize(("transport", "loads"), [("rdma", [f"load {PROVIDER}"]), ("tcp", [])])
def test_it_is_imported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, transport: str, loads: list[str]
) -> None:
    done = what_is_done(configured(tmp_path, table, transport), monkeypatch)
    assert done[: len(loads)] == loads
    assert sorted(done[len(loads) :]) == ["connected", "run", "wait"]


def test_it_is_imported_before_the_time_to_connect_begins() -> None:
    """That time runs from the start of the block, which this test does not enter."""
    with pytest.raises(VerbsUnavailable):
        open_controller("127.0.0.1", 4420, "nqn.a", "nqn.b", bytes(16), verbs=VerbsChoice("no_such_verbs"))
