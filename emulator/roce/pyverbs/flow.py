"""`pyverbs.flow`: flow steering. Everything is refused."""

from __future__ import annotations

from emulator.roce.pyverbs.refused import Refused


class FlowAttr(Refused):
    """A rule for packets."""

    __slots__ = ()


class Flow(Refused):
    """A rule in force."""

    __slots__ = ()


class FlowAction(Refused):
    """What a rule does."""

    __slots__ = ()
