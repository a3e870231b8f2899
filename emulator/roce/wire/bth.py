"""The base transport header, with which every packet begins (IBTA volume 1, 9.2).

    0       opcode                      `Opcode`
    1       7 solicited event, 6 MigReq, 5..4 pad count, 3..0 TVer (0)
    2..3    P_Key
    4       7 FECN, 6 BECN, 5..0 reserved                       all of it masked in the ICRC
    5..7    destination queue pair
    8       7 acknowledge request, 6..0 reserved
    9..11   packet sequence number

Big-endian. `BTH_DTYPE` is the same for a row of packets in a numpy array.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from emulator.roce.wire.opcodes import BTH_BYTES as BTH_BYTES

BTH: Final = struct.Struct(">BBHII")
"""Opcode, flags, P_Key, byte 4 and queue pair, byte 8 and PSN."""
assert BTH.size == BTH_BYTES

OFFSET_OPCODE: Final = 0
OFFSET_FLAGS: Final = 1
OFFSET_P_KEY: Final = 2
OFFSET_QUEUE_PAIR: Final = 4
"""Of the 32-bit word whose lower 24 bits are the queue pair; the upper 8 are FECN, BECN and reserved."""
OFFSET_PSN: Final = 8
"""Of the 32-bit word whose lower 24 bits are the PSN; bit 31 is the acknowledge request."""

BTH_DTYPE: Final = np.dtype(
    {
        "names": ["opcode", "flags", "p_key", "queue_pair_word", "psn_word"],
        "formats": ["u1", "u1", ">u2", ">u4", ">u4"],
        "offsets": [OFFSET_OPCODE, OFFSET_FLAGS, OFFSET_P_KEY, OFFSET_QUEUE_PAIR, OFFSET_PSN],
        "itemsize": BTH_BYTES,
    }
)

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
PSN_MODULUS: Final = 1 << 24
"""PSNs count modulo this."""


def pad_count(payload_bytes: int) -> int:
    """Bytes (0 to 3) that bring a payload to a multiple of four (IBTA volume 1, 9.2)."""
    return -payload_bytes & 3


def psn_difference(psn: int, other: int) -> int:
    """How far `psn` is ahead of `other`, from -2^23 to 2^23 - 1 (IBTA volume 1, 9.7.2)."""
    return (psn - other + 0x80_0000 & LOW_24_BITS) - 0x80_0000
