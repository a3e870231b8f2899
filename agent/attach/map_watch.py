"""How a serving agent learns of changes of the pool: it looks at the pool map again.

Nobody tells an agent: a verb that erases a tenant may not know of all agents. So once a second each agent
reads one block of one namespace, of all in turn. By a newer map it drops the volumes whose tenant has no key
any more, and those that the map lacks; it uses namespaces that joined. Volumes that are new in it wait for
the agent's next start.

A version takes no key, so a greater one is not the last word. The end of a key counts from every copy,
whatever its version (`with_key_ends` in agent/pool/map/reconcile.py). Once all namespaces of the agent's map
were seen without it, the agent goes by what they agree on: the map was an overtaken writer's, or nobody's. An
old map that is played back looks the same, so an agent never goes back behind a map that it has seen on most
namespaces.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from agent.attach.map_history import MapHistory, opens
from agent.inline.secrets import RootKey
from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.map.document import VERSIONS_AHEAD_MAX, MapNamespace, PoolMap
from agent.pool.map.inspect import LOOK_SECONDS, Content, Inspection, inspect
from agent.pool.map.key_epochs import has_keys_of
from agent.pool.map.kv_superblock import inspect_kv
from agent.pool.map.map_seal import WITHOUT_SEAL, MapSeal
from agent.pool.map.reconcile import agreed, with_key_ends
from agent.pool.map.replicas import name_in, name_of
from agent.pool.map.superblock import BLOCK_BYTES, NoSuperblock, head_of
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.key_transition import slept_seconds
from agent.pool.volume.volume import Layout, MapCheck, PoolVolume, Volume, in_sets
from agent.remote.fabric import Fabric

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
OTHERS_MAX = 64
"""Copies that differ from the map in force, and of which it is remembered what they say."""


class _Found(NamedTuple):
    """A map that a namespace carries, and the mark of its first copy (`name_in`)."""

    pool_map: PoolMap
    mark: bytes


class AnotherPool(NamedTuple):
    """What is on a namespace now, in the place of this pool's map."""

    pool_id: str


class _Known(NamedTuple):
    """The map that an agent goes by, and the marks (`name_in`) of the copies read beside it.

    `same`: marks of the map itself. `others`: marks of copies that say nothing new of keys; they are not read
    again while the map is in force. One record, so that any thread sees both of one map.
    """

    pool_map: PoolMap
    same: frozenset[bytes]
    others: Mapping[bytes, PoolMap]


