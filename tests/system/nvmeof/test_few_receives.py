"""An enclosure whose admin queue takes fewer commands than a session has under way: its session ends, and
nothing else does.
"""

from __future__ import annotations

import pytest
import trio

from emulator.jbof import rdma_connection
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.errors import NvmeofError
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.rdma import open_controller
from nvmeof.transport.reconnect import Disconnected, keep_controller
from nvmeof.transport.verbs_provider import free_loopback_address
from nvmeof.wire.rdma import encode_connect_accept
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.nvme.transport_ways import EMULATED

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("receives", [0, 1, 2])
def test_the_keeper_tries_again(monkeypatch: pytest.MonkeyPatch, receives: int) -> None:
    """With two receives the session comes up before its next command finds no room."""
    monkeypatch.setattr(rdma_connection, "encode_connect_accept", lambda _: encode_connect_accept(receives))
    settings = EnclosureSettings(
        drives=1, drive_bytes=32 << 20, name="few", transports=("rdma",), address=free_loopback_address()
    )

    async def disconnected_twice(port: int) -> None:
        def opened() -> object:
            return open_controller(
                settings.address, port, settings.subsystem_nqn, HOST, HOST_ID, verbs=VerbsChoice(EMULATED),
                keep_alive_s=1.0,
            )  # fmt: skip

        seen = 0
        with trio.fail_after(60):
            async with keep_controller(opened) as keeper:  # type: ignore[arg-type]
                async for event in keeper.events:
                    if isinstance(event, Disconnected):
                        assert isinstance(event.error, NvmeofError)
                        seen += 1
                    if seen == 2:
                        return

    with Enclosure(settings) as enclosure:
        trio.run(disconnected_twice, enclosure.port)
