"""The extended transport headers (IBTA volume 1, 9.3), big-endian all:

    RETH           0..7 virtual address   8..11 R_Key   12..15 DMA length
    AETH           0 syndrome             1..3 message sequence number
    AtomicETH      0..7 virtual address   8..11 R_Key   12..19 swap or add data   20..27 compare data
    AtomicAckETH   0..7 original remote data
    ImmDt          0..3 immediate data
    IETH           0..3 R_Key to invalidate
    DETH           0..3 Q_Key             4 reserved    5..7 source queue pair

The syndrome (IBTA volume 1, 9.7.5.2): bit 7 is 0, bits 6..5 say which kind,

    00 acknowledgement    4..0 credit count, coded; 31: no credits are counted
    01 RNR NAK            4..0 timer, coded
    11 NAK                4..0 reason
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

RETH: Final = struct.Struct(">QII")
AETH: Final = struct.Struct(">I")
ATOMIC_ETH: Final = struct.Struct(">QIQQ")
ATOMIC_ACK_ETH: Final = struct.Struct(">Q")
IMM_DT: Final = struct.Struct(">I")
IETH: Final = struct.Struct(">I")
DETH: Final = struct.Struct(">II")

# These records are made for every packet, so they are tuples: half the cost of a frozen data class.


class Reth(NamedTuple):
    """RDMA extended transport header: `length` bytes at `address` of the region `r_key`."""

    address: int
    r_key: int
    length: int


class AtomicEth(NamedTuple):
    """Atomic extended transport header: eight bytes at `address` of the region `r_key`."""

    address: int
    r_key: int
    swap_or_add: int
    compare: int


class Deth(NamedTuple):
    """Datagram extended transport header."""

    q_key: int
    source_queue_pair: int


class Aeth(NamedTuple):
    """Acknowledgement extended transport header."""

    syndrome: int
    message_sequence: int
    """Messages that the responder has completed, modulo 2^24."""

    @property
    def kind(self) -> "AethKind | None":
        """None for the reserved kinds."""
        return _KINDS[self.syndrome >> 5]

    @property
    def code(self) -> int:
        """The lower five bits: credits, RNR timer or `NakCode`, by `kind`."""
        return self.syndrome & CODE_MASK


class AethKind(IntEnum):
    """Bits 7..5 of the syndrome."""

    ACK = 0b000
    RNR_NAK = 0b001
    NAK = 0b011


_KINDS: Final = tuple(AethKind(value) if value in (0, 1, 3) else None for value in range(8))

CODE_MASK: Final = 0x1F
SYNDROME_ACK: Final = 0x1F
"""An acknowledgement that counts no credits: what rxe and we send."""
SYNDROME_RNR_NAK: Final = 0x20
"""Or-ed with the timer's code."""
SYNDROME_NAK: Final = 0x60
"""Or-ed with a `NakCode`."""


class NakCode(IntEnum):
    """Why a request was not carried out (IBTA volume 1, 9.7.5.2)."""

    PSN_SEQUENCE_ERROR = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS_ERROR = 2
    REMOTE_OPERATIONAL_ERROR = 3
    INVALID_RD_REQUEST = 4


def rnr_syndrome(timer: int) -> int:
    """`timer` is a code of `RNR_TIMERS`."""
    return SYNDROME_RNR_NAK | timer & CODE_MASK


def nak_syndrome(code: NakCode) -> int:
    return SYNDROME_NAK | code


_RNR_HUNDREDTHS_OF_MS: Final = (
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
    256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
)  # fmt: skip
RNR_TIMERS: Final = tuple(value / 100_000 for value in _RNR_HUNDREDTHS_OF_MS)
"""Seconds to wait after an RNR NAK, by its code (IBTA volume 1, 9.7.5.2). Code 0 is the longest."""


def exponential_seconds(code: int) -> float:
    """4.096 us * 2^code: CM response and service time-outs, and packet lifetimes, in five bits."""
    return 4.096e-6 * (1 << code)


def ack_timeout_seconds(code: int) -> float | None:
    """The local ACK time-out (IBTA volume 1, 9.7.6.1); None for code 0, which means: wait for ever."""
    return exponential_seconds(code) if code else None


def read_packets(length: int, mtu: int) -> int:
    """PSNs that an RDMA READ of `length` bytes takes: one for each packet of its response, at least one."""
    return max(1, -(-length // mtu))
