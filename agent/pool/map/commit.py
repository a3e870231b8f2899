"""How the pool map is changed, by several programs at once if need be, and to one map in the end.

The map lies on every namespace, twice (on one of keys once). A copy can be read and written, and no more; so
nobody is locked out, and a program that meets another is told. A change goes in rounds:

1. All copies that are reached are read, and the map in force is found (reconcile.py). 2. The change makes the
next version of it. 3. The copies are overwritten one after the other, in the order of the map, each right
after another look:    one that is not what step 1 read ends the round (`Overtaken`). 4. All are read again,
to their ends. One that is another map than was written ends the round.

The next round makes the change of what is there then; a change that is in it already changes nothing. A map
that this writer has begun to write counts no longer where another one has come that was not made from it. The
map that it was made from counts instead, so that keys that were gone in that stay gone.

Of two maps neither of which is made of the other, at most one passes step 4, whatever the speed of their
writers. Say that both A and B read their own map from every copy there. Of each copy one wrote last; let it
be B of copy 1. Then B looked at copy 1 before A wrote it, and wrote it after A had read it again. By then A
had written all copies; B looks at copy 2 after that, finds A's map there, and is overtaken. It takes two
copies: a pool of a single KV namespace has one. If B ends right then, its map is on one copy and A's on the
others: a tie, of which the next change, or an agent with `pool.membership = "auto"`, makes one map, without
the keys that are gone in either.
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent.errors import G35Error
from agent.pool.map.document import MapNamespace, PoolMap
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.reconcile import agreed, counting
from agent.pool.map.replicas import (
    Copy,
    mark_at,
    name_in,
    name_of,
    places_on,
    read_copies,
    superblock_copies_are,
    write_superblock,
)
from agent.pool.map.tenant_changes import version_after
from agent.pool.steps import IoChannel, Steps

ROUNDS_MAX = 12
PAUSE_SECONDS = 0.05
"""Between rounds at the most, times the number of the round: so that two do not stay in step."""

TRIES_OF_A_COPY = 3
"""Rounds after which a copy that stays as it was is held to be a drive that does not write."""

Guard: TypeAlias = Callable[[], Steps[None]]
"""Raises Overtaken where the map that a change is made of is in force no longer."""
Change: TypeAlias = Callable[[PoolMap, Guard], Steps[PoolMap]]
"""The next version of a map, or the same map where there is nothing to change. It may be called again."""


class Overtaken(Exception):
    """Somebody else has changed the pool map meanwhile."""

    def __init__(self, wrote: bool) -> None:
        super().__init__("somebody else has changed the pool map")
        self.wrote = wrote
        """Whether something of ours was written before that was noticed."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What is in force after a change, and the namespaces that may hold another map: NGUID, why."""

    pool_map: PoolMap
    left: dict[str, str]


def simply(change: Callable[[PoolMap], PoolMap]) -> Change:
    """A change that takes no I/O."""

    def steps(pool_map: PoolMap, _: Guard) -> Steps[PoolMap]:
        yield from ()
        return change(pool_map)

    return steps


