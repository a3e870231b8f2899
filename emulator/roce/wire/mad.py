"""Management datagrams: the 256 bytes that a UD packet from QP1 to QP1 carries (IBTA volume 1, 13.4).

    0       base version (1)        1   management class (7: communication management)
    2       class version (2)       3   method (3: Send; 7 R bit, 6..0 method)
    4..5    status                  6..7 class specific
    8..15   transaction ID, the sender's; an answer to a message bears the same
    16..17  attribute               `Attribute`: which message it is
    18..19  reserved                20..23 attribute modifier
    24..255 data of the message     `cm_messages.py`

Big-endian. Of the classes only the connection manager's is understood here: RoCE has no subnet manager.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from emulator.roce.wire.flow import Buffer
from emulator.roce.wire.malformed import Cause, MalformedPacket

HEADER: Final = struct.Struct(">BBBBHHQHHI")
assert HEADER.size == 24

MAD_BYTES: Final = 256
DATA_BYTES: Final = MAD_BYTES - HEADER.size

BASE_VERSION: Final = 1
CLASS_COMMUNICATION: Final = 0x07
CLASS_VERSION: Final = 2
METHOD_SEND: Final = 0x03


class Attribute(IntEnum):
    """The connection manager's messages (IBTA volume 1, 16.7)."""

    REQ = 0x0010
    MRA = 0x0011
    REJ = 0x0012
    REP = 0x0013
    RTU = 0x0014
    DREQ = 0x0015
    DREP = 0x0016
    SIDR_REQ = 0x0017
    SIDR_REP = 0x0018
    LAP = 0x0019
    APR = 0x001A


@dataclass(frozen=True, slots=True)
class ManagementDatagram:
    """One of the connection manager's class. `data` has 232 bytes."""

    attribute: int
    transaction: int
    data: bytes
    status: int = 0
    class_specific: int = 0
    modifier: int = 0

    def encode(self) -> bytes:
        """256 bytes. ValueError when `data` has any other length."""
        if len(self.data) != DATA_BYTES:
            raise ValueError(f"a management datagram carries {DATA_BYTES} bytes, not {len(self.data)}")
        head = HEADER.pack(
            BASE_VERSION, CLASS_COMMUNICATION, CLASS_VERSION, METHOD_SEND, self.status, self.class_specific,
            self.transaction, self.attribute, 0, self.modifier,
        )  # fmt: skip
        return head + self.data


def decode_mad_untrusted(raw: Buffer) -> ManagementDatagram:
    """The datagram. MalformedPacket (causes MAD_LENGTH, MAD_CLASS): not the connection manager's."""
    if len(raw) != MAD_BYTES:
        raise MalformedPacket(Cause.MAD_LENGTH, f"{len(raw)} bytes")
    fields = HEADER.unpack_from(raw)
    base, kind, version, method, status, specific, transaction, attribute, _, modifier = fields
    if (base, kind, version, method) != (BASE_VERSION, CLASS_COMMUNICATION, CLASS_VERSION, METHOD_SEND):
        raise MalformedPacket(
            Cause.MAD_CLASS, f"base version {base}, class {kind:#04x} version {version}, method {method:#04x}"
        )
    return ManagementDatagram(attribute, transaction, bytes(raw[HEADER.size :]), status, specific, modifier)
