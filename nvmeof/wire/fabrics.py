"""Fabrics commands: Connect, Disconnect, Property Get and Set, Authentication Send and Receive.

NVMe-oF 1.1, chapter 3. All have opcode 7Fh and travel as an ordinary `Sqe`, whose byte 4 is the command
type; the bytes from 40 on are theirs. Disconnect has RECFMT there alone, in two bytes.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from nvmeof.errors import MalformedPdu, exactly
from nvmeof.wire.bit_fields import Bits, Bytes, Order, Record
from nvmeof.wire.command_dwords import CommandDwords
from nvmeof.wire.sqe import Sqe

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
MAX_NQN_BYTES = 223
DYNAMIC_CONTROLLER = 0xFFFF
"""CNTLID that asks for any controller (the dynamic controller model)."""

CONNECT_DATA_BYTES = 1024

CATTR_NO_FLOW_CONTROL = 0x04
"""CATTR: do not use SQ head pointers for flow control."""

RESULT_AUTH_REQUIRED = 1 << 17
RESULT_AUTH_SECURE_CHANNEL = 1 << 18
"""Result of Connect: 15:0 CNTLID, ATR and ASCR."""


class FabricsType(IntEnum):
    """FCTYPE."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTHENTICATION_SEND = 0x05
    AUTHENTICATION_RECEIVE = 0x06
    DISCONNECT = 0x08


_IN_DATA = 1 << 16
"""IATTR."""


class ConnectParameter(IntEnum):
    """What a controller does not take: the result of a refused Connect (Connect Invalid Parameters).

    15:0 is the offset (IPO), in the data where bit 16 (IATTR) is set, else in the command.
    """

    RECFMT = 40
    QID = 42
    SQSIZE = 44
    CATTR = 46
    KATO = 48
    HOSTID = _IN_DATA
    CNTLID = _IN_DATA | 16
    SUBNQN = _IN_DATA | 256
    HOSTNQN = _IN_DATA | 512


def refused_parameter(result: int) -> ConnectParameter | None:
    """The parameter that such a result names; None where it names none."""
    try:
        return ConnectParameter(result & (_IN_DATA | 0xFFFF))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Connect(CommandDwords):
    """The fields of a Connect command. `sqsize` is 0's based, `kato` is in milliseconds (0: none)."""

    qid: Annotated[int, Bits(2, 16)]
    sqsize: Annotated[int, Bits(4, 16)]
    kato: Annotated[int, Bits(8, 32)] = 0
    cattr: Annotated[int, Bits(6, 8)] = 0
    recfmt: Annotated[int, Bits(0, 16)] = 0


def encode_nqn(name: str) -> bytes:
    """A qualified name as bytes; ValueError if it is too long or carries a NUL."""
    raw = name.encode()
    if not raw or len(raw) > MAX_NQN_BYTES or 0 in raw:
        raise ValueError(f"not an NVMe qualified name: {name!r}")
    return raw


class _Nqn(Bytes):
    """A qualified name, UTF-8 and padded with NUL; `name` is the field's in the specification."""

    def __init__(self, byte: int, name: str) -> None:
        super().__init__(byte, 256)
        self.name = name

    def number(self, value: str, order: Order) -> int:
        return super().number(encode_nqn(value), order)

    def value(self, number: int, order: Order) -> str:
        name, end, _ = super().value(number, order).partition(b"\0")
        if not end or len(name) > MAX_NQN_BYTES:
            raise MalformedPdu(f"{self.name} has no end")
        try:
            return str(name, "utf-8")
        except UnicodeDecodeError:
            raise MalformedPdu(f"{self.name} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class ConnectData(Record):
    """Who connects to what. `host_id` has 16 bytes; `cntlid` is FFFFh on the admin queue."""

    BYTES: ClassVar[int] = CONNECT_DATA_BYTES

    host_id: Annotated[bytes, Bytes(0, 16, whole=True)]
    cntlid: Annotated[int, Bits(16, 16)]
    subsystem_nqn: Annotated[str, _Nqn(256, "SUBNQN")]
    host_nqn: Annotated[str, _Nqn(512, "HOSTNQN")]


def decode_connect_data_untrusted(data: bytes | bytearray | memoryview) -> ConnectData:
    """Connect data from exactly 1024 bytes. An empty name decodes; the controller refuses it."""
    exactly(data, CONNECT_DATA_BYTES, "Connect data")
    return ConnectData.decode(data)


@dataclass(frozen=True, slots=True)
class PropertyAccess:
    """A Property Get (`value` is None) or Property Set. `size` is 4 or 8 bytes, 0 if the code is reserved.

    Bytes from 40 on: 40 ATTRIB u8 (1 = 8 bytes, 0 = 4), 44 OFST u32, 48 VALUE u64.
    """

    offset: int
    size: int
    value: int | None = None

    def dwords(self) -> tuple[int, ...]:
        """Command dwords from 10 on. The command has no data."""
        value = self.value or 0
        return 1 if self.size == 8 else 0, self.offset, value & 0xFFFF_FFFF, value >> 32


def decode_property_access(sqe: Sqe) -> PropertyAccess:
    size = {0: 4, 1: 8}.get(sqe.cdw10 & 7, 0)
    if sqe.fctype == FabricsType.PROPERTY_GET:
        return PropertyAccess(sqe.cdw11, size)
    value = sqe.cdw12 | sqe.cdw13 << 32
    return PropertyAccess(sqe.cdw11, size, value if size == 8 else value & 0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Authentication(CommandDwords):
    """An Authentication Send or Receive: `length` bytes of protocol `secp` (E9h is DH-HMAC-CHAP)."""

    receive: bool
    length: Annotated[int, Bits(4, 32)]
    secp: Annotated[int, Bits(3, 8)] = 0xE9
    spsp0: Annotated[int, Bits(1, 8)] = 1
    spsp1: Annotated[int, Bits(2, 8)] = 1


def decode_authentication(sqe: Sqe) -> Authentication:
    return Authentication.of(sqe, receive=sqe.fctype == FabricsType.AUTHENTICATION_RECEIVE)
