"""NVMe/TCP rules of the controller role: settings, and the judgement of SGLs and data.

`tcp_queue.py` applies them.
"""

from dataclasses import dataclass
from typing import Final

from nvmeof.controller.request import Direction, Request
from nvmeof.errors import FatalErrorStatus, RemoteProtocolError
from nvmeof.limits import MIN_MAXH2CDATA
from nvmeof.tcp.pdu import H2CData
from nvmeof.wire.sgl import SUBTYPE_TRANSPORT, SglKind
from nvmeof.wire.sqe import Sqe
from nvmeof.wire.status import Status

_AT_CCCID: Final = 8
_AT_TTAG: Final = 10
_AT_OFFSET: Final = 12
_AT_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """The settings of TCP alone. `max_h2c_data` bounds the payload of one H2CData PDU (MAXH2CDATA)."""

    max_h2c_data: int = 2 << 20
    allow_header_digest: bool = True
    allow_data_digest: bool = True

    def __post_init__(self) -> None:
        if self.max_h2c_data < MIN_MAXH2CDATA or self.max_h2c_data % 4:
            raise ValueError(f"max_h2c_data is a multiple of 4 of at least {MIN_MAXH2CDATA}")


class Transfer:
    """Data that an R2T has asked for. `placed` bytes have been given a place, `accepted` have arrived."""

    __slots__ = ("accepted", "placed", "request", "tag")

    def __init__(self, request: Request, tag: int) -> None:
        self.request = request
        self.tag = tag
        self.placed = 0
        self.accepted = 0


def wrong_sgl(sqe: Sqe, request: Request, capsule_data: int) -> int:
    """The status of an SGL that does not fit the command; 0 if it does."""
    sgl = sqe.sgl
    if sgl.in_capsule:
        if request.direction is not Direction.FROM_HOST:
            return Status.SGL_TYPE_INVALID
        if sgl.address:
            return Status.SGL_OFFSET_INVALID
        if sgl.length != request.length or capsule_data != sgl.length:
            return Status.DATA_SGL_LENGTH_INVALID
        return 0
    if sgl.kind != SglKind.TRANSPORT or sgl.subtype != SUBTYPE_TRANSPORT:
        return Status.SGL_TYPE_INVALID
    if sgl.length != request.length:
        return Status.DATA_SGL_LENGTH_INVALID
    return Status.INVALID_FIELD if capsule_data else 0


def judge_data(pdu: H2CData, transfer: Transfer | None, most: int) -> Transfer:
    """The transfer that data of a host belong to. Raises RemoteProtocolError for data that nobody asked for.

    `most`: MAXH2CDATA.
    """
    if transfer is None:
        raise RemoteProtocolError(f"no transfer has tag {pdu.ttag}", information=_AT_TTAG)
    request = transfer.request
    if request.sqe.cid != pdu.cid:
        raise RemoteProtocolError(f"transfer {pdu.ttag} is not of command {pdu.cid}", information=_AT_CCCID)
    end = pdu.offset + pdu.data_length
    if pdu.offset != transfer.placed or end > request.length:
        raise RemoteProtocolError(
            f"data {pdu.offset}..{end} of {request.length}, {transfer.placed} expected",
            fatal_error_status=FatalErrorStatus.OUT_OF_RANGE,
            information=_AT_OFFSET,
        )
    if pdu.data_length > most:
        raise RemoteProtocolError(
            f"{pdu.data_length} bytes in one PDU, {most} allowed",
            fatal_error_status=FatalErrorStatus.LIMIT_EXCEEDED,
            information=_AT_LENGTH,
        )
    if pdu.last != (end == request.length):
        raise RemoteProtocolError("LAST_PDU is not on the last PDU of the transfer", information=1)
    return transfer


def out_of_order(reason: str) -> RemoteProtocolError:
    """A PDU that may not come now."""
    return RemoteProtocolError(reason, fatal_error_status=FatalErrorStatus.SEQUENCE_ERROR)
