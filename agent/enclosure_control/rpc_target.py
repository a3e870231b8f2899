"""An enclosure behind SPDK's JSON-RPC: its state, steps carried out, its counters.

SPDK's own target and `g35 jbof --rpc` alike. A target that lacks a module (a build without logical volumes,
or without a keyring) answers -32601 to its listing. That counts as an empty listing.
"""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from agent.enclosure_control import records
from agent.enclosure_control.description import Description
from agent.enclosure_control.records import Present
from agent.enclosure_control.rpc_client import TIMEOUT_S, RpcClient
from agent.enclosure_control.rpc_errors import (
    INVALID_PARAMETERS,
    METHOD_NOT_FOUND,
    RpcAnswerError,
    RpcError,
)
from agent.enclosure_control.steps import AddKey, AddListener, AddNamespace, Step
from agent.errors import UserError, did_you_mean, printable
from nvmeof.authentication.private_files import SecretFileError, check_private
from nvmeof.authentication.secret import parse_secret

T = TypeVar("T")

_TRANSPORTS: Final = "nvmf_get_transports"
_KEY_BYTES_MAX: Final = 4096
"""Far above the longest secret, of 64 bytes in base64."""
_MAKE_KEY: Final = "make one with `g35 key make-dhchap`"
_LISTENER_ADVICE: Final = "is that an address of the enclosure's machine, and is the port free there?"


class RpcTarget:
    """One enclosure by its RPC. Raises the errors of `RpcClient.call`."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client

    @classmethod
    def at(cls, socket_path: Path, timeout_s: float = TIMEOUT_S) -> "RpcTarget":
        """The enclosure at a Unix socket; connects at the first call."""
        return cls(RpcClient(socket_path, timeout_s))

    def check(self, description: Description) -> None:
        """SPDK has everything that can be described. UserError for a key file that holds no secret."""
        for key in description.keys:
            _check_secret(key.name, key.file)

    def read(self, _description: Description | None = None) -> Present:
        everything = self._list("nvmf_get_subsystems", records.Subsystem)
        keys = self._list("keyring_get_keys", records.Key, optional=True)
        return Present(
            transports=records.transports(_TRANSPORTS, self.client.call(_TRANSPORTS)),
            keys=tuple(each for each in keys if not each.removed),
            bdevs=self._list("bdev_get_bdevs", records.Bdev),
            nvme=self._list("bdev_nvme_get_controllers", records.NvmeController, optional=True),
            lvol_stores=self._list("bdev_lvol_get_lvstores", records.LvolStore, optional=True),
            subsystems=tuple(each for each in everything if each.nqn != records.DISCOVERY_NQN),
        )

    def _list(self, method: str, record: type[T], *, optional: bool = False) -> tuple[T, ...]:
        try:
            answer = self.client.call(method)
        except RpcError as error:
            if optional and error.code == METHOD_NOT_FOUND:
                return ()
            raise
        return records.decoded(method, answer, tuple[record, ...])  # type: ignore[valid-type]

    def check_steps(self, steps: Sequence[Step]) -> None:
        """UserError for a step whose method this enclosure lacks, or whose key file is missing or exposed."""
        if not steps:
            return
        for step in steps:
            if isinstance(step, AddKey):
                self._check_key_file(step)
        try:
            answer = self.client.call("rpc_get_methods")
        except RpcError as error:
            if error.code == METHOD_NOT_FOUND:
                return
            raise
        if not isinstance(answer, list):
            raise RpcAnswerError("rpc_get_methods: the answer is no list")
        lacking = {step.call().method: step for step in reversed(steps)}
        for method in [each for each in answer if isinstance(each, str)]:
            lacking.pop(method, None)
        if lacking:
            method, step = lacking.popitem()
            raise UserError(
                f"{printable(str(step))}: this enclosure has no method {method}; nothing was changed",
                "it was built without that module, or is `g35 jbof`: take what needs it out of the file",
            )

    def _check_key_file(self, step: AddKey) -> None:
        if self.client.is_local() and not os.path.lexists(step.path):
            raise UserError(f"key {step.name}: there is no file {step.path}; nothing was changed", _MAKE_KEY)
        try:
            check_private(Path(step.path))
        except SecretFileError as refused:
            # The enclosure judges a file that cannot be read here.
            if os.access(step.path, os.R_OK):
                raise UserError(refused.message, refused.advice) from None

    def perform(self, step: Step) -> None:
        method, params = step.call()
        try:
            self.client.call(method, params)
        except RpcError as error:
            advice = self._advice(step) if error.code == INVALID_PARAMETERS else ""
            if advice:
                raise RpcError(error.method, error.code, error.text, advice) from None
            raise

    def _advice(self, step: Step) -> str:
        """A hint for a step that was refused as "Invalid parameters", where its likely cause is known."""
        if isinstance(step, AddListener):
            return _LISTENER_ADVICE
        if isinstance(step, AddNamespace):
            name = step.namespace.bdev
            present = Present(bdevs=self._list("bdev_get_bdevs", records.Bdev))
            if present.bdev(name) is None:
                return f"there is no bdev {name}{did_you_mean(name, present.bdev_names())}"
        return ""

    def show(self, steps: Sequence[Step]) -> list[str]:
        """The call of each step, on a line. Keys are names and paths, never secrets."""
        return [f"{method} {json.dumps(params)}" for method, params in (step.call() for step in steps)]

    def stats(self) -> tuple[records.BdevStats, ...]:
        return records.bdev_stats("bdev_get_iostat", self.client.call("bdev_get_iostat"))

    def close(self) -> None:
        self.client.close()


def _check_secret(name: str, file: str) -> None:
    """UserError where `file` can be read here and holds no DH-HMAC-CHAP secret. Quotes nothing of it.

    SPDK takes any file of mode 0600 and reads it at the first authentication: a file without a secret would
    lock its hosts out. A file that cannot be read here may lie on the enclosure's machine.
    """
    try:
        # Non-blocking: an open of a FIFO waits for its other end.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no ordinary file")
        text = os.read(descriptor, _KEY_BYTES_MAX).decode("ascii", "replace")
        if text[:1].isspace():
            raise ValueError("SPDK takes no blanks before the secret")
        parse_secret(text)
    except OSError:
        return
    except ValueError as error:
        raise UserError(f"key {name}: {file}: {error}; nothing was changed", _MAKE_KEY) from None
    finally:
        os.close(descriptor)
