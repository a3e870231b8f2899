"""`pyverbs.wq`: work queues and receive side scaling. Everything is refused."""

from __future__ import annotations

from emulator.roce.pyverbs.refused import Refused


class WQInitAttr(Refused):
    """Attributes of a work queue."""

    __slots__ = ()


class WQAttr(Refused):
    """What is set of a work queue."""

    __slots__ = ()


class WQ(Refused):
    """A work queue."""

    __slots__ = ()


class RwqIndTableInitAttr(Refused):
    """Attributes of an indirection table."""

    __slots__ = ()


class RwqIndTable(Refused):
    """An indirection table."""

    __slots__ = ()


class RxHashConf(Refused):
    """How packets are spread."""

    __slots__ = ()
