"""The opcodes of the RC, UC and UD transport services, and what each says of its packet (IBTA volume 1, 9.2).

The first byte of a packet: bits 7..5 the transport service, 4..0 the operation. Everything else that is
known from it alone stands in one table, `OPCODES`, indexed by that byte.
"""

from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from emulator.roce.wire.extended import AETH, ATOMIC_ACK_ETH, ATOMIC_ETH, DETH, IETH, IMM_DT, RETH


class Service(IntEnum):
    """Transport service: bits 7..5 of the opcode."""

    RC = 0b000
    UC = 0b001
    UD = 0b011


SERVICE_SHIFT: Final = 5


class Opcode(IntEnum):
    """The whole first byte of a packet."""

    SEND_FIRST = 0x00
    SEND_MIDDLE = 0x01
    SEND_LAST = 0x02
    SEND_LAST_WITH_IMMEDIATE = 0x03
    SEND_ONLY = 0x04
    SEND_ONLY_WITH_IMMEDIATE = 0x05
    WRITE_FIRST = 0x06
    WRITE_MIDDLE = 0x07
    WRITE_LAST = 0x08
    WRITE_LAST_WITH_IMMEDIATE = 0x09
    WRITE_ONLY = 0x0A
    WRITE_ONLY_WITH_IMMEDIATE = 0x0B
    READ_REQUEST = 0x0C
    READ_RESPONSE_FIRST = 0x0D
    READ_RESPONSE_MIDDLE = 0x0E
    READ_RESPONSE_LAST = 0x0F
    READ_RESPONSE_ONLY = 0x10
    ACKNOWLEDGE = 0x11
    ATOMIC_ACKNOWLEDGE = 0x12
    COMPARE_SWAP = 0x13
    FETCH_ADD = 0x14
    SEND_LAST_WITH_INVALIDATE = 0x16
    SEND_ONLY_WITH_INVALIDATE = 0x17
    ATOMIC_WRITE = 0x1D
    UC_SEND_FIRST = 0x20
    UC_SEND_MIDDLE = 0x21
    UC_SEND_LAST = 0x22
    UC_SEND_LAST_WITH_IMMEDIATE = 0x23
    UC_SEND_ONLY = 0x24
    UC_SEND_ONLY_WITH_IMMEDIATE = 0x25
    UC_WRITE_FIRST = 0x26
    UC_WRITE_MIDDLE = 0x27
    UC_WRITE_LAST = 0x28
    UC_WRITE_LAST_WITH_IMMEDIATE = 0x29
    UC_WRITE_ONLY = 0x2A
    UC_WRITE_ONLY_WITH_IMMEDIATE = 0x2B
    UD_SEND_ONLY = 0x64
    UD_SEND_ONLY_WITH_IMMEDIATE = 0x65


class Operation(IntEnum):
    """What a packet is part of, whichever part it is."""

    SEND = 0
    WRITE = 1
    READ_REQUEST = 2
    READ_RESPONSE = 3
    ACKNOWLEDGE = 4
    ATOMIC_ACKNOWLEDGE = 5
    ATOMIC = 6
    ATOMIC_WRITE = 7


BTH_BYTES: Final = 12


class OpcodeClass(NamedTuple):
    """What an opcode says of its packet. The offsets count from the first byte of the BTH; 0: not there."""

    opcode: Opcode
    service: Service
    operation: Operation
    first: bool
    """Begins a message; an only packet does, and ends it."""
    last: bool
    request: bool
    """Goes from requester to responder."""
    payload: bool
    """May carry payload."""
    reth: int
    aeth: int
    atomic: int
    atomic_ack: int
    immediate: int
    invalidate: int
    deth: int
    header_bytes: int
    """BTH and extended headers: where the payload begins."""


_SIZES: Final = {
    "deth": DETH.size,
    "reth": RETH.size,
    "aeth": AETH.size,
    "atomic": ATOMIC_ETH.size,
    "atomic_ack": ATOMIC_ACK_ETH.size,
    "immediate": IMM_DT.size,
    "invalidate": IETH.size,
}
"""The extended headers, in the order in which they follow each other."""

_FIRST: Final = (True, False)
_MIDDLE: Final = (False, False)
_LAST: Final = (False, True)
_ONLY: Final = (True, True)

