"""A device of this machine that is away, or is pulled: named in the log and in the status, and served once it
comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from agent.config.local_section import LocalSection
from agent.local.device import open_device
from agent.local.namespaces import LocalNamespaces
from agent.local.storage import DeviceStorage
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
            supervisor = Supervisor([], HOST, bytes(16), 1, local=local)
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


@pytest.mark.expects_log(
    "local:ssd: away, and looked for again: .*/ssd is gone", "enclosure local:ssd: away: .*/ssd .*it is gone"
)
def test_a_device_that_is_pulled_is_served_again_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LOCAL_AGAIN_SECONDS", 0.01)
    pulled: set[DeviceStorage] = set()
    monkeypatch.setattr(DeviceStorage, "is_gone", lambda storage: storage in pulled)
    section = LocalSection.model_validate({"path": tmp_path / "ssd", "size": "8M"})

    async def main() -> None:
        with LocalNamespaces([section], HOST, bytes(16), tmp_path, make=True) as local:
            supervisor = Supervisor([], HOST, bytes(16), 1, local=local)
            (enclosure,), (first,) = supervisor.fabric.enclosures, local.opened
            supervisor.fabric.adopt([first.namespace.nguid])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                (tmp_path / "ssd").rename(tmp_path / "pulled")
                pulled.add(first.storage)
                with trio.fail_after(10):
                    while "it is gone" not in enclosure.fault:  # noqa: ASYNC110 - as above
                        await trio.sleep(0.01)
                assert supervisor.fabric.routes == (None,)
                (tmp_path / "pulled").rename(tmp_path / "ssd")
                with trio.fail_after(10):
                    while enclosure.session is None:  # noqa: ASYNC110 - as above
                        await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            assert enclosure.session is not first.session
            assert [each is not None for each in supervisor.fabric.routes] == [True]
            (row,) = _enclosures(supervisor.fabric)
            assert (row["connected"], row["fault"], row["reconnects"]) == (True, "", 1)
            enclosure.complain(enclosure.epoch)
            assert enclosure.complaints == 0

    trio.run(main)
