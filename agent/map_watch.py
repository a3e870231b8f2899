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
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from agent.pool.key_epochs import has_keys_of
from agent.pool.key_turn import slept_seconds
from agent.pool.kv_opening import inspect_kv
from agent.pool.opening import LOOK_SECONDS, Content, inspect, newer_of
from agent.pool.operations import AnyVolume
from agent.pool.pool_map import VERSIONS_AHEAD_MAX, MapNamespace, PoolMap
from agent.pool.prestage import PrestageCache
from agent.pool.steps import Lanes, Steps
from agent.pool.superblock import BLOCK_BYTES, NoSuperblock, map_version_of, pool_id_of
from agent.pool.tally import MissCause
from agent.pool.volume import Volume, wait_for

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0


class AnotherPool(NamedTuple):
    """What is on a namespace now, in the place of this pool's map."""

    pool_id: str


class MapWatch:
    """The map that is in force as far as this agent knows. One thread looks. `now` is in seconds."""

    def __init__(
        self,
        pool_map: PoolMap,
        volumes: Sequence[AnyVolume],
        prestage: PrestageCache,
        remember: Callable[[PoolMap], None] = lambda _: None,
        grow: Callable[[Sequence[bytes]], None] | None = None,
        distrust: Callable[[PoolMap], Collection[str]] = lambda _: (),
        taken: Callable[[bytes, str], None] = lambda _, __: None,
    ) -> None:
        """`remember` is told of each newer map, once it is followed; `grow` of the namespaces, as NGUIDs,
        where others have followed those that there were. Without it they wait for the next start. `distrust`
        is asked first, for the ids of volumes that nobody may be served by that map (agent/seen_map.py).
        `taken` is told of a namespace (NGUID) that carries another pool now, and which, so that nothing is
        written there; and with "" when it carries this one again."""
        self.pool_map = pool_map
        self._grow = grow
        self._distrust = distrust
        self._remember = remember
        self._volumes = volumes
        self._prestage = prestage
        self._turn = itertools.cycle(range(len(pool_map.namespaces)))
        self._next_look = 0.0
        self._tell_taken = taken
        self._taken: dict[int, str] = {}
        """Numbers of namespaces that carry another pool, and which."""
        self.without_map: dict[str, str] = {}
        """Namespaces (NGUID) that answer and do not carry the pool's map any more, and what was found. One
        thread puts another dictionary here; any may read it."""
        self._said_too_far_ahead: set[int] = set()
        """Numbers of namespaces."""
        for volume in volumes:
            if isinstance(volume, Volume):
                volume.map_age.watch(functools.partial(self._still_has_keys_of, volume))
                volume.in_force = self.in_force

    def look(self, lanes: Lanes) -> Steps[None]:
        """Look at the next namespace, where it is time for that."""
        now = lanes.now()
        if now < self._next_look:
            return
        self._next_look, slept = now + EVERY_SECONDS, slept_seconds()
        number = next(self._turn)
        # Namespaces keep their numbers: no verb takes one out of a pool.
        member = self.pool_map.namespaces[number]
        found = yield from _version_and_map(lanes, number, member, self.pool_map, now + LOOK_SECONDS)
        if isinstance(found, MissCause):
            if found is MissCause.CORRUPT:
                yield from self._look_for_map(lanes, number, member)
            return
        self._note_taken(number, found.pool_id)
        if isinstance(found, AnotherPool):
            return
        self._note_map(member.nguid, "")
        if found.version > self.pool_map.version + VERSIONS_AHEAD_MAX:
            # Nobody goes by its version, or what the pool's own map says later would be older. What is gone
            # in it is gone: it may be all that verbs have to go on from.
            self._say_too_far_ahead(number, found)
            self._drop_gone(found)
        elif found.version > self.pool_map.version:
            self._follow(found)
        for volume in self._volumes:
            if isinstance(volume, Volume):
                volume.map_age.note(now, slept)

    def _still_has_keys_of(
        self, volume: Volume, lanes: Lanes, number: int, deadline: float
    ) -> Steps[MissCause | None]:
        """For any thread: whether the map on a namespace gives a volume the keys that this agent knows. As
        `Ask` in agent/pool/key_turn.py."""
        known = self.pool_map
        if number >= len(known.namespaces):
            return MissCause.LATE  # it has joined, and this agent has not followed yet
        found = yield from _version_and_map(
            lanes, number, known.namespaces[number], known, deadline, deadline
        )
        if isinstance(found, MissCause | AnotherPool):
            return found if isinstance(found, MissCause) else MissCause.WRONG_KEY
        return None if has_keys_of(known, found, volume.settings.volume_id.hex()) else MissCause.WRONG_KEY

    def in_force(self, lanes: Lanes, deadline: float) -> Steps[int | None]:
        """For any thread: as `InForce` in agent/pool/key_turn.py. All namespaces are asked, for a newer map
        comes to one after the other, and who has seen it on one goes by it."""
        known = self.pool_map
        for number, member in enumerate(known.namespaces):
            found = yield from _version_and_map(lanes, number, member, known, deadline, deadline)
            if isinstance(found, MissCause | AnotherPool) or found.version > known.version:
                return None
        return known.version if self.pool_map is known else None

    def _look_for_map(self, lanes: Lanes, number: int, member: MapNamespace) -> Steps[None]:
        """What was read is no map; look at all of its copies."""
        nguid = bytes.fromhex(member.nguid)
        if member.kind == "kv":
            found = yield from inspect_kv(lanes, number, nguid, LOOK_SECONDS)
        else:
            found = yield from inspect(lanes, number, nguid, member.bytes, lanes.now() + LOOK_SECONDS)
        if found.content in (Content.BLANK, Content.FOREIGN):
            self._note_map(member.nguid, found.detail or "it is blank")

    def _note_map(self, nguid: str, lacks: str) -> None:
        """`lacks`: what is there instead of the map; empty where it is there."""
        if self.without_map.get(nguid, "") == lacks:
            return
        others = {other: said for other, said in self.without_map.items() if other != nguid}
        self.without_map = others | ({nguid: lacks} if lacks else {})
        if lacks:
            log.error(
                "namespace %s does not carry the pool's map any more (%s): what lay there may be lost, "
                "and puts that ask it for the map are refused. The next change of the pool (g35 tenant set) "
                'writes it again, and so does an agent with membership = "auto"',
                nguid,
                lacks,
            )
        else:
            log.warning("namespace %s carries the pool's map again", nguid)

    def _note_taken(self, number: int, pool_id: str) -> None:
        """Another pool was put on a namespace (g35 pool add --force, g35 pool format): what this one writes
        there would destroy what that one is told that it has."""
        other = "" if pool_id == self.pool_map.pool_id else pool_id
        if self._taken.get(number, "") == other:
            return
        self._taken[number] = other
        nguid = self.pool_map.namespaces[number].nguid
        self._tell_taken(bytes.fromhex(nguid), other)
        if other:
            log.error(
                "namespace %s carries pool %s now, and this agent serves %s: nothing is written there any "
                "more. Somebody has given it away (g35 pool add --force): what this pool had there is lost",
                nguid,
                other,
                self.pool_map.pool_id,
            )
        else:
            log.warning("namespace %s carries this pool again: it is written to", nguid)

    def _say_too_far_ahead(self, number: int, found: PoolMap) -> None:
        if number not in self._said_too_far_ahead:
            self._said_too_far_ahead.add(number)
            log.error(
                "namespace %s carries a pool map of version %d, and the pool's is %d: no change leads to "
                "that. Somebody without the root key has written it: look at who writes to the enclosures. "
                "The next change of the pool (g35 tenant set) writes over it",
                self.pool_map.namespaces[number].nguid,
                found.version,
                self.pool_map.version,
            )

    def _drop_gone(self, newer: PoolMap) -> None:
        """Forget the volumes that nobody may be served by a map."""
        kept = {each.volume_id for each in newer.volumes if not newer.is_erased(each)}
        forged = self._distrust(newer)
        for volume in self._volumes:
            volume_id = volume.settings.volume_id.hex()
            if volume.erased or (volume_id in kept and volume_id not in forged):
                continue
            volume.forget_secret()
            self._prestage.discard_volume(volume.settings.volume_id)
            if volume_id in kept:
                log.error(
                    "volume %s is served no longer: the pool map that is there gives it other settings than "
                    "its key was made for, or a key that was dropped. Somebody without the root key has "
                    "changed it: look at who writes to the enclosures",
                    volume.settings.name,
                )
            else:
                log.warning("volume %s was erased; it is served no longer", volume.settings.name)

    def _follow(self, newer: PoolMap) -> None:
        self._drop_gone(newer)
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
                volume.follow(replace(had, extents=settings.extents, settled=settings.settled))
        return True


