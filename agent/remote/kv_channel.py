"""Commands on keys, on a worker's lanes: what agent/pool/kv/commands.py asks for. Read remote/channel.py
first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agent.inline.scatter import Buffer
from agent.pool.counters import Tally
from agent.remote.fabric import Fabric
from agent.remote.pending_request import PendingRequest
from nvmeof.host import kv_commands
from nvmeof.host.command import Command
from nvmeof.wire.kv import StoreOption
from nvmeof.wire.status import Status

_OF_THE_NAMESPACE: Final = frozenset(
    {
        Status.CAPACITY_EXCEEDED,
        Status.INVALID_VALUE_SIZE,
        Status.INVALID_KEY_SIZE,
        Status.KEY_NOT_FOUND,
        Status.UNRECOVERED_ERROR,
        Status.KEY_EXISTS,
    }
)
"""Generic statuses that a KV namespace gives of itself: the way to it is fine."""

_ANSWERS: Final = frozenset({Status.KEY_NOT_FOUND, Status.KEY_EXISTS, Status.CAPACITY_EXCEEDED})
"""And those that say nothing against it."""


class KvPendingRequest(PendingRequest):
    """One command on a key: agent.pool.kv.commands.KvPending."""

    __slots__ = ()

    @property
    def _status(self) -> int | None:
        if self._fault is not None or not self._commands:
            return None
        return self._commands[0].status

    @property
    def missing(self) -> bool:
        return self._status == Status.KEY_NOT_FOUND

    @property
    def full(self) -> bool:
        return self._status == Status.CAPACITY_EXCEEDED

    @property
    def present(self) -> bool:
        return self._status == Status.KEY_EXISTS

    @property
    def value_bytes(self) -> int:
        return self._commands[0].result if self._commands else 0

    @property
    def unreachable(self) -> bool:
        return self._status not in _OF_THE_NAMESPACE and super().unreachable

    def is_error(self, command: Command) -> bool:
        """That a key is or is not there, or that there is no room, is none."""
        return bool(command.status) and command.status not in _ANSWERS


class _Starter(Protocol):
    _fabric: Fabric
    tallies: dict[str, Tally]

    def start_kv(
        self, namespace: int, build: Callable[[int], Command], key: bytes = b""
    ) -> KvPendingRequest: ...


class KvCommands:
    """The part of `WorkerLanes` that knows commands on keys; `start_kv` is the other's."""

    def kv_store(
        self: _Starter, namespace: int, key: bytes, parts: Sequence[Buffer], *, only_new: bool = False
    ) -> KvPendingRequest:
        option = StoreOption.ONLY_IF_ABSENT if only_new else StoreOption.NONE
        self.tallies[""].flash_bytes_written += sum(map(len, parts))
        return self.start_kv(namespace, lambda nsid: kv_commands.store(nsid, key, parts, options=option), key)

    def kv_retrieve(self: _Starter, namespace: int, key: bytes, into: memoryview) -> KvPendingRequest:
        self.tallies[""].flash_bytes_read += len(into)
        return self.start_kv(namespace, lambda nsid: kv_commands.retrieve(nsid, key, into))

    def kv_delete(self: _Starter, namespace: int, key: bytes) -> KvPendingRequest:
        return self.start_kv(namespace, lambda nsid: kv_commands.delete(nsid, key), key)

    def kv_exists(self: _Starter, namespace: int, key: bytes) -> KvPendingRequest:
        return self.start_kv(namespace, lambda nsid: kv_commands.exist(nsid, key))

    def kv_list(self: _Starter, namespace: int, first: bytes, into: memoryview) -> KvPendingRequest:
        return self.start_kv(namespace, lambda nsid: kv_commands.list_keys(nsid, first, into))

    def kv_used_bytes(self: _Starter, namespace: int) -> int:
        routes = self._fabric.routes
        route = routes[namespace] if namespace < len(routes) else None
        return 0 if route is None else route.used_bytes
