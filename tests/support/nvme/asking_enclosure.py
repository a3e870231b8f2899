"""An enclosure that asks its host to authenticate, and that host, by a way of the test's."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final

from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from nvmeof.authentication.secret import Credentials
from nvmeof.transport import connect_io_queue
from nvmeof.transport.controller import Controller
from tests.support.nvme.nvme_ends import HOST, HOST_ID
from tests.support.nvme.transport_ways import Way

PATIENCE_S: Final = 60.0


class AskingEnclosure:
    """With a drive of 1 MiB. `right` is what it wants of the host."""

    def __init__(self, way: Way, right: Credentials) -> None:
        self.way = way
        settings = EnclosureSettings(
            drive_bytes=1 << 20,
            name="asking",
            transports=way.transports,
            address=way.address,
            credentials={HOST: right},
        )
        self.served = Enclosure(settings)

    def __enter__(self) -> AskingEnclosure:
        self.served.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.served.close()

    def open_controller(
        self, credentials: Credentials, **options: Any
    ) -> AbstractAsyncContextManager[Controller]:
        """As the host that has these."""
        nqn = self.served.settings.subsystem_nqn
        return self.way.open_controller(
            self.served.port, nqn, HOST, HOST_ID, credentials=credentials, **options
        )


def join_queue(controller: Controller, credentials: Credentials) -> None:
    """A queue that authenticates with these, on this thread: one of trio's would stay for longer than the
    whole test takes."""
    info = controller.info
    info = replace(info, config=replace(info.config, credentials=credentials))
    connect_io_queue(info, 1, 8, PATIENCE_S)
