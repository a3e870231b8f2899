"""Values by one request through the control face: the whole value or a miss, counted once either way."""

from __future__ import annotations

import errno
import random

import pytest

from agent.fs.control.face import CONTROL_ROOT
from agent.fs.interface import Caller, FsError
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.prestage.readahead import Readahead
from agent.pool.steps import settle
from host_shim.control_wire import AT_ONCE_BYTES, value_xattr
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of

SESSION, STATUS = CONTROL_ROOT + 1, CONTROL_ROOT + 2
BLOB = random.Random(35).randbytes(2 * AT_ONCE_BYTES)


class Counted(SessionDoor):
    """Counts the requests, each kind by itself."""

    reads = at_once = 0

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.reads += 1
        return super().preadv(descriptor, into, offset)

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        self.at_once += 1
        return super().fgetxattr(descriptor, name, into)


def agent_with(suite: str = SUITES[0], unit_bytes: int = 1 << 16) -> PoolAgent:
    return MemoryPool((1, 1), value_bytes=len(BLOB), unit_bytes=unit_bytes, suite=suite).agent()


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("unit_bytes", [1 << 16, 1 << 20])
def test_lengths(suite: str, unit_bytes: int) -> None:
    agent = agent_with(suite, unit_bytes)
    door = Counted(agent)
    with Pool("/nowhere", files=door) as pool:
        volume = pool.volume("v")
        for length in (1, 4096, 60_001, AT_ONCE_BYTES - 1, AT_ONCE_BYTES):
            assert agent.put(key_of(length), BLOB[:length]).stored
            for room in {length, AT_ONCE_BYTES}:
                buffer = bytearray(room)
                assert volume.get_into(key_of(length), buffer) == length
                assert buffer[:length] == BLOB[:length]
        assert volume.get_into(key_of(0), bytearray(10)) is None
        assert (door.at_once, door.reads) == (10, 0)
        assert (agent.tally.gets_hit, agent.tally.gets_missed) == (9, 1)
        for length in (AT_ONCE_BYTES + 1, len(BLOB)):
            assert agent.put(key_of(length), BLOB[:length]).stored
            with pytest.raises(BufferTooSmall):
                volume.get_into(key_of(length), bytearray(AT_ONCE_BYTES))


def test_a_flipped_bit_is_a_miss() -> None:
    pool = MemoryPool((1, 1), value_bytes=len(BLOB))
    agent = pool.agent()
    with Pool("/nowhere", files=SessionDoor(agent)) as client:
        agent.put(key_of(1), BLOB[:5000])
        namespace, slot, _ = agent.where(key_of(1))
        pool.namespaces[namespace].flip(slot + HEADER_BYTES + 100)
        assert client.volume("v").get_into(key_of(1), bytearray(6000)) is None
    assert sum(agent.tally.misses.values()) == agent.tally.gets_missed == 1


def test_an_erased_volume_is_none() -> None:
    agent = agent_with()
    agent.put(key_of(1), b"value")
    agent.volume.change(erased=True)
    with Pool("/nowhere", files=SessionDoor(agent)) as client, pytest.raises(UnknownVolume):
        client.volume("v").get_into(key_of(1), bytearray(10))


def test_an_agent_that_learns_from_gets_has_them_in_the_session() -> None:
    agent = agent_with()
    agent.put(key_of(1), b"value")
    door = Counted(agent, Readahead(lambda _volume, _pseudonym: None))
    with Pool("/nowhere", files=door) as client:
        for _ in range(3):
            assert client.volume("v").get_into(key_of(1), bytearray(10)) == 5
    assert (door.at_once, door.reads) == (1, 3)


@pytest.mark.parametrize(
    ("ino", "name", "refusal"),
    [
        (SESSION, b"security.capability", errno.EOPNOTSUPP),
        (SESSION, b"user.g35.", errno.EOPNOTSUPP),
        (SESSION, b"user.g35." + b"0" * 31 + b".v", errno.EOPNOTSUPP),
        (SESSION, b"user.g35." + b"0" * 32 + b".\xff", errno.EOPNOTSUPP),
        (SESSION, b"user.g35." + b"0" * 32 + b".", errno.ENOENT),
        (SESSION, value_xattr("v", key_of(7)), errno.ENODATA),
        (STATUS, value_xattr("v", key_of(1)), errno.EOPNOTSUPP),
        (CONTROL_ROOT, value_xattr("v", key_of(1)), errno.EOPNOTSUPP),
    ],
)
def test_other_names_and_files(ino: int, name: bytes, refusal: int) -> None:
    agent = agent_with()
    agent.put(key_of(1), b"value")
    door = SessionDoor(agent)
    room = memoryview(bytearray(10))
    with pytest.raises(FsError) as refused:
        settle(door.face.getxattr(Caller(), ino, name, room), agent.channel)
    assert refused.value.errno == refusal
