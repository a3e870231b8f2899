"""An enclosure behind SPDK's JSON-RPC: reading what it is, carrying out steps, its counters.

SPDK's own target and `g35 jbof --rpc` alike. A target that lacks a module (a build without logical volumes,
or without a keyring) answers -32601 to its listing; then there is nothing of it, which is not an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from agent.enclosure_control import records
from agent.enclosure_control.description import Description
from agent.enclosure_control.key_files import check_key_file, refuse_exposed
from agent.enclosure_control.present import Present
from agent.enclosure_control.printable import printable
from agent.enclosure_control.rpc_calls import call_of
from agent.enclosure_control.rpc_client import TIMEOUT_S, RpcClient
from agent.enclosure_control.rpc_errors import (
    INVALID_PARAMETERS,
    METHOD_NOT_FOUND,
    RpcAnswerError,
    RpcError,
)
from agent.enclosure_control.steps import AddKey, AddListener, Step
from agent.errors import UserError

T = TypeVar("T")

_LISTENER_ADVICE: Final = "is that an address of the enclosure's machine, and is the port free there?"


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
        """Everything that can be described, SPDK has. UserError for a key file that holds no secret."""
        for key in description.keys:
            check_key_file(key.name, key.file)

    def read(self, _description: Description | None = None) -> Present:
        """What it is at present."""
        everything = self._list("nvmf_get_subsystems", records.subsystem)
        keys = self._list("keyring_get_keys", records.key, optional=True)
        return Present(
            transports=self._list("nvmf_get_transports", records.transport),
            keys=tuple(each for each in keys if not each.removed),
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

    def vet(self, steps: Sequence[Step]) -> None:
        """UserError if a step needs a method that this enclosure does not have, or names a file of a key that
        others can read or exchange; before any is carried out."""
        if not steps:
            return
        for step in steps:
            if isinstance(step, AddKey):
                refuse_exposed(step.path)
        try:
            answer = self._client.call("rpc_get_methods")
        except RpcError as error:
            if error.code == METHOD_NOT_FOUND:
                return
            raise
        if not isinstance(answer, list):
            raise RpcAnswerError("rpc_get_methods: the answer is no list")
        lacking = {call_of(step).method: step for step in reversed(steps)}
        for method in [each for each in answer if isinstance(each, str)]:
            lacking.pop(method, None)
        if lacking:
            method, step = lacking.popitem()
            raise UserError(
                f"{printable(str(step))}: this enclosure has no method {method}; nothing was changed",
                "it was built without that module, or is `g35 jbof`: take what needs it out of the file",
            )

    def perform(self, step: Step) -> None:
        """Carry one step out."""
        call = call_of(step)
        try:
            self._client.call(call.method, call.params)
        except RpcError as error:
            if isinstance(step, AddListener) and error.code == INVALID_PARAMETERS:
                raise RpcError(error.method, error.code, error.text, _LISTENER_ADVICE) from None
            raise

    def show(self, steps: Sequence[Step]) -> list[str]:
        """The call that `perform` would make of each, on a line. Keys are names and paths, never secrets."""
        calls = [call_of(step) for step in steps]
        return [f"{call.method} {json.dumps(call.params)}" for call in calls]

    def stats(self) -> tuple[records.BdevStats, ...]:
        """Counters of its bdevs."""
        return records.bdev_stats(self._client.call("bdev_get_iostat"))

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Any other method, as it is."""
        return self._client.call(method, params)

    def close(self) -> None:
        """Give the connection up."""
        self._client.close()
