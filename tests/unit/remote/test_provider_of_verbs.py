"""The provider of verbs is imported before enclosures are waited for: a slow machine takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from agent.attach import connect
from agent.config.configuration import Configuration
from agent.remote.supervisor import Supervisor
from nvmeof.transport.verbs_provider import VerbsUnavailable


def configured(state: Path, transport: str) -> Configuration:
    return Configuration.model_validate(
        {
            "fabric": {"verbs_provider": "emulator.roce.pyverbs"},
            "agent": {"mount": str(state / "mount"), "state": str(state), "key_file": str(state / "key")},
            "enclosures": [
                {
                    "name": "a",
                    "transport": transport,
                    "address": "127.0.0.1",
                    "port": 4420,
                    "nqn": "nqn.2014-08.org.nvmexpress:a",
                }
            ],
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


@pytest.mark.parametrize(("transport", "loads"), [("rdma", ["load emulator.roce.pyverbs"]), ("tcp", [])])
def test_it_is_imported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, loads: list[str]
) -> None:
    done = what_is_done(configured(tmp_path, transport), monkeypatch)
    assert done[: len(loads)] == loads
    assert sorted(done[len(loads) :]) == ["connected", "run", "wait"]
