"""Conflicts of a plan that an enclosure would only refuse: unknown names, and bdevs or ids used twice. Pure.

SPDK answers the same -32602 to an unknown bdev, key or transport.
"""

import re
from collections.abc import Iterable
from typing import TypeAlias

from agent.enclosure_control import steps
from agent.enclosure_control.description import Description
from agent.enclosure_control.records import Present
from agent.enclosure_control.steps import Step
from agent.errors import did_you_mean

Conflicts: TypeAlias = dict[str, str]
"""Texts, each with its remedy."""


def names_bdev_of(controller: str, bdev: str) -> bool:
    """Whether a bdev is, by its name, a namespace (or a part of one) of an NVMe controller."""
    return re.match(rf"{re.escape(controller)}n\d", bdev) is not None


def shared_bdevs(description: Description, present: Present) -> Conflicts:
    """Bdevs that two namespaces name, by different names; the description itself refuses equal ones."""
    found: Conflicts = {}
    places: dict[str, str] = {}
    for subsystem in description.subsystems:
        for namespace in subsystem.namespaces:
            place = f"namespace {namespace.nsid} of {subsystem.nqn}"
            name = present.name_of(namespace.bdev)
            other = places.setdefault(name, place)
            if other != place:
                found[f"{other} and {place} are the same bdev, {name}"] = "give each namespace its own bdev"
    return found


def taken_elsewhere(planned: Iterable[Step], present: Present, *, prune: bool) -> Conflicts:
    """Bdevs, NGUIDs and UUIDs of new namespaces that another namespace has, which is there and stays."""
    found: Conflicts = {}
    remedy = "choose another" if prune else "choose another, or take away what is not described (--prune)"
    there = {(each.nqn, one.nsid): one for each in present.subsystems for one in each.namespaces}
    for step in planned:
        match step:
            case steps.DeleteSubsystem(nqn):
                there = {place: one for place, one in there.items() if place[0] != nqn}
            case steps.RemoveNamespace(nqn, nsid):
                there.pop((nqn, nsid), None)
            case steps.AddNamespace(nqn, new):
                bdev = present.name_of(new.bdev)
                for (other_nqn, nsid), other in there.items():
                    same = [("bdev", bdev)] if present.name_of(other.bdev) == bdev else []
                    same += [("NGUID", new.nguid)] if new.nguid and new.nguid == other.nguid else []
                    same += [("UUID", new.uuid)] if new.uuid and new.uuid == other.uuid else []
                    for what, value in same[:1]:
                        text = f"namespace {new.nsid} of {nqn}: its {what} {value} is that of namespace "
                        found[f"{text}{nsid} of {other_nqn} already, which stays"] = remedy
                there[nqn, new.nsid] = new
            case _:
                pass
    return found


def missing_names(planned: Iterable[Step], present: Present) -> Conflicts:
    """Keys, transports, stores and bdevs that a step names, and that neither exist nor are made before it."""
    check = _Names(present)
    for step in planned:
        match step:
            case steps.CreateTransport(trtype):
                check.transports.add(trtype)
            case steps.AddKey(name):
                check.keys.add(name)
            case steps.CreateMemory():
                check.bdevs |= {step.name, step.uuid or step.name}
            case steps.CreateAio():
                check.examined = True
            case steps.AttachNvme():
                check.examined = True
                check.key(f"NVMe controller {step.name}", step.key, step.controller_key)
            case steps.CreateLvolStore():
                check.stores.add(step.name)
                check.bdev(f"lvol store {step.name}", step.bdev)
            case steps.CreateLvol():
                check.bdevs.add(f"{step.store}/{step.name}")
                if not check.examined:
                    check.known(f"lvol {step.name}", "store", step.store, check.stores)
            case steps.AddNamespace(nqn, namespace):
                check.bdev(f"namespace {namespace.nsid} of {nqn}", namespace.bdev)
            case steps.AddHost(nqn, host) | steps.SetKeys(nqn, host):
                check.key(f"host {host.nqn} of {nqn}", host.key, host.controller_key)
            case steps.AddListener(nqn, place):
                if present.traits.transports_are_made:
                    check.known(f"listener {place} of {nqn}", "transport", place.trtype, check.transports)
            case _:
                pass
    return check.conflicts


class _Names:
    def __init__(self, present: Present) -> None:
        self.present = present
        self.keys = {each.name for each in present.keys}
        self.transports = {each.trtype for each in present.transports}
        self.stores = {each.name for each in present.lvol_stores}
        self.bdevs: set[str] = set()
        self.examined = False
        """Whether a new bdev may have brought along any bdev and any store."""
        self.conflicts: Conflicts = {}

    def known(self, user: str, kind: str, name: str, names: Iterable[str]) -> None:
        if name not in (known := set(names)):
            text = f"{user}: there is no {kind} {name}{did_you_mean(name, known)}"
            self.conflicts[text] = f"name a {kind} that is there (`g35 enclosure show`), or describe one"

    def bdev(self, user: str, name: str) -> None:
        if not self.examined and self.present.bdev(name) is None:
            self.known(user, "bdev", name, {*self.bdevs, *self.present.bdev_names()})

    def key(self, user: str, *names: str | None) -> None:
        for name in names:
            if name is not None:
                self.known(user, "key", name, self.keys)
