"""A device of this machine that is away: named in the log and in the status, and served once it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from agent.config.local_section import LocalSection
from agent.local.device import open_device
from agent.local.namespaces import LocalNamespaces
from agent.remote import supervisor as supervisor_module
from agent.remote.supervisor import Supervisor
from agent.telemetry.snapshot import _enclosures

HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001"


@pytest.mark.expects_log("local:ssd: away, and looked for again: .*/ssd does not exist")
def test_a_device_that_comes_later_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOCAL_AGAIN_SECONDS", 0.01)
    made = LocalSection.model_validate({"path": tmp_path / "made", "size": "8M"})
    open_device(made).close()
    section = LocalSection.model_validate({"path": tmp_path / "ssd"})

    async def main() -> None:
        with LocalNamespaces([section], HOST, bytes(16), tmp_path) as local:
            supervisor = Supervisor([], HOST, bytes(16), 1, local=local.opened, away=local.away)
            (row,) = _enclosures(supervisor.fabric)
            assert (row["name"], row["local"], row["connected"]) == ("local:ssd", True, False)
            assert row["fault"] == f"{tmp_path}/ssd does not exist"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                (tmp_path / "made").rename(tmp_path / "ssd")
                (enclosure,) = supervisor.fabric.enclosures
                with trio.fail_after(10):
                    while enclosure.session is None:  # noqa: ASYNC110 - the supervisor has no event for it
                        await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            supervisor.fabric.adopt([enclosure.namespaces[0].nguid])
            (route,) = supervisor.fabric.routes
            assert route is not None
            assert route.enclosure is enclosure
            (row,) = _enclosures(supervisor.fabric)
            assert (row["connected"], row["fault"], row["reconnects"]) == (True, "", 0)

    trio.run(main)