def change_map(
    channel: IoChannel,
    pool_map: PoolMap,
    numbers: Mapping[str, int],
    change: Change,
    *,
    newcomers: Iterable[MapNamespace] = (),
    all_of_them: bool = True,
    seal: MapSeal | None = None,
) -> Steps[Changed]:
    """See the module's docstring. `pool_map` is one that was found; `numbers` gives the reached NGUIDs (hex)
    their numbers in `channel`; `newcomers` may be added. `seal` says which copies count, and seals the new
    map; None: all count.

    Raises G35Error where `all_of_them` is set and a member is not reached, where no copy counts, where others
    do not stop changing the map, where no version follows, and as the change raises.
    """
    known: dict[bytes, PoolMap] = {}
    mine: _Mine | None = None
    for attempt in range(ROUNDS_MAX):
        if attempt:
            time.sleep(random.uniform(0, PAUSE_SECONDS * attempt))
        copies = yield from _read_all(channel, pool_map, numbers, newcomers, known)
        found = [
            each.pool_map
            for held in copies.values()
            for each in held
            if each.pool_map is not None and each.pool_map.pool_id == pool_map.pool_id
        ]
        if not found:
            continue  # Somebody was writing each copy that was read.
        if seal is not None and not (found := seal.counting(found)):
            raise seal.refusal()
        base, is_there = _in_force(found, mine)
        pool_map = base
        # What somebody has made another pool of, or says to be one, is not written over.
        reached = {
            nguid: number
            for nguid, number in numbers.items()
            if all(
                each.pool_map is None or each.pool_map.pool_id == base.pool_id
                for each in copies.get(nguid, ())
            )
        }
        taken = dict.fromkeys(numbers.keys() - reached.keys(), "it carries another pool")
        away = [each.nguid for each in base.namespaces if each.nguid not in reached]
        if away and all_of_them:
            raise G35Error(
                f"{len(away)} of the pool's namespaces are not reached, or carry another pool",
                "the pool map is changed with all of them",
            )
        try:
            target = yield from change(base, _guard(channel, base, reached, copies))
            if target != base or not is_there or not (seal is None or seal.holds(base)):
                versions = [each.version for each in counting(found)] + ([mine.wrote.version] if mine else [])
                target = target.model_copy(update={"version": version_after(max(versions))})
                target = target if seal is None else seal.put(target)
            elif not away and _is_everywhere(base, copies):
                return Changed(base, {})
            is_last_try = attempt >= TRIES_OF_A_COPY
            left = yield from replace_map(channel, target, reached, copies, is_last_try, seal)
        except Overtaken as overtaken:
            if overtaken.wrote:
                mine = _Mine(target, base, [*found, *(mine.seen if mine else ())])
            continue
        return Changed(target, left | {nguid: why for nguid, why in taken.items() if nguid in left})
    raise G35Error(
        "other programs change the pool map at the same time, again and again",
        "look for another operator, and for agents with pool.membership = auto; then say it again",
    )


@dataclass(frozen=True, slots=True)
class _Mine:
    """What this writer has begun to write, what of, and the maps that it knew then."""

    wrote: PoolMap
    made_from: PoolMap
    seen: Sequence[PoolMap]


def _in_force(found: Sequence[PoolMap], mine: _Mine | None) -> tuple[PoolMap, bool]:
    """The map to go on from, and whether it is as it lies there, with no other of its version."""
    candidates, greatest = list(found), counting(found)
    if mine is not None:
        greatest.append(mine.wrote)
        others = [each for each in found if each != mine.wrote]
        if any(each not in mine.seen for each in others):
            candidates = [mine.made_from, *others]
    base = agreed(candidates)
    top = max(each.version for each in greatest)
    return base, all(each == base for each in greatest if each.version == top)


def _is_everywhere(pool_map: PoolMap, copies: Mapping[str, Sequence[Copy]]) -> bool:
    return all(
        copy.pool_map is not None and (copy.pool_map is pool_map or copy.pool_map == pool_map)
        for member in pool_map.namespaces
        for copy in copies.get(member.nguid) or (Copy(b"", None),)
    )


def _read_all(
    channel: IoChannel,
    pool_map: PoolMap,
    numbers: Mapping[str, int],
    newcomers: Iterable[MapNamespace],
    known: dict[bytes, PoolMap],
) -> Steps[dict[str, Sequence[Copy]]]:
    """The copies of all namespaces of the map, of newcomers, and of those that another map names; none of one
    that cannot be read, which is not written."""
    copies: dict[str, Sequence[Copy]] = {}
    waiting = {each.nguid: each for each in (*pool_map.namespaces, *newcomers)}
    while waiting:
        also: dict[str, MapNamespace] = {}
        for nguid, member in waiting.items():
            copies[nguid] = ()
            if nguid in numbers:
                copies[nguid] = yield from read_copies(channel, numbers[nguid], member, known)
            for copy in copies[nguid]:
                if copy.pool_map is not None and copy.pool_map.pool_id == pool_map.pool_id:
                    also.update((each.nguid, each) for each in copy.pool_map.namespaces)
        waiting = {nguid: each for nguid, each in also.items() if nguid not in copies}
    return copies


