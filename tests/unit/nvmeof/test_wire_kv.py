"""Records of the Key Value command set: golden bytes, round trips, and what is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeof.errors import MalformedPdu
from nvmeof.host import kv_commands
from nvmeof.host.command import Command
from nvmeof.wire.kv import (
    IdentifyKvNamespace,
    KvFormat,
    StoreOption,
    decode_identify_kv_namespace_untrusted,
    decode_key_list_untrusted,
    decode_key_untrusted,
    encode_key_list,
    key_dwords,
    options,
)
from nvmeof.wire.sqe import Sqe, decode_sqe_untrusted
from tests.support.nvme.entries import encode_entry

KEY = bytes(range(0xA1, 0xB1))
keys = st.binary(min_size=1, max_size=16)


def sqe_of(command: Command) -> Sqe:
    return Sqe(
        command.opcode, 7, command.nsid, cdw10=command.cdw10, cdw11=command.cdw11, cdw12=command.cdw12,
        cdw13=command.cdw13, cdw14=command.cdw14, cdw15=command.cdw15, cdw2=command.cdw2, cdw3=command.cdw3,
    )  # fmt: skip


def test_a_store_on_the_wire() -> None:
    value = [b"abc", memoryview(bytearray(8)).cast("I")]
    command = kv_commands.store(
        3, KEY, value, options=StoreOption.ONLY_IF_ABSENT | StoreOption.NO_COMPRESSION
    )
    raw = encode_entry(sqe_of(command))
    assert raw[0] == 0x01
    assert raw[4:8] == b"\3\0\0\0"
    assert raw[8:16] == KEY[:8]
    assert raw[40:44] == struct.pack("<I", 11)
    assert raw[44:48] == bytes([16, 6, 0, 0])
    assert raw[48:56] == bytes(8)
    assert raw[56:64] == KEY[8:]
    assert command.out_bytes == 11


@pytest.mark.parametrize(
    ("command", "opcode", "size", "option"),
    [
        (kv_commands.retrieve(1, KEY, memoryview(bytearray(9))), 0x02, 9, 0),
        (kv_commands.list_keys(1, KEY, memoryview(bytearray(b"x" * 9))), 0x06, 9, 0),
        (kv_commands.delete(1, KEY), 0x10, 0, 0),
        (kv_commands.exist(1, KEY), 0x14, 0, 0),
    ],
)
def test_the_other_commands(command: Command, opcode: int, size: int, option: int) -> None:
    sqe = sqe_of(command)
    assert (sqe.opcode, sqe.cdw10, options(sqe)) == (opcode, size, option)
    assert decode_key_untrusted(decode_sqe_untrusted(encode_entry(sqe))) == KEY
    if command.data_in is not None and opcode == 0x06:
        assert bytes(command.data_in) == bytes(9), "what is not answered must not look like an answer"


@given(keys)
def test_keys_round_trip(key: bytes) -> None:
    low, second, third, high = key_dwords(key)
    sqe = Sqe(1, cdw2=low, cdw3=second, cdw14=third, cdw15=high, cdw11=len(key))
    assert decode_key_untrusted(sqe) == key


def test_a_key_has_sixteen_bytes_at_most() -> None:
    with pytest.raises(ValueError, match="17"):
        kv_commands.delete(1, bytes(17))
    with pytest.raises(MalformedPdu):
        decode_key_untrusted(Sqe(1, cdw11=17))


@given(st.lists(keys, max_size=40), st.integers(4, 300))
def test_lists_round_trip_as_far_as_there_is_room(found: list[bytes], size: int) -> None:
    data = encode_key_list(found, size)
    assert len(data) == size
    back = decode_key_list_untrusted(data)
    assert back == found[: len(back)]
    if len(back) < len(found):
        taken = 4 + sum(-(-(2 + len(key)) // 4) * 4 for key in found[: len(back) + 1])
        assert taken > size


def test_a_list_on_the_wire() -> None:
    assert encode_key_list([b"ab", b"cde"], 20) == bytes.fromhex(
        "02000000 02006162 03006364 65000000 00000000"
    )


@given(st.binary(max_size=64))
def test_any_bytes_are_a_list_or_refused(data: bytes) -> None:
    try:
        found = decode_key_list_untrusted(data)
    except MalformedPdu:
        return
    assert all(1 <= len(key) <= 16 for key in found)


FULL = IdentifyKvNamespace(
    nsze=0x0102030405060708,
    nuse=0x1112131415161718,
    nsfeat=0x21,
    nmic=0x22,
    anagrpid=0x292A2B2C,
    nguid=bytes(range(0x40, 0x50)),
    eui64=bytes(range(0x50, 0x58)),
    formats=(KvFormat(16, 0x61626364, 0x65666768, 0x69), KvFormat(8, 0x71727374, 0x75767778, 0x79)),
)


def test_identify_namespace() -> None:
    raw = FULL.encode()
    assert len(raw) == 4096
    assert raw[:8] == bytes.fromhex("0807060504030201")
    assert raw[16:29] == bytes.fromhex("1817161514131211") + bytes([0x21, 1, 0x22, 0, 0])
    assert raw[32:48] == bytes.fromhex("00000000 2c2b2a29").ljust(16, b"\0")
    assert raw[48:72] == bytes(range(0x40, 0x58))
    assert raw[72:88] == bytes.fromhex("1000 00 69 64636261 68676665 00000000")
    assert decode_identify_kv_namespace_untrusted(raw) == FULL
    assert decode_identify_kv_namespace_untrusted(bytes(4096)).nsze == 0


def test_identify_namespace_refuses() -> None:
    with pytest.raises(MalformedPdu):
        decode_identify_kv_namespace_untrusted(bytes(4095))
    raw = bytearray(FULL.encode())
    raw[25] = 16
    with pytest.raises(MalformedPdu, match="17"):
        decode_identify_kv_namespace_untrusted(raw)
