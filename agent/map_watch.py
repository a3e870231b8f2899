"""What an agent does while it serves to learn that a tenant was erased: it looks at the pool map again.

Nobody tells an agent, for whoever erases may not know of all. So once a second each reads one block of one
namespace, of all in turn. A map that is newer takes from it the volumes whose tenant has no key any more,
and those that are not in it under their id; namespaces that joined are used from then on. Volumes that are
new in it wait for the agent's next start.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence

from agent.pool.key_epochs import has_keys_of
from agent.pool.kv_opening import inspect_kv
from agent.pool.opening import LOOK_SECONDS, Content, inspect, newer_of
from agent.pool.operations import AnyVolume
from agent.pool.pool_map import MapNamespace, PoolMap
from agent.pool.prestage import PrestageCache
from agent.pool.steps import Lanes, Steps
from agent.pool.superblock import BLOCK_BYTES, NoSuperblock, map_version_of
from agent.pool.volume import Volume, wait_for

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
        for volume in volumes:
            if isinstance(volume, Volume):
                volume.map_age.watch(functools.partial(self._still_has_keys_of, volume))

    def look(self, lanes: Lanes) -> Steps[None]:
        """Look at the next namespace, where it is time for that."""
        now = lanes.now()
        if now < self._next_look:
            return
        self._next_look = now + EVERY_SECONDS
        number = next(self._turn)
        # Namespaces keep their numbers: no verb takes one out of a pool.
        member = self.pool_map.namespaces[number]
        found = yield from _version_and_map(lanes, number, member, self.pool_map)
        if found is None:
            return
        if found.version > self.pool_map.version:
            self._follow(found)
        for volume in self._volumes:
            if isinstance(volume, Volume):
                volume.map_age.note(now)

    def _still_has_keys_of(self, volume: Volume, lanes: Lanes, number: int) -> Steps[bool]:
        """For any thread: whether the map on a namespace gives a volume the keys that this agent knows."""
        known = self.pool_map
        if number >= len(known.namespaces):
            return False
        found = yield from _version_and_map(lanes, number, known.namespaces[number], known)
        return found is not None and has_keys_of(known, found, volume.settings.volume_id.hex())

    def _follow(self, newer: PoolMap) -> None:
        kept = {each.volume_id for each in newer.volumes if not newer.is_erased(each)}
        for volume in self._volumes:
            if volume.settings.volume_id.hex() not in kept and not volume.erased:
                volume.forget_secret()
                self._prestage.discard_volume(volume.settings.volume_id)
                log.warning("volume %s was erased; it is served no longer", volume.settings.name)
        if not self._follow_members(newer):
            newer = newer.model_copy(update={"namespaces": self.pool_map.namespaces})
        self._remember(newer)
        # After that: who asks by it meanwhile must not take keys for known that are not followed yet.
        self.pool_map = newer

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


def _version_and_map(
    lanes: Lanes, number: int, member: MapNamespace, known: PoolMap
) -> Steps[PoolMap | None]:
    """The map on a namespace where it is newer than the one that is known, and otherwise that one. None: it
    cannot be read. Of a namespace of blocks one block is read where there is nothing new."""
    nguid = bytes.fromhex(member.nguid)
    if member.kind == "kv":
        found = yield from inspect_kv(lanes, number, nguid, LOOK_SECONDS)
    else:
        block = memoryview(bytearray(BLOCK_BYTES))
        cause = yield from wait_for(lanes, lanes.read(number, 0, block), lanes.now() + LOOK_SECONDS)
        if cause is not None:
            return None
        try:
            if map_version_of(block) <= known.version:
                return known
        except NoSuperblock:
            return None
        found = yield from inspect(lanes, number, nguid, member.bytes)
    if found.content is not Content.POOL:
        return None
    return newer_of(found, known) or known
