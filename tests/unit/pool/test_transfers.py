"""Values from and to registered memory through the control face: the same values, misses and refusals."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.fs.control.face import CONTROL_ROOT
from agent.fs.control.registered_memory import REGIONS_MAX, RegisteredMemory
from agent.fs.interface import Caller, FsError
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.prestage.readahead import Readahead
from agent.pool.steps import settle
from host_shim.control_wire import FLAG_NO_ANSWER, Operation, Outcome, Request
from host_shim.named_values import NamedValues
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume, ValueTooLong
from host_shim.registered_memory import Registrable
from host_shim.session_files import Refusal
from host_shim.transfer_wire import (
    REGISTER_BYTES,
    Ioctl,
    decode_done_untrusted,
    decode_registered_untrusted,
    encode_register,
    encode_transfer,
    ioctl_command,
)
from tests.support.engines.session_door import SessionDoor
from tests.support.pool.memory_pool import SUITES, MemoryPool, PoolAgent, key_of

PIECE = 1 << 20
ROOM = 6 * PIECE
BLOB = random.Random(35).randbytes(ROOM)


class Counted(SessionDoor):
    """Counts the requests, each kind by itself; `deaf` to REGISTER, where that is set."""

    moves = others = 0
    deaf = False

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        if self.deaf:
            raise Refusal(errno.ENOTTY, "deaf")
        self.moves += command & 0xFF in (Ioctl.LOAD, Ioctl.STORE)
        super().ioctl(descriptor, command, data)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.others += 1
        return super().preadv(descriptor, into, offset)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self.others += 1
        return super().pwrite(descriptor, data, offset)


def agent_with(suite: str = SUITES[0], unit_bytes: int = PIECE, **options: object) -> PoolAgent:
    pool = MemoryPool((1, 1), value_bytes=ROOM, unit_bytes=unit_bytes, suite=suite)
    return pool.agent(**options)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("unit_bytes", [1 << 17, 1 << 20])
def test_lengths(suite: str, unit_bytes: int, memory: RegisteredMemory) -> None:
    agent = agent_with(suite, unit_bytes)
    door = Counted(agent, memory=memory)
    lengths = (1, 4095, 4096, 65_537, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77, 5 * PIECE + 12_345, ROOM)
    with Pool("/nowhere", files=door) as pool:
        volume, buffer, source = pool.volume("v"), pool.memory(ROOM), pool.memory(ROOM)
        source[:] = BLOB
        for number, length in enumerate(lengths):
            assert volume.put(key_of(number), source[:length])
        for number, length in enumerate(lengths):
            buffer[:] = bytes(ROOM)
            assert volume.get_into(key_of(number), buffer[:length]) == length
            assert buffer[:length] == BLOB[:length]
            assert not any(buffer[length : length + 4096])
            assert volume.get_into(key_of(number), buffer) == length
        assert volume.get_into(key_of(99), buffer) is None
        assert (door.moves, door.others) == (3 * len(lengths) + 1, 0)
        assert (agent.tally.gets_hit, agent.tally.gets_missed) == (2 * len(lengths), 1)
        assert agent.tally.puts == len(lengths)
        assert agent.tally.bytes_read == 2 * sum(lengths)
    assert memory.mapped_bytes() == 0


def test_the_same_as_by_any_other_memory(memory: RegisteredMemory) -> None:
    agent = agent_with()
    with Pool("/nowhere", files=SessionDoor(agent, memory=memory)) as pool:
        volume, ours = pool.volume("v"), pool.memory(2 * PIECE)
        ours[:] = BLOB[: 2 * PIECE]
        assert volume.put_many([key_of(1), key_of(2)], [ours[:PIECE], BLOB[7 : 7 + PIECE]]) == [True, True]
        assert volume.get(key_of(1)) == BLOB[:PIECE]
        other = bytearray(PIECE)
        assert volume.get_many([key_of(2), key_of(1), key_of(3)], [ours[PIECE:], other, ours[:10]]) == [
            PIECE,
            PIECE,
            None,
        ]
        assert ours[PIECE:] == BLOB[7 : 7 + PIECE]
        assert other == BLOB[:PIECE]


@pytest.mark.parametrize("suite", SUITES)
def test_texts_whose_proof_is_a_crc_pass_through_memory_of_the_agents(
    suite: str, memory: RegisteredMemory
) -> None:
    """What a client changes meanwhile would look like a broken drive otherwise; GCM proves the ciphertext."""
    agent = agent_with(suite)
    with Pool("/nowhere", files=SessionDoor(agent, memory=memory)) as pool:
        ours = pool.memory(PIECE)
        assert pool.volume("v").put(key_of(1), ours)
        assert pool.volume("v").get_into(key_of(1), ours) == PIECE
    assert agent.tally.bytes_copied == (0 if suite == "aes-256-gcm" else PIECE)


def test_a_longer_value(memory: RegisteredMemory, expects_log: Callable[..., None]) -> None:
    expects_log("longer than the buffer of 1 bytes")
    agent = agent_with()
    agent.put(key_of(1), BLOB[: 2 * PIECE])
    with Pool("/nowhere", files=SessionDoor(agent, memory=memory)) as pool:
        volume, ours = pool.volume("v"), pool.memory(2 * PIECE)
        for room in (1, PIECE - 1, PIECE, 2 * PIECE - 1):
            with pytest.raises(BufferTooSmall):
                volume.get_into(key_of(1), ours[:room])
            assert volume.get_many([key_of(2), key_of(1)], [bytearray(1), ours[:room]]) == [None, None]
        with pytest.raises(UnknownVolume):
            pool.volume("w").get_into(key_of(1), ours)
        with pytest.raises(UnknownVolume):
            pool.volume("w").put(key_of(1), ours)
        too_long = pool.memory(ROOM + 1)
        with pytest.raises(ValueTooLong):
            volume.put(key_of(1), too_long)


@pytest.mark.parametrize("flipped", [100, PIECE + 100, 2 * PIECE + 100])
def test_a_flipped_bit_is_a_miss_and_leaves_nothing_unproven(flipped: int, memory: RegisteredMemory) -> None:
    pool = MemoryPool((1, 1), value_bytes=ROOM, unit_bytes=PIECE)
    agent = pool.agent()
    agent.put(key_of(1), BLOB[: 3 * PIECE])
    namespace, slot, _ = agent.where(key_of(1))
    pool.namespaces[namespace].flip(slot + HEADER_BYTES + flipped)
    with Pool("/nowhere", files=SessionDoor(agent, memory=memory)) as client:
        ours = client.memory(3 * PIECE)
        assert client.volume("v").get_into(key_of(1), ours) is None
    start = flipped // PIECE * PIECE
    assert ours[:start] == BLOB[:start]
    assert not any(ours[start : start + PIECE])
    assert sum(agent.tally.misses.values()) == agent.tally.gets_missed == 1


def test_an_agent_that_maps_nothing(memory: RegisteredMemory) -> None:
    agent = agent_with()
    doors = [
        SessionDoor(agent),
        SessionDoor(agent, memory=RegisteredMemory(0)),
        Counted(agent, memory=memory),
    ]
    doors[-1].deaf = True  # type: ignore[attr-defined]
    for number, door in enumerate(doors):
        with Pool("/nowhere", files=door) as pool:
            ours = pool.memory(PIECE)
            ours[:] = BLOB[:PIECE]
            assert pool.volume("v").put(key_of(number), ours)
            ours[:] = bytes(PIECE)
            assert pool.volume("v").get_into(key_of(number), ours) == PIECE
            assert ours == BLOB[:PIECE]
    assert memory.mapped_bytes() == 0


def test_an_agent_that_learns_sees_what_follows_what(memory: RegisteredMemory) -> None:
    agent = agent_with()
    guessed: list[bytes] = []
    continuer = Readahead(lambda _volume, pseudonym: guessed.append(pseudonym))
    with Pool("/nowhere", files=SessionDoor(agent, continuer, memory=memory)) as pool:
        volume, ours = pool.volume("v"), pool.memory(4096)
        for number in range(3):
            volume.put(key_of(number), ours)
        for _ in range(2):
            for number in range(3):
                assert volume.get_into(key_of(number), ours) == 4096
    assert agent.volume.placement.pseudonym(key_of(1)) in guessed


def test_blocks_of_connectors(memory: RegisteredMemory) -> None:
    """Their labels lie in registered memory, too, so a block and its label are one transfer."""
    door = Counted(agent_with(), memory=memory)
    with Pool("/nowhere", files=door) as pool:
        values = NamedValues(pool, "v")
        room = values.room(4 * PIECE)
        room[: 2 * PIECE] = BLOB[: 2 * PIECE]
        names = [b"one", b"two"]
        assert values.store(names, [[room[:PIECE]], [room[PIECE : 2 * PIECE]]]) == [True, True]
        into = [[room[3 * PIECE :]], [room[2 * PIECE : 3 * PIECE]]]
        assert values.load(names, into) == [PIECE, PIECE]
        assert room[2 * PIECE :] == BLOB[PIECE : 2 * PIECE] + BLOB[:PIECE]
        assert values.load([b"other"], [[room[:PIECE]]]) == [None]
        assert door.moves == 5


class Session:
    """A client that speaks the ioctls itself, rightly or not."""

    def __init__(self, agent: PoolAgent, memory: RegisteredMemory) -> None:
        self.door = SessionDoor(agent, memory=memory)
        self.handle = self.door.open("")
        self.theirs = Registrable(4 * PIECE)

    def call(self, which: Ioctl, data: bytes | bytearray) -> bytearray:
        answer = bytearray(data)
        self.door.ioctl(self.handle, ioctl_command(which, len(data)), answer)
        return answer

    def register(self) -> int:
        data = encode_register(self.theirs.descriptor, self.theirs.size)
        return decode_registered_untrusted(self.call(Ioctl.REGISTER, data))[0]

    def load(self, *parts: tuple[int, int, int], ticket: int | None = None) -> tuple[int, int]:
        asked = encode_transfer("v", key_of(1), ticket, parts)
        return decode_done_untrusted(self.call(Ioctl.LOAD, asked))

    def store(self, *parts: tuple[int, int, int], ticket: int | None = None) -> tuple[int, int]:
        asked = encode_transfer("v", key_of(1), ticket, parts)
        return decode_done_untrusted(self.call(Ioctl.STORE, asked))

    def bind(self, operation: Operation, length: int) -> None:
        lengths = (length,) if operation is Operation.PUT else ()
        request = Request(operation, 1, "v", (key_of(1),), flags=FLAG_NO_ANSWER, lengths=lengths)
        self.door.pwrite(self.handle, request.encode(), 0)

    def close(self) -> None:
        self.door.close(self.handle)


@pytest.fixture
def session(memory: RegisteredMemory) -> Iterator[Session]:
    session = Session(agent_with(), memory)
    yield session
    session.close()
    assert memory.mapped_bytes() == 0


def test_parts_in_any_order(session: Session) -> None:
    region = session.register()
    session.theirs.view[:] = BLOB[: 4 * PIECE]
    stored = [(region, 64, 100), (region, 0, 64), (region, PIECE, 2 * PIECE + 1)]
    assert session.store(*stored) == (Outcome.HIT, 0)
    value = BLOB[64:164] + BLOB[:64] + BLOB[PIECE : 3 * PIECE + 1]
    session.theirs.view[:] = bytes(4 * PIECE)
    parts = [(region, 3 * PIECE, 1), (region, 10, 2 * PIECE), (region, 3 * PIECE + 5, 164)]
    assert session.load(*parts) == (Outcome.HIT, len(value))
    view = session.theirs.view
    found = view[3 * PIECE : 3 * PIECE + 1].tobytes() + view[10 : 10 + 2 * PIECE].tobytes()
    assert found + view[3 * PIECE + 5 : 3 * PIECE + 169].tobytes() == value


def test_by_ticket(session: Session) -> None:
    region = session.register()
    session.theirs.view[:PIECE] = BLOB[:PIECE]
    session.bind(Operation.PUT, PIECE)
    assert session.store((region, 0, PIECE), ticket=0) == (Outcome.HIT, 0)
    with pytest.raises(OSError, match="for reading"):
        session.load((region, 0, PIECE), ticket=0)
    session.bind(Operation.GET, 0)
    assert session.load((region, PIECE, PIECE), ticket=0) == (Outcome.HIT, PIECE)
    assert session.theirs.view[PIECE : 2 * PIECE] == BLOB[:PIECE]
    with pytest.raises(OSError, match="for writing"):
        session.store((region, 0, PIECE), ticket=0)
    for move in (session.load, session.store):
        with pytest.raises(OSError, match="no key is bound"):
            move((region, 0, PIECE), ticket=7)


@pytest.mark.parametrize(
    "part",
    [
        (0, 0, 1), (2, 0, 1), ((1 << 32) - 1, 0, 1), (1, 4 * PIECE, 1), (1, 4 * PIECE - 1, 2),
        (1, (1 << 64) - 1, 1), (1, 1 << 63, 4096), (1, (1 << 64) - 4096, 8192),
    ],
)  # fmt: skip
def test_parts_that_lie_nowhere(session: Session, part: tuple[int, int, int]) -> None:
    assert session.register() == 1
    for move in (session.load, session.store):
        with pytest.raises(OSError, match="no region"):
            move((1, 0, 10), part)


def test_regions_end(session: Session, memory: RegisteredMemory) -> None:
    numbers = [session.register() for _ in range(REGIONS_MAX)]
    assert len(set(numbers)) == REGIONS_MAX
    with pytest.raises(OSError, match="regions at most"):
        session.register()
    session.call(Ioctl.UNREGISTER, bytearray(numbers[3].to_bytes(REGISTER_BYTES, "little")))
    with pytest.raises(OSError, match="no region"):
        session.load((numbers[3], 0, 1))
    with pytest.raises(OSError, match="no region"):
        session.call(Ioctl.UNREGISTER, bytearray(numbers[3].to_bytes(REGISTER_BYTES, "little")))
    assert session.register() not in numbers
    assert memory.mapped_bytes() == session.theirs.size


def test_threads_that_register_at_one_time(memory: RegisteredMemory) -> None:
    """Each number is one region's, and none is mapped without one."""
    agent = agent_with()
    door = SessionDoor(agent, memory=memory)
    made = [Registrable(4096) for _ in range(8)]
    command, caller = ioctl_command(Ioctl.REGISTER, 16), Caller(pid=os.getpid())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(made)) as threads:
            for _ in range(50):
                handle, together = door.open(""), threading.Barrier(len(made))

                def register(
                    one: Registrable, handle: int = handle, together: threading.Barrier = together
                ) -> int:
                    data = memoryview(encode_register(one.descriptor, one.size))
                    together.wait()
                    asked = door.face.ioctl(caller, CONTROL_ROOT + 1, handle, command, data)
                    return decode_registered_untrusted(settle(asked, agent.channel))[0]

                assert sorted(threads.map(register, made)) == list(range(1, 9))
                door.close(handle)
                assert memory.mapped_bytes() == 0
    finally:
        sys.setswitchinterval(interval)


