"""Management datagrams: the 256 bytes that a UD packet from QP1 to QP1 carries (IBTA volume 1, 13.4).

    0       base version (1)        1   management class (7: communication management)
    2       class version (2)       3   method (3: Send; 7 R bit, 6..0 method)

An answer to a message bears the same transaction ID; it is the sender's. Of the classes only the connection
manager's is understood here: RoCE has no subnet manager.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from emulator.roce.wire.flow import Buffer
from emulator.roce.wire.malformed import Cause, MalformedPacket
from nvmeof.wire.bit_fields import BigEndianRecord, Bits, Bytes, layout_of

MAD_BYTES: Final = 256
DATA_BYTES: Final = 232

_KIND: Final = 0x01070203
"""Base version, class, class version and method: all that there are here."""


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
class ManagementDatagram(BigEndianRecord):
    """One of the connection manager's class. `data` has 232 bytes: the message, see `cm_messages.py`."""

    attribute: Annotated[int, Bits(16, 16)]
    transaction: Annotated[int, Bits(8, 64)]
    data: Annotated[bytes, Bytes(24, DATA_BYTES, whole=True)]
    status: Annotated[int, Bits(4, 16)] = 0
    class_specific: Annotated[int, Bits(6, 16)] = 0
    modifier: Annotated[int, Bits(20, 32)] = 0
    kind: Annotated[int, Bits(0, 32)] = _KIND


assert layout_of(ManagementDatagram).size == MAD_BYTES


def decode_mad_untrusted(raw: Buffer) -> ManagementDatagram:
    """The datagram. MalformedPacket (causes MAD_LENGTH, MAD_CLASS): not the connection manager's."""
    if len(raw) != MAD_BYTES:
        raise MalformedPacket(Cause.MAD_LENGTH, f"{len(raw)} bytes")
    datagram = ManagementDatagram.decode(raw)
    if datagram.kind != _KIND:
        base, kind, version, method = raw[:4]
        raise MalformedPacket(
            Cause.MAD_CLASS, f"base version {base}, class {kind:#04x} version {version}, method {method:#04x}"
        )
    return datagram
