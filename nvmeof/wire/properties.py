"""Controller properties: the registers of a controller, over Fabrics (NVMe Base 2.0, 3.1.3).

They are read and written by Property Get and Property Set (`fabrics.py`). Bit fields are named here once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias


class Property(IntEnum):
    """Offsets."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C


PROPERTY_BYTES = {
    Property.CAP: 8,
    Property.VS: 4,
    Property.CC: 4,
    Property.CSTS: 4,
}
"""Size of each property in bytes."""

VERSION_1_4 = 0x0001_0400


Bits: TypeAlias = Mapping[str, tuple[int, int]]
"""By field of a record: its lowest bit in the register, and how many bits it has."""

CAP_BITS: Bits = {
    "max_queue_entries": (0, 16), "timeout": (24, 8), "command_sets": (37, 8), "min_page_size": (48, 4),
}  # fmt: skip
CAP_CQR = 1 << 16
"""Queues are contiguous."""
CC_BITS: Bits = {
    "enable": (0, 1), "command_set": (4, 3), "page_size": (7, 4), "arbitration": (11, 3), "shutdown": (14, 2),
    "sq_entry_size": (16, 4), "cq_entry_size": (20, 4),
}  # fmt: skip
CSTS_BITS: Bits = {"ready": (0, 1), "fatal": (1, 1), "shutdown": (2, 2)}


def _encoded(record: object, bits: Bits) -> int:
    return sum(int(getattr(record, name)) << low for name, (low, _) in bits.items())


def _decoded(value: int, bits: Bits) -> dict[str, Any]:
    fields = {name: (value >> low & (1 << width) - 1, width) for name, (low, width) in bits.items()}
    return {name: field if width > 1 else bool(field) for name, (field, width) in fields.items()}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """CAP. `max_queue_entries` is 0's based (MQES), `timeout` counts 500 ms, `min_page_size` is MPSMIN."""

    max_queue_entries: int
    timeout: int = 0
    command_sets: int = 1
    min_page_size: int = 0

    def encode(self) -> int:
        return _encoded(self, CAP_BITS) | CAP_CQR


def decode_capabilities(value: int) -> Capabilities:
    return Capabilities(**_decoded(value, CAP_BITS))


class Shutdown(IntEnum):
    """CC.SHN, and CSTS.SHST with the same meaning shifted by what is under way."""

    NONE = 0
    NORMAL = 1


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

    def encode(self) -> int:
        return _encoded(self, CC_BITS)


def decode_configuration(value: int) -> Configuration:
    return Configuration(**_decoded(value, CC_BITS))


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """CSTS."""

    ready: bool
    fatal: bool = False
    shutdown: int = 0

    def encode(self) -> int:
        return _encoded(self, CSTS_BITS)


def decode_controller_status(value: int) -> ControllerStatus:
    return ControllerStatus(**_decoded(value, CSTS_BITS))
