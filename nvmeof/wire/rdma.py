"""What NVMe/RDMA adds to the wire (NVMe/RDMA Transport Specification 1.0, chapter 3): private data of the
connection manager's messages, the rules of SGL descriptors in capsules, and a discovery entry's TSAS.

Little-endian, although the messages around them are not.

    request, 32 bytes  0..1 record format 0   2..3 queue id
                       4..5 HRQSIZE: entries of the host's receive queue
                       6..7 HSQSIZE: entries of its send queue, 0's based
                       8..9 controller id   10..31 reserved
    accept, 32 bytes   0..1 record format 0   2..3 CRQSIZE: entries of the controller's receive queue
    reject, 4 bytes    0..1 record format 0   2..3 status
    TSAS, 256 bytes    0 QPTYPE  1 PRTYPE  2 CMS  8..9 partition key (of datagram pairs)

A capsule is one SEND: 64 bytes of command, then the data that the SGL says are inside it; a completion is one
SEND of 16 bytes. Everything else moves by RDMA WRITE and READ of the memory that a keyed SGL names.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from nvmeof.errors import MalformedPdu
from nvmeof.wire.sgl import SUBTYPE_ADDRESS, SUBTYPE_INVALIDATE, SglDescriptor, SglKind
from nvmeof.wire.status import Status

REQUEST = struct.Struct("<HHHHH22x")
ACCEPT = struct.Struct("<HH28x")
REJECT = struct.Struct("<HH")
TSAS = struct.Struct("<BBB5xH246x")
assert (REQUEST.size, ACCEPT.size, REJECT.size, TSAS.size) == (32, 32, 4, 256)

CAPSULE_BYTES = 64
COMPLETION_BYTES = 16

MAX_KEYED_LENGTH = (1 << 24) - 1
"""What the 24-bit length of a keyed descriptor can say."""


class RejectStatus(IntEnum):
    """Why a controller refuses a connection (figure 8)."""

    INVALID_PRIVATE_DATA_LENGTH = 1
    INVALID_RECORD_FORMAT = 2
    INVALID_QUEUE_ID = 3
    INVALID_HSQSIZE = 4
    INVALID_HRQSIZE = 5
    NO_RESOURCES = 6
    INVALID_IRD = 7


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Private data of a REQ. `host_send_entries` counts from 1; 0's based on the wire."""

    qid: int
    host_receive_entries: int
    host_send_entries: int
    cntlid: int = 0
    """For an I/O queue the controller that it belongs to; hosts before NVMe-oF 1.1 leave it 0."""

    def encode(self) -> bytes:
        return REQUEST.pack(0, self.qid, self.host_receive_entries, self.host_send_entries - 1, self.cntlid)


def encode_connect_accept(controller_receive_entries: int) -> bytes:
    """Private data of a REP."""
    return ACCEPT.pack(0, controller_receive_entries)


def encode_connect_reject(status: RejectStatus) -> bytes:
    """Private data of a REJ."""
    return REJECT.pack(0, status)


def describe_reject(status: int) -> str:
    """A status of a controller in plain words, or as its number where we do not know it."""
    try:
        return RejectStatus(status).name.lower().replace("_", " ")
    except ValueError:
        return f"status {status}"


class UnacceptableRequest(MalformedPdu):
    """Private data of a REQ that are answered with a REJ of this status."""

    def __init__(self, status: RejectStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def decode_connect_request_untrusted(data: bytes | memoryview) -> ConnectRequest:
    """The request of a host. Longer data are cut: the connection manager pads them. Raises
    `UnacceptableRequest`, which knows the answer.
    """
    if len(data) < REQUEST.size:
        raise UnacceptableRequest(
            RejectStatus.INVALID_PRIVATE_DATA_LENGTH, f"{len(data)} bytes of private data, 32 expected"
        )
    record_format, qid, receive_entries, send_entries, cntlid = REQUEST.unpack_from(data)
    if record_format != 0:
        raise UnacceptableRequest(RejectStatus.INVALID_RECORD_FORMAT, f"record format {record_format}")
    return ConnectRequest(qid, receive_entries, send_entries + 1, cntlid)


def decode_connect_accept_untrusted(data: bytes | memoryview) -> int:
    """The receive entries of a controller that accepts; padded as above."""
    return _answer(data, ACCEPT, "an accept")


def decode_connect_reject_untrusted(data: bytes | memoryview) -> int:
    """The status of a controller that refuses. Without private data the reason is unknown: `MalformedPdu`."""
    return _answer(data, REJECT, "a reject")


def _answer(data: bytes | memoryview, layout: struct.Struct, name: str) -> int:
    if len(data) < layout.size:
        raise MalformedPdu(f"{len(data)} bytes of private data in {name}, {layout.size} expected")
    record_format, value = layout.unpack_from(data)
    if record_format != 0:
        raise MalformedPdu(f"{name} of record format {record_format}")
    return int(value)


def is_keyed(sgl: SglDescriptor) -> bool:
    """Whether a descriptor names memory of the host, or, with length 0, that a command has no data."""
    return sgl.kind == SglKind.KEYED and sgl.subtype in (SUBTYPE_ADDRESS, SUBTYPE_INVALIDATE)


def wrong_sgl(sgl: SglDescriptor, length: int, capsule_data: int, *, from_host: bool) -> int:
    """The NVMe status of a descriptor that does not fit its command; 0 if it does.

    `length` is what the command moves, `capsule_data` the bytes that came behind it in the capsule. Data in
    the capsule may begin anywhere in it (SGLS bit 20), but only a host's data can be there.
    """
    if sgl.in_capsule:
        if not from_host:
            return Status.SGL_TYPE_INVALID
        if sgl.address + sgl.length > capsule_data:
            return Status.SGL_OFFSET_INVALID
    elif not is_keyed(sgl):
        return Status.SGL_TYPE_INVALID
    return 0 if sgl.length == length else Status.DATA_SGL_LENGTH_INVALID


RDMA_ADDRESS = TSAS.pack(1, 4, 1, 0)
"""TSAS of a discovery entry whose transport is RDMA: connected queue pairs, RoCE v2, RDMA_IP_CM."""
