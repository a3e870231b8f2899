"""The connection manager's messages: the 232 bytes of data in its management datagrams (IBTA volume 1, 12.6).

"Local" is always the sender, "remote" the receiver. Offsets in bytes; n..m within a
byte are bits. Big-endian.

    REQ   0 local communication ID u32    8 service ID u64      16 CA GUID u64      28 Q_Key u32
          32 QPN u24   35 responder resources u8   36 EECN u24  39 initiator depth u8   40 remote EECN u24
          43 7..3 remote CM response time-out, 2..1 transport service type, 0 end-to-end flow control
          44 starting PSN u24   47 7..3 local CM response time-out, 2..0 retry count     48 P_Key u16
          50 7..4 path MTU, 3 RDC exists, 2..0 RNR retry count
          51 7..4 max CM retries, 3 SRQ, 2..0 extended transport type
          52 primary path, 96 alternate path (`cm_path.py`, 44 bytes each)   140 private data, 92 bytes
    MRA   0, 4 IDs   8 7..6 message   9 7..3 service time-out   10 private data, 222
    REJ   0, 4 IDs   8 7..6 message   9 7..1 bytes of information   10 reason u16   12 information, 72
          84 private data, 148
    REP   0, 4 IDs   8 Q_Key u32   12 QPN u24   16 EECN u24   20 starting PSN u24
          24 responder resources u8   25 initiator depth u8
          26 7..3 target ACK delay, 2..1 failover accepted, 0 end-to-end flow control
          27 7..5 RNR retry count, 4 SRQ   28 CA GUID u64   36 private data, 196
    RTU   0, 4 IDs   8 private data, 224
    DREQ  0, 4 IDs   8 remote QPN u24   12 private data, 220
    DREP  0, 4 IDs   8 private data, 224

and, to resolve the queue pair of a datagram service (12.11):

    SIDR_REQ  0 request ID u32   4 P_Key u16   8 service ID u64   16 private data, 216
    SIDR_REP  0 request ID u32   4 status u8   5 bytes of information u8   8 QPN u24   12 service ID u64
              20 Q_Key u32   24 information, 72   96 private data, 136

The starting PSN of REQ and REP is the one with which the *receiver* of the message begins to send: it says
what the sender expects. Responder resources and initiator depth are crossed in the same way: what one side
may have outstanding is bounded by what the other side keeps ready. Zeros fill up shorter private data, so the
other side does not see their length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from emulator.roce.wire.cm_path import NO_PATH, CmPath, decode_path
from emulator.roce.wire.cm_reject import reject_reason
from emulator.roce.wire.mad import DATA_BYTES, Attribute, ManagementDatagram, decode_mad_untrusted
from emulator.roce.wire.malformed import Cause, MalformedPacket

REQ: Final = struct.Struct(">I4xQQ4xIIIIIHBB44s44s92s")
MRA: Final = struct.Struct(">IIBB222s")
REJ: Final = struct.Struct(">IIBBH72s148s")
REP: Final = struct.Struct(">IIIIIIBBBBQ196s")
RTU: Final = struct.Struct(">II224s")
DREQ: Final = struct.Struct(">III220s")
DREP: Final = RTU
SIDR_REQ: Final = struct.Struct(">IH2xQ216s")
SIDR_REP: Final = struct.Struct(">IBB2xIQI72s136s")
for layout in (REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP):
    assert layout.size == DATA_BYTES

PRIVATE_BYTES: Final = {
    Attribute.REQ: 92, Attribute.MRA: 222, Attribute.REJ: 148, Attribute.REP: 196, Attribute.RTU: 224,
    Attribute.DREQ: 220, Attribute.DREP: 224, Attribute.SIDR_REQ: 216, Attribute.SIDR_REP: 136,
}  # fmt: skip
"""Bytes of private data that each message carries."""
INFORMATION_BYTES: Final = 72
"""Bytes of additional information that REJ and SIDR_REP carry at most."""
_OFFSET_PRIMARY: Final = 52
_OFFSET_ALTERNATE: Final = 96


class MessageKind(IntEnum):
    """What an MRA acknowledges or a REJ rejects."""

    REQ = 0
    REP = 1
    OTHER = 2
    """LAP in an MRA, no message in particular in a REJ."""


class TransportType(IntEnum):
    """Transport service type of a REQ."""

    RC = 0
    UC = 1
    RD = 2
    EXTENDED = 3


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """REQ. Time-outs and the path MTU are coded as they are sent."""

    local_id: int
    service_id: int
    ca_guid: int
    queue_pair: int
    starting_psn: int
    primary: CmPath
    path_mtu: int
    """1 to 5: 256 to 4096 bytes."""
    responder_resources: int = 0
    initiator_depth: int = 0
    retry_count: int = 7
    rnr_retry_count: int = 7
    remote_response_timeout: int = 20
    local_response_timeout: int = 20
    max_cm_retries: int = 15
    transport_type: int = TransportType.RC
    end_to_end_flow_control: bool = True
    srq: bool = False
    p_key: int = 0xFFFF
    q_key: int = 0
    alternate: CmPath = NO_PATH
    rdc_exists: bool = False
    local_eecn: int = 0
    remote_eecn: int = 0
    extended_transport_type: int = 0
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class MessageReceipt:
    """MRA: the message has come, its answer takes a while (`service_timeout`, coded)."""

    local_id: int
    remote_id: int
    message: int
    service_timeout: int
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class ConnectReject:
    """REJ. The local ID is 0 where the sender has no connection yet."""

    local_id: int
    remote_id: int
    message: int
    reason: int
    information: bytes = b""
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class ConnectReply:
    """REP."""

    local_id: int
    remote_id: int
    queue_pair: int
    starting_psn: int
    ca_guid: int
    responder_resources: int = 0
    initiator_depth: int = 0
    target_ack_delay: int = 0
    failover_accepted: int = 0
    end_to_end_flow_control: bool = True
    rnr_retry_count: int = 7
    srq: bool = False
    q_key: int = 0
    eecn: int = 0
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadyToUse:
    """RTU."""

    local_id: int
    remote_id: int
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class DisconnectRequest:
    """DREQ. `remote_queue_pair` is the receiver's."""

    local_id: int
    remote_id: int
    remote_queue_pair: int
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class DisconnectReply:
    """DREP."""

    local_id: int
    remote_id: int
    private_data: bytes = b""


