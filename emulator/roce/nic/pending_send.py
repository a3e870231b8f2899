"""A send request under way: its packets, and its opcode in the completion.

PSNs in this package count on beyond 24 bits ("extended"), so that they compare as numbers; the wire carries
the lower 24.
"""

from typing import Final, NamedTuple

from emulator.roce.nic.memory import EMPTY, SpanList
from emulator.roce.nic.verbs import SendOpcode, WcOpcode, WcStatus
from emulator.roce.nic.work_requests import SendRequest
from emulator.roce.wire.bth import LOW_24_BITS, psn_difference
from emulator.roce.wire.extended import NakCode
from emulator.roce.wire.opcodes import Opcode

_O: Final = Opcode
_S: Final = SendOpcode


class Shape(NamedTuple):
    """What kind of request an opcode of the verbs is. `first` to `only` are its opcodes on the wire."""

    completion: WcOpcode
    first: Opcode
    middle: Opcode
    last: Opcode
    only: Opcode
    write: bool = False
    """Carries a RETH in its first packet."""
    answered: bool = False
    """READ and atomics: complete by data from the responder, and take one of its resources."""
    trailer: bool = False
    """Immediate data or an R_Key in the last packet."""


def _message(completion: WcOpcode, kind: str, more: str = "") -> Shape:
    """A SEND or a WRITE, of which the last packet may have `more`."""
    names = ("FIRST", "MIDDLE", f"LAST{more}", f"ONLY{more}")
    first, middle, last, only = (Opcode[f"{kind}_{name}"] for name in names)
    return Shape(completion, first, middle, last, only, write=kind.endswith("WRITE"), trailer=more != "")


SHAPES: Final[dict[SendOpcode, Shape]] = {
    _S.SEND: _message(WcOpcode.SEND, "SEND"),
    _S.SEND_WITH_IMM: _message(WcOpcode.SEND, "SEND", "_WITH_IMMEDIATE"),
    _S.SEND_WITH_INV: _message(WcOpcode.SEND, "SEND", "_WITH_INVALIDATE"),
    _S.RDMA_WRITE: _message(WcOpcode.RDMA_WRITE, "WRITE"),
    _S.RDMA_WRITE_WITH_IMM: _message(WcOpcode.RDMA_WRITE, "WRITE", "_WITH_IMMEDIATE"),
    _S.RDMA_READ: Shape(WcOpcode.RDMA_READ, *(_O.READ_REQUEST,) * 4, answered=True),
    _S.ATOMIC_CMP_AND_SWP: Shape(WcOpcode.COMP_SWAP, *(_O.COMPARE_SWAP,) * 4, answered=True),
    _S.ATOMIC_FETCH_AND_ADD: Shape(WcOpcode.FETCH_ADD, *(_O.FETCH_ADD,) * 4, answered=True),
    _S.ATOMIC_WRITE: Shape(WcOpcode.ATOMIC_WRITE, *(_O.ATOMIC_WRITE,) * 4, answered=True),
}


UNRELIABLE_SHAPES: Final[dict[SendOpcode, Shape]] = {
    _S.SEND: _message(WcOpcode.SEND, "UC_SEND"),
    _S.SEND_WITH_IMM: _message(WcOpcode.SEND, "UC_SEND", "_WITH_IMMEDIATE"),
    _S.RDMA_WRITE: _message(WcOpcode.RDMA_WRITE, "UC_WRITE"),
    _S.RDMA_WRITE_WITH_IMM: _message(WcOpcode.RDMA_WRITE, "UC_WRITE", "_WITH_IMMEDIATE"),
}
"""The same over an unreliable connection, as far as there are opcodes for it (IBTA table 38)."""

LOCAL_COMPLETION: Final = {_S.LOCAL_INV: WcOpcode.LOCAL_INV, _S.BIND_MW: WcOpcode.BIND_MW}
"""Requests that send nothing."""

MESSAGES: Final = frozenset({opcode for opcode, shape in SHAPES.items() if not shape.answered})
"""Requests that an acknowledgement completes; their payload may be inline."""

NAK_STATUS: Final = {
    NakCode.INVALID_REQUEST: WcStatus.REM_INV_REQ_ERR,
    NakCode.REMOTE_ACCESS_ERROR: WcStatus.REM_ACCESS_ERR,
    NakCode.REMOTE_OPERATIONAL_ERROR: WcStatus.REM_OP_ERR,
    NakCode.INVALID_RD_REQUEST: WcStatus.REM_INV_RD_REQ_ERR,
}
"""What a refusal is called in the completion."""

ATOMICS: Final = frozenset({_S.ATOMIC_CMP_AND_SWP, _S.ATOMIC_FETCH_AND_ADD})
ONE_PACKET: Final = ATOMICS | {_S.ATOMIC_WRITE}
"""Answered requests of one packet, whatever their length."""

ATOMIC_BYTES: Final = 8


def completion_opcode(opcode: SendOpcode) -> WcOpcode:
    local = LOCAL_COMPLETION.get(opcode)
    return SHAPES[opcode].completion if local is None else local


def extended_psn(psn: int, reference: int) -> int:
    """The extended PSN nearest to `reference` whose lower 24 bits are `psn`."""
    return reference + psn_difference(psn, reference & LOW_24_BITS)


class Work:
    """A send request that has begun. It takes PSNs `first` to `end` - 1; a local request takes none. A
    request with a `failure` ends its queue at its turn."""

    __slots__ = ("end", "failure", "first", "length", "packets", "request", "shape", "signaled", "spans")

    def __init__(self, request: SendRequest, signaled: bool, first: int, shape: Shape | None) -> None:
        self.request = request
        self.signaled = signaled
        self.shape = shape
        self.first = self.end = first
        self.packets = 0
        self.length = 0
        self.spans: SpanList = EMPTY
        self.failure: WcStatus | None = None

    def take_psns(self, spans: SpanList, packets: int) -> None:
        """It will go out, from or into this memory."""
        self.spans = spans
        self.length = spans.length
        self.packets = packets
        self.end = self.first + packets
