"""One subsystem's part of a plan: what comes, what goes, what stands against it. Pure; see `plan.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.enclosure_control.description import NamespaceSection, SubsystemSection
from agent.enclosure_control.present import Present
from agent.enclosure_control.records import Namespace, Subsystem
from agent.enclosure_control.steps import (
    AddHost,
    AddListener,
    AddNamespace,
    CreateSubsystem,
    RemoveHost,
    RemoveListener,
    RemoveNamespace,
    SetAllowAnyHost,
    SetKeys,
    Step,
)


@dataclass(slots=True)
class SubsystemPlan:
    """Steps in three lists, each carried out for all subsystems before the next.

    `restrictions` shut doors: they come before everything that may be refused, and before anything new is
    offered to those who are about to be let in no more.
    """

    nqn: str
    restrictions: list[Step] = field(default_factory=list)
    removals: list[Step] = field(default_factory=list)
    additions: list[Step] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    def beyond(self, prune: bool, text: str, step: Step) -> None:
        """Something that is there and not described."""
        if prune:
            (self.restrictions if isinstance(step, RemoveHost) else self.removals).append(step)
        else:
            self.left_alone.append(f"{text} of {self.nqn}")


def plan_subsystem(
    wanted: SubsystemSection,
    there: Subsystem | None,
    present: Present,
    *,
    undescribed: frozenset[str] = frozenset(),
    prune: bool = False,
) -> SubsystemPlan:
    """What makes `there` (None: it is not there) into `wanted`.

    `undescribed`: hosts of other subsystems that stay there although the description does not name them.
    """
    part = SubsystemPlan(wanted.nqn)
    most = wanted.max_namespaces or present.traits.max_namespaces
    if there is None:
        part.additions.append(
            CreateSubsystem(
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
                part.conflicts.append(
                    f"subsystem {wanted.nqn} is there with {name} {has!r}, not {want!r}; "
                    "delete it first, hosts will lose it"
                )
    _namespaces(part, wanted, there, present, prune)
    part.conflicts += [
        f"subsystem {wanted.nqn} has room for namespace ids up to {most}, not for {step.namespace.nsid}; "
        "max_namespaces says how many a new subsystem gets"
        for step in part.additions
        if isinstance(step, AddNamespace) and most is not None and step.namespace.nsid > most
    ]
    _hosts(part, wanted, there, present, undescribed, prune)
    _listeners(part, wanted, there, prune)
    return part


def _namespaces(
    part: SubsystemPlan, wanted: SubsystemSection, there: Subsystem, present: Present, prune: bool
) -> None:
    has = {each.nsid: each for each in there.namespaces}
    for want in wanted.namespaces:
        namespace = has.pop(want.nsid, None)
        if namespace is not None:
            if _fits(want, namespace, present):
                continue
            part.removals.append(RemoveNamespace(wanted.nqn, want.nsid))
        part.additions.append(
            AddNamespace(wanted.nqn, Namespace(want.nsid, want.bdev, want.nguid or "", want.uuid or ""))
        )
    for nsid in has:
        part.beyond(prune, f"namespace {nsid}", RemoveNamespace(wanted.nqn, nsid))


def _fits(want: NamespaceSection, has: Namespace, present: Present) -> bool:
    bdev = present.bdev(want.bdev)
    return (
        has.bdev in (want.bdev, bdev.name if bdev is not None else want.bdev)
        and want.nguid in (None, has.nguid)
        and want.uuid in (None, has.uuid)
    )


def _hosts(
    part: SubsystemPlan,
    wanted: SubsystemSection,
    there: Subsystem,
    present: Present,
    undescribed: frozenset[str],
    prune: bool,
) -> None:
    closing = there.allow_any_host and not wanted.allow_any_host
    if closing:
        part.restrictions.append(SetAllowAnyHost(wanted.nqn, False))
    opening = wanted.allow_any_host and not there.allow_any_host
    if opening and there.hosts and present.traits.any_or_named and not prune:
        part.conflicts.append(
            f"subsystem {wanted.nqn} has named hosts, which end when any host is let in; --prune removes them"
        )
    has = {each.nqn: each for each in there.hosts}
    for want in wanted.hosts:
        host, new = has.pop(want.nqn, None), want.record
        if host is None:
            # Where the door shuts, those that stay are named at once, so that they are out for a moment only.
            (part.restrictions if closing else part.additions).append(AddHost(wanted.nqn, new))
        elif host == new:
            continue
        elif (host.key and not new.key) or (host.controller_key and not new.controller_key):
            # Setting keys replaces those that are given; to be rid of one, the host has to go and come.
            if present.traits.hosts_are_shared and want.nqn in undescribed:
                part.conflicts.append(
                    f"host {want.nqn} keeps its key while a subsystem that is left alone names it"
                )
            part.removals.append(RemoveHost(wanted.nqn, want.nqn))
            part.additions.append(AddHost(wanted.nqn, new))
        else:
            part.restrictions.append(SetKeys(wanted.nqn, new))
    for nqn in has:
        part.beyond(prune, f"host {nqn}", RemoveHost(wanted.nqn, nqn))
    if opening:
        part.additions.append(SetAllowAnyHost(wanted.nqn, True))


def _listeners(part: SubsystemPlan, wanted: SubsystemSection, there: Subsystem, prune: bool) -> None:
    has = set(there.listeners)
    for want in wanted.listeners:
        if want.place in has:
            has.discard(want.place)
        else:
            part.additions.append(AddListener(wanted.nqn, want.place))
    for place in sorted(has):
        part.beyond(prune, f"listener {place}", RemoveListener(wanted.nqn, place))
