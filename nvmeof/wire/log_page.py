"""Get Log Page and the pages that we speak (NVMe Base 2.0, 5.16; discovery: NVMe-oF 1.1, 5.3).

CDW10  7:0 LID, 14:8 LSP, 15 RAE, 31:16 number of dwords (low half, 0's based)
CDW11  15:0 number of dwords (high half), 31:16 LSI
CDW12, 13  offset in bytes
CDW14  6:0 UUID index, 23 offset type, 31:24 CSI
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from nvmeof.errors import MalformedPdu
from nvmeof.limits import MAX_DISCOVERY_ENTRIES
from nvmeof.wire.sqe import Sqe


class LogPage(IntEnum):
    """LID."""

    SUPPORTED = 0x00
    ERROR = 0x01
    SMART = 0x02
    FIRMWARE_SLOT = 0x03
    CHANGED_NAMESPACES = 0x04
    COMMAND_EFFECTS = 0x05
    ANA = 0x0C
    DISCOVERY = 0x70


@dataclass(frozen=True, slots=True)
class LogPageRequest:
    """The fields of a Get Log Page command; `length` and `offset` are in bytes."""

    page: int
    length: int
    offset: int = 0
    retain_event: bool = False
    specific: int = 0
    csi: int = 0

    def dwords(self) -> tuple[int, int, int, int, int]:
        """Command dwords 10 to 14. `length` is a multiple of 4, at least 4."""
        count = self.length // 4 - 1
        return (
            self.page | self.specific << 8 | self.retain_event << 15 | (count & 0xFFFF) << 16,
            count >> 16,
            self.offset & 0xFFFF_FFFF,
            self.offset >> 32,
            self.csi << 24,
        )


def decode_log_page_request(sqe: Sqe) -> LogPageRequest:
    """The fields of a Get Log Page command."""
    return LogPageRequest(
        page=sqe.cdw10 & 0xFF,
        length=((sqe.cdw10 >> 16 | (sqe.cdw11 & 0xFFFF) << 16) + 1) * 4,
        offset=sqe.cdw12 | sqe.cdw13 << 32,
        retain_event=sqe.cdw10 >> 15 & 1 != 0,
        specific=sqe.cdw10 >> 8 & 0x7F,
        csi=sqe.cdw14 >> 24,
    )


def _exactly(data: bytes | bytearray | memoryview, length: int, what: str) -> None:
    if len(data) != length:
        raise MalformedPdu(f"{what} has {length} bytes, not {len(data)}")


# --- 01: errors ----------------------------------------

ERROR_ENTRY = struct.Struct("<QHHHHQIBB2xQH22x")
assert ERROR_ENTRY.size == 64


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One entry of the error log. `count` 0 marks an entry that was never used."""

    count: int
    sqid: int
    cid: int
    status: int
    parameter_location: int = 0xFFFF
    lba: int = 0
    nsid: int = 0
    vendor: int = 0
    transport_type: int = 0
    specific: int = 0
    transport_specific: int = 0

    def encode(self) -> bytes:
        """Sixty-four bytes; the status is stored as in a CQE, one bit to the left."""
        return ERROR_ENTRY.pack(
            self.count, self.sqid, self.cid, self.status << 1, self.parameter_location, self.lba, self.nsid,
            self.vendor, self.transport_type, self.specific, self.transport_specific,
        )  # fmt: skip


def decode_error_entry_untrusted(data: bytes | bytearray | memoryview) -> ErrorEntry:
    """One entry from exactly 64 bytes."""
    _exactly(data, ERROR_ENTRY.size, "an error log entry")
    values = list(ERROR_ENTRY.unpack(data))
    values[3] >>= 1
    return ErrorEntry(*values)


# --- 02: SMART / health ----------------------------------------