def _version_and_map(
    lanes: Lanes,
    number: int,
    member: MapNamespace,
    known: PoolMap,
    until: float,
    deadline: float = float("inf"),
) -> Steps[PoolMap | AnotherPool | MissCause]:
    """The map on a namespace where it is newer than the one that is known, and otherwise that one; or why it
    was not read. Of a namespace of blocks one block is read `until` then, and where it tells of a newer map
    that one by the deadline."""
    nguid = bytes.fromhex(member.nguid)
    if member.kind == "kv":
        found = yield from inspect_kv(lanes, number, nguid, until - lanes.now())
    else:
        block = memoryview(bytearray(BLOCK_BYTES))
        cause = yield from wait_for(lanes, lanes.read(number, 0, block), until)
        if cause is not None:
            return cause
        try:
            if (pool_id := pool_id_of(block)) != known.pool_id:
                return AnotherPool(pool_id)
            if map_version_of(block) <= known.version:
                return known
        except NoSuperblock:
            return MissCause.CORRUPT
        found = yield from inspect(lanes, number, nguid, member.bytes, deadline)
    if found.content is Content.UNREADABLE:
        return MissCause.LATE
    if found.content is not Content.POOL:
        return MissCause.CORRUPT
    if found.superblock is not None and found.superblock.pool_map.pool_id != known.pool_id:
        return AnotherPool(found.superblock.pool_map.pool_id)
    return newer_of(found, known) or known
