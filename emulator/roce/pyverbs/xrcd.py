"""`pyverbs.xrcd`: extended reliable connections. The attributes are a record; the domain is refused."""

from dataclasses import dataclass

from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject, not_here
from emulator.roce.pyverbs.device import Context


@dataclass(slots=True, eq=False)
class XRCDInitAttr(PyverbsObject):
    comp_mask: int
    oflags: int
    fd: int


class XRCD(PyverbsCM):
    """An XRC domain: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, context: Context, init_attr: XRCDInitAttr) -> None:
        raise not_here("XRCD")
