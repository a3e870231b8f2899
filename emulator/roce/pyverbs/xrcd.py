"""`pyverbs.xrcd`: extended reliable connections. Everything is refused."""

from __future__ import annotations

from emulator.roce.pyverbs.refused import Refused


class XRCDInitAttr(Refused):
    """Attributes of an XRC domain."""

    __slots__ = ()


class XRCD(Refused):
    """An XRC domain."""

    __slots__ = ()