class SidrStatus(IntEnum):
    """Status of a SIDR_REP (IBTA volume 1, 12.11)."""

    VALID = 0
    UNSUPPORTED_SERVICE_ID = 1
    REJECTED = 2
    NO_QUEUE_PAIR = 3
    REDIRECT = 4
    UNSUPPORTED_VERSION = 5


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """SIDR_REQ: which queue pair serves this service?"""

    request_id: int
    service_id: int
    p_key: int = 0xFFFF
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """SIDR_REP: this one, with this Q_Key."""

    request_id: int
    status: int
    queue_pair: int = 0
    service_id: int = 0
    q_key: int = 0
    information: bytes = b""
    private_data: bytes = b""


CmMessage: TypeAlias = (
    ConnectRequest
    | MessageReceipt
    | ConnectReject
    | ConnectReply
    | ReadyToUse
    | DisconnectRequest
    | DisconnectReply
    | ServiceRequest
    | ServiceReply
)

_ATTRIBUTES: Final[dict[type[CmMessage], Attribute]] = {
    ConnectRequest: Attribute.REQ,
    MessageReceipt: Attribute.MRA,
    ConnectReject: Attribute.REJ,
    ConnectReply: Attribute.REP,
    ReadyToUse: Attribute.RTU,
    DisconnectRequest: Attribute.DREQ,
    DisconnectReply: Attribute.DREP,
    ServiceRequest: Attribute.SIDR_REQ,
    ServiceReply: Attribute.SIDR_REP,
}


def attribute_of(message: CmMessage) -> Attribute:
    """Which message it is."""
    return _ATTRIBUTES[type(message)]


# --- encoding ----------------------------------------


def _bits(value: int, width: int) -> int:
    """`value`, if it fits into `width` bits; ValueError if not: a neighbour would be changed."""
    if not 0 <= value < 1 << width:
        raise ValueError(f"{value:#x} does not fit into {width} bits")
    return value


