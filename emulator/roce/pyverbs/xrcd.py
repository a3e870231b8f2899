"""`pyverbs.xrcd`: extended reliable connections. The attributes are a record; the domain is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject
from emulator.roce.pyverbs.refused import not_here

if TYPE_CHECKING:
    from emulator.roce.pyverbs.device import Context


class XRCDInitAttr(PyverbsObject):
    """struct ibv_xrcd_init_attr."""

    __slots__ = ("comp_mask", "fd", "oflags")

    def __init__(self, comp_mask: int, oflags: int, fd: int) -> None:
        self.comp_mask = comp_mask
        self.oflags = oflags
        self.fd = fd


class XRCD(PyverbsCM):
    """An XRC domain: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, context: Context, init_attr: XRCDInitAttr) -> None:
        raise not_here("XRCD")
