"""What an agent does about namespaces that join its pool: it moves values to them, and says how far that is.

The map itself is followed by agent/map_watch.py; `g35 pool add` makes it. One thread, that of upkeep, takes
turns here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agent.config import PoolSection
from agent.pool.mover import Mover
from agent.pool.operations import AnyVolume
from agent.pool.steps import Lanes, Steps
from agent.pool.volume import Volume
from agent.remote.fabric import Fabric


class Membership:
    """See the module's docstring."""

    def __init__(self, section: PoolSection, volumes: Sequence[AnyVolume], fabric: Fabric) -> None:
        self._section = section
        self._volumes = volumes
        self._fabric = fabric
        self._mover = Mover(volumes, section.rebalance)

    def turn(self, lanes: Lanes) -> Steps[None]:
        """Do what is due."""
        yield from self._mover.turn(lanes)

    def snapshot(self) -> dict[str, Any]:
        """For the status: the newcomers that the map does not name, and the moving."""
        joined = [
            each.settings.name
            for each in self._volumes
            if isinstance(each, Volume) and each.earlier is not None
        ]
        return {
            "newcomers": dict(self._fabric.strays),
            "rebalance_bytes_per_s": self._section.rebalance,
            "volumes_unsettled": joined,
            **{f"moves_{name}": value for name, value in asdict(self._mover.moves).items()},
        }
