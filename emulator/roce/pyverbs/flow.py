"""`pyverbs.flow`: flow steering. The attributes of a rule are a record; a rule in force is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject
from emulator.roce.pyverbs.enums_device import ibv_flow_attr_type
from emulator.roce.pyverbs.refused import not_here

if TYPE_CHECKING:
    from emulator.roce.pyverbs.queue_pair import QP
    from emulator.roce.pyverbs.spec import Spec


class FlowAttr(PyverbsObject):
    """struct ibv_flow_attr. The program appends to `specs`."""

    __slots__ = ("_specs", "flags", "num_of_specs", "port", "priority", "type")

    def __init__(
        self,
        num_of_specs: int = 0,
        flow_type: int = ibv_flow_attr_type.IBV_FLOW_ATTR_NORMAL,
        priority: int = 0,
        port: int = 1,
        flags: int = 0,
    ) -> None:
        self.num_of_specs = num_of_specs
        self.type = flow_type
        self.priority = priority
        self.port = port
        self.flags = flags
        self._specs: list[Spec] = []

    @property
    def specs(self) -> list[Spec]:
        """What packets the rule is about."""
        return self._specs


class Flow(PyverbsCM):
    """A rule in force: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, qp: QP, flow_attr: FlowAttr) -> None:
        raise not_here("Flow")


class FlowAction(PyverbsObject):
    """What a rule does: in pyverbs too only the base of what providers of single vendors have."""

    __slots__ = ()
