"""What an agent does while it serves to learn that a tenant was erased: it looks at the pool map again.

Nobody tells an agent, for whoever erases may not know of all. So once a second each reads one block of one
namespace, of all in turn. A map that is newer takes from it the volumes whose tenant has no key any more,
and those that are not in it under their id; namespaces that joined are used from then on. Volumes that are
new in it wait for the agent's next start.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from agent.pool.kv_opening import inspect_kv
from agent.pool.opening import LOOK_SECONDS, newer_map, newer_of
from agent.pool.operations import AnyVolume
from agent.pool.pool_map import PoolMap
from agent.pool.prestage import PrestageCache
from agent.pool.steps import Lanes, Steps
from agent.pool.volume import Volume

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0


class MapWatch:
    """The map that is in force as far as this agent knows. One thread looks. `now` is in seconds."""

    def __init__(
        self,
        pool_map: PoolMap,
        volumes: Sequence[AnyVolume],
        prestage: PrestageCache,
        remember: Callable[[PoolMap], None] = lambda _: None,
        grow: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        """`remember` is told of each newer map, once it is followed; `grow` of the namespaces, as NGUIDs,
        where others have followed those that there were. Without it they wait for the next start."""
        self.pool_map = pool_map
        self._grow = grow
        self._remember = remember
        self._volumes = volumes
        self._prestage = prestage
        self._turn = itertools.cycle(range(len(pool_map.namespaces)))
        self._next_look = 0.0

    def look(self, lanes: Lanes) -> Steps[None]:
        """Look at the next namespace, where it is time for that."""
        now = lanes.now()
        if now < self._next_look:
            return
        self._next_look = now + EVERY_SECONDS
        number = next(self._turn)
        # Namespaces keep their numbers: no verb takes one out of a pool.
        member = self.pool_map.namespaces[number]
        nguid = bytes.fromhex(member.nguid)
        if member.kind == "kv":
            found = yield from inspect_kv(lanes, number, nguid, LOOK_SECONDS)
            newer = newer_of(found, self.pool_map)
        else:
            newer = yield from newer_map(lanes, number, nguid, member.bytes, self.pool_map)
        if newer is not None:
            self._follow(newer)

    def _follow(self, newer: PoolMap) -> None:
        kept = {each.volume_id for each in newer.volumes if not newer.is_erased(each)}
        for volume in self._volumes:
            if volume.settings.volume_id.hex() not in kept and not volume.erased:
                volume.forget_secret()
                self._prestage.discard_volume(volume.settings.volume_id)
                log.warning("volume %s was erased; it is served no longer", volume.settings.name)
        if not self._follow_members(newer):
            newer = newer.model_copy(update={"namespaces": self.pool_map.namespaces})
        self.pool_map = newer
        self._remember(newer)

    def _follow_members(self, newer: PoolMap) -> bool:
        """Go by the namespaces and extents of a newer map; False where it lists those of before otherwise."""
        before = [each.nguid for each in self.pool_map.namespaces]
        now = [each.nguid for each in newer.namespaces]
        if self._grow is None or now[: len(before)] != before:
            return False
        if len(now) > len(before):
            self._grow([bytes.fromhex(each) for each in now])
            self._turn = itertools.cycle(range(len(now)))
            log.info("%d namespaces have joined the pool", len(now) - len(before))
        entries = {each.volume_id: each for each in newer.volumes}
        for volume in self._volumes:
            entry = entries.get(volume.settings.volume_id.hex())
            if entry is None or not isinstance(volume, Volume) or volume.erased:
                continue
            settings, had = newer.settings(entry), volume.settings
            grown = settings.extents[: len(had.extents)] == had.extents
            if grown and (settings.extents, settings.settled) != (had.extents, had.settled):
                volume.follow(settings)
        return True