def test_an_agent_that_ends_with_a_transfer_under_way_keeps_its_lock(
    session: Session, memory: RegisteredMemory
) -> None:
    region = session.register()
    session.load((region, 0, 10))
    assert not memory.under_way
    memory.under_way.append(None)  # as while a worker hangs in one
    memory.close()
    assert memory.mapped_bytes() == session.theirs.size
    memory.under_way.clear()
    memory.close()
    assert memory.mapped_bytes() == 0


def test_a_miss_says_why(session: Session) -> None:
    region = session.register()
    assert session.load((region, 0, 10)) == (Outcome.NEVER_STORED, 0)


@pytest.mark.parametrize("command", [0x5401, ioctl_command(Ioctl.LOAD, 48) ^ 1 << 30, 0xC0106709])
def test_other_ioctls(session: Session, command: int) -> None:
    with pytest.raises(OSError) as refused:
        session.door.ioctl(session.handle, command, bytearray(48))
    assert refused.value.errno == errno.ENOTTY


@pytest.mark.parametrize("which", list(Ioctl))
def test_nonsense(session: Session, which: Ioctl) -> None:
    for size in (0, 1, 15, 17, 48, 4000):
        with pytest.raises(OSError) as refused:
            session.call(which, b"\xff" * size)
        assert refused.value.errno == errno.EINVAL


def test_not_on_other_files(session: Session) -> None:
    face, channel = session.door.face, session.door._channel
    status = settle(face.open(Caller(), CONTROL_ROOT + 2, 0), channel).handle
    for ino, handle in ((CONTROL_ROOT + 2, status), (CONTROL_ROOT, 99)):
        with pytest.raises(FsError) as refused:
            settle(face.ioctl(Caller(), ino, handle, ioctl_command(Ioctl.LOAD, 48), memoryview(b"")), channel)
        assert refused.value.errno == errno.ENOTTY
    settle(face.release(CONTROL_ROOT + 2, status), channel)
