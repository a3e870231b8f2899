"""The completion queue entry: the answer to one command, 16 bytes (NVMe Base 2.0, figure 92).

    0..7   result (dwords 0 and 1); meaning by command
    8..9   submission queue head pointer, the flow control of Fabrics queues
    10..11 submission queue id (reserved in Fabrics)
    12..13 command id
    14..15 bit 0 phase (reserved in Fabrics), 8:1 SC, 11:9 SCT, 13:12 CRD, 14 More, 15 Do Not Retry

`status.py` has the codes. The retry delay (CRD) and More are neither sent nor read.
"""

import struct
from dataclasses import dataclass
from typing import Final

from nvmeof.errors import MalformedPdu

CQE: Final = struct.Struct("<QHHHH")
assert CQE.size == 16


@dataclass(init=False, slots=True)
class Cqe:
    """One completion. `status` is SCT << 8 | SC, 0 for success."""

    cid: int
    status: int
    result: int
    sqhd: int
    sqid: int
    do_not_retry: bool

    # Written out: what `dataclass` writes is interpreted, and every command has one.
    def __init__(
        self,
        cid: int,
        status: int = 0,
        result: int = 0,
        sqhd: int = 0,
        sqid: int = 0,
        do_not_retry: bool = False,
    ) -> None:
        self.cid = cid
        self.status = status
        self.result = result
        self.sqhd = sqhd
        self.sqid = sqid
        self.do_not_retry = do_not_retry

    def encode(self) -> bytes:
        word = self.do_not_retry << 15 | self.status << 1
        return CQE.pack(self.result, self.sqhd, self.sqid, self.cid, word)


def decode_cqe_untrusted(data: bytes | bytearray | memoryview) -> Cqe:
    """A completion from exactly 16 bytes. Every value decodes."""
    if len(data) != CQE.size:
        raise MalformedPdu(f"a completion has 16 bytes, not {len(data)}")
    result, sqhd, sqid, cid, word = CQE.unpack(data)
    return Cqe(cid, word >> 1 & 0x7FF, result, sqhd, sqid, word & 0x8000 != 0)
