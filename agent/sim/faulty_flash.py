"""Namespaces in virtual time: latency, hangs, kills, rot, and writes that tear, get lost or land late.

`SimNamespace` is the medium and its faults; `SimChannel` are one worker's ways to all of them. A write
takes effect at a moment between its submission and its completion, a read likewise, and neither in the
order of submission: whatever relies on an order that NVMe does not promise will be seen to.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.inline.scatter import Buffer
from agent.pool.steps import Pending
from agent.remote.circuit_breaker import NOT_ANSWERING, Health, Outstanding
from agent.sim.medium import Medium
from agent.sim.seeded_scheduler import StepScheduler
from agent.sim.timed_channel import TimedChannel, TimedPending

BLOCK = 4096


@dataclass
class SimNamespace(Medium):
    """A namespace with a service time of its own. Faults are set from outside while it runs."""

    latency: tuple[float, float] = (0.0001, 0.002)
    lose_writes: float = 0.0
    """Part of the writes that are acknowledged and never stored."""
    erring: float = 0.0
    """Part of the commands that end with an error of the medium."""
    tainted: bool = False
    """A fault was injected here at some time: what was stored here need not be there."""
    waiting: "list[tuple[Callable[[], None], SimPending]]" = field(default_factory=list)

    def hang(self) -> None:
        self.hung = self.tainted = True

    def wake(self, scheduler: StepScheduler) -> None:
        """Everything that waited is served, late."""
        self.hung = False
        for number, (action, pending) in enumerate(self.waiting):
            scheduler.call_at(scheduler.now + 1e-6 * number, action, pending)
        self.waiting.clear()

    def rot(self, rng: random.Random, flips: int) -> None:
        self.tainted = True
        for _ in range(flips):
            if self.blocks:
                at = rng.choice(sorted(self.blocks))
                self.flip(at + rng.randrange(BLOCK), rng.randrange(8))


class SimPending(TimedPending):
    __slots__ = ("land",)

    def __init__(self, size: int = -1) -> None:
        super().__init__(size)
        self.land: Callable[[str], None] | None = None
        """For a write: make it take effect now, "whole", "torn" or "not"."""

    def fail(self, fault: str, *, unreachable: bool = False) -> None:
        if not self.done:
            self.done, self.fault, self.unreachable = True, fault, unreachable


class SimChannel(TimedChannel):
    """One worker's channel.

    `health`, one of each namespace, is the agent's; without it nobody is judged.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        namespaces: Sequence[SimNamespace],
        name: str = "w",
        health: Sequence[Health] | None = None,
    ) -> None:
        self._health = health
        super().__init__(scheduler)
        self._scheduler = scheduler
        self._namespaces = namespaces
        self._random = random.Random(f"lanes {name} {scheduler.random.random()}")
        self.in_flight: list[SimPending] = []

    # -- Channel ------------------------------------------------------------------------------------

    def read(self, namespace: int, offset: int, into: memoryview, *, more: bool = False) -> SimPending:
        target = self._namespaces[namespace]
        target.reads += 1
        pending = SimPending(len(into))

        def part() -> None:
            # The beginning may arrive before the rest is even read from the medium.
            if not pending.done:
                size = self._random.randrange(0, len(into) + 1, BLOCK)
                target.load(offset, into[:size])
                pending.received = size

        def whole() -> None:
            if target.broken or self._errs(target):
                pending.fail("Unrecovered Read Error")
            elif not pending.done:
                at = pending.received
                target.load(offset + at, into[at:])
                pending.received = len(into)
                pending.done = True

        self._submit(namespace, pending, part, whole)
        return pending

    def write(
        self, namespace: int, offset: int, parts: Sequence[Buffer], *, more: bool = False
    ) -> SimPending:
        target = self._namespaces[namespace]
        target.writes += 1
        pending = SimPending()
        # Taken when it is applied, not now: a buffer that is used again too early then does harm.
        held: list[Buffer] = list(parts)
        state = {"applied": False}

        def land(how: str) -> None:
            if state["applied"]:
                return
            state["applied"] = True
            data = b"".join(bytes(part) for part in held)
            if how == "torn":
                for at in range(0, len(data), BLOCK):
                    if self._random.random() < 0.5:
                        target.store(offset + at, [data[at : at + BLOCK]])
            elif how == "whole":
                target.store(offset, [data])

        def take_effect() -> None:
            if target.lose_writes and self._random.random() < target.lose_writes:
                target.tainted = True
                land("not")
            else:
                land("whole")

        def acknowledge() -> None:
            if target.broken or self._errs(target):
                land("torn")
                pending.fail("Write Fault")
            elif target.down:
                land("torn")
                pending.fail("the connection is gone", unreachable=True)
            else:
                take_effect()
                pending.received = 0
                pending.done = True

        def keep(how: str) -> None:
            # The caller gives its buffer up: what has been sent has been sent.
            held[:] = [b"".join(bytes(part) for part in held)]
            if how:
                land(how)

        pending.land = keep
        self._submit(namespace, pending, take_effect, acknowledge)
        return pending

    def flush(self, namespace: int) -> SimPending:
        pending = SimPending()

        def done() -> None:
            pending.done = True

        self._submit(namespace, pending, lambda: None, done)
        return pending

    def _errs(self, target: SimNamespace) -> bool:
        return target.erring > 0 and self._random.random() < target.erring

    def _submit(
        self, namespace: int, pending: SimPending, effect: Callable[[], None], end: Callable[[], None]
    ) -> None:
        target, health = self._namespaces[namespace], None
        if self._health is not None:
            health = self._health[namespace]
        if target.down or (health is not None and not health.may_ask(self.now())):
            pending.fail("no way there" if target.down else NOT_ANSWERING, unreachable=True)
            if pending.land is not None:
                pending.land("not")
            return
        if health is not None:
            pending.asked = Outstanding(health, self.now(), is_read=pending.size >= 0)
        self.in_flight = [each for each in self.in_flight if not each.done or each.abandoned][-256:]
        self.in_flight.append(pending)
        now = self._scheduler.now
        total = self._random.uniform(*target.latency)
        begun = {"effect": False}

        def effect_if_up() -> None:
            if target.hung:
                target.waiting.append((effect_if_up, pending))
            elif not target.down and not target.broken:
                begun["effect"] = True
                effect()

        def end_if_up() -> None:
            if target.hung:
                target.waiting.append((end_if_up, pending))
            elif target.down:
                if pending.land is not None and not pending.done:
                    pending.land(self._random.choice(["whole", "torn", "not"]))
                pending.fail("the connection is gone", unreachable=True)
            else:
                end()
            if pending.done and pending.asked is not None and not pending.abandoned:
                failed = pending.fault is not None
                pending.asked.answered(self.now(), failed=failed, lost=pending.unreachable)

        self._scheduler.call_at(now + total * self._random.random(), effect_if_up, pending)
        self._scheduler.call_at(now + total, end_if_up, pending)

    def abandon(self, pending: Pending) -> None:
        assert isinstance(pending, SimPending)
        if not pending.done:
            if pending.asked is not None:
                pending.asked.given_up(self.now())
            pending.abandoned = True
            pending.fail("abandoned")
            if pending.land is not None:
                # It may land now, later (an event is still to come), or never.
                pending.land(self._random.choice(["whole", "torn", "", "", "not"]))

    def unsettled(self) -> int:
        """Reads and writes that nobody waits for and nobody gave up: they would use the buffers later.

        A read whose bytes have all come, and only its completion has not, touches nothing any more.
        """
        return sum(not pending.done and pending.received != pending.size for pending in self.in_flight)

    def crash(self) -> None:
        """The agent is gone: what was under way lands whole, in part or not at all, and that is final."""
        for pending in self.in_flight:
            if pending.land is not None and not pending.done:
                pending.land(self._random.choice(["whole", "torn", "not"]))
            pending.fail("crashed")
        self.in_flight.clear()

    def trusts(self, namespace: int) -> bool:
        if self._health is not None:
            return self._health[namespace].trusted
        return not self._namespaces[namespace].suspect
