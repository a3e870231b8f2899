"""From a description and the present state to the steps between them. A pure function for all back-ends.

A namespace, host or key that differs from its description is replaced. Anything that the description does not
name is listed in `Plan.left_alone`; with `prune` it is taken away, except logical volumes and their stores,
whose contents outlive every process. A change that would lose contents (the size of memory, the serial number
of a subsystem) is a `PlanConflict`.

Steps come in an order that lets no host in too early: first restrictions (keys, hosts that go, named hosts
alone), then removals, then additions. A new subsystem gets its namespaces and hosts before its listeners.
"""

import dataclasses
from dataclasses import dataclass

from agent.enclosure_control import steps
from agent.enclosure_control.description import Description
from agent.enclosure_control.plan_checks import (
    Conflicts,
    missing_names,
    names_bdev_of,
    shared_bdevs,
    taken_elsewhere,
)
from agent.enclosure_control.plan_keys import ASIDE, plan_keys
from agent.enclosure_control.plan_subsystems import SubsystemPlan
from agent.enclosure_control.records import Bdev, Key, LvolStore, Present
from agent.enclosure_control.steps import MIB, Step
from agent.errors import UserError, printable
from agent.sizes import size_text

SIZES = frozenset({"size", "block_size", "cluster_size", "in_capsule_data_size", "max_io_size"})
_CONFLICTS_SHOWN = 8
_WRITE_OR_RENAME = "write what is there into the description, or choose another name for a new one"


class PlanConflict(UserError):
    """The description cannot be reached from the present state without a loss, or not at all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in order, and what is there that the description does not name."""

    steps: tuple[Step, ...]
    left_alone: tuple[str, ...] = ()


def plan(description: Description, present: Present, *, prune: bool = False) -> Plan:
    """The steps from `present` to `description`. Raises PlanConflict, with conflicts and remedies."""
    planner = _Planner(description, present, prune)
    planner.run()
    if planner.conflicts:
        shown = list(planner.conflicts.items())[:_CONFLICTS_SHOWN]
        remedies = dict.fromkeys(remedy for _, remedy in shown)
        raise PlanConflict(
            printable("; ".join(text for text, _ in shown)), "; ".join(("nothing was changed", *remedies))
        )
    return Plan(tuple(planner.steps), tuple(planner.left_alone))


