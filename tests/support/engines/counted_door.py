"""A client without a mount that counts its requests, and short values of all lengths for it."""

from __future__ import annotations

import errno
import random

from agent.fs.control.registered_memory import RegisteredMemory
from host_shim.pool import Pool, Volume
from host_shim.session_files import Refusal
from host_shim.transfer_wire import Ioctl
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

KIB = 1 << 10
BLOB = random.Random(35).randbytes(1 << 20)
LENGTHS = [1, 100, 4095, 4096, 4097, 16 * KIB, 65_535, 64 * KIB, 64 * KIB + 1, 128 * KIB]


class Counted(SessionDoor):
    """Counts the requests by their kind; `old`: an agent that knows no LOAD_MANY; `fails`: the errno of each
    request for many."""

    old = is_interrupted = False
    fails = 0

    def __init__(self, agent: PoolAgent, memory: RegisteredMemory | None = None) -> None:
        super().__init__(agent, memory=memory)
        self.asked: dict[str, int] = {}

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        name = Ioctl(command & 0xFF).name
        if self.old and command & 0xFF >= Ioctl.LOAD_MANY:
            raise Refusal(errno.ENOTTY, "what is that?")
        if self.fails and command & 0xFF >= Ioctl.LOAD_MANY:
            raise Refusal(self.fails, "no answer")
        self.asked[name] = self.asked.get(name, 0) + 1
        super().ioctl(descriptor, command, data)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.asked["read"] = self.asked.get("read", 0) + 1
        return super().preadv(descriptor, into, offset)


def agent_with(sets: tuple[int, ...] = (4, 4), **settings: object) -> PoolAgent:
    options = {"value_bytes": 1 << 20, "unit_bytes": 1 << 20} | settings
    return MemoryPool(sets, **options).agent()


def value_of(number: int) -> bytes:
    length = LENGTHS[number % len(LENGTHS)]
    return BLOB[number : number + length]


def filled(pool: Pool, count: int) -> Volume:
    volume = pool.volume("v")
    stored = volume.put_many([key_of(number) for number in range(count)], [value_of(n) for n in range(count)])
    assert all(stored)
    return volume
