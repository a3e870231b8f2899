"""The Key Value command set (CSI 1): its commands, its namespaces, its lists of keys. Read `sqe.py` first.

NVMe Key Value Command Set 1.0. A key has 1 to 16 bytes and travels in the command: bytes 0 to 7 in command
dwords 2 and 3, bytes 8 to 15 in dwords 14 and 15, each dword little-endian, the rest zero. Its length is
dword 11 bits 7:0. Dword 11 bits 15:8 are options; dword 10 is the length of the value (Store) or of the
host's buffer (Retrieve, List). Dwords 12 and 13 are reserved: there is no offset into a value, and a
Retrieve begins at its first byte.

Dword 0 of the completion of Retrieve is the length of the whole value, also where the buffer is shorter.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Annotated, ClassVar

from nvmeof.errors import MalformedPdu, exactly
from nvmeof.wire.bit_fields import Bits, Bytes, Record
from nvmeof.wire.identify import IDENTIFY_BYTES, Formats
from nvmeof.wire.sqe import Sqe

KEY_BYTES_MAX = 16


class KvOpcode(IntEnum):
    """Opcodes on I/O queues, for a namespace of the KV command set."""

    FLUSH = 0x00
    STORE = 0x01
    RETRIEVE = 0x02
    LIST = 0x06
    DELETE = 0x10
    EXIST = 0x14


class StoreOption(IntFlag):
    """Command dword 11 bits 15:8 of Store. Without one the value replaces what is there, or is new."""

    NONE = 0
    ONLY_IF_PRESENT = 1
    ONLY_IF_ABSENT = 2
    NO_COMPRESSION = 4


class RetrieveOption(IntFlag):
    """Command dword 11 bits 15:8 of Retrieve. RAW: as it is on the medium, not decompressed."""

    NONE = 0
    RAW = 1


_KEY = struct.Struct("<IIII")
assert _KEY.size == KEY_BYTES_MAX


def key_dwords(key: bytes) -> tuple[int, int, int, int]:
    """Command dwords 2, 3, 14 and 15. ValueError for a key of more than 16 bytes."""
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key has up to {KEY_BYTES_MAX} bytes, not {len(key)}")
    low, second, third, high = _KEY.unpack(key.ljust(KEY_BYTES_MAX, b"\0"))
    return low, second, third, high


def options(sqe: Sqe) -> int:
    return sqe.cdw11 >> 8 & 0xFF


def decode_key_untrusted(sqe: Sqe) -> bytes:
    """The key of a command; empty where its length is 0. MalformedPdu for one of more than 16 bytes."""
    length = sqe.cdw11 & 0xFF
    if length > KEY_BYTES_MAX:
        raise MalformedPdu(f"a key of {length} bytes")
    return _KEY.pack(sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15)[:length]


_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<H")
LIST_BYTES_MIN = _COUNT.size


def _entry_bytes(key: bytes) -> int:
    return -(-(_LENGTH.size + len(key)) // 4) * 4


def encode_key_list(keys: Iterable[bytes], size: int) -> bytes:
    """`size` bytes: how many keys, then each as a u16 length and its bytes, padded to a multiple of four.

    As many of `keys`, in their order, as there is room for; zeros behind them.
    """
    entries: list[bytes] = []
    left = size - _COUNT.size
    for key in keys:
        room = _entry_bytes(key)
        if room > left:
            break
        left -= room
        entries.append((_LENGTH.pack(len(key)) + key).ljust(room, b"\0"))
    return (_COUNT.pack(len(entries)) + b"".join(entries)).ljust(size, b"\0")


def decode_key_list_untrusted(data: bytes | bytearray | memoryview) -> list[bytes]:
    """The keys of a List. MalformedPdu where the count and the lengths do not fit the data."""
    raw = bytes(data)
    if len(raw) < _COUNT.size:
        raise MalformedPdu(f"a list of keys in {len(raw)} bytes")
    (count,) = _COUNT.unpack_from(raw)
    keys: list[bytes] = []
    at = _COUNT.size
    for _ in range(count):
        if at + _LENGTH.size > len(raw):
            raise MalformedPdu("a list of keys runs over its end")
        (length,) = _LENGTH.unpack_from(raw, at)
        key = raw[at + _LENGTH.size : at + _LENGTH.size + length]
        if not 1 <= length <= KEY_BYTES_MAX or len(key) != length:
            raise MalformedPdu(f"a list with a key of {length} bytes")
        keys.append(key)
        at += _entry_bytes(key)
    return keys


# --- CNS 05, CSI 1: namespace ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvFormat(Record):
    """One KV format: the longest key and value in bytes, and how many keys there may be (0: no bound)."""

    BYTES: ClassVar[int] = 16

    key_max: Annotated[int, Bits(0, 16)]
    value_max: Annotated[int, Bits(4, 32)]
    keys_max: Annotated[int, Bits(8, 32)] = 0
    additional: Annotated[int, Bits(3, 8)] = 0
    """AFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyKvNamespace(Record):
    """What a KV namespace is. Sizes are in bytes; the first of `formats` is in use."""

    BYTES: ClassVar[int] = IDENTIFY_BYTES

    nsze: Annotated[int, Bits(0, 64)] = 0
    nuse: Annotated[int, Bits(16, 64)] = 0
    nsfeat: Annotated[int, Bits(24, 8)] = 0
    nmic: Annotated[int, Bits(26, 8)] = 0
    anagrpid: Annotated[int, Bits(36, 32)] = 0
    nguid: Annotated[bytes, Bytes(48, 16)] = bytes(16)
    eui64: Annotated[bytes, Bytes(64, 8)] = bytes(8)
    formats: Annotated[tuple[KvFormat, ...], Formats(72, KvFormat, 16)] = (KvFormat(KEY_BYTES_MAX, 1 << 20),)


def decode_identify_kv_namespace_untrusted(data: bytes | bytearray | memoryview) -> IdentifyKvNamespace:
    """CNS 05 with CSI 1. All zeros is an inactive namespace id, and decodes."""
    exactly(data, IDENTIFY_BYTES, "Identify Namespace")
    return IdentifyKvNamespace.decode(data)
