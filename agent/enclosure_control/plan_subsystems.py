"""One subsystem's part of a plan. Pure; see `plan.py`."""

from dataclasses import dataclass, field

from agent.enclosure_control import steps
from agent.enclosure_control.description import NamespaceSection, SubsystemSection
from agent.enclosure_control.plan_checks import Conflicts
from agent.enclosure_control.records import Namespace, Present, Subsystem
from agent.enclosure_control.steps import Step


@dataclass(slots=True)
class SubsystemPlan:
    """The plan from `there` (None: it does not exist) to `wanted`.

    `undescribed`: hosts of other subsystems that stay there although the description does not name them.

    Each list of steps is carried out for all subsystems before the next. `restrictions` take access away:
    they come before every step that may be refused, and before anything new is offered to hosts that lose
    their access.
    """

    wanted: SubsystemSection
    there: Subsystem | None
    present: Present
    undescribed: frozenset[str] = frozenset()
    prune: bool = False
    restrictions: list[Step] = field(default_factory=list)
    removals: list[Step] = field(default_factory=list)
    additions: list[Step] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    conflicts: Conflicts = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted, there = self.wanted, self.there
        most = wanted.max_namespaces or self.present.traits.max_namespaces
        if there is None:
            self.additions.append(
                steps.CreateSubsystem(
                    wanted.nqn,
                    wanted.serial,
                    wanted.model,
                    wanted.max_namespaces,
                    wanted.allow_any_host,
                    wanted.ana_reporting,
                )
            )
            there = Subsystem(wanted.nqn, allow_any_host=wanted.allow_any_host)
        else:
            most = there.max_namespaces
            for name in ("serial", "model", "max_namespaces"):
                has, want = getattr(there, name), getattr(wanted, name)
                if want is not None and has is not None and has != want:
                    text = f"subsystem {wanted.nqn} is there with {name} {has!r}, not {want!r}"
                    self.conflicts[text] = (
                        "write the subsystem's own into the description, or delete it first; "
                        "hosts will lose it"
                    )
        self._namespaces(there)
        for step in self.additions:
            if isinstance(step, steps.AddNamespace) and most is not None and step.namespace.nsid > most:
                nsid = step.namespace.nsid
                text = f"subsystem {wanted.nqn} has room for namespace ids up to {most}, not for {nsid}"
                self.conflicts[text] = "choose lower ids; a new subsystem has max_namespaces of them"
        self._hosts(there)
        self._listeners(there)

    def _beyond(self, text: str, step: Step) -> None:
        """Take away, or list, a thing that is there and not described."""
        if self.prune:
            (self.restrictions if isinstance(step, steps.RemoveHost) else self.removals).append(step)
        else:
            self.left_alone.append(f"{text} of {self.wanted.nqn}")

    def _namespaces(self, there: Subsystem) -> None:
        nqn, has = self.wanted.nqn, {each.nsid: each for each in there.namespaces}
        for want in self.wanted.namespaces:
            namespace = has.pop(want.nsid, None)
            if namespace is not None:
                if self._fits(want, namespace):
                    continue
                self.removals.append(steps.RemoveNamespace(nqn, want.nsid))
            new = Namespace(want.nsid, want.bdev, want.nguid or "", want.uuid or "")
            self.additions.append(steps.AddNamespace(nqn, new))
        for nsid in has:
            self._beyond(f"namespace {nsid}", steps.RemoveNamespace(nqn, nsid))

    def _fits(self, want: NamespaceSection, has: Namespace) -> bool:
        bdevs = (want.bdev, self.present.name_of(want.bdev))
        return has.bdev in bdevs and want.nguid in (None, has.nguid) and want.uuid in (None, has.uuid)

    def _hosts(self, there: Subsystem) -> None:
        wanted, nqn, traits = self.wanted, self.wanted.nqn, self.present.traits
        closing = there.allow_any_host and not wanted.allow_any_host
        if closing:
            self.restrictions.append(steps.SetAllowAnyHost(nqn, False))
        opening = wanted.allow_any_host and not there.allow_any_host
        if opening and there.hosts and traits.any_or_named and not self.prune:
            text = f"subsystem {nqn} has named hosts, which end when any host is let in"
            self.conflicts[text] = "remove the named hosts (--prune)"
        has = {each.nqn: each for each in there.hosts}
        for want in wanted.hosts:
            host, new = has.pop(want.nqn, None), want.record
            if host is None:
                # Where access is restricted, hosts that stay are named at once: out for a moment only.
                (self.restrictions if closing else self.additions).append(steps.AddHost(nqn, new))
            elif host == new:
                continue
            elif (host.key and not new.key) or (host.controller_key and not new.controller_key):
                # Setting keys replaces the given ones; to lose one, the host has to be removed and added.
                if traits.hosts_are_shared and want.nqn in self.undescribed:
                    text = f"host {want.nqn} keeps its key while a subsystem that is left alone names it"
                    self.conflicts[text] = "describe that subsystem's hosts, or remove them (--prune)"
                self.removals.append(steps.RemoveHost(nqn, want.nqn))
                self.additions.append(steps.AddHost(nqn, new))
            else:
                self.restrictions.append(steps.SetKeys(nqn, new))
        for host_nqn in has:
            self._beyond(f"host {host_nqn}", steps.RemoveHost(nqn, host_nqn))
        if opening:
            self.additions.append(steps.SetAllowAnyHost(nqn, True))

    def _listeners(self, there: Subsystem) -> None:
        nqn, has, wanted = (
            self.wanted.nqn,
            set(there.listeners),
            [each.place for each in self.wanted.listeners],
        )
        self.additions += [steps.AddListener(nqn, place) for place in wanted if place not in has]
        for place in sorted(has.difference(wanted)):
            self._beyond(f"listener {place}", steps.RemoveListener(nqn, place))
