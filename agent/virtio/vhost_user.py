"""vhost-user: the messages between QEMU (the front-end) and a device in another process (the back-end).

Source: QEMU's `docs/interop/vhost-user.rst`. A message on the Unix socket is a header of 12 bytes,

    0  request  u32    `Request`
    4  flags    u32    bits 0-1 version (1), bit 2 REPLY, bit 3 NEED_REPLY
    8  size     u32    bytes of payload that follow

and a payload, one of the records below. Everything is little-endian (the byte order of both ends, which
share memory). File descriptors ride beside the message (SCM_RIGHTS), never in it: how many belong to a
request is `FDS_MAX`.

SET_VRING_KICK, CALL and ERR carry a U64 whose bits 0-7 are the queue and whose bit 8 says that no
descriptor comes along: `VringFd`.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import ClassVar, Self, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

VERSION = 1
REGIONS_MAX = 8
"""Regions in one SET_MEM_TABLE, and descriptors beside any message."""
PAYLOAD_BYTES_MAX = 4096
"""A longer payload is refused before it is received; the longest of ours is 264 bytes."""


class VhostUserFormatError(ValueError):
    """The peer's fault: these bytes are not the message that they should be."""


class Request(IntEnum):
    """What the front-end asks of a device like ours. QEMU's names begin with VHOST_USER_."""

    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    RESET_OWNER = 4
    SET_MEM_TABLE = 5
    SET_LOG_BASE = 6
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    SET_VRING_ERR = 14
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18
    GET_INFLIGHT_FD = 31
    SET_INFLIGHT_FD = 32
    RESET_DEVICE = 34
    GET_MAX_MEM_SLOTS = 36
    ADD_MEM_REG = 37
    REM_MEM_REG = 38


class HeaderFlag(IntFlag):
    """Bits of the header's flags above the version."""

    REPLY = 1 << 2
    NEED_REPLY = 1 << 3


class Feature(IntFlag):
    """Virtio feature bits that vhost-user negotiates for the device; virtio 1.2, 6."""

    RING_INDIRECT_DESC = 1 << 28
    RING_EVENT_IDX = 1 << 29
    PROTOCOL_FEATURES = 1 << 30
    """Not virtio's: vhost-user has protocol features of its own, below."""
    VERSION_1 = 1 << 32


class ProtocolFeature(IntFlag):
    """VHOST_USER_PROTOCOL_F_*, as far as the device offers them."""

    MQ = 1 << 0
    REPLY_ACK = 1 << 3
    INFLIGHT_SHMFD = 1 << 12
    RESET_DEVICE = 1 << 13
    CONFIGURE_MEM_SLOTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Header:
    """The 12 bytes before every payload. `size` counts the payload alone."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<III")

    request: int
    flags: int
    size: int

    @property
    def is_reply(self) -> bool:
        return bool(self.flags & HeaderFlag.REPLY)

    @property
    def needs_reply(self) -> bool:
        return bool(self.flags & HeaderFlag.NEED_REPLY)

    def encode(self) -> bytes:
        return self.LAYOUT.pack(self.request, self.flags, self.size)

    @classmethod
    def decode_untrusted(cls, buffer: Buffer) -> Self:
        """Raises VhostUserFormatError where it is cut short, of another version, or absurdly long."""
        try:
            request, flags, size = cls.LAYOUT.unpack_from(buffer)
        except struct.error:
            raise VhostUserFormatError("a header is cut short") from None
        if flags & 3 != VERSION:
            raise VhostUserFormatError(f"version {flags & 3} instead of {VERSION}")
        if size > PAYLOAD_BYTES_MAX:
            raise VhostUserFormatError(f"a payload of {size} bytes; {PAYLOAD_BYTES_MAX} is the most")
        return cls(request, flags, size)


class PayloadRecord:
    """A payload of one fixed layout: `LAYOUT`, and the fields of the dataclass in the same order."""

    __slots__: tuple[str, ...] = ()
    LAYOUT: ClassVar[struct.Struct]

    @classmethod
    def decode_untrusted(cls, payload: Buffer) -> Self:
        """Raises VhostUserFormatError unless the payload is exactly this record."""
        if len(payload) != cls.LAYOUT.size:
            raise VhostUserFormatError(f"{cls.__name__} has {cls.LAYOUT.size} bytes, not {len(payload)}")
        return cls(*cls.LAYOUT.unpack(payload))

    def encode(self) -> bytes:
        return self.LAYOUT.pack(*(getattr(self, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class U64(PayloadRecord):
    """Features, a queue number, a status, or the answer to NEED_REPLY (0 is success)."""

    LAYOUT = struct.Struct("<Q")

    value: int


@dataclass(frozen=True, slots=True)
class VringFd(PayloadRecord):
    """A U64 of SET_VRING_KICK, CALL or ERR, taken apart."""

    LAYOUT = struct.Struct("<Q")
    INDEX_MASK: ClassVar[int] = 0xFF
    NO_FD: ClassVar[int] = 1 << 8

    word: int

    @property
    def index(self) -> int:
        return self.word & self.INDEX_MASK

    @property
    def has_fd(self) -> bool:
        return not self.word & self.NO_FD


@dataclass(frozen=True, slots=True)
class VringState(PayloadRecord):
    """A queue and a number: its size (SET_VRING_NUM), its next available index (BASE), 0 or 1 (ENABLE)."""

    LAYOUT = struct.Struct("<II")

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class VringAddress(PayloadRecord):
    """Where the three parts of a ring lie, as addresses in the front-end's process (user addresses)."""

    LAYOUT = struct.Struct("<IIQQQQ")

    index: int
    flags: int
    descriptors: int
    used: int
    available: int
    log: int


