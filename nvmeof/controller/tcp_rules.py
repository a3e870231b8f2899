"""NVMe/TCP rules of the controller role that need no state: settings, and the judgement of an SGL.

`tcp_queue.py` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvmeof.controller.request import Direction, Request
from nvmeof.errors import FatalErrorStatus, RemoteProtocolError
from nvmeof.limits import MIN_MAXH2CDATA
from nvmeof.wire.sgl import SUBTYPE_TRANSPORT, SglKind
from nvmeof.wire.sqe import Sqe
from nvmeof.wire.status import Status


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """What is particular to TCP. `max_h2c_data` bounds the payload of one H2CData PDU (MAXH2CDATA)."""

    max_h2c_data: int = 2 << 20
    allow_header_digest: bool = True
    allow_data_digest: bool = True

    def __post_init__(self) -> None:
        if self.max_h2c_data < MIN_MAXH2CDATA or self.max_h2c_data % 4:
            raise ValueError(f"max_h2c_data is a multiple of 4 of at least {MIN_MAXH2CDATA}")


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


def out_of_order(reason: str) -> RemoteProtocolError:
    """A PDU that may not come now."""
    return RemoteProtocolError(reason, fatal_error_status=FatalErrorStatus.SEQUENCE_ERROR)


def bad_field(reason: str, where: int) -> RemoteProtocolError:
    """A field with a value that cannot be; `where` is its offset in the header."""
    return RemoteProtocolError(
        reason, fatal_error_status=FatalErrorStatus.INVALID_HEADER_FIELD, information=where
    )
