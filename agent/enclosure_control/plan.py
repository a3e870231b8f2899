"""From a description and the present state to the steps between them. A pure function, whatever the back-end.

What is taken away: a namespace, a host or a key that the description names and has otherwise is replaced.
Anything that the description does not name is left alone and listed in `Plan.left_alone`, unless `prune`; and
logical volumes and their stores not even then, for their contents outlive every process. What cannot be
changed without losing contents (the size of memory, the serial number of a subsystem) is a `PlanConflict`.

The order of steps keeps a door shut until what is behind it is ready: doors are shut (keys, hosts that go,
named hosts alone) before anything new is made; a new subsystem gets its namespaces and hosts before its
listeners; with `prune`, what goes, goes before what comes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from agent.enclosure_control.description import MIB, Description, NullSection, NvmeSection
from agent.enclosure_control.plan_keys import ASIDE, plan_keys
from agent.enclosure_control.plan_names import missing_names, names_bdev_of, shared_bdevs, taken_elsewhere
from agent.enclosure_control.plan_subsystems import SubsystemPlan, plan_subsystem
from agent.enclosure_control.present import Present
from agent.enclosure_control.printable import printable
from agent.enclosure_control.records import Key, LvolStore
from agent.enclosure_control.steps import (
    AttachNvme,
    CreateAio,
    CreateLvol,
    CreateLvolStore,
    CreateMalloc,
    CreateNull,
    CreateTransport,
    DeleteBdev,
    DeleteSubsystem,
    RemoveKey,
    ResizeLvol,
    Step,
    WaitForExamine,
)
from agent.errors import UserError


class PlanConflict(UserError):
    """The description asks for what cannot be reached from here without losing something."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order, and what is there beyond the description."""

    steps: tuple[Step, ...]
    left_alone: tuple[str, ...] = ()


def plan(description: Description, present: Present, *, prune: bool = False) -> Plan:
    """The steps from `present` to `description`. Raises PlanConflict, which names all conflicts."""
    planner = _Planner(description, present, prune)
    planner.run()
    if planner.conflicts:
        raise PlanConflict(
            printable("; ".join(planner.conflicts[:8])),
            "nothing was changed; change the description, or remove what is in the way (--prune)",
        )
    return Plan(tuple(planner.steps), tuple(planner.left_alone))


