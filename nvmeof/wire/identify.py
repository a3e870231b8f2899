"""Identify data structures (NVMe Base 2.0, 5.17). Each has 4096 bytes; reserved bytes are 0.

CNS, in command dword 10, says which one a host asks for: `IdentifyCns`. Fields keep the names and the order
of the specification. A field that our controller does not fill and our host does not read is left 0.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from nvmeof.errors import MalformedPdu, exactly

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


def _text(value: str, length: int) -> bytes:
    return value.encode("ascii", "replace").ljust(length)[:length]


def _plain(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("ascii", "replace").rstrip()


# --- CNS 01: controller ----------------------------------------

CONTROLLER = struct.Struct(
    "<4x20s40s8s4xBBHI8xII11xB141x"  # 0..252: who it is
    "5xBBBBB3xHH42x"  # 253..311: administration
    "8xH20xBBII160x"  # 312..511
    "BBHIH3xB10xII"  # 512..543: I/O commands
    "224x256s768x"  # 544..1791: names
    "IIHxBH2290x"  # 1792..4095: fabrics
)
assert CONTROLLER.size == IDENTIFY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyController:
    serial: str = ""
    model: str = ""
    firmware: str = ""
    cmic: int = 0
    mdts: int = 0
    cntlid: int = 0
    version: int = 0
    oaes: int = 0
    ctratt: int = 0
    cntrltype: int = 0
    acl: int = 0
    aerl: int = 0
    frmw: int = 0
    lpa: int = 0
    elpe: int = 0
    wctemp: int = 0
    cctemp: int = 0
    kas: int = 0
    anatt: int = 0
    anacap: int = 0
    anagrpmax: int = 0
    nanagrpid: int = 0
    sqes: int = 0
    cqes: int = 0
    maxcmd: int = 0
    nn: int = 0
    oncs: int = 0
    vwc: int = 0
    sgls: int = 0
    mnan: int = 0
    subnqn: str = ""
    ioccsz: int = 0
    iorcsz: int = 0
    icdoff: int = 0
    msdbd: int = 0
    ofcs: int = 0

    def encode(self) -> bytes:
        s = self
        return CONTROLLER.pack(
            _text(s.serial, 20), _text(s.model, 40), _text(s.firmware, 8), s.cmic, s.mdts, s.cntlid,
            s.version, s.oaes, s.ctratt, s.cntrltype, s.acl, s.aerl, s.frmw, s.lpa, s.elpe, s.wctemp,
            s.cctemp, s.kas, s.anatt, s.anacap, s.anagrpmax, s.nanagrpid, s.sqes, s.cqes, s.maxcmd, s.nn,
            s.oncs, s.vwc, s.sgls, s.mnan, s.subnqn.encode(), s.ioccsz, s.iorcsz, s.icdoff, s.msdbd, s.ofcs,
        )  # fmt: skip


def decode_identify_controller_untrusted(data: bytes | bytearray | memoryview) -> IdentifyController:
    """CNS 01. Text that is not ASCII decodes with replacement characters."""
    exactly(data, IDENTIFY_BYTES, "Identify Controller")
    fields = dict(zip(IdentifyController.__dataclass_fields__, CONTROLLER.unpack(data), strict=True))
    for name in ("serial", "model", "firmware"):
        fields[name] = _plain(fields[name])
    fields["subnqn"] = fields["subnqn"].split(b"\0")[0].decode("utf-8", "replace")
    return IdentifyController(**fields)


# --- CNS 00: namespace, NVM command set ----------------------------------------

NAMESPACE = struct.Struct("<QQQBBB3xB2xB30xHH24xI8x16s8s")
LBA_FORMAT = struct.Struct("<HBB")
assert NAMESPACE.size == 128
assert LBA_FORMAT.size == 4
MAX_LBA_FORMATS = 64


@dataclass(frozen=True, slots=True)
class LbaFormat:
    """One LBA format: blocks of 2^`data_shift` bytes, each with `metadata_bytes` beside it."""

    data_shift: int
    metadata_bytes: int = 0
    performance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyNamespace:
    """What a namespace is. Sizes are in logical blocks; `nlbaf` is derived from `formats`."""

    nsze: int = 0
    ncap: int = 0
    nuse: int = 0
    nsfeat: int = 0
    flbas: int = 0
    nmic: int = 0
    dlfeat: int = 0
    npwg: int = 0
    npwa: int = 0
    anagrpid: int = 0
    nguid: bytes = bytes(16)
    eui64: bytes = bytes(8)
    formats: tuple[LbaFormat, ...] = (LbaFormat(12),)

    @property
    def format_index(self) -> int:
        """The format in use (FLBAS 3:0 and, with more than 16 formats, 6:5)."""
        return self.flbas & 0xF | (self.flbas >> 1 & 0x30 if len(self.formats) > 16 else 0)

    @property
    def lba_bytes(self) -> int:
        return 1 << self.formats[self.format_index].data_shift

    def encode(self) -> bytes:
        s = self
        head = NAMESPACE.pack(
            s.nsze, s.ncap, s.nuse, s.nsfeat, len(s.formats) - 1, s.flbas, s.nmic, s.dlfeat, s.npwg, s.npwa,
            s.anagrpid, s.nguid, s.eui64,
        )  # fmt: skip
        formats = b"".join(LBA_FORMAT.pack(f.metadata_bytes, f.data_shift, f.performance) for f in s.formats)
        return (head + formats).ljust(IDENTIFY_BYTES, b"\0")


def decode_identify_namespace_untrusted(data: bytes | bytearray | memoryview) -> IdentifyNamespace:
    """CNS 00. All zeros is an inactive namespace id, and decodes. Refuses a format out of the list."""
    exactly(data, IDENTIFY_BYTES, "Identify Namespace")
    values = list(NAMESPACE.unpack_from(data))
    count = values.pop(4) + 1
    if count > MAX_LBA_FORMATS:
        raise MalformedPdu(f"{count} LBA formats")
    end = NAMESPACE.size + count * LBA_FORMAT.size
    formats = tuple(
        LbaFormat(shift, metadata, performance)
        for metadata, shift, performance in LBA_FORMAT.iter_unpack(data[NAMESPACE.size : end])
    )
    names = [name for name in IdentifyNamespace.__dataclass_fields__ if name != "formats"]
    namespace = IdentifyNamespace(**dict(zip(names, values, strict=True)), formats=formats)
    index = namespace.format_index
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


class DescriptorKind(IntEnum):
    """NIDT."""

    EUI64 = 1
    NGUID = 2
    UUID = 3
    COMMAND_SET = 4


DESCRIPTOR_BYTES = {
    DescriptorKind.EUI64: 8,
    DescriptorKind.NGUID: 16,
    DescriptorKind.UUID: 16,
    DescriptorKind.COMMAND_SET: 1,
}


@dataclass(frozen=True, slots=True)
class NamespaceDescriptors:
    """The names of one namespace; None for those it does not have."""

    nguid: bytes | None = None
    eui64: bytes | None = None
    uuid: bytes | None = None
    command_set: int | None = None

    def encode(self) -> bytes:
        entries: list[tuple[int, bytes | None]] = [
            (DescriptorKind.EUI64, self.eui64),
            (DescriptorKind.NGUID, self.nguid),
            (DescriptorKind.UUID, self.uuid),
            (DescriptorKind.COMMAND_SET, None if self.command_set is None else bytes([self.command_set])),
        ]
        packed = [DESCRIPTOR.pack(kind, len(value)) + value for kind, value in entries if value is not None]
        return b"".join(packed).ljust(IDENTIFY_BYTES, b"\0")


def decode_namespace_descriptors_untrusted(data: bytes | bytearray | memoryview) -> NamespaceDescriptors:
    """CNS 03. Kinds that we do not know are skipped; one of the wrong length is refused."""
    exactly(data, IDENTIFY_BYTES, "a descriptor list")
    raw = bytes(data)
    found: dict[int, bytes] = {}
    position = 0
    while position + DESCRIPTOR.size <= len(raw):
        kind, length = DESCRIPTOR.unpack_from(raw, position)
        if length == 0:
            break
        position += DESCRIPTOR.size
        if position + length > len(raw):
            raise MalformedPdu("a namespace descriptor runs over the end")
        if kind in DESCRIPTOR_BYTES:
            if length != DESCRIPTOR_BYTES[DescriptorKind(kind)]:
                raise MalformedPdu(f"a namespace descriptor of kind {kind} has {length} bytes")
            found[kind] = raw[position : position + length]
        position += length
    command_set = found.get(DescriptorKind.COMMAND_SET)
    return NamespaceDescriptors(
        nguid=found.get(DescriptorKind.NGUID),
        eui64=found.get(DescriptorKind.EUI64),
        uuid=found.get(DescriptorKind.UUID),
        command_set=None if command_set is None else command_set[0],
    )


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
