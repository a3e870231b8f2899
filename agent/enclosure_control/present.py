"""What an enclosure is at one moment, whoever told it: SPDK's RPC (`rpc_target.py`) or nvmet's configfs."""

from __future__ import annotations

from dataclasses import dataclass

from agent.enclosure_control.records import Bdev, Key, LvolStore, NvmeController, Subsystem, Transport


@dataclass(frozen=True, slots=True)
class Traits:
    """What a plan has to know of the kind of enclosure. The defaults are those of SPDK's RPC.

    `max_namespaces`: the largest namespace id of a subsystem that asks for none; None: no bound.
    `transports_are_made`: a listener needs its transport to be made first.
    `any_or_named`: a subsystem lets any host in or has named ones, never both.
    `hosts_are_shared`: a host has its keys for all subsystems, and keeps them while one of them names it.
    """

    max_namespaces: int | None = 32
    transports_are_made: bool = True
    any_or_named: bool = False
    hosts_are_shared: bool = False


@dataclass(frozen=True, slots=True)
class Present:
    """The state that a plan starts from. The discovery subsystem is not in `subsystems`."""

    transports: tuple[Transport, ...] = ()
    keys: tuple[Key, ...] = ()
    bdevs: tuple[Bdev, ...] = ()
    nvme: tuple[NvmeController, ...] = ()
    lvol_stores: tuple[LvolStore, ...] = ()
    subsystems: tuple[Subsystem, ...] = ()
    traits: Traits = Traits()

    def bdev(self, name: str) -> Bdev | None:
        """By its name, its UUID or an alias (`STORE/NAME` of a logical volume)."""
        for each in self.bdevs:
            if name == each.name or name in each.aliases:
                return each
        for each in self.bdevs:
            if each.uuid and name.lower() == each.uuid:
                return each
        return None

    def name_of(self, name: str) -> str:
        """The name proper of a bdev that may be called by another; of one that is not there, as it is."""
        found = self.bdev(name)
        return name if found is None else found.name
