"""What a plan names and nobody has: found before the first step, for the enclosure says only that it refused.

Pure. SPDK answers the same -32602 to an unknown bdev, key or transport, whichever it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from agent.enclosure_control.description import Description
from agent.enclosure_control.present import Present
from agent.enclosure_control.steps import (
    AddHost,
    AddKey,
    AddListener,
    AddNamespace,
    AttachNvme,
    CreateAio,
    CreateLvol,
    CreateLvolStore,
    CreateMalloc,
    CreateNull,
    CreateTransport,
    DeleteSubsystem,
    RemoveNamespace,
    SetKeys,
    Step,
)


def names_bdev_of(controller: str, bdev: str) -> bool:
    """Whether a bdev is a namespace (or a part of one) of an NVMe controller, by its name."""
    return re.match(rf"{re.escape(controller)}n\d", bdev) is not None


def shared_bdevs(description: Description, present: Present) -> list[str]:
    """Bdevs that two namespaces name, by different names; the description itself refuses equal ones."""
    found: list[str] = []
    places: dict[str, str] = {}
    for subsystem in description.subsystems:
        for namespace in subsystem.namespaces:
            place = f"namespace {namespace.nsid} of {subsystem.nqn}"
            name = present.name_of(namespace.bdev)
            other = places.setdefault(name, place)
            if other != place:
                found.append(f"{other} and {place} are the same bdev, {name}")
    return found


def taken_elsewhere(steps: Iterable[Step], present: Present) -> list[str]:
    """Bdevs, NGUIDs and UUIDs of new namespaces that another namespace has, which is there and stays."""
    found: list[str] = []
    there = {(each.nqn, one.nsid): one for each in present.subsystems for one in each.namespaces}
    for step in steps:
        match step:
            case DeleteSubsystem(nqn):
                there = {place: one for place, one in there.items() if place[0] != nqn}
            case RemoveNamespace(nqn, nsid):
                there.pop((nqn, nsid), None)
            case AddNamespace(nqn, new):
                bdev = present.name_of(new.bdev)
                for (other_nqn, nsid), other in there.items():
                    same = [("bdev", bdev)] if present.name_of(other.bdev) == bdev else []
                    same += [("NGUID", new.nguid)] if new.nguid and new.nguid == other.nguid else []
                    same += [("UUID", new.uuid)] if new.uuid and new.uuid == other.uuid else []
                    found += [
                        f"namespace {new.nsid} of {nqn}: its {what} {value} is that of namespace {nsid} of "
                        f"{other_nqn} already, which stays"
                        for what, value in same[:1]
                    ]
                there[nqn, new.nsid] = new
            case _:
                pass
    return found


def missing_names(steps: Iterable[Step], present: Present) -> list[str]:
    """Keys, transports, stores and bdevs that steps name, and that are neither there nor made before."""
    found: list[str] = []
    keys = {each.name for each in present.keys}
    transports = {each.trtype for each in present.transports}
    stores = {each.name for each in present.lvol_stores}
    bdevs: set[str] = set()
    examined = False  # what was attached may have brought along any bdev and any store
    for step in steps:
        match step:
            case CreateTransport(trtype):
                transports.add(trtype)
            case AddKey(name):
                keys.add(name)
            case CreateMalloc() | CreateNull():
                bdevs |= {step.name, step.uuid or step.name}
            case CreateAio():
                examined = True
            case AttachNvme():
                examined = True
                found += _unknown_keys(f"NVMe controller {step.name}", (step.key, step.controller_key), keys)
            case CreateLvolStore():
                stores.add(step.name)
                if not examined and step.bdev not in bdevs and present.bdev(step.bdev) is None:
                    found.append(f"lvol store {step.name}: there is no bdev {step.bdev}")
            case CreateLvol():
                bdevs.add(f"{step.store}/{step.name}")
                if not examined and step.store not in stores:
                    found.append(f"lvol {step.name}: there is no store {step.store}")
            case AddNamespace(nqn, namespace):
                name = namespace.bdev
                if not examined and name not in bdevs and present.bdev(name) is None:
                    found.append(f"namespace {namespace.nsid} of {nqn}: there is no bdev {name}")
            case AddHost(nqn, host) | SetKeys(nqn, host):
                found += _unknown_keys(f"host {host.nqn} of {nqn}", (host.key, host.controller_key), keys)
            case AddListener(nqn, place):
                if present.traits.transports_are_made and place.trtype not in transports:
                    found.append(f"listener {place} of {nqn}: there is no transport {place.trtype}")
            case _:
                pass
    return list(dict.fromkeys(found))


def _unknown_keys(what: str, names: Iterable[str | None], known: set[str]) -> list[str]:
    return [f"{what}: there is no key {name}" for name in names if name is not None and name not in known]
