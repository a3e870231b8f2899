"""`pyverbs.qp`: queue pairs, what they are made of, and their extended form."""

from __future__ import annotations

from emulator.roce.pyverbs.qp_attributes import (
    ECE,
    DataBuffer,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    _copy_caps,
)
from emulator.roce.pyverbs.qp_extended import QPEx
from emulator.roce.pyverbs.queue_pair import QP

__all__ = [
    "ECE", "QP", "DataBuffer", "QPAttr", "QPCap", "QPEx", "QPInitAttr", "QPInitAttrEx", "_copy_caps",
]  # fmt: skip
