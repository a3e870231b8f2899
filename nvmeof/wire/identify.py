"""Identify data structures (NVMe Base 2.0, 5.17). Each has 4096 bytes; reserved bytes are 0.

CNS, in command dword 10, says which one a host asks for: `IdentifyCns`. Fields keep the names and the order
of the specification. A field that our controller does not fill and our host does not read is left 0.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar

from nvmeof.errors import MalformedPdu, exactly
from nvmeof.wire.bit_fields import Bits, Bytes, Layout, Order, Record, layout_of

IDENTIFY_BYTES = 4096


class IdentifyCns(IntEnum):
    """CNS, command dword 10 bits 7:0. 31:16 is a controller id; CSI is command dword 11 bits 31:24."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACES = 0x02
    NAMESPACE_DESCRIPTORS = 0x03
    COMMAND_SET_NAMESPACE = 0x05
    COMMAND_SET_CONTROLLER = 0x06
    COMMAND_SET_ACTIVE_NAMESPACES = 0x07
    INDEPENDENT_NAMESPACE = 0x08
    COMMAND_SETS = 0x1C


class CommandSet(IntEnum):
    """CSI."""

    NVM = 0
    KEY_VALUE = 1


class ControllerKind(IntEnum):
    """CNTRLTYPE."""

    NOT_REPORTED = 0
    IO = 1
    DISCOVERY = 2


ONCS_COMPARE = 1 << 0
ONCS_DATASET_MANAGEMENT = 1 << 2
ONCS_WRITE_ZEROES = 1 << 3
SGLS_SUPPORTED = 1
SGLS_KEYED = 1 << 2
SGLS_OFFSET = 1 << 20
LPA_EFFECTS = 1 << 1
LPA_EXTENDED = 1 << 2
CTRATT_HOST_ID_128 = 1 << 0
VWC_PRESENT = 1 << 0


class Formats(Bytes):
    """Records of one kind from `byte` on, up to `most`; byte 25 (NLBAF, NKVF) has their number less one."""

    def __init__(self, byte: int, kind: type[Record], most: int) -> None:
        self.step = layout_of(kind).size
        super().__init__(byte, most * self.step)
        self.kind = kind

    def put(self, value: Sequence[Record], layout: Layout) -> int:
        raw = b"".join(each.encode() for each in value)
        return super().put(raw, layout) | _COUNT.put(len(value) - 1, layout)

    def take(self, record: int, layout: Layout) -> Any:
        end = (_COUNT.take(record, layout) + 1) * self.step
        if end > self.size:
            raise MalformedPdu(f"{end // self.step} formats")
        raw = super().take(record, layout)
        return tuple(self.kind.decode(raw[at : at + self.step]) for at in range(0, end, self.step))


_COUNT = Bits(25, 8)


class Text(Bytes):
    """Text behind which `fill` follows. What is too long is cut off, what is not in the encoding replaced."""

    def __init__(self, byte: int, size: int, encoding: str = "ascii", fill: bytes = b" ") -> None:
        super().__init__(byte, size)
        self.encoding, self.fill = encoding, fill

    def number(self, value: str, order: Order) -> int:
        raw = value.encode(self.encoding, "replace").ljust(self.size, self.fill)
        return super().number(raw[: self.size], order)

    def value(self, number: int, order: Order) -> str:
        raw: bytes = super().value(number, order)
        return raw.split(b"\0")[0].decode(self.encoding, "replace").rstrip()