SMART = struct.Struct("<BHBBBB25x" + "16s" * 10 + "II8H296x")
assert SMART.size == 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartLog:
    """Health. Temperature is in kelvin; data units are thousands of 512 bytes."""

    critical_warning: int = 0
    temperature: int = 0
    available_spare: int = 100
    available_spare_threshold: int = 0
    percentage_used: int = 0
    endurance_warning: int = 0
    data_units_read: int = 0
    data_units_written: int = 0
    host_reads: int = 0
    host_writes: int = 0
    busy_minutes: int = 0
    power_cycles: int = 0
    power_on_hours: int = 0
    unsafe_shutdowns: int = 0
    media_errors: int = 0
    error_entries: int = 0
    warning_temperature_minutes: int = 0
    critical_temperature_minutes: int = 0
    sensors: tuple[int, ...] = (0,) * 8

    def encode(self) -> bytes:
        """512 bytes."""
        counters = (
            self.data_units_read, self.data_units_written, self.host_reads, self.host_writes,
            self.busy_minutes, self.power_cycles, self.power_on_hours, self.unsafe_shutdowns,
            self.media_errors, self.error_entries,
        )  # fmt: skip
        return SMART.pack(
            self.critical_warning, self.temperature, self.available_spare, self.available_spare_threshold,
            self.percentage_used, self.endurance_warning, *(c.to_bytes(16, "little") for c in counters),
            self.warning_temperature_minutes, self.critical_temperature_minutes, *self.sensors,
        )  # fmt: skip


def decode_smart_log_untrusted(data: bytes | bytearray | memoryview) -> SmartLog:
    """Health from exactly 512 bytes."""
    _exactly(data, SMART.size, "the SMART log")
    values = [int.from_bytes(v, "little") if isinstance(v, bytes) else v for v in SMART.unpack(data)]
    names = list(SmartLog.__dataclass_fields__)[:-1]
    return SmartLog(**dict(zip(names, values[:18], strict=True)), sensors=tuple(values[18:]))


# --- 04: changed namespaces ----------------------------------------

CHANGED_NAMESPACES_BYTES = 4096
TOO_MANY_CHANGED = 0xFFFF_FFFF


def encode_changed_namespaces(nsids: Iterable[int]) -> bytes:
    """1024 ids; when more have changed, the first entry is FFFFFFFFh and the rest 0."""
    ids = sorted(nsids)
    if len(ids) > 1024:
        ids = [TOO_MANY_CHANGED]
    return struct.pack(f"<{len(ids)}I", *ids).ljust(CHANGED_NAMESPACES_BYTES, b"\0")


def decode_changed_namespaces_untrusted(data: bytes | bytearray | memoryview) -> list[int] | None:
    """The ids that changed since the last reading; None when there were too many to list."""
    _exactly(data, CHANGED_NAMESPACES_BYTES, "the changed-namespace log")
    ids: list[int] = []
    for (nsid,) in struct.iter_unpack("<I", data):
        if nsid == 0:
            break
        ids.append(nsid)
    return None if ids[:1] == [TOO_MANY_CHANGED] else ids


# --- 05: commands supported and effects ----------------------------------------

EFFECTS = struct.Struct("<256I256I2048x")
assert EFFECTS.size == 4096
EFFECT_SUPPORTED = 1 << 0
EFFECT_CONTENT_CHANGE = 1 << 1


@dataclass(frozen=True, slots=True)
class CommandEffects:
    """By opcode, the effects of each command that is supported."""

    admin: Mapping[int, int]
    io: Mapping[int, int]

    def encode(self) -> bytes:
        """4096 bytes."""
        return EFFECTS.pack(
            *(self.admin.get(i, 0) for i in range(256)), *(self.io.get(i, 0) for i in range(256))
        )


def decode_command_effects_untrusted(data: bytes | bytearray | memoryview) -> CommandEffects:
    """The page from exactly 4096 bytes."""
    _exactly(data, EFFECTS.size, "the command effects log")
    values = EFFECTS.unpack(data)
    return CommandEffects(
        {opcode: value for opcode, value in enumerate(values[:256]) if value},
        {opcode: value for opcode, value in enumerate(values[256:]) if value},
    )


# --- 70: discovery ----------------------------------------