class MapWatch:
    """The map that is in force as far as this agent knows. One thread looks. `now` is in seconds."""

    def __init__(
        self,
        pool_map: PoolMap,
        volumes: Sequence[PoolVolume],
        prestage: PrestageCache,
        history: MapHistory,
        root: RootKey,
        fabric: Fabric,
        seal: MapSeal,
        followed: Callable[[PoolMap], None] = lambda _: None,
        to_be_followed: Callable[[PoolMap], None] = lambda _: None,
    ) -> None:
        """`followed` gets each newer map, before the history does; `to_be_followed`, before anything is done
        by it, unless it lists namespaces otherwise. The root key has opened the `volumes`."""
        self._history, self._root, self._fabric, self._followed = history, root, fabric, followed
        self._to_be_followed = to_be_followed
        self._opens = functools.partial(opens, root)
        self._seal = seal
        self._known = _Known(pool_map, frozenset({name_of(pool_map)}), {})
        self._seen_with: set[int] = set()
        """Numbers of the namespaces that carry the map in force."""
        self._is_confirmed = False
        self._elsewhere: dict[int, _Found | None] = {}
        """What the others carry, as each was last seen; None where it is no map of this pool."""
        self._said_behind = False
        self._volumes = volumes
        self._prestage = prestage
        self._turn = itertools.cycle(range(len(pool_map.namespaces)))
        self._next_look = 0.0
        self._taken: dict[int, str] = {}
        """Numbers of namespaces that carry another pool, and which."""
        self.without_map: dict[str, str] = {}
        """Namespaces (NGUID) that answer without the pool's map, and their content. One thread replaces the
        dictionary."""
        self._said_forged: set[bytes] = set()
        """Marks of maps that were not made with the root key; OTHERS_MAX at most."""
        self._said_too_far_ahead: set[int] = set()
        """Numbers of namespaces."""
        self.is_listed_otherwise = False
        """The pool has other namespaces than this agent follows (`_members_to_follow`)."""
        for volume in in_sets(volumes):
            check = MapCheck(functools.partial(self._still_has_keys_of, volume), self.newest_version)
            volume.change(map_check=check)
        self._note(pool_map, is_on_most=False)

    def _note(self, pool_map: PoolMap, *, is_on_most: bool) -> None:
        opened = [each.settings.volume_id.hex() for each in self._volumes if not each.erased]
        has_seal = pool_map.pool_id in self._seal.pools
        self._history.note(pool_map, opened, is_on_most=is_on_most, has_seal=has_seal)

    def _distrust(self, newer: PoolMap) -> set[str]:
        return self._history.distrusted(self._volumes, self._root, newer)

    @property
    def pool_map(self) -> PoolMap:
        """The map in force, as far as this agent knows."""
        return self._known.pool_map

    def look(self, channel: IoChannel) -> Steps[None]:
        """Look at the next namespace, where it is time for that."""
        now = channel.now()
        if now < self._next_look:
            return
        self._next_look, slept = now + EVERY_SECONDS, slept_seconds()
        number = next(self._turn)
        # Namespaces keep their numbers: no verb takes one out of a pool.
        member = self.pool_map.namespaces[number]
        known = self.pool_map
        until = now + LOOK_SECONDS
        found = yield from self._map_at(channel, number, member, until, until + 2 * LOOK_SECONDS)
        if isinstance(found, MissCause):
            if found is MissCause.CORRUPT and (yield from self._lacks_map(channel, number, member)):
                self._elsewhere[number] = None
            return
        self.note_taken(number, found.pool_id if isinstance(found, AnotherPool) else known.pool_id)
        if isinstance(found, AnotherPool):
            self._elsewhere[number] = None
            return
        self._note_map(member.nguid, "")
        if found.pool_map is known:
            self._elsewhere.pop(number, None)
            self._seen_with.add(number)
            self._said_behind = False
        elif not known.version < found.pool_map.version <= known.version + VERSIONS_AHEAD_MAX:
            self._compare(number, found)
        elif forged := self._distrust(found.pool_map):
            self._refuse(number, found, forged)
        else:
            self._follow(found.pool_map, {found.mark})
            self._seen_with.add(number)
        if not self._is_confirmed and 2 * len(self._seen_with) > len(self.pool_map.namespaces):
            self._is_confirmed = True
            self._note(self.pool_map, is_on_most=True)
        for volume in in_sets(self._volumes):
            volume.map_age.note(now, slept)

    def _compare(self, number: int, found: _Found) -> None:
        """A namespace carries another map that is no newer one: only the keys that are over in it count.

        A map that is too far ahead is nobody's next map, or the pool's own later maps would be older. What is
        gone in it is gone: verbs may have nothing else to go on from.
        """
        there = found.pool_map
        is_too_far = there.version > self.pool_map.version
        if is_too_far:
            self._say_too_far_ahead(number, there)
            self._drop_gone(there)
        self._end_keys(number, found)
        if is_too_far:
            return
        self._elsewhere[number] = found
        left = agreed(each.pool_map for each in self._elsewhere.values() if each is not None)
        members = self._members()
        # Those too that only the map in force has: a map from before they joined does not name them.
        are_all_seen = len(self._elsewhere) == len(members)
        if not are_all_seen or not {each.nguid for each in left.namespaces} <= {*members}:
            return
        if self._distrust(left):
            return
        if self._history.is_behind(left):
            self._say_behind(left)
            return
        is_same = left.version == self.pool_map.version
        log.warning(
            "no namespace carries pool map %d any more, by which this agent served: it goes on by what "
            "their copies lead to, %s",
            self.pool_map.version,
            "another map of that version" if is_same else f"map {left.version}",
        )
        self._follow(left, {each.mark for each in self._elsewhere.values() if each is not None})

    def _say_behind(self, left: PoolMap) -> None:
        if not self._said_behind:
            self._said_behind = True
            log.error(
                "no namespace carries pool map %d any more, by which this agent serves. Their copies lead to "
                "map %d, which is older than one that most of them have carried: it goes on by map %d. "
                "Somebody has put back what the enclosures once held: look at who writes to them, and bring "
                "back the namespaces that carry the newer map",
                self.pool_map.version,
                left.version,
                self.pool_map.version,
            )

    def _refuse(self, number: int, found: _Found, forged: Collection[str]) -> None:
        """A greater version with keys or settings that the root key never made: no map of this pool.

        The volumes are served on by the known map. Ends of keys in it count, as in any copy.
        """
        if found.mark not in self._said_forged:
            self._said_forged = {
                *(self._said_forged if len(self._said_forged) < OTHERS_MAX else ()),
                found.mark,
            }
            names = [each.settings.name for each in self._volumes if each.settings.volume_id.hex() in forged]
            log.error(
                "namespace %s carries pool map %d, which gives %s other settings than their keys were made "
                "for, or keys that were dropped: it is not followed. Somebody without the root key has "
                "written it: look at who writes to the enclosures",
                self.pool_map.namespaces[number].nguid,
                found.pool_map.version,
                ", ".join(f"volume {name}" for name in names),
            )
        self._end_keys(number, found)

    def _end_keys(self, number: int, found: _Found) -> None:
        """Go by the ends of keys that a copy tells of."""
        there, known = found.pool_map, self.pool_map
        ended = with_key_ends(known, there, self._opens)
        if ended is not known:
            log.info(
                "namespace %s carries pool map %d, by which keys are over that map %d has: they are over",
                known.namespaces[number].nguid,
                there.version,
                known.version,
            )
            self._follow(ended, self._known.same, is_known=True)
        self._remember_other(found)
        self._seen_with.discard(number)

    def _remember_other(self, found: _Found) -> None:
        known, same, others = self._known
        if found.mark and found.mark not in others:
            self._known = _Known(
                known, same, {**(others if len(others) < OTHERS_MAX else {}), found.mark: found.pool_map}
            )

    def _map_at(
        self, channel: IoChannel, number: int, member: MapNamespace, until: float, deadline: float
    ) -> Steps[_Found | AnotherPool | MissCause]:
        """The map on a namespace, the same object where it is the one in force; or why it was not read. For
        any thread.

        Of a namespace of blocks one block is read `until` then, and a map that is not known yet by the
        deadline.
        """
        known, same, others = self._known
        nguid, mark = bytes.fromhex(member.nguid), b""
        if member.kind == "kv":
            found = yield from inspect_kv(channel, number, nguid, until - channel.now())
        else:
            block = memoryview(bytearray(BLOCK_BYTES))
            cause = yield from wait_for(channel, channel.read(number, 0, block), until)
            if cause is not None:
                return cause
            try:
                pool_id = head_of(block).pool_id
            except NoSuperblock:
                return MissCause.CORRUPT
            if pool_id != known.pool_id:
                return AnotherPool(pool_id)
            mark = name_in(bytes(block))
            if mark in same or mark in others:
                return _Found(known if mark in same else others[mark], mark)
            found = yield from inspect(channel, number, nguid, member.bytes, deadline)
        if found.content is Content.UNREADABLE:
            return MissCause.LATE
        if (there := self._counting_map(found)) is None:
            return MissCause.CORRUPT
        if there.pool_id != known.pool_id:
            return AnotherPool(there.pool_id)
        mark = mark or name_of(there)
        return _Found(known if mark in same or there == known else there, mark)

    def _counting_map(self, found: Inspection) -> PoolMap | None:
        """What a namespace carries by those of its copies that count; None where none does."""
        if found.superblock is None:
            return None
        maps = found.maps or (found.superblock.pool_map,)
        counting = self._seal.counting(maps)
        return agreed(counting) if counting else None

    def _still_has_keys_of(
        self, volume: Volume, channel: IoChannel, number: int, deadline: float
    ) -> Steps[MissCause | None]:
        """For any thread: whether the map on a namespace gives a volume the known keys. See `Ask` in
        key_transition.py.

        LATE, too, where a pool was settled that this agent does not know to have grown: the others look no
        more where it would store a value."""
        known = self.pool_map
        if number >= len(known.namespaces):
            return MissCause.LATE  # it has joined, and this agent has not followed yet
        found = yield from self._map_at(channel, number, known.namespaces[number], deadline, deadline)
        if isinstance(found, MissCause | AnotherPool):
            return found if isinstance(found, MissCause) else MissCause.WRONG_KEY
        there = found.pool_map
        if there.version <= known.version:
            there = with_key_ends(known, there, self._opens)
        volume_id = volume.settings.volume_id.hex()
        if there is known:
            return None
        if not has_keys_of(known, there, volume_id):
            return MissCause.WRONG_KEY
        return None if _looks_for_values_of(there, known, volume_id) else MissCause.LATE

    def newest_version(self, channel: IoChannel, deadline: float) -> Steps[int | None]:
        """For any thread: see `InForce` in key_transition.py. All namespaces are asked: a newer map comes to
        one after the other, and an agent that has seen it on one goes by it."""
        known = self.pool_map
        for number, member in enumerate(known.namespaces):
            found = yield from self._map_at(channel, number, member, deadline, deadline)
            if isinstance(found, MissCause | AnotherPool) or found.pool_map.version > known.version:
                return None
            if with_key_ends(known, found.pool_map, self._opens) is not known:
                return None
        return known.version if self.pool_map is known else None

    def _lacks_map(self, channel: IoChannel, number: int, member: MapNamespace) -> Steps[bool]:
        """What was read is no map; look at all of its copies. Whether none of them counts."""
        nguid = bytes.fromhex(member.nguid)
        if member.kind == "kv":
            found = yield from inspect_kv(channel, number, nguid, LOOK_SECONDS)
        else:
            found = yield from inspect(channel, number, nguid, member.bytes, channel.now() + LOOK_SECONDS)
        if found.content in (Content.BLANK, Content.FOREIGN):
            self._note_map(member.nguid, found.detail or "it is blank")
            return True
        if found.content is Content.POOL and self._counting_map(found) is None:
            self._note_map(member.nguid, WITHOUT_SEAL)
            return True
        return False

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

    def note_taken(self, number: int, pool_id: str) -> None:
        """Which pool a namespace carries. Where it was given to another (g35 pool add --force, g35 pool
        format), writes of this pool would destroy values of that one."""
        other = "" if pool_id == self.pool_map.pool_id else pool_id
        if self._taken.get(number, "") == other:
            return
        self._taken[number] = other
        nguid = self.pool_map.namespaces[number].nguid
        self._fabric.note_taken(bytes.fromhex(nguid), other)
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

    def _say_listed_otherwise(self, newer: PoolMap) -> None:
        if not self.is_listed_otherwise:
            self.is_listed_otherwise = True
            log.error(
                "pool map %d lists other namespaces than map %d did, by which this agent uses what has "
                "joined: two programs let namespaces in at once. What this agent stores there others do not "
                "find, and the other way round: start it again",
                newer.version,
                self.pool_map.version,
            )

    def _drop_gone(self, newer: PoolMap) -> None:
        """Forget the volumes that a map has no more, or whose tenant has no key in it."""
        kept = {each.volume_id for each in newer.volumes if not newer.is_erased(each)}
        for volume in self._volumes:
            if volume.erased or volume.settings.volume_id.hex() in kept:
                continue
            volume.change(erased=True)
            self._prestage.discard_volume(volume.settings.volume_id)
            log.warning("volume %s was erased; it is served no longer", volume.settings.name)

    def _follow(self, newer: PoolMap, marks: Set[bytes], *, is_known: bool = False) -> None:
        """Go by another map, which lies on flash under these marks. All that may fail is done before any
        change. `is_known`: it is the map in force, with fewer keys."""
        members = self._members_to_follow(newer)
        layouts = [] if members is None else self._layouts(newer)
        if members is None:
            self._say_listed_otherwise(newer)
        else:
            self._to_be_followed(newer)
        more = 0 if members is None else len(members) - len(self._members())
        if members is not None and more > 0:
            self._fabric.grow([bytes.fromhex(each) for each in members])
            log.info("%d namespaces have joined the pool", more)
        if members is not None and more:
            # Where there are fewer, their numbers stay good: somebody may be reading there.
            self._turn = itertools.cycle(range(len(members)))
        self._drop_gone(newer)
        for volume, layout in layouts:
            if not volume.erased:
                volume.change(layout=layout)
        if members is None:
            newer = newer.model_copy(update={"namespaces": self.pool_map.namespaces})
        self._followed(newer)
        # After that: the disk of the state folder may be full, or hang.
        self._note(newer, is_on_most=False)
        # After that: a check by it must not meanwhile take keys for known that are not followed yet.
        self._known = _Known(newer, frozenset(marks), {})
        if not is_known:
            self._elsewhere, self._seen_with, self._is_confirmed = {}, set(), False
            self._said_behind = False

    def _members(self) -> list[str]:
        return [each.nguid for each in self.pool_map.namespaces]

    def _members_to_follow(self, newer: PoolMap) -> list[str] | None:
        """The namespaces of another map; None where it lists the known ones otherwise: these are not followed
        then. It has fewer where the known map was nobody's, and is left again."""
        before, now = self._members(), [each.nguid for each in newer.namespaces]
        shorter = min(len(before), len(now))
        return None if before[:shorter] != now[:shorter] else now

    def _layouts(self, newer: PoolMap) -> list[tuple[Volume, Layout]]:
        """What the volumes that are served on do to go by the extents of another map."""
        entries = {each.volume_id: each for each in newer.volumes}
        found = []
        for volume in in_sets(self._volumes):
            entry = entries.get(volume.settings.volume_id.hex())
            if entry is None or volume.erased:
                continue
            settings, had = newer.settings(entry), volume.settings
            shorter = min(len(settings.extents), len(had.extents))
            follows = settings.extents[:shorter] == had.extents[:shorter]
            if follows and (settings.extents, settings.settled_extents) != (had.extents, had.settled_extents):
                wanted = replace(had, extents=settings.extents, settled_extents=settings.settled_extents)
                found.append((volume, volume.layout(wanted)))
        return found


def _looks_for_values_of(there: PoolMap, mine: PoolMap, volume_id: str) -> bool:
    """Whether agents by the map `there` look where a map stores values of a volume. They do until the pool
    has grown without it, and was settled."""
    others, own = (
        next(volume for volume in pool_map.volumes if volume.volume_id == volume_id)
        for pool_map in (there, mine)
    )
    return len(own.extents) >= (others.settled or len(others.extents))
