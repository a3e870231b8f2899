"""Gets into registered memory, by an agent that is scripted down to its ioctls."""

from __future__ import annotations

import errno

import pytest

from host_shim.block_key import key_of
from host_shim.control_session import SessionDead
from host_shim.control_wire import VALUE_BYTES_MAX, Outcome
from host_shim.pool import Pool
from host_shim.session_files import Files, Refusal
from host_shim.transfer_wire import (
    Ioctl,
    Transfer,
    decode_transfer_untrusted,
    encode_done,
    encode_registered,
    ioctl_of,
)

KEY = key_of("a block")


class Ioctls(Files):
    """Answers every LOAD with a length; everything else finds no agent."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.registered = 0
        self.asked: list[Transfer] = []

    def open(self, path: str) -> int:
        return 1 << 20

    def close(self, descriptor: int) -> None:
        pass

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        if ioctl_of(command) is Ioctl.REGISTER:
            self.registered += 1
            data[:] = encode_registered(self.registered, 5)
            return
        self.asked.append(decode_transfer_untrusted(data))
        done = encode_done(Outcome.HIT.value, self.length)
        data[: len(done)] = done

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        raise Refusal(errno.ENOTCONN, "gone")

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        raise Refusal(errno.ENOTCONN, "gone")

    def preadv_parts(self, descriptor: int, parts: object, offset: int) -> int:
        raise Refusal(errno.ENOTCONN, "gone")


def test_a_buffer_may_be_longer_than_any_value() -> None:
    files = Ioctls(length=100)
    with Pool("/nowhere", files=files) as pool:
        assert pool.volume("kv").get_into(KEY, pool.memory(VALUE_BYTES_MAX + 1)) == 100
    assert [part[2] for asked in files.asked for part in asked.parts] == [VALUE_BYTES_MAX]


def test_an_agent_that_dies_before_it_says_how_long_values_are_is_a_miss() -> None:
    with Pool("/nowhere", files=Ioctls(length=8192)) as pool:
        assert pool.volume("kv").get_into(KEY, pool.memory(4096)) is None


def test_nothing_is_registered_where_a_part_lies_elsewhere() -> None:
    files = Ioctls(length=8192)
    with Pool("/nowhere", files=files) as pool:
        session = pool._lender.take()
        assert session is not None
        with pytest.raises(SessionDead, match="gone"):
            session.read_parts(0, [pool.memory(4096), memoryview(bytearray(4096))])
        pool._lender.free.append(session)
    assert files.registered == 0
    assert not files.asked