def _guard(
    channel: IoChannel, base: PoolMap, numbers: Mapping[str, int], copies: Mapping[str, Sequence[Copy]]
) -> Guard:
    # Maps are written in this order, so every change has begun here.
    first = next((each for each in base.namespaces if each.nguid in numbers and copies.get(each.nguid)), None)

    def guard() -> Steps[None]:
        if first is not None:
            mark = yield from mark_at(channel, numbers[first.nguid], places_on(first)[0])
            if mark != copies[first.nguid][0].mark:
                raise Overtaken(False)

    return guard


def replace_map(
    channel: IoChannel,
    pool_map: PoolMap,
    numbers: Mapping[str, int],
    expected: Mapping[str, Sequence[Copy]] | None = None,
    is_last_try: bool = True,
    seal: MapSeal | None = None,
) -> Steps[dict[str, str]]:
    """Write a map to each of its namespaces, and read all of them back. Those that may still hold another:
    NGUID, why.

    `numbers` gives the reached NGUIDs (hex) their numbers in `channel`. A copy that is neither `expected` nor
    the map itself raises Overtaken. An unchanged copy may be a drive that does not write, or a writer that
    wrote the same again: it is left where this `is_last_try`, and raises Overtaken else. With a `seal`, only
    maps that count and are no older overtake the last try: an attacker on one enclosure does not keep the
    rest of the pool from a change.
    """

    def is_anothers(number: int, member: MapNamespace, which: int) -> Steps[bool]:
        if seal is None or not is_last_try:
            return True
        there = (yield from read_copies(channel, number, member, {})) or (Copy(b"", None),) * 2
        found = there[which].pool_map
        return (
            found is not None
            and (found.pool_id, found.version >= pool_map.version) == (pool_map.pool_id, True)
            and found != pool_map
            and bool(seal.counting([found]))
        )

    left: dict[str, str] = {}
    wrote, ours = False, name_of(pool_map)
    for member in pool_map.namespaces:
        number = numbers.get(member.nguid)
        if number is None:
            left[member.nguid] = "not reached"
            continue
        before = None if expected is None else expected.get(member.nguid, ())
        if before is not None and not before:
            left[member.nguid] = "it does not answer"
            continue
        try:
            for which, place in enumerate(places_on(member)):
                if before is not None:
                    mark = yield from mark_at(channel, number, place)
                    is_new = mark != before[which].mark and name_in(mark) != ours
                    if is_new and (yield from is_anothers(number, member, which)):
                        raise Overtaken(wrote)
                wrote = True
                yield from write_superblock(channel, number, bytes.fromhex(member.nguid), pool_map, [place])
        except G35Error as failed:
            left[member.nguid] = str(failed)
    for member in pool_map.namespaces:
        if member.nguid in left:
            continue
        number, nguid, places = numbers[member.nguid], bytes.fromhex(member.nguid), places_on(member)
        if (yield from superblock_copies_are(channel, number, nguid, pool_map, places)):
            continue
        left[member.nguid] = "what was written is not read back"
        for which, copy in enumerate(() if expected is None else expected[member.nguid]):
            try:
                mark = yield from mark_at(channel, number, places[which])
            except G35Error:
                continue
            is_new = name_in(mark) != ours and not (is_last_try and mark == copy.mark)
            if is_new and (yield from is_anothers(number, member, which)):
                raise Overtaken(True)
    return left
