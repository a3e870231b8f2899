"""The base transport header, with which every packet begins (IBTA volume 1, 9.2).

    0       opcode                      `Opcode`
    1       7 solicited event, 6 MigReq, 5..4 pad count, 3..0 TVer (0)
    2..3    P_Key
    4       7 FECN, 6 BECN, 5..0 reserved                       all of it masked in the ICRC
    5..7    destination queue pair
    8       7 acknowledge request, 6..0 reserved
    9..11   packet sequence number

Big-endian.
"""

import struct
from typing import Final

from emulator.roce.wire.opcodes import BTH_BYTES as BTH_BYTES

BTH: Final = struct.Struct(">BBHII")
"""Opcode, flags, P_Key, byte 4 and queue pair, byte 8 and PSN."""
assert BTH.size == BTH_BYTES

OFFSET_PSN: Final = 8
"""Of the 32-bit word whose lower 24 bits are the PSN; bit 31 is the acknowledge request."""

SOLICITED_EVENT: Final = 0x80
MIGRATION_REQUEST: Final = 0x40
PAD_SHIFT: Final = 4
PAD_MASK: Final = 0x30
VERSION_MASK: Final = 0x0F
FECN: Final = 0x8000_0000
BECN: Final = 0x4000_0000
ACKNOWLEDGE_REQUEST: Final = 0x8000_0000
LOW_24_BITS: Final = 0x00FF_FFFF

DEFAULT_P_KEY: Final = 0xFFFF


def psn_difference(psn: int, other: int) -> int:
    """How far `psn` is ahead of `other`, from -2^23 to 2^23 - 1 (IBTA volume 1, 9.7.2)."""
    return (psn - other + 0x80_0000 & LOW_24_BITS) - 0x80_0000
