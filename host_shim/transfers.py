"""Transfers of one session between the pool and registered memory: the client's half of transfer_wire.py."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

from host_shim.control_wire import MalformedControl, Outcome
from host_shim.registered_memory import Place, RegisteredMemory, Registrable
from host_shim.transfer_wire import (
    PARTS_MAX,
    Ioctl,
    Part,
    Registering,
    decode_done_untrusted,
    decode_registered_untrusted,
    encode_transfer,
    ioctl_command,
)

NO_ANSWER: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ETIMEDOUT, errno.ENODEV})
"""How the kernel ends a call that the agent may still be working on."""
_HIT: Final = Outcome.HIT.value


@runtime_checkable
class IoctlFiles(Protocol):
    """The system call on a session's open file: `data` goes in, what the agent answers comes back in it."""

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None: ...


class Transfers:
    """Of one session. Safe from several threads at once."""

    def __init__(self, files: IoctlFiles, memory: RegisteredMemory) -> None:
        self._files = files
        self._memory = memory
        self._lock = threading.Lock()
        self._numbers: dict[Registrable, tuple[int, int] | None] = {}
        """Number in this session and locked byte of what was registered; None where the agent refused."""

    def move(
        self,
        descriptor: int,
        which: Ioctl,
        buffers: Sequence[memoryview],
        volume: str,
        key: bytes,
        ticket: int | None,
        ttl_seconds: int = 0,
    ) -> int | None:
        """LOAD or STORE a value of registered memory: its length, 0 for a miss.

        None where one of the buffers is other memory, or the agent does not map it, or they are too many.
        Raises the OSError of the call, and MalformedControl for an answer that makes no sense. Whatever is
        raised, the agent does not touch the memory any more when this returns.
        """
        if len(buffers) > PARTS_MAX:
            return None
        places: list[Place] = []
        for buffer in buffers:
            place = self._memory.find(buffer)
            if place is None:
                return None
            places.append(place)
        if not places:
            return None
        parts: list[Part] = []
        for memory, offset, length in places:
            number = self._number(descriptor, memory)
            if number is None:
                return None
            parts.append((number, offset, length))
        data = encode_transfer(volume, key, ticket, parts, ttl_seconds)
        self._call(descriptor, which, data, places)
        outcome, moved = decode_done_untrusted(data)
        return moved if outcome == _HIT else _miss(outcome)

    def _number(self, descriptor: int, memory: Registrable) -> int | None:
        try:
            known = self._numbers[memory]
        except KeyError:
            with self._lock:
                if memory not in self._numbers:
                    self._numbers[memory] = self._register(descriptor, memory)
                known = self._numbers[memory]
        return None if known is None else known[0]

    def _register(self, descriptor: int, memory: Registrable) -> tuple[int, int] | None:
        data = Registering(memory.descriptor, memory.size).encode()
        try:
            self._call(descriptor, Ioctl.REGISTER, data, ())
            registered = decode_registered_untrusted(data)
        except (OSError, MalformedControl):
            return None
        return registered.region, registered.locked_byte

    def _call(self, descriptor: int, which: Ioctl, data: bytearray, places: Sequence[Place]) -> None:
        try:
            self._files.ioctl(descriptor, ioctl_command(which, len(data)), data)
        except OSError as error:
            if error.errno in NO_ANSWER:
                for memory, _, _ in places:
                    known = self._numbers.get(memory)
                    if known is not None:
                        memory.wait_for(known[1])
            raise


def _miss(outcome: int) -> int:
    """0, where it is an outcome at all. Raises MalformedControl."""
    try:
        Outcome(outcome)
    except ValueError as unknown:
        raise MalformedControl(str(unknown)) from None
    return 0