# --- CNS 01: controller ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyController(Record):
    BYTES: ClassVar[int] = IDENTIFY_BYTES

    serial: Annotated[str, Text(4, 20)] = ""
    model: Annotated[str, Text(24, 40)] = ""
    firmware: Annotated[str, Text(64, 8)] = ""
    cmic: Annotated[int, Bits(76, 8)] = 0
    mdts: Annotated[int, Bits(77, 8)] = 0
    cntlid: Annotated[int, Bits(78, 16)] = 0
    version: Annotated[int, Bits(80, 32)] = 0
    oaes: Annotated[int, Bits(92, 32)] = 0
    ctratt: Annotated[int, Bits(96, 32)] = 0
    cntrltype: Annotated[int, Bits(111, 8)] = 0
    acl: Annotated[int, Bits(258, 8)] = 0
    aerl: Annotated[int, Bits(259, 8)] = 0
    frmw: Annotated[int, Bits(260, 8)] = 0
    lpa: Annotated[int, Bits(261, 8)] = 0
    elpe: Annotated[int, Bits(262, 8)] = 0
    wctemp: Annotated[int, Bits(266, 16)] = 0
    cctemp: Annotated[int, Bits(268, 16)] = 0
    kas: Annotated[int, Bits(320, 16)] = 0
    anatt: Annotated[int, Bits(342, 8)] = 0
    anacap: Annotated[int, Bits(343, 8)] = 0
    anagrpmax: Annotated[int, Bits(344, 32)] = 0
    nanagrpid: Annotated[int, Bits(348, 32)] = 0
    sqes: Annotated[int, Bits(512, 8)] = 0
    cqes: Annotated[int, Bits(513, 8)] = 0
    maxcmd: Annotated[int, Bits(514, 16)] = 0
    nn: Annotated[int, Bits(516, 32)] = 0
    oncs: Annotated[int, Bits(520, 16)] = 0
    vwc: Annotated[int, Bits(525, 8)] = 0
    sgls: Annotated[int, Bits(536, 32)] = 0
    mnan: Annotated[int, Bits(540, 32)] = 0
    subnqn: Annotated[str, Text(768, 256, "utf-8", b"\0")] = ""
    ioccsz: Annotated[int, Bits(1792, 32)] = 0
    iorcsz: Annotated[int, Bits(1796, 32)] = 0
    icdoff: Annotated[int, Bits(1800, 16)] = 0
    msdbd: Annotated[int, Bits(1803, 8)] = 0
    ofcs: Annotated[int, Bits(1804, 16)] = 0


def decode_identify_controller_untrusted(data: bytes | bytearray | memoryview) -> IdentifyController:
    """CNS 01. Text that is not ASCII decodes with replacement characters."""
    exactly(data, IDENTIFY_BYTES, "Identify Controller")
    return IdentifyController.decode(data)


# --- CNS 00: namespace, NVM command set ----------------------------------------


