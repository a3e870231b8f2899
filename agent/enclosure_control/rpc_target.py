"""An enclosure behind SPDK's JSON-RPC: reading what it is, carrying out steps, its counters.

SPDK's own target and `g35 jbof --rpc` alike. A target that lacks a module (a build without logical volumes,
or without a keyring) answers -32601 to its listing; then there is nothing of it, which is not an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.enclosure_control import records
from agent.enclosure_control.description import Description
from agent.enclosure_control.present import Present
from agent.enclosure_control.rpc_calls import call_of
from agent.enclosure_control.rpc_client import TIMEOUT_S, RpcClient
from agent.enclosure_control.rpc_errors import METHOD_NOT_FOUND, RpcError
from agent.enclosure_control.steps import Step

T = TypeVar("T")


class Caller(Protocol):
    """What carries calls out; `RpcClient` does it over a socket."""

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """The result. RpcError if it was refused."""

    def close(self) -> None:
        """Give the connection up."""


class RpcTarget:
    """One enclosure by its RPC. Raises what `RpcClient.call` raises."""

    def __init__(self, client: Caller) -> None:
        self._client = client

    @classmethod
    def at(cls, socket_path: Path, timeout_s: float = TIMEOUT_S) -> RpcTarget:
        """The one at a Unix socket; connects at the first call."""
        return cls(RpcClient(socket_path, timeout_s))

    def check(self, description: Description) -> None:
        """Everything that can be described, SPDK has."""

    def read(self, _description: Description | None = None) -> Present:
        """What it is at present."""
        everything = self._list("nvmf_get_subsystems", records.subsystem)
        return Present(
            transports=self._list("nvmf_get_transports", records.transport),
            keys=self._list("keyring_get_keys", records.key, optional=True),
            bdevs=self._list("bdev_get_bdevs", records.bdev),
            nvme=self._list("bdev_nvme_get_controllers", records.nvme_controller, optional=True),
            lvol_stores=self._list("bdev_lvol_get_lvstores", records.lvol_store, optional=True),
            subsystems=tuple(each for each in everything if each.nqn != records.DISCOVERY_NQN),
        )

    def _list(
        self, method: str, decode: Callable[[records.Members], T], *, optional: bool = False
    ) -> tuple[T, ...]:
        try:
            answer = self._client.call(method)
        except RpcError as error:
            if optional and error.code == METHOD_NOT_FOUND:
                return ()
            raise
        return records.decode_all(method, answer, decode)

    def perform(self, step: Step) -> None:
        """Carry one step out."""
        call = call_of(step)
        self._client.call(call.method, call.params)

    def show(self, step: Step) -> str:
        """The call that `perform` would make, on one line. Keys are names and paths there, never secrets."""
        call = call_of(step)
        return f"{call.method} {json.dumps(call.params)}"

    def stats(self) -> tuple[records.BdevStats, ...]:
        """Counters of its bdevs."""
        return records.bdev_stats(self._client.call("bdev_get_iostat"))

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Any other method, as it is."""
        return self._client.call(method, params)

    def close(self) -> None:
        """Give the connection up."""
        self._client.close()
