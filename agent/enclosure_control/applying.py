"""Making an enclosure what its description says, whatever is behind it.

Each round reads the present state, plans, and carries the steps out in order. Nothing is remembered between
runs, so a run that ended half-way is gone on with by running it again. A round ends early after
`WaitForExamine`, for new bdevs may have brought volumes along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.enclosure_control.description import Description
from agent.enclosure_control.plan import Plan, plan
from agent.enclosure_control.present import Present
from agent.enclosure_control.printable import printable
from agent.enclosure_control.steps import Step, WaitForExamine
from agent.errors import BugError, G35Error

ROUNDS_MAX: Final = 4
"""One, one more after an examination, and room for a surprise."""


class Target(Protocol):
    """What can be described: an SPDK target or nvmet."""

    def check(self, description: Description) -> None:
        """UserError if this kind of target cannot be what is described."""

    def read(self, description: Description | None = None) -> Present:
        """What it is at present."""

    def vet(self, steps: Sequence[Step]) -> None:
        """UserError if one of them is more than this target can do."""

    def perform(self, step: Step) -> None:
        """Carry one step out. G35Error if it was refused."""

    def show(self, steps: Sequence[Step]) -> list[str]:
        """What would be done for each, after those before it, for people to read; without secrets."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a run did, and what is there beyond the description."""

    done: tuple[Step, ...]
    left_alone: tuple[str, ...]


class ApplyFailed(G35Error):
    """A step was refused. `done` were carried out, `failed` was not, `left` were not begun."""

    def __init__(self, error: G35Error, done: tuple[Step, ...], failed: Step, left: tuple[Step, ...]) -> None:
        super().__init__(
            f"{printable(str(failed))}: {error.message} ({len(done)} steps done, {len(left) + 1} not)",
            error.advice,
            fault=error.fault,
        )
        self.error = error
        self.done = done
        self.failed = failed
        self.left = left


def planned(target: Target, description: Description, *, prune: bool = False) -> Plan:
    """What `apply` would do now. Raises what reading does, and PlanConflict."""
    target.check(description)
    found = plan(description, target.read(description), prune=prune)
    target.vet(found.steps)
    return found


def apply(
    target: Target,
    description: Description,
    *,
    prune: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Applied:
    """Carry out all steps; none if all is as described. Raises ApplyFailed at the first that is refused."""
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
    raise BugError(f"still not done after {ROUNDS_MAX} rounds")
