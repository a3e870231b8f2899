"""Asymmetric Namespace Access: by which controllers a namespace is best reached (NVMe Base 2.0, 8.1).

Namespaces are put together in ANA groups. Each controller reports a state for each group in log page 0Ch
(5.16.1.13), and an event when one changes; a command to a group that cannot be reached by this controller is
answered with a path-related status.

    header      0  change count, 8 bytes    8  number of descriptors, 2 bytes   10  reserved, 6 bytes
    descriptor  0  ANAGRPID, 4 bytes        4  number of NSIDs, 4 bytes          8  change count, 8 bytes
               16  3:0 state                17  reserved, 15 bytes              32  the NSIDs, 4 bytes each
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from nvmeof.errors import MalformedPdu
from nvmeof.wire.status import Status

ANA_HEADER = struct.Struct("<QH6x")
ANA_DESCRIPTOR = struct.Struct("<IIQB15x")
assert ANA_HEADER.size == 16
assert ANA_DESCRIPTOR.size == 32

ANA_GROUPS_ONLY = 1 << 0
"""RGO, bit 0 of LSP in Get Log Page: descriptors without their NSIDs."""
CMIC_ANA = 1 << 3
"""Bit of CMIC: the subsystem reports asymmetric access."""
MAX_GROUPS = 1024
"""More groups than this are refused: one each for as many namespaces as we take of a subsystem."""


class AnaState(IntEnum):
    """How a controller reaches the namespaces of a group."""

    OPTIMIZED = 0x1
    NON_OPTIMIZED = 0x2
    INACCESSIBLE = 0x3
    PERSISTENT_LOSS = 0x4
    CHANGE = 0xF

    @property
    def serves(self) -> bool:
        """Commands that touch the media are carried out."""
        return self in (AnaState.OPTIMIZED, AnaState.NON_OPTIMIZED)


ANA_STATUS = {
    AnaState.INACCESSIBLE: Status.ANA_INACCESSIBLE,
    AnaState.PERSISTENT_LOSS: Status.ANA_PERSISTENT_LOSS,
    AnaState.CHANGE: Status.ANA_TRANSITION,
}
"""What a command is answered with in a state that does not serve."""

ANACAP_ALL_STATES = 0x1F
"""ANACAP bits 4:0: each of the five states may be reported."""


@dataclass(frozen=True, slots=True)
class AnaGroup:
    """One descriptor. `nsids` is empty where groups only were asked for."""

    group: int
    state: AnaState
    change_count: int = 0
    nsids: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """Thirty-two bytes, and four for each NSID."""
        head = ANA_DESCRIPTOR.pack(self.group, len(self.nsids), self.change_count, self.state)
        return head + struct.pack(f"<{len(self.nsids)}I", *self.nsids)


@dataclass(frozen=True, slots=True)
class AnaLog:
    """The whole page."""

    change_count: int
    groups: Sequence[AnaGroup]

    def encode(self) -> bytes:
        """Sixteen bytes and the descriptors."""
        head = ANA_HEADER.pack(self.change_count, len(self.groups))
        return head + b"".join(group.encode() for group in self.groups)


def ana_log_bytes(groups: int) -> int:
    """How long the page is without NSIDs. `groups` is NANAGRPID."""
    return ANA_HEADER.size + groups * ANA_DESCRIPTOR.size


def decode_ana_log_untrusted(data: bytes | bytearray | memoryview) -> AnaLog:
    """The page; what lies behind its last descriptor is ignored. Raises MalformedPdu."""
    raw = bytes(data)
    if len(raw) < ANA_HEADER.size:
        raise MalformedPdu(f"an ANA log has at least {ANA_HEADER.size} bytes, not {len(raw)}")
    change_count, count = ANA_HEADER.unpack_from(raw)
    if count > MAX_GROUPS:
        raise MalformedPdu(f"an ANA log of {count} groups")
    position = ANA_HEADER.size
    groups = []
    for _ in range(count):
        if position + ANA_DESCRIPTOR.size > len(raw):
            raise MalformedPdu("an ANA log is cut short")
        group, nsids, changes, state = ANA_DESCRIPTOR.unpack_from(raw, position)
        position += ANA_DESCRIPTOR.size
        if position + 4 * nsids > len(raw):
            raise MalformedPdu("the NSIDs of an ANA group are cut short")
        try:
            known = AnaState(state & 0xF)
        except ValueError:
            raise MalformedPdu(f"ANA group {group} is in state {state & 0xF:#x}") from None
        groups.append(AnaGroup(group, known, changes, struct.unpack_from(f"<{nsids}I", raw, position)))
        position += 4 * nsids
    return AnaLog(change_count, tuple(groups))
