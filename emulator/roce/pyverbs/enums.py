"""`pyverbs.enums`: every enumeration of the verbs, and every enumerator as a name of this module."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from emulator.roce.pyverbs import enums_device, enums_queues

_IBV_DEVICE_RAW_SCATTER_FCS: Final = 1 << 34
_IBV_DEVICE_PCI_WRITE_END_PADDING: Final = 1 << 36
_IBV_ALLOCATOR_USE_DEFAULT: Final = (1 << 64) - 1
_IBV_ADVISE_MR_ADVICE_PREFETCH: Final = 0
_IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: Final = 1
_IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT: Final = 2
_IBV_ADVISE_MR_FLAG_FLUSH: Final = 1

IBV_LINK_LAYER_UNSPECIFIED: Final = 0
IBV_LINK_LAYER_INFINIBAND: Final = 1
IBV_LINK_LAYER_ETHERNET: Final = 2

IBV_QPF_GRH_REQUIRED: Final = 1
IBV_WC_STANDARD_FLAGS: Final = 0x7F


def _publish() -> None:
    """Enumerations and their members become names of this module, as a C header has them."""
    for module in (enums_device, enums_queues):
        for name, enumeration in vars(module).items():
            if isinstance(enumeration, type) and issubclass(enumeration, IntEnum) and name != "IntEnum":
                globals()[name] = enumeration
                globals().update(enumeration.__members__)


_publish()

if TYPE_CHECKING:  # the names that `_publish` adds are numbers

    def __getattr__(name: str) -> int: ...
