"""Controller properties: the registers of a controller, over Fabrics (NVMe Base 2.0, 3.1.3).

They are read and written by Property Get and Property Set (`fabrics.py`). Bit fields are named here once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Property(IntEnum):
    """Offsets."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C
    NSSR = 0x20
    CRTO = 0x68


PROPERTY_BYTES = {
    Property.CAP: 8,
    Property.VS: 4,
    Property.CC: 4,
    Property.CSTS: 4,
    Property.NSSR: 4,
    Property.CRTO: 4,
}
"""Size of each property in bytes."""

VERSION_1_4 = 0x0001_0400


@dataclass(frozen=True, slots=True)
class Capabilities:
    """CAP. `max_queue_entries` is 0's based (MQES), `timeout` counts 500 ms."""

    max_queue_entries: int
    contiguous_queues: bool = True
    timeout: int = 0
    command_sets: int = 1
    min_page_size: int = 0
    max_page_size: int = 0
    subsystem_reset: bool = False
    ready_modes: int = 0
    doorbell_stride: int = 0
    arbitration: int = 0

    def encode(self) -> int:
        """The 64-bit value."""
        return (
            self.max_queue_entries
            | self.contiguous_queues << 16
            | self.arbitration << 17
            | self.timeout << 24
            | self.doorbell_stride << 32
            | self.subsystem_reset << 36
            | self.command_sets << 37
            | self.min_page_size << 48
            | self.max_page_size << 52
            | self.ready_modes << 59
        )


def decode_capabilities(value: int) -> Capabilities:
    """CAP from its 64-bit value; bits that we have no use for are dropped."""
    return Capabilities(
        max_queue_entries=value & 0xFFFF,
        contiguous_queues=value >> 16 & 1 != 0,
        arbitration=value >> 17 & 3,
        timeout=value >> 24 & 0xFF,
        doorbell_stride=value >> 32 & 0xF,
        subsystem_reset=value >> 36 & 1 != 0,
        command_sets=value >> 37 & 0xFF,
        min_page_size=value >> 48 & 0xF,
        max_page_size=value >> 52 & 0xF,
        ready_modes=value >> 59 & 3,
    )


class Shutdown(IntEnum):
    """CC.SHN, and CSTS.SHST with the same meaning shifted by what is under way."""

    NONE = 0
    NORMAL = 1
    ABRUPT = 2


CAPABLE_OF_NVM = 1 << 0
CAPABLE_OF_ALL_SETS = 1 << 6
"""CAP.CSS: the NVM command set; and that CC.CSS may ask for one or more sets, told apart by their CSI."""
CONFIGURE_NVM = 0
CONFIGURE_ALL_SETS = 6
"""CC.CSS."""

SHUTDOWN_COMPLETE = 2
"""CSTS.SHST."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """CC. Entry sizes are powers of two: 6 is 64 bytes, 4 is 16 bytes."""

    enable: bool
    shutdown: int = Shutdown.NONE
    command_set: int = 0
    page_size: int = 0
    arbitration: int = 0
    sq_entry_size: int = 6
    cq_entry_size: int = 4
    ready_independent: bool = False

    def encode(self) -> int:
        """The 32-bit value."""
        return (
            self.enable
            | self.command_set << 4
            | self.page_size << 7
            | self.arbitration << 11
            | self.shutdown << 14
            | self.sq_entry_size << 16
            | self.cq_entry_size << 20
            | self.ready_independent << 24
        )


def decode_configuration(value: int) -> Configuration:
    """CC from its 32-bit value."""
    return Configuration(
        enable=value & 1 != 0,
        command_set=value >> 4 & 7,
        page_size=value >> 7 & 0xF,
        arbitration=value >> 11 & 7,
        shutdown=value >> 14 & 3,
        sq_entry_size=value >> 16 & 0xF,
        cq_entry_size=value >> 20 & 0xF,
        ready_independent=value >> 24 & 1 != 0,
    )


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """CSTS."""

    ready: bool
    fatal: bool = False
    shutdown: int = 0
    subsystem_reset_occurred: bool = False
    paused: bool = False

    def encode(self) -> int:
        """The 32-bit value."""
        return (
            self.ready
            | self.fatal << 1
            | self.shutdown << 2
            | self.subsystem_reset_occurred << 4
            | self.paused << 5
        )


def decode_controller_status(value: int) -> ControllerStatus:
    """CSTS from its 32-bit value."""
    return ControllerStatus(
        ready=value & 1 != 0,
        fatal=value >> 1 & 1 != 0,
        shutdown=value >> 2 & 3,
        subsystem_reset_occurred=value >> 4 & 1 != 0,
        paused=value >> 5 & 1 != 0,
    )
