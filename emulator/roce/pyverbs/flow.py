"""`pyverbs.flow`: flow steering. The attributes of a rule are a record; a rule in force is refused."""

from dataclasses import InitVar, dataclass, field

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject, not_here
from emulator.roce.pyverbs.qp import QP
from emulator.roce.pyverbs.spec import Spec


@dataclass(slots=True, eq=False)
class FlowAttr(PyverbsObject):
    """struct ibv_flow_attr. The program appends to `specs`: what packets the rule is about."""

    num_of_specs: int = 0
    flow_type: InitVar[int] = e.IBV_FLOW_ATTR_NORMAL
    priority: int = 0
    port: int = 1
    flags: int = 0
    type: int = field(default=0, init=False)
    specs: list[Spec] = field(default_factory=list, init=False)

    def __post_init__(self, flow_type: int) -> None:
        self.type = flow_type


class Flow(PyverbsCM):
    """A rule in force: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, qp: QP, flow_attr: FlowAttr) -> None:
        raise not_here("Flow")


class FlowAction(PyverbsObject):
    """What a rule does: in pyverbs too only the base of what providers of single vendors have."""

    __slots__ = ()