def _u24(value: int, low: int = 0) -> int:
    """A 24-bit field and the byte that follows it, as one word."""
    return _bits(value, 24) << 8 | _bits(low, 8)


def encode_cm(message: CmMessage, transaction: int) -> bytes:
    """The whole management datagram, 256 bytes. ValueError for what does not fit, private data included."""
    attribute = attribute_of(message)
    if len(message.private_data) > PRIVATE_BYTES[attribute]:
        raise ValueError(
            f"{attribute.name} carries {PRIVATE_BYTES[attribute]} bytes of private data, "
            f"not {len(message.private_data)}"
        )
    try:
        return ManagementDatagram(attribute, transaction, _encode_data(message)).encode()
    except struct.error as error:
        raise ValueError(f"{attribute.name}: {error}") from None


def _encode_data(message: CmMessage) -> bytes:
    match message:
        case ConnectRequest() as m:
            return REQ.pack(
                m.local_id, m.service_id, m.ca_guid, m.q_key,
                _u24(m.queue_pair, m.responder_resources),
                _u24(m.local_eecn, m.initiator_depth),
                _u24(
                    m.remote_eecn,
                    _bits(m.remote_response_timeout, 5) << 3 | _bits(m.transport_type, 2) << 1
                    | m.end_to_end_flow_control,
                ),
                _u24(m.starting_psn, _bits(m.local_response_timeout, 5) << 3 | _bits(m.retry_count, 3)),
                m.p_key,
                _bits(m.path_mtu, 4) << 4 | m.rdc_exists << 3 | _bits(m.rnr_retry_count, 3),
                _bits(m.max_cm_retries, 4) << 4 | m.srq << 3 | _bits(m.extended_transport_type, 3),
                m.primary.encode(), m.alternate.encode(), m.private_data,
            )  # fmt: skip
        case ConnectReply() as m:
            return REP.pack(
                m.local_id, m.remote_id, m.q_key, _u24(m.queue_pair), _u24(m.eecn), _u24(m.starting_psn),
                m.responder_resources, m.initiator_depth,
                _bits(m.target_ack_delay, 5) << 3 | _bits(m.failover_accepted, 2) << 1
                | m.end_to_end_flow_control,
                _bits(m.rnr_retry_count, 3) << 5 | m.srq << 4, m.ca_guid, m.private_data,
            )  # fmt: skip
        case MessageReceipt() as m:
            times = _bits(m.service_timeout, 5) << 3
            return MRA.pack(m.local_id, m.remote_id, _bits(m.message, 2) << 6, times, m.private_data)
        case ConnectReject() as m:
            return REJ.pack(
                m.local_id, m.remote_id, _bits(m.message, 2) << 6, _information_size(m.information) << 1,
                m.reason, m.information, m.private_data,
            )  # fmt: skip
        case ReadyToUse() | DisconnectReply() as m:
            return RTU.pack(m.local_id, m.remote_id, m.private_data)
        case DisconnectRequest() as m:
            return DREQ.pack(m.local_id, m.remote_id, _u24(m.remote_queue_pair), m.private_data)
        case ServiceRequest() as m:
            return SIDR_REQ.pack(m.request_id, m.p_key, m.service_id, m.private_data)
        case ServiceReply() as m:
            return SIDR_REP.pack(
                m.request_id, m.status, _information_size(m.information), _u24(m.queue_pair), m.service_id,
                m.q_key, m.information, m.private_data,
            )  # fmt: skip


def _information_size(information: bytes) -> int:
    if len(information) > INFORMATION_BYTES:
        raise ValueError(f"{len(information)} bytes of additional information, more than {INFORMATION_BYTES}")
    return len(information)


# --- decoding ----------------------------------------


def decode_cm_untrusted(raw: bytes | bytearray | memoryview) -> tuple[CmMessage, int]:
    """The message in a management datagram, and its transaction ID. Private data come in the full
    length of their field. MalformedPacket (causes MAD_LENGTH, MAD_CLASS, CM_ATTRIBUTE) if there is none.
    """
    datagram = decode_mad_untrusted(raw)
    decode = _DECODERS.get(datagram.attribute)
    if decode is None:
        raise MalformedPacket(Cause.CM_ATTRIBUTE, f"{datagram.attribute:#06x}")
    return decode(datagram.data), datagram.transaction


