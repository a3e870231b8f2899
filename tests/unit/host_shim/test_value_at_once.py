"""Values by one request: what the client makes of a scripted agent's answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_shim.block_key import key_of
from host_shim.control_wire import (
    AT_ONCE_BYTES,
    KEY_BYTES,
    MalformedControl,
    decode_value_xattr_untrusted,
    value_xattr,
)
from host_shim.pool import BufferTooSmall, Pool, UnknownVolume, Volume
from host_shim.session_files import Files
from tests.support.engines.scripted_agent import AgentThatGivesAtOnce

KEY, OTHER = key_of("one"), key_of("other")


@pytest.fixture
def agent() -> AgentThatGivesAtOnce:
    return AgentThatGivesAtOnce()


@pytest.fixture
def volume(agent: AgentThatGivesAtOnce) -> Iterator[Volume]:
    with Pool("/nowhere", files=agent) as pool:
        yield pool.volume("kv")
    assert agent.open_files == 0


def test_a_short_buffer_costs_one_request(agent: AgentThatGivesAtOnce, volume: Volume) -> None:
    assert volume.put(KEY, b"x" * 5000)
    agent.requests.clear()
    buffer = bytearray(AT_ONCE_BYTES)
    assert volume.get_into(KEY, buffer) == 5000
    assert buffer[:5001] == b"x" * 5000 + b"\0"
    assert volume.get_into(OTHER, buffer) is None
    exact = bytearray(5000)
    assert volume.get_into(KEY, exact) == 5000
    assert exact == b"x" * 5000
    assert (agent.at_once, agent.requests) == (3, [])


def test_a_long_buffer_goes_through_the_session(agent: AgentThatGivesAtOnce, volume: Volume) -> None:
    volume.put(KEY, b"x" * 5000)
    assert volume.get_into(KEY, bytearray(AT_ONCE_BYTES + 1)) == 5000
    assert agent.at_once == 0


def test_a_longer_value_is_said_to_be_so(volume: Volume) -> None:
    volume.put(KEY, b"x" * 5000)
    with pytest.raises(BufferTooSmall, match="longer than the buffer of 4999 bytes"):
        volume.get_into(KEY, bytearray(4999))


def test_one_longer_than_any_attribute_does_not_end_that_way(
    agent: AgentThatGivesAtOnce, volume: Volume
) -> None:
    volume.put(KEY, b"x" * (AT_ONCE_BYTES + 1))
    volume.put(OTHER, b"y" * AT_ONCE_BYTES)
    with pytest.raises(BufferTooSmall, match="longer than the buffer of 65536 bytes"):
        volume.get_into(KEY, bytearray(AT_ONCE_BYTES))
    agent.requests.clear()
    assert volume.get_into(OTHER, bytearray(AT_ONCE_BYTES)) == AT_ONCE_BYTES
    assert (agent.at_once, agent.requests) == (2, [])


def test_an_unknown_volume_is_wrong_use(agent: AgentThatGivesAtOnce) -> None:
    with Pool("/nowhere", files=agent) as pool, pytest.raises(UnknownVolume):
        pool.volume("nobodys").get_into(KEY, bytearray(10))


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.ENOMEM, errno.ENOSYS])
def test_who_does_not_have_it_is_asked_once(
    agent: AgentThatGivesAtOnce, volume: Volume, refusal: int
) -> None:
    volume.put(KEY, b"value")
    agent.refuses = refusal
    for _ in range(2):
        buffer = bytearray(10)
        assert volume.get_into(KEY, buffer) == 5
        assert buffer[:5] == b"value"
        agent.refuses = 0  # it is not asked again in this session
    assert agent.at_once == 0
    assert agent.opens == 1


@pytest.mark.parametrize("death", [errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE])
def test_an_agent_that_goes_is_a_miss_and_the_next_is_asked(
    agent: AgentThatGivesAtOnce, volume: Volume, death: int
) -> None:
    volume.put(KEY, b"value")
    agent.fail(death)
    assert volume.get_into(KEY, bytearray(10)) is None
    assert volume.get_into(KEY, bytearray(10)) == 5
    assert agent.opens == 2


def test_what_cannot_be_had_is_a_miss_and_the_session_lives(
    agent: AgentThatGivesAtOnce, volume: Volume
) -> None:
    volume.put(KEY, b"value")
    agent.fail(errno.EIO)
    assert volume.get_into(KEY, bytearray(10)) is None
    assert volume.get_into(KEY, bytearray(10)) == 5
    assert agent.opens == 1


def test_a_name_with_a_nul_is_not_cut_off(agent: AgentThatGivesAtOnce) -> None:
    """It cannot be the name of an attribute, and the session says what there is to say."""
    with Pool("/nowhere", files=agent) as pool, pytest.raises(UnknownVolume):
        pool.volume("kv\0x").get_into(KEY, bytearray(10))
    assert agent.at_once == 0


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), st.text(max_size=16))
def test_names_of_values(key: bytes, volume: str) -> None:
    name = value_xattr(volume, key)
    assert len(name) <= 255
    assert decode_value_xattr_untrusted(name) == (volume, key)


@given(st.binary(max_size=100).map(lambda tail: b"user.g35." + tail) | st.binary(max_size=60))
def test_any_bytes_are_a_name_or_refused(name: bytes) -> None:
    try:
        volume, key = decode_value_xattr_untrusted(name)
    except MalformedControl:
        return
    assert len(key) == KEY_BYTES
    assert value_xattr(volume, key).lower() == name.lower()


def test_the_operating_systems_call_fills_the_callers_memory(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        files, into = Files(), memoryview(bytearray(8))
        try:
            os.setxattr(path, "user.x", b"value")
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            pytest.skip(f"the file system of {tmp_path} has no user attributes: give a --basetemp on ext4")
        assert files.fgetxattr(file.fileno(), b"user.x", into[1:]) == 5
        assert into == b"\0value\0\0"
        for name, room, code in ((b"user.y", 8, errno.ENODATA), (b"user.x", 4, errno.ERANGE)):
            with pytest.raises(OSError, match=os.strerror(code)) as refused:
                files.fgetxattr(file.fileno(), name, into[:room])
            assert refused.value.errno == code
