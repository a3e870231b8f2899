"""Fabrics commands: Connect, Disconnect, Property Get and Set, Authentication Send and Receive.

NVMe-oF 1.1, chapter 3. All have opcode 7Fh and travel as an ordinary `Sqe`, whose byte 4 is the command
type; the bytes from 40 on are theirs:

    Connect       40 RECFMT u16, 42 QID u16, 44 SQSIZE u16 (0's based), 46 CATTR u8, 48 KATO u32 (ms)
    Property Get  40 ATTRIB u8 (1 = 8 bytes, 0 = 4), 44 OFST u32
    Property Set  the same, 48 VALUE u64
    Disconnect    40 RECFMT u16
    Auth          41 SPSP0 u8, 42 SPSP1 u8, 43 SECP u8, 44 length u32

Connect data, 1024 bytes: 0 HOSTID 16, 16 CNTLID u16 (FFFFh: give me one), 256 SUBNQN 256, 512 HOSTNQN 256.
The names are UTF-8, padded with NUL.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from nvmeof.errors import MalformedPdu, exactly
from nvmeof.wire.sqe import Sqe

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
MAX_NQN_BYTES = 223
DYNAMIC_CONTROLLER = 0xFFFF
"""CNTLID that asks for any controller (the dynamic controller model)."""

CONNECT_DATA = struct.Struct("<16sH238x256s256s256x")
assert CONNECT_DATA.size == 1024

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
class Connect:
    """The fields of a Connect command. `sqsize` is 0's based, `kato` is in milliseconds (0: none)."""

    qid: int
    sqsize: int
    kato: int = 0
    cattr: int = 0
    recfmt: int = 0

    def dwords(self) -> tuple[int, ...]:
        return self.recfmt | self.qid << 16, self.sqsize | self.cattr << 16, self.kato


def decode_connect(sqe: Sqe) -> Connect:
    return Connect(
        qid=sqe.cdw10 >> 16,
        sqsize=sqe.cdw11 & 0xFFFF,
        kato=sqe.cdw12,
        cattr=sqe.cdw11 >> 16 & 0xFF,
        recfmt=sqe.cdw10 & 0xFFFF,
    )


@dataclass(frozen=True, slots=True)
class ConnectData:
    """Who connects to what. `host_id` has 16 bytes; `cntlid` is FFFFh on the admin queue."""

    host_id: bytes
    cntlid: int
    subsystem_nqn: str
    host_nqn: str

    def encode(self) -> bytes:
        return CONNECT_DATA.pack(
            self.host_id, self.cntlid, encode_nqn(self.subsystem_nqn), encode_nqn(self.host_nqn)
        )


def encode_nqn(name: str) -> bytes:
    """A qualified name as bytes; ValueError if it is too long or carries a NUL."""
    raw = name.encode()
    if not raw or len(raw) > MAX_NQN_BYTES or 0 in raw:
        raise ValueError(f"not an NVMe qualified name: {name!r}")
    return raw


def _decode_nqn(raw: bytes, field: str) -> str:
    name, end, _ = raw.partition(b"\0")
    if not end or len(name) > MAX_NQN_BYTES:
        raise MalformedPdu(f"{field} has no end")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise MalformedPdu(f"{field} is not UTF-8") from None


def decode_connect_data_untrusted(data: bytes | bytearray | memoryview) -> ConnectData:
    """Connect data from exactly 1024 bytes. An empty name decodes; the controller refuses it."""
    exactly(data, CONNECT_DATA.size, "Connect data")
    host_id, cntlid, subsystem, host = CONNECT_DATA.unpack(data)
    return ConnectData(host_id, cntlid, _decode_nqn(subsystem, "SUBNQN"), _decode_nqn(host, "HOSTNQN"))


@dataclass(frozen=True, slots=True)
class PropertyAccess:
    """A Property Get (`value` is None) or Property Set. `size` is 4 or 8 bytes, 0 if the code is reserved."""

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
class Authentication:
    """An Authentication Send or Receive: `length` bytes of protocol `secp` (E9h is DH-HMAC-CHAP)."""

    receive: bool
    length: int
    secp: int = 0xE9
    spsp0: int = 1
    spsp1: int = 1

    def dwords(self) -> tuple[int, ...]:
        return self.spsp0 << 8 | self.spsp1 << 16 | self.secp << 24, self.length


def decode_authentication(sqe: Sqe) -> Authentication:
    return Authentication(
        receive=sqe.fctype == FabricsType.AUTHENTICATION_RECEIVE,
        length=sqe.cdw11,
        secp=sqe.cdw10 >> 24,
        spsp0=sqe.cdw10 >> 8 & 0xFF,
        spsp1=sqe.cdw10 >> 16 & 0xFF,
    )
