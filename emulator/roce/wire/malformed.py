"""The one exception that bytes of the network may cause."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a packet was thrown away: the label of a counter."""

    SHORT = "short"
    """Fewer bytes than its headers and the ICRC need."""
    UNALIGNED = "unaligned"
    """No multiple of four bytes, which padding guarantees (IBTA volume 1, 9.2)."""
    OPCODE = "opcode"
    """No opcode of the RC, UC or UD transport service."""
    VERSION = "version"
    """TVer is not 0 (IBTA volume 1, 9.2)."""
    PAD = "pad"
    """The pad count is larger than what it pads."""
    UNWANTED_PAYLOAD = "unwanted payload"
    """A packet without payload by its opcode has some."""
    TOO_LONG = "too long"
    """More payload than the largest path MTU."""
    QUEUE_PAIR_0 = "queue pair 0"
    """The subnet manager's queue pair, which RoCE has not (IBTA annex A16)."""
    ICRC = "icrc"
    """The invariant CRC differs."""
    MAD_LENGTH = "mad length"
    """A management datagram that has not 256 bytes."""
    MAD_CLASS = "mad class"
    """A management class, version or method other than the connection manager's."""
    CM_ATTRIBUTE = "cm attribute"
    """A connection-manager message that is not understood here."""
    IP_CM = "ip cm"
    """Private data that do not begin with the header of the RDMA IP CM service, or contradict it."""


class MalformedPacket(Exception):
    """The peer's, or the network's, fault: bytes that are no packet. `cause` is the counter's label."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
