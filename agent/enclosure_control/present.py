"""What an enclosure is at one moment, whoever told it: SPDK's RPC (`rpc_target.py`) or nvmet's configfs."""

from __future__ import annotations

from dataclasses import dataclass

from agent.enclosure_control.records import Bdev, Key, LvolStore, NvmeController, Subsystem, Transport


@dataclass(frozen=True, slots=True)
class Present:
    """The state that a plan starts from. The discovery subsystem is not in `subsystems`."""

    transports: tuple[Transport, ...] = ()
    keys: tuple[Key, ...] = ()
    bdevs: tuple[Bdev, ...] = ()
    nvme: tuple[NvmeController, ...] = ()
    lvol_stores: tuple[LvolStore, ...] = ()
    subsystems: tuple[Subsystem, ...] = ()

    def bdev(self, name: str) -> Bdev | None:
        """By its name or an alias (`STORE/NAME` of a logical volume)."""
        for each in self.bdevs:
            if name == each.name or name in each.aliases:
                return each
        return None
