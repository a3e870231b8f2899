"""The connection manager's messages: the 232 bytes of data in its management datagrams (IBTA volume 1, 12.6).

"Local" is always the sender, "remote" the receiver. SIDR_REQ and SIDR_REP resolve the queue pair of a
datagram service (12.11).

The starting PSN of REQ and REP is the one with which the *receiver* of the message begins to send: it says
what the sender expects. Responder resources and initiator depth are crossed in the same way: what one side
may have outstanding is bounded by what the other side keeps ready. Zeros fill up shorter private data, so the
other side does not see their length.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Final, TypeAlias

from emulator.roce.wire.flow import GID_BYTES
from emulator.roce.wire.mad import Attribute, ManagementDatagram, decode_mad_untrusted
from emulator.roce.wire.malformed import Cause, MalformedPacket
from nvmeof.wire.bit_fields import BigEndianRecord, Bits, Bytes, Flag, Layout, Order, layout_of

NO_LID: Final = 0xFFFF
"""RoCE has none."""


@dataclass(frozen=True, slots=True)
class CmPath(BigEndianRecord):
    """The path of a connection as REQ describes it, primary and alternate alike (12.6.5).

    "Local" is the sender of the REQ; GIDs have 16 bytes.
    """

    local_gid: Annotated[bytes, Bytes(4, GID_BYTES, whole=True)]
    remote_gid: Annotated[bytes, Bytes(20, GID_BYTES, whole=True)]
    local_lid: Annotated[int, Bits(0, 16)] = NO_LID
    remote_lid: Annotated[int, Bits(2, 16)] = NO_LID
    flow_label: Annotated[int, Bits(36, 20)] = 0
    packet_rate: Annotated[int, Bits(39, 6, 5)] = 0
    traffic_class: Annotated[int, Bits(40, 8)] = 0
    hop_limit: Annotated[int, Bits(41, 8)] = 64
    service_level: Annotated[int, Bits(42, 4)] = 0
    subnet_local: Annotated[bool, Flag(42, 3)] = False
    local_ack_timeout: Annotated[int, Bits(43, 5)] = 0
    """The sender's, coded (`ack_timeout_seconds`): the receiver's queue pair waits for ACKs so long."""


NO_PATH: Final = CmPath(bytes(GID_BYTES), bytes(GID_BYTES), 0, 0, hop_limit=0)
"""All zero: there is no alternate path."""


class RejectReason(IntEnum):
    """The reason of a REJ (12.6.7.2). A number that is not here is kept as it came."""

    NO_QUEUE_PAIR = 1
    NO_EE_CONTEXT = 2
    NO_RESOURCES = 3
    TIMEOUT = 4
    """Sent after all tries of a REP remained without an answer; the peer forgets the connection."""
    UNSUPPORTED_REQUEST = 5
    INVALID_COMMUNICATION_ID = 6
    INVALID_COMMUNICATION_INSTANCE = 7
    INVALID_SERVICE_ID = 8
    """No listener there."""
    INVALID_TRANSPORT_SERVICE_TYPE = 9
    STALE_CONNECTION = 10
    """The receiver knows this queue pair of the sender, in a connection that is not over for it yet."""
    RDC_DOES_NOT_EXIST = 11
    PRIMARY_GID_REJECTED = 12
    PRIMARY_LID_REJECTED = 13
    INVALID_PRIMARY_SERVICE_LEVEL = 14
    INVALID_PRIMARY_TRAFFIC_CLASS = 15
    INVALID_PRIMARY_HOP_LIMIT = 16
    INVALID_PRIMARY_PACKET_RATE = 17
    ALTERNATE_GID_REJECTED = 18
    ALTERNATE_LID_REJECTED = 19
    INVALID_ALTERNATE_SERVICE_LEVEL = 20
    INVALID_ALTERNATE_TRAFFIC_CLASS = 21
    INVALID_ALTERNATE_HOP_LIMIT = 22
    INVALID_ALTERNATE_PACKET_RATE = 23
    PORT_AND_CM_REDIRECTION = 24
    PORT_REDIRECTION = 25
    INVALID_PATH_MTU = 26
    """The additional information is one byte: in its upper four bits, the largest MTU that is accepted."""
    INSUFFICIENT_RESPONDER_RESOURCES = 27
    CONSUMER_DEFINED = 28
    """The application said no; its reason is in the private data (NVMe/RDMA's is)."""
    INVALID_RNR_RETRY = 29
    DUPLICATE_LOCAL_COMMUNICATION_ID = 30
    INVALID_CLASS_VERSION = 31
    INVALID_PRIMARY_FLOW_LABEL = 32
    INVALID_ALTERNATE_FLOW_LABEL = 33
    VENDOR_OPTION_NOT_SUPPORTED = 35


def reject_reason(number: int) -> int:
    """The `RejectReason` of a number where it is one, else the number."""
    return RejectReason(number) if number in RejectReason._value2member_map_ else number


class _Path(Bytes):
    """A path, which has a layout of its own."""

    def __init__(self, byte: int) -> None:
        super().__init__(byte, layout_of(CmPath).size)

    def number(self, value: CmPath, order: Order) -> int:
        return value.to_number()

    def value(self, number: int, order: Order) -> CmPath:
        return CmPath.of_number(number)


class _Counted(Bytes):
    """Bytes, and in another place how many there are."""

    def __init__(self, byte: int, size: int, count: Bits) -> None:
        super().__init__(byte, size)
        self.count = count

    def put(self, value: Any, layout: Layout) -> int:
        return super().put(value, layout) | self.count.put(len(value), layout)

    def take(self, record: int, layout: Layout) -> Any:
        return super().take(record, layout)[: self.count.take(record, layout)]


class _Reason(Bits):
    def value(self, number: int, order: Order) -> int:
        return reject_reason(number)


class MessageKind(IntEnum):
    """What an MRA acknowledges or a REJ rejects."""

    REQ = 0
    REP = 1
    OTHER = 2
    """LAP in an MRA, no message in particular in a REJ."""


class TransportType(IntEnum):
    RC = 0
    UC = 1
    RD = 2
    EXTENDED = 3


@dataclass(frozen=True, slots=True)
class ConnectRequest(BigEndianRecord):
    """REQ. Time-outs and the path MTU are coded as they are sent."""

    local_id: Annotated[int, Bits(0, 32)]
    service_id: Annotated[int, Bits(8, 64)]
    ca_guid: Annotated[int, Bits(16, 64)]
    queue_pair: Annotated[int, Bits(32, 24)]
    starting_psn: Annotated[int, Bits(44, 24)]
    primary: Annotated[CmPath, _Path(52)]
    path_mtu: Annotated[int, Bits(50, 4)]
    """1 to 5: 256 to 4096 bytes."""
    responder_resources: Annotated[int, Bits(35, 8)] = 0
    initiator_depth: Annotated[int, Bits(39, 8)] = 0
    retry_count: Annotated[int, Bits(47, 3, 2)] = 7
    rnr_retry_count: Annotated[int, Bits(50, 3, 2)] = 7
    remote_response_timeout: Annotated[int, Bits(43, 5)] = 20
    local_response_timeout: Annotated[int, Bits(47, 5)] = 20
    max_cm_retries: Annotated[int, Bits(51, 4)] = 15
    transport_type: Annotated[int, Bits(43, 2, 2)] = TransportType.RC
    end_to_end_flow_control: Annotated[bool, Flag(43, 0)] = True
    srq: Annotated[bool, Flag(51, 3)] = False
    p_key: Annotated[int, Bits(48, 16)] = 0xFFFF
    q_key: Annotated[int, Bits(28, 32)] = 0
    alternate: Annotated[CmPath, _Path(96)] = NO_PATH
    rdc_exists: Annotated[bool, Flag(50, 3)] = False
    local_eecn: Annotated[int, Bits(36, 24)] = 0
    remote_eecn: Annotated[int, Bits(40, 24)] = 0
    extended_transport_type: Annotated[int, Bits(51, 3, 2)] = 0
    private_data: Annotated[bytes, Bytes(140, 92)] = b""


@dataclass(frozen=True, slots=True)
class _OfConnection(BigEndianRecord):
    """A message of a connection that both sides have numbered."""

    local_id: Annotated[int, Bits(0, 32)]
    remote_id: Annotated[int, Bits(4, 32)]


@dataclass(frozen=True, slots=True)
class MessageReceipt(_OfConnection):
    """MRA: the message has come, its answer takes a while (`service_timeout`, coded)."""

    message: Annotated[int, Bits(8, 2)]
    service_timeout: Annotated[int, Bits(9, 5)]
    private_data: Annotated[bytes, Bytes(10, 222)] = b""


@dataclass(frozen=True, slots=True)
class ConnectReject(_OfConnection):
    """REJ. The local ID is 0 where the sender has no connection yet."""

    message: Annotated[int, Bits(8, 2)]
    reason: Annotated[int, _Reason(10, 16)]
    information: Annotated[bytes, _Counted(12, 72, Bits(9, 7))] = b""
    private_data: Annotated[bytes, Bytes(84, 148)] = b""


@dataclass(frozen=True, slots=True)
class ConnectReply(_OfConnection):
    """REP."""

    queue_pair: Annotated[int, Bits(12, 24)]
    starting_psn: Annotated[int, Bits(20, 24)]
    ca_guid: Annotated[int, Bits(28, 64)]
    responder_resources: Annotated[int, Bits(24, 8)] = 0
    initiator_depth: Annotated[int, Bits(25, 8)] = 0
    target_ack_delay: Annotated[int, Bits(26, 5)] = 0
    failover_accepted: Annotated[int, Bits(26, 2, 2)] = 0
    end_to_end_flow_control: Annotated[bool, Flag(26, 0)] = True
    rnr_retry_count: Annotated[int, Bits(27, 3)] = 7
    srq: Annotated[bool, Flag(27, 4)] = False
    q_key: Annotated[int, Bits(8, 32)] = 0
    eecn: Annotated[int, Bits(16, 24)] = 0
    private_data: Annotated[bytes, Bytes(36, 196)] = b""


@dataclass(frozen=True, slots=True)
class ReadyToUse(_OfConnection):
    """RTU."""

    private_data: Annotated[bytes, Bytes(8, 224)] = b""


@dataclass(frozen=True, slots=True)
class DisconnectRequest(_OfConnection):
    """DREQ. `remote_queue_pair` is the receiver's."""

    remote_queue_pair: Annotated[int, Bits(8, 24)]
    private_data: Annotated[bytes, Bytes(12, 220)] = b""


@dataclass(frozen=True, slots=True)
class DisconnectReply(_OfConnection):
    """DREP."""

    private_data: Annotated[bytes, Bytes(8, 224)] = b""


class SidrStatus(IntEnum):
    """Status of a SIDR_REP (IBTA volume 1, 12.11)."""

    VALID = 0
    UNSUPPORTED_SERVICE_ID = 1
    REJECTED = 2
    NO_QUEUE_PAIR = 3
    REDIRECT = 4
    UNSUPPORTED_VERSION = 5


@dataclass(frozen=True, slots=True)
class ServiceRequest(BigEndianRecord):
    """SIDR_REQ: which queue pair serves this service?"""

    request_id: Annotated[int, Bits(0, 32)]
    service_id: Annotated[int, Bits(8, 64)]
    p_key: Annotated[int, Bits(4, 16)] = 0xFFFF
    private_data: Annotated[bytes, Bytes(16, 216)] = b""


@dataclass(frozen=True, slots=True)
class ServiceReply(BigEndianRecord):
    """SIDR_REP: this one, with this Q_Key."""

    request_id: Annotated[int, Bits(0, 32)]
    status: Annotated[int, Bits(4, 8)]
    queue_pair: Annotated[int, Bits(8, 24)] = 0
    service_id: Annotated[int, Bits(12, 64)] = 0
    q_key: Annotated[int, Bits(20, 32)] = 0
    information: Annotated[bytes, _Counted(24, 72, Bits(5, 8))] = b""
    private_data: Annotated[bytes, Bytes(96, 136)] = b""


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

_MESSAGES: Final[dict[int, type[CmMessage]]] = {
    Attribute.REQ: ConnectRequest,
    Attribute.MRA: MessageReceipt,
    Attribute.REJ: ConnectReject,
    Attribute.REP: ConnectReply,
    Attribute.RTU: ReadyToUse,
    Attribute.DREQ: DisconnectRequest,
    Attribute.DREP: DisconnectReply,
    Attribute.SIDR_REQ: ServiceRequest,
    Attribute.SIDR_REP: ServiceReply,
}
_ATTRIBUTES: Final = {kind: Attribute(attribute) for attribute, kind in _MESSAGES.items()}

PRIVATE_BYTES: Final = {
    attribute: layout_of(kind).fields["private_data"].width // 8 for attribute, kind in _MESSAGES.items()
}
"""Bytes of private data that each message carries."""


def attribute_of(message: CmMessage) -> Attribute:
    return _ATTRIBUTES[type(message)]


def encode_cm(message: CmMessage, transaction: int) -> bytes:
    """The whole management datagram, 256 bytes. ValueError for what does not fit, private data included."""
    attribute = attribute_of(message)
    try:
        return ManagementDatagram(attribute, transaction, message.encode()).encode()
    except ValueError as error:
        raise ValueError(f"{attribute.name}: {error}") from None


def decode_cm_untrusted(raw: bytes | bytearray | memoryview) -> tuple[CmMessage, int]:
    """The message in a management datagram, and its transaction ID. Private data come in the full
    length of their field. MalformedPacket (causes MAD_LENGTH, MAD_CLASS, CM_ATTRIBUTE) if there is none.
    """
    datagram = decode_mad_untrusted(raw)
    kind = _MESSAGES.get(datagram.attribute)
    if kind is None:
        raise MalformedPacket(Cause.CM_ATTRIBUTE, f"{datagram.attribute:#06x}")
    return kind.decode(datagram.data), datagram.transaction