DISCOVERY_HEADER = struct.Struct("<QQH1006x")
DISCOVERY_ENTRY = struct.Struct("<BBBBHHHH20x32s192x256s256s256s")
assert DISCOVERY_HEADER.size == 1024
assert DISCOVERY_ENTRY.size == 1024


class TransportType(IntEnum):
    """TRTYPE."""

    RDMA = 1
    FIBRE_CHANNEL = 2
    TCP = 3
    LOOP = 254


class AddressFamily(IntEnum):
    """ADRFAM."""

    IPV4 = 1
    IPV6 = 2
    INFINIBAND = 3
    FIBRE_CHANNEL = 4


class SubsystemType(IntEnum):
    """SUBTYPE."""

    REFERRAL = 1
    NVM = 2
    CURRENT_DISCOVERY = 3


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One way to one subsystem. `port_id` names the port, `tsas` is transport specific (256 bytes)."""

    transport_type: int
    address_family: int
    subsystem_type: int
    address: str
    service: str
    subsystem_nqn: str
    port_id: int = 0
    cntlid: int = 0xFFFF
    admin_queue_size: int = 32
    requirements: int = 0
    flags: int = 0
    tsas: bytes = bytes(256)

    def encode(self) -> bytes:
        """1024 bytes. Address and service are padded with spaces, the name with NUL."""
        return DISCOVERY_ENTRY.pack(
            self.transport_type, self.address_family, self.subsystem_type, self.requirements, self.port_id,
            self.cntlid, self.admin_queue_size, self.flags, self.service.encode("ascii").ljust(32),
            self.subsystem_nqn.encode(), self.address.encode("ascii").ljust(256), self.tsas,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiscoveryLog:
    """The whole page. `generation` changes whenever an entry does."""

    generation: int
    entries: Sequence[DiscoveryEntry]
    record_format: int = 0

    def encode(self) -> bytes:
        """1024 bytes, and 1024 for each entry."""
        head = DISCOVERY_HEADER.pack(self.generation, len(self.entries), self.record_format)
        return head + b"".join(entry.encode() for entry in self.entries)


def decode_discovery_header_untrusted(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(generation, number of entries) from the first 1024 bytes."""
    if len(data) < DISCOVERY_HEADER.size:
        raise MalformedPdu(f"a discovery log has at least 1024 bytes, not {len(data)}")
    generation, count, record_format = DISCOVERY_HEADER.unpack_from(data)
    if record_format != 0:
        raise MalformedPdu(f"a discovery log of format {record_format}")
    if count > MAX_DISCOVERY_ENTRIES:
        raise MalformedPdu(f"a discovery log of {count} entries")
    return generation, count


def _padded(raw: bytes, what: str) -> str:
    try:
        return raw.split(b"\0")[0].decode().rstrip(" ")
    except UnicodeDecodeError:
        raise MalformedPdu(f"{what} of a discovery entry is not text") from None


def decode_discovery_entry_untrusted(data: bytes | bytearray | memoryview) -> DiscoveryEntry:
    """One entry from exactly 1024 bytes."""
    _exactly(data, DISCOVERY_ENTRY.size, "a discovery entry")
    (kind, family, subtype, treq, port, cntlid, size, flags, service, nqn, address, tsas) = (
        DISCOVERY_ENTRY.unpack(data)
    )
    return DiscoveryEntry(
        kind, family, subtype, _padded(address, "the address"), _padded(service, "the service"),
        _padded(nqn, "the NQN"), port, cntlid, size, treq, flags, tsas,
    )  # fmt: skip


def decode_discovery_log_untrusted(data: bytes | bytearray | memoryview) -> DiscoveryLog:
    """The whole page; refuses one that is shorter than its number of entries says."""
    generation, count = decode_discovery_header_untrusted(data)
    if len(data) < 1024 * (count + 1):
        raise MalformedPdu("a discovery log is cut short")
    view = memoryview(data)
    return DiscoveryLog(
        generation,
        tuple(
            decode_discovery_entry_untrusted(view[1024 * i : 1024 * i + 1024]) for i in range(1, count + 1)
        ),
    )
