"""The submission queue entry: one command, 64 bytes (NVMe Base 2.0, figure 86). Read `sgl.py` first.

0      opcode
1      flags: 1:0 FUSE, 7:6 PSDT (1 = SGL; Fabrics uses nothing else)
2..3   command id
4..7   namespace id; in a Fabrics command byte 4 is the command type (FCTYPE)
8..15  command dwords 2 and 3
16..23 metadata pointer
24..39 SGL 1
40..63 command dwords 10 to 15
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from nvmeof.errors import MalformedPdu
from nvmeof.wire.sgl import SglDescriptor, from_words

SQE: Final = struct.Struct("<BBHIIIQQQ6I")
_SQE_IN: Final = struct.Struct("<BBHIIIQQII6I")
"""The same to read: a number of more than 62 bits is many times as slow to work with, compiled."""
assert SQE.size == _SQE_IN.size == 64

FLAGS_SGL: Final = 0x40
"""PSDT 01b: SGL 1 is an SGL descriptor, the metadata pointer an address."""

FLAGS_FUSE: Final = 0x03
FLAGS_PSDT: Final = 0xC0
"""The two fields of the flags byte."""


class AdminOpcode(IntEnum):
    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class IoOpcode(IntEnum):
    """Opcodes on I/O queues, NVM command set."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    FABRICS = 0x7F


READ_WRITE_FUA: Final = 1 << 30
WRITE_ZEROES_DEALLOCATE: Final = 1 << 25
"""Bits of command dword 12 of Read, Write, Compare and Write Zeroes; 15:0 is the block count, 0's based."""

DATASET_DEALLOCATE: Final = 1 << 2
"""Bit of command dword 11 of Dataset Management."""

DATASET_RANGE: Final = struct.Struct("<IIQ")
assert DATASET_RANGE.size == 16
MAX_DATASET_RANGES: Final = 256


class Sqe(NamedTuple):
    """One command. Dwords that an opcode does not use are 0."""

    opcode: int
    cid: int = 0
    nsid: int = 0
    sgl: SglDescriptor = SglDescriptor(0, 0, 5, 0xA)
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0
    cdw2: int = 0
    cdw3: int = 0
    metadata_pointer: int = 0
    flags: int = FLAGS_SGL

    @property
    def slba(self) -> int:
        """Starting LBA of Read, Write, Compare and Write Zeroes."""
        return self.cdw10 | self.cdw11 << 32

    @property
    def blocks(self) -> int:
        """Number of logical blocks of the same commands, counted from 1."""
        return (self.cdw12 & 0xFFFF) + 1

    @property
    def fctype(self) -> int:
        """Fabrics command type, when the opcode is FABRICS."""
        return self.nsid & 0xFF


def decode_sqe_untrusted(data: bytes | bytearray | memoryview) -> Sqe:
    """A command from exactly 64 bytes. Every value decodes; whether it makes sense is for a controller."""
    if len(data) != SQE.size:
        raise MalformedPdu(f"a command has 64 bytes, not {len(data)}")
    opcode, flags, cid, nsid, cdw2, cdw3, pointer, address, low, high, d10, d11, d12, d13, d14, d15 = (
        _SQE_IN.unpack(data)
    )
    sgl = from_words(address, low, high)
    # As in `from_words`: a named tuple's own way to be made is interpreted.
    return tuple.__new__(
        Sqe, (opcode, cid, nsid, sgl, d10, d11, d12, d13, d14, d15, cdw2, cdw3, pointer, flags)
    )


@dataclass(frozen=True, slots=True)
class DatasetRange:
    """One range of Dataset Management: `blocks` logical blocks from `slba`."""

    slba: int
    blocks: int
    attributes: int = 0


def decode_dataset_ranges_untrusted(data: bytes | bytearray | memoryview) -> list[DatasetRange]:
    """The ranges of a Dataset Management command: 1 to 256 of 16 bytes each."""
    if not data or len(data) % DATASET_RANGE.size or len(data) > DATASET_RANGE.size * MAX_DATASET_RANGES:
        raise MalformedPdu(f"{len(data)} bytes are no list of dataset ranges")
    return [
        DatasetRange(slba, blocks, attributes) for attributes, blocks, slba in DATASET_RANGE.iter_unpack(data)
    ]
