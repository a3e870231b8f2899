"""Make an enclosure of any kind what its description says.

Each round reads the present state, plans, and carries the steps out in order. Nothing is remembered between
runs, so another run continues one that ended half-way. A round ends early after `WaitForExamine`, for new
bdevs may have brought volumes along.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from agent.enclosure_control.configfs_target import ConfigfsTarget
from agent.enclosure_control.description import Description
from agent.enclosure_control.plan import Plan, plan
from agent.enclosure_control.rpc_target import RpcTarget
from agent.enclosure_control.steps import Step, WaitForExamine
from agent.errors import Fault, G35Error, printable
from agent.sizes import counted

ROUNDS_MAX: Final = 4
"""One, one more after an examination, and room for a surprise."""


Target: TypeAlias = RpcTarget | ConfigfsTarget
"""SPDK's RPC, or nvmet. Both have `check`, `read`, `check_steps`, `perform`, `show` and `close`."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a run did, and what is there that the description does not name."""

    done: tuple[Step, ...]
    left_alone: tuple[str, ...]


class ApplyFailed(G35Error):
    """A step was refused. `done` were carried out, `failed` was not, `left` were not begun."""

    def __init__(self, error: G35Error, done: tuple[Step, ...], failed: Step, left: tuple[Step, ...]) -> None:
        super().__init__(
            f"{printable(str(failed))}: {error.message} "
            f"({counted(len(done), 'step')} done, {len(left) + 1} not)",
            error.advice,
            fault=error.fault,
        )
        self.error = error
        self.done = done
        self.failed = failed
        self.left = left


def planned(target: Target, description: Description, *, prune: bool = False) -> Plan:
    """The steps that `apply` would do now. Raises the errors of reading, and PlanConflict."""
    target.check(description)
    found = plan(description, target.read(description), prune=prune)
    target.check_steps(found.steps)
    return found


def apply(
    target: Target,
    description: Description,
    *,
    prune: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Applied:
    """Carry out all steps. Raises ApplyFailed at the first that is refused."""
    done: list[Step] = []
    for _ in range(ROUNDS_MAX):
        found = planned(target, description, prune=prune)
        again = False
        for number, step in enumerate(found.steps):
            try:
                target.perform(step)
            except G35Error as error:
                raise ApplyFailed(error, tuple(done), step, found.steps[number + 1 :]) from error
            done.append(step)
            on_step(step)
            if isinstance(step, WaitForExamine):
                again = True
                break
        if not again:
            return Applied(tuple(done), found.left_alone)
    what = f"still not done after {ROUNDS_MAX} rounds"
    raise G35Error(what, "this is a bug of g35; please report it", fault=Fault.BUG)
