"""What an agent does about namespaces that join its pool: it moves values to them, and says how far that is.

The map itself is followed by agent/attach/map_watch.py; `g35 pool add` makes it, or
agent/membership/auto_join.py where the configuration says so. One thread, that of upkeep, takes turns here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent.config.pool_section import PoolSection
from agent.inline.root_keys import RootKey
from agent.membership.auto_join import AutoJoin
from agent.pool.access import AnyVolume
from agent.pool.maintenance.rebalance import Rebalancer
from agent.pool.map.document import PoolMap
from agent.pool.map.seal import MapSeal
from agent.pool.steps import Lanes, Steps
from agent.pool.volume.volume import Volume
from agent.remote.fabric import Fabric


class RebalanceStatus:
    """See the module's docstring."""

    def __init__(
        self,
        section: PoolSection,
        volumes: Sequence[AnyVolume],
        fabric: Fabric,
        root: RootKey,
        in_force: Callable[[], PoolMap],
        seal: MapSeal,
        without_map: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`in_force` gives the map that the agent goes by; `without_map` the members that do not carry it any
        more, by NGUID, and what they carry (agent/attach/map_watch.py)."""
        self._section = section
        self._volumes = volumes
        self._fabric = fabric
        self._without_map = without_map
        self._mover = Rebalancer(volumes, section.rebalance)
        self._auto: AutoJoin | None = None
        if section.membership == "auto":
            self._auto = AutoJoin(section, fabric, root, in_force, lambda: self._mover.moves.left, seal)

    def start(self, queue_id: int) -> None:
        """Let newcomers in from now on, if that is the policy. Nobody else uses queues of this id."""
        if self._auto is not None:
            self._auto.start(queue_id)

    def stop(self) -> None:
        if self._auto is not None:
            self._auto.stop()

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
        taken = {
            nguid.hex(): f"carries pool {pool_id} now; nothing is written there"
            for nguid, pool_id in self._fabric.taken.items()
        }
        blank = {
            nguid: f"does not carry the pool's map any more: {found}"
            for nguid, found in self._without_map().items()
        }
        return {
            "newcomers": dict(self._fabric.strays),
            "contested": {**blank, **self._fabric.contested, **taken},
            "membership": self._section.membership,
            "rebalance_bytes_per_s": self._section.rebalance,
            "volumes_unsettled": joined,
            **{f"moves_{name}": value for name, value in asdict(self._mover.moves).items()},
            **(self._auto.snapshot() if self._auto is not None else {}),
        }
