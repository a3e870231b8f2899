"""A control face over a pool in memory as a file that host_shim opens: a whole client without a mount."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from agent.fs.control.face import CONTROL_ROOT, ControlFace
from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.control.start_prestage import StartPrestage
from agent.fs.interface import Caller, FsError
from agent.pool.access import ServedVolume
from agent.pool.prestage.readahead import INACTIVE, Readahead
from agent.pool.steps import settle
from host_shim.control_wire import Outcome
from host_shim.session_files import Refusal
from tests.support.engines.scripted_agent import PlainFiles
from tests.support.pool.memory_pool import PoolAgent

_SESSION = CONTROL_ROOT + 1


def refuse_prestage(_volume: ServedVolume, _key: bytes, _milliseconds: int = 0) -> Outcome:
    return Outcome.REFUSED


class SessionDoor(PlainFiles):
    """Implements `host_shim.control_session.Files`; one request at a time, as a worker serves them."""

    def __init__(
        self,
        agent: PoolAgent,
        continuer: Readahead = INACTIVE,
        start_prestage: StartPrestage = refuse_prestage,
        memory: RegisteredMemory | None = None,
    ) -> None:
        """`memory`: what this process may register, as a client of the agent that is this process as well."""
        self._channel = agent.channel
        self._lock = threading.Lock()

        def status() -> Mapping[str, Any]:
            settings = agent.volume.settings
            return {"volumes": [{"name": settings.name, "value_bytes": settings.value_bytes}]}

        self.face = ControlFace(
            [agent.served],
            lambda: agent.channel,
            status,
            start_prestage,
            agent.prestage,
            (0, 0),
            continuer,
            memory,
        )

    def open(self, _path: str) -> int:
        return settle(self.face.open(Caller(), _SESSION, 0), self._channel).handle

    def close(self, descriptor: int) -> None:
        settle(self.face.release(_SESSION, descriptor), self._channel)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        try:
            with self._lock:
                return settle(self.face.write(_SESSION, descriptor, offset, memoryview(data)), self._channel)
        except FsError as error:
            raise Refusal(error.errno, str(error)) from None

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        try:
            with self._lock:
                value = settle(self.face.getxattr(Caller(), _SESSION, name, into), self._channel)
        except FsError as error:
            raise Refusal(error.errno, str(error)) from None
        assert isinstance(value, memoryview)
        assert value.obj is into.obj
        return len(value)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        try:
            with self._lock:
                return settle(self.face.read(_SESSION, descriptor, offset, into), self._channel)
        except FsError as error:
            raise Refusal(error.errno, str(error)) from None

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        caller = Caller(pid=os.getpid())
        try:
            with self._lock:
                asked = self.face.ioctl(caller, _SESSION, descriptor, command, memoryview(bytes(data)))
                answer = settle(asked, self._channel)
        except FsError as error:
            raise Refusal(error.errno, str(error)) from None
        data[: len(answer)] = answer