@dataclass(frozen=True, slots=True)
class LbaFormat(Record):
    """One LBA format: blocks of 2^`data_shift` bytes, each with `metadata_bytes` beside it."""

    data_shift: Annotated[int, Bits(2, 8)]
    metadata_bytes: Annotated[int, Bits(0, 16)] = 0
    performance: Annotated[int, Bits(3, 8)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyNamespace(Record):
    """What a namespace is. Sizes are in logical blocks."""

    BYTES: ClassVar[int] = IDENTIFY_BYTES

    nsze: Annotated[int, Bits(0, 64)] = 0
    ncap: Annotated[int, Bits(8, 64)] = 0
    nuse: Annotated[int, Bits(16, 64)] = 0
    nsfeat: Annotated[int, Bits(24, 8)] = 0
    flbas: Annotated[int, Bits(26, 8)] = 0
    nmic: Annotated[int, Bits(30, 8)] = 0
    dlfeat: Annotated[int, Bits(33, 8)] = 0
    npwg: Annotated[int, Bits(64, 16)] = 0
    npwa: Annotated[int, Bits(66, 16)] = 0
    anagrpid: Annotated[int, Bits(92, 32)] = 0
    nguid: Annotated[bytes, Bytes(104, 16)] = bytes(16)
    eui64: Annotated[bytes, Bytes(120, 8)] = bytes(8)
    formats: Annotated[tuple[LbaFormat, ...], Formats(128, LbaFormat, 64)] = (LbaFormat(12),)

    @property
    def format_index(self) -> int:
        """The format in use (FLBAS 3:0 and, with more than 16 formats, 6:5)."""
        return self.flbas & 0xF | (self.flbas >> 1 & 0x30 if len(self.formats) > 16 else 0)

    @property
    def lba_bytes(self) -> int:
        return 1 << self.formats[self.format_index].data_shift


def decode_identify_namespace_untrusted(data: bytes | bytearray | memoryview) -> IdentifyNamespace:
    """CNS 00. All zeros is an inactive namespace id, and decodes. Refuses a format out of the list."""
    exactly(data, IDENTIFY_BYTES, "Identify Namespace")
    namespace = IdentifyNamespace.decode(data)
    index, count = namespace.format_index, len(namespace.formats)
    if index >= count or namespace.formats[index].data_shift > 24:
        raise MalformedPdu(f"LBA format {index} of {count} cannot be in use")
    return namespace


# --- CNS 02, 07, 10: lists of namespace ids ----------------------------------------

NAMESPACE_LIST_ENTRIES = 1024


def encode_namespace_list(nsids: Iterable[int]) -> bytes:
    """Up to 1024 ids, ascending, the rest 0."""
    ids = sorted(nsids)[:NAMESPACE_LIST_ENTRIES]
    return struct.pack(f"<{len(ids)}I", *ids).ljust(IDENTIFY_BYTES, b"\0")


def decode_namespace_list_untrusted(data: bytes | bytearray | memoryview) -> list[int]:
    """The ids of an active-namespace list; refuses one that does not ascend."""
    exactly(data, IDENTIFY_BYTES, "a namespace list")
    ids: list[int] = []
    for (nsid,) in struct.iter_unpack("<I", data):
        if nsid == 0:
            break
        if ids and nsid <= ids[-1]:
            raise MalformedPdu("a namespace list does not ascend")
        ids.append(nsid)
    return ids


# --- CNS 03: namespace descriptors ----------------------------------------

DESCRIPTOR = struct.Struct("<BB2x")


_DESCRIPTORS = {1: ("eui64", 8), 2: ("nguid", 16), 3: ("uuid", 16), 4: ("command_set", 1)}
"""By NIDT: the field below, and its length (NIDL)."""


@dataclass(frozen=True, slots=True)
class NamespaceDescriptors:
    """The names of one namespace; None for those it does not have."""

    nguid: bytes | None = None
    eui64: bytes | None = None
    uuid: bytes | None = None
    command_set: int | None = None

    def encode(self) -> bytes:
        raw = b""
        for kind, (name, length) in _DESCRIPTORS.items():
            value = getattr(self, name)
            if value is not None:
                raw += DESCRIPTOR.pack(kind, length) + (value if length > 1 else bytes([value]))
        return raw.ljust(IDENTIFY_BYTES, b"\0")


def decode_namespace_descriptors_untrusted(data: bytes | bytearray | memoryview) -> NamespaceDescriptors:
    """CNS 03. Kinds that we do not know are skipped; one of the wrong length is refused."""
    exactly(data, IDENTIFY_BYTES, "a descriptor list")
    raw = bytes(data)
    found: dict[str, Any] = {}
    position = 0
    while position + DESCRIPTOR.size <= len(raw):
        kind, length = DESCRIPTOR.unpack_from(raw, position)
        if length == 0:
            break
        position += DESCRIPTOR.size
        if position + length > len(raw):
            raise MalformedPdu("a namespace descriptor runs over the end")
        name, expected = _DESCRIPTORS.get(kind, ("", length))
        if length != expected:
            raise MalformedPdu(f"a namespace descriptor of kind {kind} has {length} bytes")
        if name:
            found[name] = raw[position : position + length] if length > 1 else raw[position]
        position += length
    return NamespaceDescriptors(**found)


# --- CNS 06, 08, 1C: by I/O command set ----------------------------------------


def encode_nvm_controller(dataset_ranges: int) -> bytes:
    """CNS 06, CSI 0: how many ranges one Dataset Management may have (DMRL, byte 3)."""
    return bytes((0, 0, 0, dataset_ranges)).ljust(IDENTIFY_BYTES, b"\0")


INDEPENDENT_NAMESPACE = struct.Struct("<xB2xI6xB")


def encode_independent_namespace(nmic: int, anagrpid: int) -> bytes:
    """CNS 08: the properties that a namespace of any command set has. It is ready (NSTAT, byte 14)."""
    return INDEPENDENT_NAMESPACE.pack(nmic, anagrpid, 1).ljust(IDENTIFY_BYTES, b"\0")


def encode_command_sets(*vectors: int) -> bytes:
    """CNS 1C: the combinations of I/O command sets that a controller offers, each a bit vector by CSI."""
    return struct.pack(f"<{len(vectors)}Q", *vectors).ljust(IDENTIFY_BYTES, b"\0")