class _Planner:
    def __init__(self, description: Description, present: Present, prune: bool) -> None:
        self.description = description
        self.before = self.present = present
        self.prune = prune
        self.steps: list[Step] = []
        self.left_alone: list[str] = []
        self.conflicts: list[str] = []

    def run(self) -> None:
        self._transports()
        keys = plan_keys(self.description, self.present)
        self.steps += keys.steps
        self.present = dataclasses.replace(self.present, subsystems=keys.subsystems)
        parts = self._subsystems()
        for part in parts:
            self.steps += part.restrictions
        self._volumes(self._bdevs())
        for part in parts:
            self.steps += part.removals
        if self.prune:
            described = {each.nqn for each in self.description.subsystems}
            self.steps += [
                DeleteSubsystem(each.nqn) for each in self.present.subsystems if each.nqn not in described
            ]
        for part in parts:
            self.steps += part.additions
        self.conflicts += shared_bdevs(self.description, self.present)
        self.conflicts += taken_elsewhere(self.steps, self.present)
        self.conflicts += missing_names(self.steps, self.present)
        self._beyond(parts)

    def _transports(self) -> None:
        there = {each.trtype: dict(each.options) for each in self.present.transports}
        for wanted in self.description.transports:
            trtype = wanted.type.upper()
            if trtype not in there:
                self.steps.append(CreateTransport(trtype, wanted.options()))
                continue
            for name, value in wanted.options():
                has = there[trtype].get(name, value)
                if has != value:
                    self.conflicts.append(
                        f"transport {trtype} has {name} {has}, not {value}; only a restart of the target "
                        "changes that"
                    )

    def _bdevs(self) -> set[str]:
        """Names of what comes into being that may carry a store already; NVMe controllers by theirs."""
        fresh = set()
        for memory in (*self.description.malloc, *self.description.null):
            is_null = isinstance(memory, NullSection)
            kind, create = ("null", CreateNull) if is_null else ("malloc", CreateMalloc)
            there = self.present.bdev(memory.name)
            if there is None:
                blocks = memory.size // memory.block_size
                self.steps.append(create(memory.name, memory.block_size, blocks, memory.uuid))
                continue
            self._same(f"bdev {memory.name}", "kind", there.kind, kind)
            self._same(f"bdev {memory.name}", "size", there.size, memory.size)
            self._same(f"bdev {memory.name}", "block_size", there.block_size, memory.block_size)
            self._same(f"bdev {memory.name}", "uuid", there.uuid, memory.uuid)
        for file in self.description.aio:
            there = self.present.bdev(file.name)
            if there is None:
                self.steps.append(CreateAio(file.name, file.file, file.block_size))
                fresh.add(file.name)
                continue
            self._same(f"bdev {file.name}", "kind", there.kind, "aio")
            self._same(f"bdev {file.name}", "file", there.filename, file.file)
            self._same(f"bdev {file.name}", "block_size", there.block_size, file.block_size)
        attached = {each.name: each for each in self.present.nvme}
        for ssd in self.description.nvme:
            controller = attached.get(ssd.name)
            if controller is None:
                self.steps.append(_attachment(ssd))
                fresh.add(ssd.name)
            elif controller.address is not None:
                self._same(f"NVMe controller {ssd.name}", "address", controller.address, ssd.place)
                self._same(f"NVMe controller {ssd.name}", "nqn", controller.subnqn or None, ssd.nqn)
        return fresh

    def _same(self, what: str, name: str, has: object, wanted: object) -> None:
        if has is not None and wanted is not None and has != wanted:
            self.conflicts.append(f"{what} is there with {name} {has}, not {wanted}")

    def _volumes(self, fresh: set[str]) -> None:
        stores = {each.name: each for each in self.present.lvol_stores}
        missing = [each for each in self.description.lvol_stores if each.name not in stores]
        if any(each.bdev in fresh or each.bdev.rpartition("n")[0] in fresh for each in missing):
            self.steps.append(WaitForExamine())
        for store in self.description.lvol_stores:
            if store.name not in stores:
                self.steps.append(CreateLvolStore(store.name, store.bdev, store.cluster_size))
                continue
            has = stores[store.name]
            base = self.present.bdev(store.bdev)
            self._same(f"lvol store {store.name}", "bdev", has.base_bdev, base.name if base else store.bdev)
            self._same(f"lvol store {store.name}", "cluster_size", has.cluster_size, store.cluster_size)
        for volume in self.description.lvols:
            there = self.present.bdev(volume.alias)
            if there is None:
                self.steps.append(CreateLvol(volume.store, volume.name, volume.size // MIB, volume.thin))
            elif there.size > _rounded(volume.size, stores.get(volume.store)):
                self.conflicts.append(
                    f"lvol {volume.alias} has {there.size} bytes; a shrink to {volume.size} loses contents"
                )
            elif there.size < volume.size:
                self.steps.append(ResizeLvol(volume.alias, volume.size // MIB))

    def _subsystems(self) -> list[SubsystemPlan]:
        there = {each.nqn: each for each in self.present.subsystems}
        wanted = {each.nqn: {host.nqn for host in each.hosts} for each in self.description.subsystems}
        undescribed = frozenset(
            host.nqn
            for each in self.present.subsystems
            for host in each.hosts
            if not self.prune and host.nqn not in wanted.get(each.nqn, ())
        )
        parts = [
            plan_subsystem(each, there.get(each.nqn), self.present, undescribed=undescribed, prune=self.prune)
            for each in self.description.subsystems
        ]
        for part in parts:
            self.conflicts += part.conflicts
        return parts

    def _used(self) -> set[str]:
        """Names proper of bdevs that the description builds on, or that carry a store."""
        used = {each.bdev for each in self.description.lvol_stores}
        used |= {each.base_bdev for each in self.present.lvol_stores}
        for subsystem in self.description.subsystems:
            used |= {each.bdev for each in subsystem.namespaces}
        return {self.present.name_of(name) for name in used}

    def _beyond(self, parts: list[SubsystemPlan]) -> None:
        """What is there and not described: taken away with `prune`, listed without."""
        wanted, present = self.description, self.present
        for part in parts:
            self.left_alone += part.left_alone
        beyond: list[tuple[str, Step]] = []
        controllers = {each.name for each in wanted.nvme}
        used = self._used()
        kept = []
        for controller in present.nvme:
            if controller.name in controllers:
                continue
            if any(names_bdev_of(controller.name, name) for name in used):
                kept.append(controller.name)
            else:
                detach = DeleteBdev("nvme", controller.name)
                beyond.append((f"NVMe controller {controller.name}", detach))
        self.left_alone += [f"NVMe controller {name}, on which described things are built" for name in kept]
        names = {each.name for each in (*wanted.malloc, *wanted.null)} | {each.name for each in wanted.aio}
        names = {present.name_of(name) for name in names}
        beyond += [
            (f"{each.kind} bdev {each.name}", DeleteBdev(each.kind, each.name))
            for each in present.bdevs
            if each.kind in ("malloc", "null", "aio") and each.name not in names | used
        ]
        keys = {each.name for each in wanted.keys}
        for each in wanted.subsystems:
            keys |= {name for host in each.hosts for name in (host.key, host.controller_key) if name}
        keys |= {name for ssd in wanted.nvme for name in (ssd.key, ssd.controller_key) if name}
        keys |= {each.name + ASIDE for each in wanted.keys}  # `plan_keys` removes them
        attached = bool(kept or [each for each in present.nvme if each.name in controllers])
        for key in present.keys:
            if key.name in keys:
                continue
            if attached and self.prune and self._controllers_may_have(key):
                self.left_alone.append(f"key {key.name}, which an attached NVMe controller may have")
            else:
                beyond.append((f"key {key.name}", RemoveKey(key.name)))
        if self.prune:
            self.steps += [step for _, step in beyond]
        else:
            described = {each.nqn for each in wanted.subsystems}
            self.left_alone += [
                f"subsystem {each.nqn}" for each in present.subsystems if each.nqn not in described
            ]
            self.left_alone += [text for text, _ in beyond]
        stores = {each.name for each in wanted.lvol_stores}
        self.left_alone += [
            f"lvol store {each.name}" for each in present.lvol_stores if each.name not in stores
        ]
        volumes = {each.alias for each in wanted.lvols}
        self.left_alone += [
            f"lvol {alias}"
            for each in present.bdevs
            if each.kind == "lvol"
            for alias in each.aliases[:1]
            if alias not in volumes
        ]

    def _controllers_may_have(self, key: Key) -> bool:
        """Whether somebody has a key who is no host of a subsystem: an NVMe controller, then.

        It would fail for ever with its next connection. An enclosure does not say which controller has which
        key, and an old one not how many have it.
        """
        names = [
            name
            for subsystem in self.before.subsystems
            for host in subsystem.hosts
            for name in (host.key, host.controller_key)
        ]
        return key.users is None or key.users > names.count(key.name)


def _attachment(ssd: NvmeSection) -> AttachNvme:
    return AttachNvme(ssd.name, ssd.place, ssd.nqn, ssd.host_nqn, ssd.key, ssd.controller_key)


def _rounded(size: int, store: LvolStore | None) -> int:
    """A volume has whole clusters, so it may be a little larger than asked for."""
    cluster = store.cluster_size if store is not None else 1
    return -(-size // cluster) * cluster
