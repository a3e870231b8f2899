"""Controller properties: the registers of a controller, over Fabrics (NVMe Base 2.0, 3.1.3).

They are read and written by Property Get and Property Set (`fabrics.py`). Bit fields are named here once.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from nvmeof.wire.bit_fields import Bits, Flag, Record


class Property(IntEnum):
    """Offsets."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C

    @property
    def bytes(self) -> int:
        return 8 if self is Property.CAP else 4


VERSION_1_4 = 0x0001_0400


@dataclass(frozen=True, slots=True)
class Capabilities(Record):
    """CAP. `max_queue_entries` is 0's based (MQES), `timeout` counts 500 ms, `min_page_size` is MPSMIN."""

    max_queue_entries: Annotated[int, Bits(0, 16)]
    timeout: Annotated[int, Bits(3, 8)] = 0
    command_sets: Annotated[int, Bits(0, 8, 37)] = 1
    min_page_size: Annotated[int, Bits(6, 4)] = 0
    contiguous_queues: Annotated[bool, Flag(2, 0)] = True


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
class Configuration(Record):
    """CC. Entry sizes are powers of two: 6 is 64 bytes, 4 is 16 bytes."""

    enable: Annotated[bool, Flag(0, 0)]
    shutdown: Annotated[int, Bits(0, 2, 14)] = Shutdown.NONE
    command_set: Annotated[int, Bits(0, 3, 4)] = 0
    page_size: Annotated[int, Bits(0, 4, 7)] = 0
    arbitration: Annotated[int, Bits(0, 3, 11)] = 0
    sq_entry_size: Annotated[int, Bits(0, 4, 16)] = 6
    cq_entry_size: Annotated[int, Bits(0, 4, 20)] = 4


@dataclass(frozen=True, slots=True)
class ControllerStatus(Record):
    """CSTS."""

    ready: Annotated[bool, Flag(0, 0)]
    fatal: Annotated[bool, Flag(0, 1)] = False
    shutdown: Annotated[int, Bits(0, 2, 2)] = 0
