"""Controller properties: the registers of a controller, over Fabrics (NVMe Base 2.0, 3.1.3).

They are read and written by Property Get and Property Set (`fabrics.py`). Bit fields are named here once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self, TypeAlias


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

VERSION_1_4 = 0x0001_0400


Bits: TypeAlias = Mapping[str, tuple[int, int]]
"""By field of a record: its lowest bit in the register, and how many bits it has."""


class _Register:
    """A record of the fields of a register."""

    __slots__ = ()
    BITS: ClassVar[Bits]

    def encode(self) -> int:
        return sum(int(getattr(self, name)) << low for name, (low, _) in self.BITS.items())

    @classmethod
    def decode(cls, value: int) -> Self:
        fields = {name: (value >> low & (1 << width) - 1, width) for name, (low, width) in cls.BITS.items()}
        return cls(**{name: field if width > 1 else bool(field) for name, (field, width) in fields.items()})


@dataclass(frozen=True, slots=True)
class Capabilities(_Register):
    """CAP. `max_queue_entries` is 0's based (MQES), `timeout` counts 500 ms, `min_page_size` is MPSMIN."""

    BITS: ClassVar[Bits] = {
        "max_queue_entries": (0, 16), "contiguous_queues": (16, 1), "timeout": (24, 8),
        "command_sets": (37, 8), "min_page_size": (48, 4),
    }  # fmt: skip

    max_queue_entries: int
    timeout: int = 0
    command_sets: int = 1
    min_page_size: int = 0
    contiguous_queues: bool = True


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
class Configuration(_Register):
    """CC. Entry sizes are powers of two: 6 is 64 bytes, 4 is 16 bytes."""

    BITS: ClassVar[Bits] = {
        "enable": (0, 1), "command_set": (4, 3), "page_size": (7, 4), "arbitration": (11, 3),
        "shutdown": (14, 2), "sq_entry_size": (16, 4), "cq_entry_size": (20, 4),
    }  # fmt: skip

    enable: bool
    shutdown: int = Shutdown.NONE
    command_set: int = 0
    page_size: int = 0
    arbitration: int = 0
    sq_entry_size: int = 6
    cq_entry_size: int = 4


@dataclass(frozen=True, slots=True)
class ControllerStatus(_Register):
    """CSTS."""

    BITS: ClassVar[Bits] = {"ready": (0, 1), "fatal": (1, 1), "shutdown": (2, 2)}

    ready: bool
    fatal: bool = False
    shutdown: int = 0