def _decode_req(data: bytes) -> ConnectRequest:
    (
        local_id, service, guid, q_key, qp_word, eecn_word, remote_word, psn_word, p_key, mtu, retries, _, _,
        private,
    ) = REQ.unpack(data)  # fmt: skip
    return ConnectRequest(
        local_id=local_id,
        service_id=service,
        ca_guid=guid,
        queue_pair=qp_word >> 8,
        starting_psn=psn_word >> 8,
        primary=decode_path(data, _OFFSET_PRIMARY),
        path_mtu=mtu >> 4,
        responder_resources=qp_word & 0xFF,
        initiator_depth=eecn_word & 0xFF,
        retry_count=psn_word & 7,
        rnr_retry_count=mtu & 7,
        remote_response_timeout=remote_word >> 3 & 0x1F,
        local_response_timeout=psn_word >> 3 & 0x1F,
        max_cm_retries=retries >> 4,
        transport_type=remote_word >> 1 & 3,
        end_to_end_flow_control=remote_word & 1 != 0,
        srq=retries & 8 != 0,
        p_key=p_key,
        q_key=q_key,
        alternate=decode_path(data, _OFFSET_ALTERNATE),
        rdc_exists=mtu & 8 != 0,
        local_eecn=eecn_word >> 8,
        remote_eecn=remote_word >> 8,
        extended_transport_type=retries & 7,
        private_data=private,
    )


def _decode_rep(data: bytes) -> ConnectReply:
    local, remote, q_key, qp, eecn, psn, resources, depth, ack, rnr, guid, private = REP.unpack(data)
    return ConnectReply(
        local_id=local,
        remote_id=remote,
        queue_pair=qp >> 8,
        starting_psn=psn >> 8,
        ca_guid=guid,
        responder_resources=resources,
        initiator_depth=depth,
        target_ack_delay=ack >> 3,
        failover_accepted=ack >> 1 & 3,
        end_to_end_flow_control=ack & 1 != 0,
        rnr_retry_count=rnr >> 5,
        srq=rnr & 0x10 != 0,
        q_key=q_key,
        eecn=eecn >> 8,
        private_data=private,
    )


def _decode_mra(data: bytes) -> MessageReceipt:
    local, remote, message, timeout, private = MRA.unpack(data)
    return MessageReceipt(local, remote, message >> 6, timeout >> 3, private)


def _decode_rej(data: bytes) -> ConnectReject:
    local, remote, message, size, reason, information, private = REJ.unpack(data)
    return ConnectReject(
        local, remote, message >> 6, reject_reason(reason), information[: size >> 1], private
    )


def _decode_dreq(data: bytes) -> DisconnectRequest:
    local, remote, qp, private = DREQ.unpack(data)
    return DisconnectRequest(local, remote, qp >> 8, private)


def _decode_sidr_req(data: bytes) -> ServiceRequest:
    request, p_key, service, private = SIDR_REQ.unpack(data)
    return ServiceRequest(request, service, p_key, private)


def _decode_sidr_rep(data: bytes) -> ServiceReply:
    request, status, size, qp, service, q_key, information, private = SIDR_REP.unpack(data)
    return ServiceReply(request, status, qp >> 8, service, q_key, information[:size], private)


_DECODERS: Final[dict[int, Callable[[bytes], CmMessage]]] = {
    Attribute.REQ: _decode_req,
    Attribute.MRA: _decode_mra,
    Attribute.REJ: _decode_rej,
    Attribute.REP: _decode_rep,
    Attribute.RTU: lambda data: ReadyToUse(*RTU.unpack(data)),
    Attribute.DREQ: _decode_dreq,
    Attribute.DREP: lambda data: DisconnectReply(*DREP.unpack(data)),
    Attribute.SIDR_REQ: _decode_sidr_req,
    Attribute.SIDR_REP: _decode_sidr_rep,
}
