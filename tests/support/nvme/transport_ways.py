"""The ways to reach an enclosure of ours, for tests that shall hold over each of them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from nvmeof.transport import rdma, tcp
from nvmeof.transport.base import VerbsChoice
from nvmeof.transport.controller import Controller
from nvmeof.transport.discovery import read_discovery_log
from nvmeof.transport.tcp import Digests
from nvmeof.transport.verbs_provider import free_loopback_address
from nvmeof.wire.fabrics import DISCOVERY_NQN
from nvmeof.wire.log_page import DiscoveryEntry

WAYS = ("tcp", "tcp with digests", "rdma")

EMULATED = "emulator.roce.pyverbs"


class Way:
    """A transport with its options, and an address for an enclosure of the test."""

    def __init__(self, name: str) -> None:
        self.is_rdma = name == "rdma"
        self.transports = ("rdma",) if self.is_rdma else ("tcp",)
        self.address = free_loopback_address() if self.is_rdma else "127.0.0.1"
        self._options: dict[str, Any]
        if self.is_rdma:
            self._options = {"verbs": VerbsChoice(EMULATED)}
        else:
            both = name == "tcp with digests"
            self._options = {"digests": Digests(both, both)}

    def open_controller(
        self, port: int, *arguments: Any, **options: Any
    ) -> AbstractAsyncContextManager[Controller]:
        """As the transport's own, at the test's address."""
        module: Any = rdma if self.is_rdma else tcp
        found: AbstractAsyncContextManager[Controller] = module.open_controller(
            self.address, port, *arguments, **self._options, **options
        )
        return found

    async def discover(self, port: int, host_nqn: str, host_id: bytes) -> list[DiscoveryEntry]:
        return await discover(self.address, port, host_nqn, host_id, **self._options)


async def discover(
    address: str, port: int, host_nqn: str, host_id: bytes, *, timeout_s: float = 10.0, **options: Any
) -> list[DiscoveryEntry]:
    """The log of the discovery subsystem at an address; over RDMA where the options have `verbs`."""
    module: Any = rdma if "verbs" in options else tcp
    opened = module.open_controller(
        address, port, DISCOVERY_NQN, host_nqn, host_id,
        keep_alive_s=0, connect_timeout_s=timeout_s, admin_timeout_s=timeout_s, **options,
    )  # fmt: skip
    async with opened as controller:
        log = await controller.perform(read_discovery_log())
        return list(log.entries)
