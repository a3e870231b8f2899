"""Identify data structures (NVMe Base 2.0, 5.17). Each is 4096 bytes; reserved bytes are 0.

Which one is asked for is CNS, in command dword 10: `IdentifyCns`. Fields keep the order of the
specification; those that no fabric controller of ours fills and no host of ours reads are left 0 and not
decoded (power states, RPMB, vendor specific).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from nvmeof.errors import MalformedPdu

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
    ALLOCATED_NAMESPACES = 0x10
    COMMAND_SETS = 0x1C


class CommandSet(IntEnum):
    """CSI."""

    NVM = 0
    KEY_VALUE = 1
    ZONED = 2


class ControllerKind(IntEnum):
    """CNTRLTYPE."""

    NOT_REPORTED = 0
    IO = 1
    DISCOVERY = 2
    ADMINISTRATIVE = 3


OAES_NAMESPACE_CHANGED = 1 << 8
OAES_ANA_CHANGED = 1 << 11
OAES_DISCOVERY_CHANGED = 1 << 31
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
    "<HH20s40s8sB3sBBHIIIII H9xB16s125x"  # 0..252: who it is
    "BBBHBBBBBBBBHHHII16s16s"  # 253..311: administration
    "IHBBHHHHIIHHHBBII"  # 312..351
    "160x"  # 352..511
    "BBHIHHBBHHBBH2xII"  # 512..543: I/O commands
    "224x256s768x"  # 544..1791: names
    "IIHBBH242x"  # 1792..2047: fabrics
    "2048x"
)
assert CONTROLLER.size == IDENTIFY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyController:
    """What a controller is and can do. Names are those of the specification, lower case."""

    vid: int = 0
    ssvid: int = 0
    serial: str = ""
    model: str = ""
    firmware: str = ""
    rab: int = 0
    ieee: bytes = bytes(3)
    cmic: int = 0
    mdts: int = 0
    cntlid: int = 0
    version: int = 0
    rtd3r: int = 0
    rtd3e: int = 0
    oaes: int = 0
    ctratt: int = 0
    rrls: int = 0
    cntrltype: int = 0
    fguid: bytes = bytes(16)
    nvmsr: int = 0
    vwci: int = 0
    mec: int = 0
    oacs: int = 0
    acl: int = 0
    aerl: int = 0
    frmw: int = 0
    lpa: int = 0
    elpe: int = 0
    npss: int = 0
    avscc: int = 0
    apsta: int = 0
    wctemp: int = 0
    cctemp: int = 0
    mtfa: int = 0
    hmpre: int = 0
    hmmin: int = 0
    tnvmcap: int = 0
    unvmcap: int = 0
    rpmbs: int = 0
    edstt: int = 0
    dsto: int = 0
    fwug: int = 0
    kas: int = 0
    hctma: int = 0
    mntmt: int = 0
    mxtmt: int = 0
    sanicap: int = 0
    hmminds: int = 0
    hmmaxd: int = 0
    nsetidmax: int = 0
    endgidmax: int = 0
    anatt: int = 0
    anacap: int = 0
    anagrpmax: int = 0
    nanagrpid: int = 0
    sqes: int = 0
    cqes: int = 0
    maxcmd: int = 0
    nn: int = 0
    oncs: int = 0
    fuses: int = 0
    fna: int = 0
    vwc: int = 0
    awun: int = 0
    awupf: int = 0
    icsvscc: int = 0
    nwpc: int = 0
    acwu: int = 0
    sgls: int = 0
    mnan: int = 0
    subnqn: str = ""
    ioccsz: int = 0
    iorcsz: int = 0
    icdoff: int = 0
    fcatt: int = 0
    msdbd: int = 0
    ofcs: int = 0

    def encode(self) -> bytes:
        """4096 bytes."""
        s = self
        return CONTROLLER.pack(
            s.vid, s.ssvid, _text(s.serial, 20), _text(s.model, 40), _text(s.firmware, 8), s.rab, s.ieee,
            s.cmic, s.mdts, s.cntlid, s.version, s.rtd3r, s.rtd3e, s.oaes, s.ctratt, s.rrls, s.cntrltype,
            s.fguid, s.nvmsr, s.vwci, s.mec, s.oacs, s.acl, s.aerl, s.frmw, s.lpa, s.elpe, s.npss, s.avscc,
            s.apsta, s.wctemp, s.cctemp, s.mtfa, s.hmpre, s.hmmin, s.tnvmcap.to_bytes(16, "little"),
            s.unvmcap.to_bytes(16, "little"), s.rpmbs, s.edstt, s.dsto, s.fwug, s.kas, s.hctma, s.mntmt,
            s.mxtmt, s.sanicap, s.hmminds, s.hmmaxd, s.nsetidmax, s.endgidmax, s.anatt, s.anacap,
            s.anagrpmax, s.nanagrpid, s.sqes, s.cqes, s.maxcmd, s.nn, s.oncs, s.fuses, s.fna, s.vwc, s.awun,
            s.awupf, s.icsvscc, s.nwpc, s.acwu, s.sgls, s.mnan, s.subnqn.encode(), s.ioccsz, s.iorcsz,
            s.icdoff, s.fcatt, s.msdbd, s.ofcs,
        )  # fmt: skip


def _whole(data: bytes | bytearray | memoryview, what: str) -> None:
    if len(data) != IDENTIFY_BYTES:
        raise MalformedPdu(f"{what} has {IDENTIFY_BYTES} bytes, not {len(data)}")


def decode_identify_controller_untrusted(data: bytes | bytearray | memoryview) -> IdentifyController:
    """CNS 01. Text that is not ASCII decodes with replacement characters."""
    _whole(data, "Identify Controller")
    values = list(CONTROLLER.unpack(data))
    for index in (2, 3, 4):
        values[index] = _plain(values[index])
    for index, name in enumerate(_CONTROLLER_FIELDS):
        if name in ("tnvmcap", "unvmcap"):
            values[index] = int.from_bytes(values[index], "little")
        elif name == "subnqn":
            values[index] = values[index].split(b"\0")[0].decode("utf-8", "replace")
    return IdentifyController(**dict(zip(_CONTROLLER_FIELDS, values, strict=True)))


_CONTROLLER_FIELDS = tuple(IdentifyController.__dataclass_fields__)


# --- CNS 00: namespace, NVM command set ----------------------------------------

NAMESPACE = struct.Struct("<QQQ10BHHHHHHH16sHHHHHHIB11xI3xBHH16s8s")
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
    mc: int = 0
    dpc: int = 0
    dps: int = 0
    nmic: int = 0
    rescap: int = 0
    fpi: int = 0
    dlfeat: int = 0
    nawun: int = 0
    nawupf: int = 0
    nacwu: int = 0
    nabsn: int = 0
    nabo: int = 0
    nabspf: int = 0
    noiob: int = 0
    nvmcap: int = 0
    npwg: int = 0
    npwa: int = 0
    npdg: int = 0
    npda: int = 0
    nows: int = 0
    mssrl: int = 0
    mcl: int = 0
    msrc: int = 0
    anagrpid: int = 0
    nsattr: int = 0
    nvmsetid: int = 0
    endgid: int = 0
    nguid: bytes = bytes(16)
    eui64: bytes = bytes(8)
    formats: tuple[LbaFormat, ...] = (LbaFormat(12),)

    @property
    def format(self) -> LbaFormat:
        """The format in use (FLBAS 3:0 and, with more than 16 formats, 6:5)."""
        index = self.flbas & 0xF | (self.flbas >> 1 & 0x30 if len(self.formats) > 16 else 0)
        return self.formats[index]

    @property
    def lba_bytes(self) -> int:
        """Bytes of data in one logical block."""
        return 1 << self.format.data_shift

    def encode(self) -> bytes:
        """4096 bytes."""
        s = self
        head = NAMESPACE.pack(
            s.nsze, s.ncap, s.nuse, s.nsfeat, len(s.formats) - 1, s.flbas, s.mc, s.dpc, s.dps, s.nmic,
            s.rescap, s.fpi, s.dlfeat, s.nawun, s.nawupf, s.nacwu, s.nabsn, s.nabo, s.nabspf, s.noiob,
            s.nvmcap.to_bytes(16, "little"), s.npwg, s.npwa, s.npdg, s.npda, s.nows, s.mssrl, s.mcl, s.msrc,
            s.anagrpid, s.nsattr, s.nvmsetid, s.endgid, s.nguid, s.eui64,
        )  # fmt: skip
        formats = b"".join(LBA_FORMAT.pack(f.metadata_bytes, f.data_shift, f.performance) for f in s.formats)
        return (head + formats).ljust(IDENTIFY_BYTES, b"\0")


def decode_identify_namespace_untrusted(data: bytes | bytearray | memoryview) -> IdentifyNamespace:
    """CNS 00. All zeros is an inactive namespace id, and decodes. Refuses a format out of the list."""
    _whole(data, "Identify Namespace")
    values = list(NAMESPACE.unpack_from(data))
    count = values.pop(4) + 1
    if count > MAX_LBA_FORMATS:
        raise MalformedPdu(f"{count} LBA formats")
    start = NAMESPACE.size
    formats = tuple(
        LbaFormat(shift, metadata, performance)
        for metadata, shift, performance in LBA_FORMAT.iter_unpack(
            data[start : start + count * LBA_FORMAT.size]
        )
    )
    names = [name for name in IdentifyNamespace.__dataclass_fields__ if name != "formats"]
    fields = dict(zip(names, values, strict=True))
    fields["nvmcap"] = int.from_bytes(fields["nvmcap"], "little")
    namespace = IdentifyNamespace(**fields, formats=formats)
    index = namespace.flbas & 0xF | (namespace.flbas >> 1 & 0x30 if count > 16 else 0)
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
    _whole(data, "a namespace list")
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
        """4096 bytes."""
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
    _whole(data, "a descriptor list")
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


# --- CNS 05, 06, 08, 1C: by I/O command set ----------------------------------------

NVM_CONTROLLER = struct.Struct("<BBBBIQ")
INDEPENDENT_NAMESPACE = struct.Struct("<BBBBIBxHHB")
assert NVM_CONTROLLER.size == 16
assert INDEPENDENT_NAMESPACE.size == 15


@dataclass(frozen=True, slots=True)
class NvmController:
    """CNS 06, CSI 0: limits of NVM commands; sizes are powers of two in units of CAP.MPSMIN, 0 is none."""

    verify_size: int = 0
    write_zeroes_size: int = 0
    write_uncorrectable_size: int = 0
    dataset_ranges: int = 0
    dataset_range_blocks: int = 0
    dataset_blocks: int = 0

    def encode(self) -> bytes:
        """4096 bytes."""
        head = NVM_CONTROLLER.pack(
            self.verify_size,
            self.write_zeroes_size,
            self.write_uncorrectable_size,
            self.dataset_ranges,
            self.dataset_range_blocks,
            self.dataset_blocks,
        )
        return head.ljust(IDENTIFY_BYTES, b"\0")


def decode_nvm_controller_untrusted(data: bytes | bytearray | memoryview) -> NvmController:
    """CNS 06, CSI 0."""
    _whole(data, "Identify Controller of the NVM command set")
    return NvmController(*NVM_CONTROLLER.unpack_from(data))


def encode_nvm_namespace() -> bytes:
    """CNS 05, CSI 0: no extended protection information, hence all zeros."""
    return bytes(IDENTIFY_BYTES)


@dataclass(frozen=True, slots=True)
class IndependentNamespace:
    """CNS 08: what is true of a namespace whatever its command set."""

    nsfeat: int = 0
    nmic: int = 0
    rescap: int = 0
    fpi: int = 0
    anagrpid: int = 0
    nsattr: int = 0
    nvmsetid: int = 0
    endgid: int = 0
    ready: bool = True

    def encode(self) -> bytes:
        """4096 bytes."""
        head = INDEPENDENT_NAMESPACE.pack(
            self.nsfeat, self.nmic, self.rescap, self.fpi, self.anagrpid, self.nsattr, self.nvmsetid,
            self.endgid, self.ready,
        )  # fmt: skip
        return head.ljust(IDENTIFY_BYTES, b"\0")


def decode_independent_namespace_untrusted(data: bytes | bytearray | memoryview) -> IndependentNamespace:
    """CNS 08."""
    _whole(data, "Identify Namespace, independent of the command set")
    values = list(INDEPENDENT_NAMESPACE.unpack_from(data))
    values[-1] = values[-1] & 1 != 0
    return IndependentNamespace(*values)


@dataclass(frozen=True, slots=True)
class CommandSets:
    """CNS 1C: the combinations of I/O command sets that a controller offers, each a bit vector by CSI."""

    vectors: Sequence[int] = field(default=(1,))

    def encode(self) -> bytes:
        """4096 bytes."""
        return struct.pack(f"<{len(self.vectors)}Q", *self.vectors).ljust(IDENTIFY_BYTES, b"\0")


def decode_command_sets_untrusted(data: bytes | bytearray | memoryview) -> CommandSets:
    """CNS 1C."""
    _whole(data, "the list of I/O command sets")
    vectors = struct.unpack("<512Q", data)
    return CommandSets(tuple(vector for vector in vectors if vector))