class _Planner:
    def __init__(self, description: Description, present: Present, prune: bool) -> None:
        self.description = description
        self.before = self.present = present
        self.prune = prune
        self.steps: list[Step] = []
        self.left_alone: list[str] = []
        self.conflicts: Conflicts = {}

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
                steps.DeleteSubsystem(each.nqn)
                for each in self.present.subsystems
                if each.nqn not in described
            ]
        for part in parts:
            self.steps += part.additions
        self.conflicts |= shared_bdevs(self.description, self.present)
        self.conflicts |= taken_elsewhere(self.steps, self.present, prune=self.prune)
        self.conflicts |= missing_names(self.steps, self.present)
        for part in parts:
            self.left_alone += part.left_alone
        self._beyond()

    def _transports(self) -> None:
        there = {each.trtype: dict(each.options) for each in self.present.transports}
        for wanted in self.description.transports:
            trtype = wanted.type.upper()
            if trtype not in there:
                self.steps.append(steps.CreateTransport(trtype, wanted.options()))
                continue
            for name, value in wanted.options():
                self._same(
                    f"transport {trtype}", name, there[trtype].get(name), value,
                    "write the transport's options as they are: only a restart of the target changes them",
                )  # fmt: skip

    def _bdevs(self) -> set[str]:
        """Names of new bdevs and NVMe controllers that may carry a store already."""
        fresh = set()
        memory = [("malloc", each) for each in self.description.malloc]
        memory += [("null", each) for each in self.description.null]
        for kind, each in memory:
            there = self._bdev(each.name, kind, each.block_size)
            if there is None:
                blocks = each.size // each.block_size
                self.steps.append(steps.CreateMemory(kind, each.name, each.block_size, blocks, each.uuid))
                continue
            self._same(f"bdev {each.name}", "size", there.size, each.size)
            self._same(f"bdev {each.name}", "uuid", there.uuid, each.uuid)
        for file in self.description.aio:
            there = self._bdev(file.name, "aio", file.block_size)
            if there is None:
                self.steps.append(steps.CreateAio(file.name, file.file, file.block_size))
                fresh.add(file.name)
                continue
            self._same(f"bdev {file.name}", "file", there.filename, file.file)
        attached = {each.name: each for each in self.present.nvme}
        for ssd in self.description.nvme:
            controller = attached.get(ssd.name)
            if controller is None:
                new = steps.AttachNvme(
                    ssd.name, ssd.place, ssd.nqn, ssd.host_nqn, ssd.key, ssd.controller_key
                )
                self.steps.append(new)
                fresh.add(ssd.name)
            elif controller.address is not None:
                self._same(f"NVMe controller {ssd.name}", "address", controller.address, ssd.place)
                self._same(f"NVMe controller {ssd.name}", "nqn", controller.subnqn or None, ssd.nqn)
        return fresh

    def _bdev(self, name: str, kind: str, block_size: int) -> Bdev | None:
        """The bdev of that name, if there is one; of another kind or block size it is a conflict."""
        there = self.present.bdev(name)
        if there is not None:
            self._same(f"bdev {name}", "kind", there.kind, kind)
            self._same(f"bdev {name}", "block_size", there.block_size, block_size)
        return there

    def _same(
        self, what: str, name: str, has: object, wanted: object, remedy: str = _WRITE_OR_RENAME
    ) -> None:
        if has is not None and wanted is not None and has != wanted:
            if name in SIZES and isinstance(has, int) and isinstance(wanted, int):
                has, wanted = size_text(has), size_text(wanted)
            self.conflicts[f"{what} is there with {name} {has}, not {wanted}"] = remedy

    def _volumes(self, fresh: set[str]) -> None:
        stores = {each.name: each for each in self.present.lvol_stores}
        missing = [each for each in self.description.lvol_stores if each.name not in stores]
        if any(each.bdev in fresh or each.bdev.rpartition("n")[0] in fresh for each in missing):
            self.steps.append(steps.WaitForExamine())
        for store in self.description.lvol_stores:
            if store.name not in stores:
                self.steps.append(steps.CreateLvolStore(store.name, store.bdev, store.cluster_size))
                continue
            has = stores[store.name]
            base = self.present.bdev(store.bdev)
            self._same(f"lvol store {store.name}", "bdev", has.base_bdev, base.name if base else store.bdev)
            self._same(f"lvol store {store.name}", "cluster_size", has.cluster_size, store.cluster_size)
        for volume in self.description.lvols:
            there = self.present.bdev(volume.alias)
            if there is None:
                self.steps.append(
                    steps.CreateLvol(volume.store, volume.name, volume.size // MIB, volume.thin)
                )
            elif there.size > _rounded(volume.size, stores.get(volume.store)):
                size = size_text(there.size)
                text = f"lvol {volume.alias} has {size}; a shrink to {size_text(volume.size)} loses contents"
                self.conflicts[text] = f"write {size} into the description, or delete the volume by hand"
            elif there.size < volume.size:
                self.steps.append(steps.ResizeLvol(volume.alias, volume.size // MIB))

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
            SubsystemPlan(each, there.get(each.nqn), self.present, undescribed, self.prune)
            for each in self.description.subsystems
        ]
        for part in parts:
            self.conflicts |= part.conflicts
        return parts

    def _used(self) -> set[str]:
        """Own names of bdevs that the description builds on, or that carry a store."""
        used = {each.bdev for each in self.description.lvol_stores}
        used |= {each.base_bdev for each in self.present.lvol_stores}
        for subsystem in self.description.subsystems:
            used |= {each.bdev for each in subsystem.namespaces}
        return {self.present.name_of(name) for name in used}

    def _beyond(self) -> None:
        """Things that are there and not described: taken away with `prune`, listed without."""
        wanted, present = self.description, self.present
        found: list[tuple[str, Step | None]] = []  # None: not taken away in any case
        if not self.prune:
            described = {each.nqn for each in wanted.subsystems}
            others = [each.nqn for each in present.subsystems if each.nqn not in described]
            found += [(f"subsystem {nqn}", None) for nqn in others]
        controllers, used, attached = {each.name for each in wanted.nvme}, self._used(), False
        for controller in present.nvme:
            name = controller.name
            if name in controllers:
                attached = True
            elif any(names_bdev_of(name, bdev) for bdev in used):
                attached = True
                found.append((f"NVMe controller {name}, on which described things are built", None))
            else:
                found.append((f"NVMe controller {name}", steps.DeleteBdev("nvme", name)))
        names = [each.name for each in (*wanted.malloc, *wanted.null)] + [each.name for each in wanted.aio]
        used |= {present.name_of(name) for name in names}
        found += [
            (f"{each.kind} bdev {each.name}", steps.DeleteBdev(each.kind, each.name))
            for each in present.bdevs
            if each.kind in ("malloc", "null", "aio") and each.name not in used
        ]
        hosts = [host.record for each in wanted.subsystems for host in each.hosts]
        keys = {name for host in hosts for name in (host.key, host.controller_key)}
        keys |= {name for ssd in wanted.nvme for name in (ssd.key, ssd.controller_key)}
        keys |= {name for each in wanted.keys for name in (each.name, each.name + ASIDE)}  # see `plan_keys`
        for key in present.keys:
            if key.name in keys:
                continue
            if attached and self.prune and self._controllers_may_have(key):
                found.append((f"key {key.name}, which an attached NVMe controller may have", None))
            else:
                found.append((f"key {key.name}", steps.RemoveKey(key.name)))
        stores = {each.name for each in wanted.lvol_stores}
        names = [each.name for each in present.lvol_stores if each.name not in stores]
        found += [(f"lvol store {name}", None) for name in names]
        volumes = {each.alias for each in wanted.lvols}
        names = [alias for each in present.bdevs if each.kind == "lvol" for alias in each.aliases[:1]]
        found += [(f"lvol {name}", None) for name in names if name not in volumes]
        self.steps += [step for _, step in found if self.prune and step is not None]
        self.left_alone += [text for text, step in found if not self.prune or step is None]

    def _controllers_may_have(self, key: Key) -> bool:
        """Whether an NVMe controller may have a key: it has users that are no hosts of subsystems.

        Without its key that controller's next connection would fail. An enclosure tells no users by name, and
        an old version not even their number.
        """
        return key.users is None or key.users > self.before.keys_of_hosts().count(key.name)


def _rounded(size: int, store: LvolStore | None) -> int:
    """The size that a volume gets: whole clusters."""
    cluster = store.cluster_size if store is not None else 1
    return -(-size // cluster) * cluster
