"""Get Log Page and the pages that we speak (NVMe Base 2.0, 5.16; discovery: NVMe-oF 1.1, 5.3)."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from nvmeof.errors import MalformedPdu, exactly
from nvmeof.limits import ADMIN_QUEUE_DEPTH, MAX_DISCOVERY_ENTRIES
from nvmeof.wire.bit_fields import Bits, Flag, Order, Record
from nvmeof.wire.command_dwords import CommandDwords


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


class _Length(Bits):
    """Bytes, as a 0's based number of dwords."""

    def number(self, value: int, order: Order) -> int:
        return super().number(value // 4 - 1, order)

    def value(self, number: int, order: Order) -> int:
        return (number + 1) * 4


@dataclass(frozen=True, slots=True)
class LogPageRequest(CommandDwords):
    """A Get Log Page command: LID, NUMD (in bytes, a multiple of 4), LPO in bytes, RAE, LSP, CSI."""

    page: Annotated[int, Bits(0, 8)]
    length: Annotated[int, _Length(2, 32)]
    offset: Annotated[int, Bits(8, 64)] = 0
    retain_event: Annotated[bool, Flag(1, 7)] = False
    specific: Annotated[int, Bits(1, 7)] = 0
    csi: Annotated[int, Bits(19, 8)] = 0


# --- 01: errors ----------------------------------------

ERROR_ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class ErrorEntry(Record):
    """One entry of the error log. `count` 0 marks an entry that was never used."""

    BYTES: ClassVar[int] = ERROR_ENTRY_BYTES

    count: Annotated[int, Bits(0, 64)]
    sqid: Annotated[int, Bits(8, 16)]
    cid: Annotated[int, Bits(10, 16)]
    status: Annotated[int, Bits(12, 15, 1)]
    lba: Annotated[int, Bits(16, 64)] = 0
    nsid: Annotated[int, Bits(24, 32)] = 0
    transport_type: Annotated[int, Bits(29, 8)] = 0
    parameter: Annotated[int, Bits(14, 16)] = 0xFFFF
    """The offset of a wrong one in the command; FFFFh is none."""


# --- 02: SMART / health ----------------------------------------

SMART = struct.Struct("<xHB172xQ328x")
assert SMART.size == 512


def encode_smart_log(temperature: int, error_entries: int) -> bytes:
    """Health. Temperature is in kelvin; the spare capacity is all there (100 per cent). The count of error
    entries has 16 bytes, of which 8 are used."""
    return SMART.pack(temperature, 100, error_entries)


# --- 04: changed namespaces ----------------------------------------

CHANGED_NAMESPACES_BYTES = 4096
TOO_MANY_CHANGED = 0xFFFF_FFFF


def encode_changed_namespaces(nsids: Iterable[int]) -> bytes:
    """1024 ids; when more have changed, the first entry is FFFFFFFFh and the rest 0."""
    ids = sorted(nsids)
    if len(ids) > 1024:
        ids = [TOO_MANY_CHANGED]
    return struct.pack(f"<{len(ids)}I", *ids).ljust(CHANGED_NAMESPACES_BYTES, b"\0")


# --- 05: commands supported and effects ----------------------------------------

EFFECTS = struct.Struct("<256I256I2048x")
assert EFFECTS.size == 4096
EFFECT_SUPPORTED = 1 << 0
EFFECT_CONTENT_CHANGE = 1 << 1


def encode_command_effects(admin: Mapping[int, int], io: Mapping[int, int]) -> bytes:
    """By opcode, the effects of each command that is supported."""
    return EFFECTS.pack(*(admin.get(i, 0) for i in range(256)), *(io.get(i, 0) for i in range(256)))


# --- 70: discovery ----------------------------------------

DISCOVERY_HEADER = struct.Struct("<QQH1006x")
DISCOVERY_ENTRY = struct.Struct("<BBBxHHH22x32s192x256s256s256s")
assert DISCOVERY_HEADER.size == 1024
assert DISCOVERY_ENTRY.size == 1024


class TransportType(IntEnum):
    """TRTYPE."""

    RDMA = 1
    TCP = 3


class AddressFamily(IntEnum):
    """ADRFAM."""

    IPV4 = 1
    IPV6 = 2


class SubsystemType(IntEnum):
    """SUBTYPE."""

    REFERRAL = 1
    NVM = 2
    CURRENT_DISCOVERY = 3


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One way to one subsystem. `service` is the port, as text; `port_id` names it for the target, `tsas` is
    transport specific (256 bytes). A target lists a way to all its subsystems without a `subsystem_nqn`."""

    address: str
    service: str
    subsystem_nqn: str = ""
    transport_type: int = TransportType.TCP
    address_family: int = AddressFamily.IPV4
    subsystem_type: int = SubsystemType.NVM
    port_id: int = 1
    tsas: bytes = bytes(256)

    def encode(self) -> bytes:
        """1024 bytes. Address and service are padded with spaces, the name with NUL. CNTLID is FFFFh (any),
        ASQSZ is ADMIN_QUEUE_DEPTH."""
        return DISCOVERY_ENTRY.pack(
            self.transport_type, self.address_family, self.subsystem_type, self.port_id, 0xFFFF,
            ADMIN_QUEUE_DEPTH, self.service.encode("ascii").ljust(32), self.subsystem_nqn.encode(),
            self.address.encode("ascii").ljust(256), self.tsas,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiscoveryLog:
    """The whole page. `generation` changes whenever an entry does."""

    generation: int
    entries: Sequence[DiscoveryEntry]

    def encode(self) -> bytes:
        head = DISCOVERY_HEADER.pack(self.generation, len(self.entries), 0)
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
    exactly(data, DISCOVERY_ENTRY.size, "a discovery entry")
    kind, family, subtype, port, _, _, service, nqn, address, tsas = DISCOVERY_ENTRY.unpack(data)
    return DiscoveryEntry(
        _padded(address, "the address"), _padded(service, "the service"), _padded(nqn, "the NQN"),
        kind, family, subtype, port, tsas,
    )  # fmt: skip


def decode_discovery_log_untrusted(data: bytes | bytearray | memoryview) -> DiscoveryLog:
    """The whole page; refuses one that is shorter than its number of entries says."""
    generation, count = decode_discovery_header_untrusted(data)
    if len(data) < 1024 * (count + 1):
        raise MalformedPdu("a discovery log is cut short")
    view = memoryview(data)
    entries = (view[1024 * number : 1024 * (number + 1)] for number in range(1, count + 1))
    return DiscoveryLog(generation, tuple(map(decode_discovery_entry_untrusted, entries)))