_O: TypeAlias = Opcode
_P: TypeAlias = Operation
_TABLE: Final[dict[Opcode, tuple[Operation, tuple[bool, bool], str]]] = {
    _O.SEND_FIRST: (_P.SEND, _FIRST, ""),
    _O.SEND_MIDDLE: (_P.SEND, _MIDDLE, ""),
    _O.SEND_LAST: (_P.SEND, _LAST, ""),
    _O.SEND_LAST_WITH_IMMEDIATE: (_P.SEND, _LAST, "immediate"),
    _O.SEND_ONLY: (_P.SEND, _ONLY, ""),
    _O.SEND_ONLY_WITH_IMMEDIATE: (_P.SEND, _ONLY, "immediate"),
    _O.WRITE_FIRST: (_P.WRITE, _FIRST, "reth"),
    _O.WRITE_MIDDLE: (_P.WRITE, _MIDDLE, ""),
    _O.WRITE_LAST: (_P.WRITE, _LAST, ""),
    _O.WRITE_LAST_WITH_IMMEDIATE: (_P.WRITE, _LAST, "immediate"),
    _O.WRITE_ONLY: (_P.WRITE, _ONLY, "reth"),
    _O.WRITE_ONLY_WITH_IMMEDIATE: (_P.WRITE, _ONLY, "reth immediate"),
    _O.READ_REQUEST: (_P.READ_REQUEST, _ONLY, "reth"),
    _O.READ_RESPONSE_FIRST: (_P.READ_RESPONSE, _FIRST, "aeth"),
    _O.READ_RESPONSE_MIDDLE: (_P.READ_RESPONSE, _MIDDLE, ""),
    _O.READ_RESPONSE_LAST: (_P.READ_RESPONSE, _LAST, "aeth"),
    _O.READ_RESPONSE_ONLY: (_P.READ_RESPONSE, _ONLY, "aeth"),
    _O.ACKNOWLEDGE: (_P.ACKNOWLEDGE, _ONLY, "aeth"),
    _O.ATOMIC_ACKNOWLEDGE: (_P.ATOMIC_ACKNOWLEDGE, _ONLY, "aeth atomic_ack"),
    _O.COMPARE_SWAP: (_P.ATOMIC, _ONLY, "atomic"),
    _O.FETCH_ADD: (_P.ATOMIC, _ONLY, "atomic"),
    _O.SEND_LAST_WITH_INVALIDATE: (_P.SEND, _LAST, "invalidate"),
    _O.SEND_ONLY_WITH_INVALIDATE: (_P.SEND, _ONLY, "invalidate"),
    _O.ATOMIC_WRITE: (_P.ATOMIC_WRITE, _ONLY, "reth"),
    _O.UD_SEND_ONLY: (_P.SEND, _ONLY, "deth"),
    _O.UD_SEND_ONLY_WITH_IMMEDIATE: (_P.SEND, _ONLY, "deth immediate"),
}
_TABLE.update(
    {
        Opcode(opcode | Service.UC << SERVICE_SHIFT): row
        for opcode, row in _TABLE.items()
        if row[0] in (_P.SEND, _P.WRITE) and opcode < _O.READ_REQUEST
    }
)
"""UC has the SENDs and WRITEs of RC, but for those that invalidate."""
assert len(_TABLE) == len(Opcode)

_ANSWERS: Final = (Operation.READ_RESPONSE, Operation.ACKNOWLEDGE, Operation.ATOMIC_ACKNOWLEDGE)
_WITH_PAYLOAD: Final = (
    Operation.SEND, Operation.WRITE, Operation.READ_RESPONSE, Operation.ATOMIC_WRITE,
)  # fmt: skip


def _class_of(opcode: Opcode) -> OpcodeClass:
    operation, (first, last), headers = _TABLE[opcode]
    offsets, position = dict[str, int](), BTH_BYTES
    for header, size in _SIZES.items():
        present = header in headers.split()
        offsets[header] = position if present else 0
        position += size if present else 0
    return OpcodeClass(
        opcode,
        Service(opcode >> SERVICE_SHIFT),
        operation,
        first,
        last,
        operation not in _ANSWERS,
        operation in _WITH_PAYLOAD,
        **offsets,
        header_bytes=position,
    )


OPCODES: Final[tuple[OpcodeClass | None, ...]] = tuple(
    _class_of(Opcode(value)) if value in _TABLE else None for value in range(256)
)
"""By the first byte of a packet; None for what is not known here (RD, XRC, CNP, reserved ones)."""


def class_of(opcode: Opcode) -> OpcodeClass:
    known = OPCODES[opcode]
    assert known is not None
    return known


ICRC_BYTES: Final = 4
MAX_PAYLOAD: Final = 4096
"""The largest path MTU."""
MAX_PACKET: Final = (
    MAX_PAYLOAD + ICRC_BYTES + max(known.header_bytes for known in OPCODES if known and known.payload)
)
"""Bytes of the largest UDP payload that any opcode makes: an RDMA WRITE with immediate data in one packet."""