@dataclass(frozen=True, slots=True)
class Region(PayloadRecord):
    """A piece of guest memory. It begins `mmap_offset` bytes into the descriptor that comes along."""

    LAYOUT = struct.Struct("<QQQQ")

    guest_address: int
    size: int
    user_address: int
    mmap_offset: int


class OneRegion(Region):
    """ADD_MEM_REG and REM_MEM_REG."""

    LAYOUT = struct.Struct("<8xQQQQ")


@dataclass(frozen=True, slots=True)
class RegionTable:
    """SET_MEM_TABLE: all of the guest's memory, a descriptor for each region."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<I4x")

    regions: tuple[Region, ...]

    @classmethod
    def decode_untrusted(cls, payload: Buffer) -> Self:
        """Raises VhostUserFormatError where the count and the length do not belong together."""
        if len(payload) < cls.LAYOUT.size:
            raise VhostUserFormatError("a memory table is cut short")
        (count,) = cls.LAYOUT.unpack_from(payload)
        each, head = Region.LAYOUT.size, cls.LAYOUT.size
        # Some front-ends send the whole array of eight, whatever the count.
        if count > REGIONS_MAX or len(payload) < head + count * each:
            raise VhostUserFormatError(f"a memory table of {count} regions in {len(payload)} bytes")
        return cls(
            tuple(
                Region.decode_untrusted(payload[at : at + each])
                for at in range(head, head + count * each, each)
            )
        )

    def encode(self) -> bytes:
        return self.LAYOUT.pack(len(self.regions)) + b"".join(region.encode() for region in self.regions)


@dataclass(frozen=True, slots=True)
class InflightArea(PayloadRecord):
    """GET_INFLIGHT_FD (the front-end sends queues and size alone, the back-end answers with all) and SET."""

    LAYOUT = struct.Struct("<QQHH4x")

    mmap_size: int
    mmap_offset: int
    queues: int
    queue_size: int


assert Header.LAYOUT.size == 12
assert U64.LAYOUT.size == VringFd.LAYOUT.size == VringState.LAYOUT.size == 8
assert VringAddress.LAYOUT.size == OneRegion.LAYOUT.size == Region.LAYOUT.size + 8 == 40
assert InflightArea.LAYOUT.size == 24

HEADER_BYTES = Header.LAYOUT.size

Payload: TypeAlias = U64 | VringFd | VringState | VringAddress | Region | RegionTable | InflightArea | None

_STATE_REQUESTS = (
    Request.SET_VRING_NUM,
    Request.SET_VRING_BASE,
    Request.GET_VRING_BASE,
    Request.SET_VRING_ENABLE,
)
PAYLOADS: dict[Request, type[PayloadRecord] | type[RegionTable]] = {
    Request.SET_FEATURES: U64,
    Request.SET_PROTOCOL_FEATURES: U64,
    Request.SET_MEM_TABLE: RegionTable,
    Request.ADD_MEM_REG: OneRegion,
    Request.REM_MEM_REG: OneRegion,
    Request.SET_VRING_ADDR: VringAddress,
    Request.SET_VRING_KICK: VringFd,
    Request.SET_VRING_CALL: VringFd,
    Request.SET_VRING_ERR: VringFd,
    Request.GET_INFLIGHT_FD: InflightArea,
    Request.SET_INFLIGHT_FD: InflightArea,
    **dict.fromkeys(_STATE_REQUESTS, VringState),
}
"""What a request of the front-end carries; those that are not listed carry nothing that we look at."""

REPLIES: dict[Request, type[U64] | type[VringState] | type[InflightArea]] = {
    Request.GET_FEATURES: U64,
    Request.GET_PROTOCOL_FEATURES: U64,
    Request.GET_QUEUE_NUM: U64,
    Request.GET_MAX_MEM_SLOTS: U64,
    Request.GET_VRING_BASE: VringState,
    Request.GET_INFLIGHT_FD: InflightArea,
}
"""What the back-end answers by itself; to anything else with NEED_REPLY it answers a U64 status."""

FDS_MAX: dict[Request, int] = {
    Request.SET_MEM_TABLE: REGIONS_MAX,
    Request.SET_VRING_KICK: 1,
    Request.SET_VRING_CALL: 1,
    Request.SET_VRING_ERR: 1,
    Request.SET_INFLIGHT_FD: 1,
    Request.ADD_MEM_REG: 1,
    Request.REM_MEM_REG: 1,
}
"""How many descriptors a request of the front-end may bring along; those that are not listed: none.

QEMU 7.2 sends REM_MEM_REG with a descriptor; the specification has none there."""


def decode_payload_untrusted(request: int, payload: Buffer) -> Payload:
    """The payload of a front-end's request, None where it has none that matters.

    Raises VhostUserFormatError where the bytes are not what the request carries.
    """
    kind = PAYLOADS.get(request)  # type: ignore[call-overload]
    return None if kind is None else kind.decode_untrusted(payload)


def decode_reply_untrusted(request: int, payload: Buffer) -> U64 | VringState | InflightArea:
    """The payload of a back-end's reply; a status (U64) where the request has no answer of its own."""
    kind: type[U64] | type[VringState] | type[InflightArea] = REPLIES.get(request, U64)  # type: ignore[call-overload]
    return kind.decode_untrusted(payload)


def encode_message(
    request: int, payload: bytes = b"", *, reply: bool = False, need_reply: bool = False
) -> bytes:
    """A whole message, header and payload, in either direction."""
    flags = VERSION | (HeaderFlag.REPLY if reply else 0) | (HeaderFlag.NEED_REPLY if need_reply else 0)
    return Header(request, int(flags), len(payload)).encode() + payload
