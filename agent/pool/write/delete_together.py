"""Deletes of many keys by one call: their directories are read, and written, each once for all of them.

Each key is deleted as by `delete` (delete_and_pin.py), with the four guarantees of set_transaction.py. The
writers of all its sets are held from before their directories are read until the key is gone from flash, or
refused. They are taken in the order of their places and only where they are free, so this never waits for a
writer while it holds others.

A round has SETS_AT_ONCE sets and KEYS_AT_ONCE keys at the most, and one part for each namespace
(side_by_side.py). So a namespace that hangs holds its own sets, and those of keys that are written there.
Once no directory has come for SLOW_SECONDS, a key lets go of those that did, and the other keys go on. From
then on rounds with other namespaces go first.

Rare cases are left to a `delete` of their own (`UNTRIED`), and nothing was written for these. The directory
is in doubt, or busy twice, or does not come when it is read again: no image goes out that is older than
`Volume.is_recent` says. The key is named again in the call, or is or may be the victim of a put. Or it has a
mark in G4, and its directory does not name it. Or enclosures join the pool meanwhile.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Pending, Steps, Write
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.side_by_side import Part, Parts
from agent.pool.volume.volume import LOADS_IN_FLIGHT, Volume
from agent.pool.volume.writable_directory import read_once
from agent.pool.write.batch import SLOW_SECONDS, UNTRIED, Untried
from agent.pool.write.delete_and_pin import MAY_LAND, NOT_DELETED, NOT_REACHED
from agent.pool.write.set_transaction import HeaderErase

SETS_AT_ONCE: Final = 256
"""Of one round: their directories are in memory, and other writers of them wait."""
KEYS_AT_ONCE: Final = 1024
"""Of one round. Each holds a set that does not name it as well, so hardly a set is free before the last keys
are gone."""
WRITES_AT_ONCE: Final = 64
"""Under way at one namespace; fewer where a queue takes fewer of a worker."""
PASSES: Final = 2
"""Rounds in which a key may find a set busy."""

Deleted: TypeAlias = PutRefused | Untried | bool
"""What became of a key. True: it was there; False: it was not."""
_Place: TypeAlias = tuple[int, int]


class _Key:
    """One key of the call."""

    __slots__ = ("failure", "generations", "is_begun", "marks", "number", "places", "pseudonym", "unwritten")

    def __init__(self, number: int, pseudonym: bytes, places: Sequence[_Place]) -> None:
        self.number: Final = number
        self.pseudonym: Final = pseudonym
        self.places: Final = places
        """Of its sets, each once."""
        self.unwritten = 0
        """Sets that name it, and of which that is not over."""
        self.is_begun = False
        """Whether a write of it was sent."""
        self.failure: MissCause | None = None
        self.marks: list[bytes] = []
        self.generations: list[int] = []


class _HeldSet:
    """One set whose writer the round holds."""

    __slots__ = ("cached", "has_come", "is_held", "is_loading", "named", "trouble", "users")

    def __init__(self, cached: CachedSet) -> None:
        self.cached: Final = cached
        self.is_held = True
        self.users = 0
        """Keys that need it held."""
        self.is_loading = True
        self.has_come = False
        self.trouble: MissCause | None = None
        """Why it could not be read."""
        self.named: list[_Key] = []
        """Keys that it names, and that are to be taken out."""


class _Volley:
    """What is written of one set at once."""

    __slots__ = ("erases", "held", "keys")

    def __init__(self, held: _HeldSet, keys: list[_Key]) -> None:
        self.held: Final = held
        self.keys: Final = keys
        self.erases: Final[list[HeaderErase]] = []


def delete_together(
    volume: Volume, channel: IoChannel, keys: Sequence[bytes], wait_seconds: float
) -> Steps[list[Deleted]]:
    """Remove these keys, and say what became of each. Each round has `wait_seconds`.

    For a volume none of whose values waits in memory.
    """
    became: list[Deleted] = [UNTRIED] * len(keys)
    placement, before = volume.placement, volume.old_placement
    left = _distinct(volume, keys)
    late: set[int] = set()
    for _ in range(PASSES):
        busy: list[_Key] = []
        while left:
            if volume.placement is not placement or volume.old_placement is not before:
                return became  # a key may have been moved from the sets that were found for it
            if late:
                left.sort(key=lambda key: any(place[0] in late for place in key.places))
            some, left = _of_one_round(left)
            deleting = _Round(volume, channel, some, became, channel.now() + wait_seconds)
            try:
                yield from deleting.run()
            finally:
                deleting.close()
            busy += deleting.busy
            late |= deleting.late
        left = busy
    return became


def _distinct(volume: Volume, keys: Sequence[bytes]) -> list[_Key]:
    """The keys with their places, each key once."""
    pseudonyms = volume.pseudonyms(keys)
    ranks = [zip(*rank, strict=True) for rank in volume.places_of_many(b"".join(pseudonyms))]
    seen: set[bytes] = set()
    distinct: list[_Key] = []
    for number, places in enumerate(zip(*ranks, strict=True)):
        pseudonym = pseudonyms[number]
        if pseudonym not in seen:
            seen.add(pseudonym)
            distinct.append(_Key(number, pseudonym, list(dict.fromkeys(places))))
    return distinct


def _of_one_round(keys: Sequence[_Key]) -> tuple[list[_Key], list[_Key]]:
    """As many as one round may hold the sets of, and the others."""
    places: set[_Place] = set()
    some: list[_Key] = []
    others: list[_Key] = []
    for key in keys:
        more = [place for place in key.places if place not in places]
        if len(some) < KEYS_AT_ONCE and len(places) + len(more) <= SETS_AT_ONCE:
            places.update(more)
            some.append(key)
        else:
            others.append(key)
    return some, others


class _Round:
    """Keys whose sets are held at the same time."""

    def __init__(
        self, volume: Volume, channel: IoChannel, keys: list[_Key], became: list[Deleted], deadline: float
    ) -> None:
        self._volume: Final = volume
        self._channel: Final = channel
        self._keys: Final = keys
        self._became: Final = became
        self._deadline: Final = deadline
        self._parts: Final = Parts(channel)
        places = sorted({place for key in keys for place in key.places})
        self._borrowed: Final = volume.cache.borrow_many(
            [place[0] for place in places], [place[1] for place in places], volume.occupancy
        )
        self._lanes: Final = 1 + len({place[0] for place in places})
        """Parts that may have commands under way, one with reads beside one with writes."""
        self._held: Final[dict[_Place, _HeldSet]] = {}
        self._heard_at = channel.now()
        """When directories came last."""
        self.busy: Final[list[_Key]] = []
        """Of which a set is being written by others, or came late."""
        self.late: Final[set[int]] = set()
        """Namespaces that were not read within SLOW_SECONDS."""

    def run(self) -> Steps[None]:
        going = self._take()
        for namespace, sets in _by_namespace(list(self._held.values())).items():
            self._parts.start(namespace, self._load(sets))
        while len(self._parts) and self._channel.now() < self._heard_at + SLOW_SECONDS:
            yield from self._parts.go_on(may_grow=True)
        unread = [key for key in going if not self._is_looked_at(key)]
        named = [each for each in self._held.values() if each.named]
        for namespace, sets in _by_namespace(named).items():
            self._parts.start(namespace, self._write(sets))
        while len(self._parts):
            yield from self._parts.go_on(may_grow=False)
        for key in unread:
            self._end_unread(key)

    def close(self) -> None:
        self._parts.close()
        for each in self._held.values():
            self._release(each)
        self._volume.cache.give_back_many(self._borrowed)

    def _take(self) -> list[_Key]:
        """Take the writers that are free; the keys all of whose sets are held."""
        for cached in self._borrowed:  # in the order of their places
            if cached.writer.acquire(blocking=False):
                self._held[cached.namespace, cached.offset] = _HeldSet(cached)
        going: list[_Key] = []
        now = self._channel.now()
        for key in self._keys:
            if not all(place in self._held for place in key.places):
                self.busy.append(key)
            elif self._volume.in_doubt_writes.may_land(key.pseudonym, now):
                self._became[key.number] = PutRefused(MAY_LAND, MissCause.LATE)
            else:
                going.append(key)
                for place in key.places:
                    self._held[place].users += 1
        for place, each in list(self._held.items()):
            if not each.users:
                self._release(each)
                del self._held[place]
        return going

    def _release(self, held: _HeldSet) -> None:
        if held.is_held:
            held.is_held = False
            held.cached.end_write()

    def _let_go(self, key: _Key) -> None:
        """It needs its sets no more."""
        for place in key.places:
            held = self._held[place]
            held.users -= 1
            if not held.users and not held.is_loading:
                self._release(held)

    def _at_once(self, most: int) -> int:
        """Commands that may be under way at one namespace: several may share a queue."""
        return max(1, min(most, self._channel.queue_depth() // self._lanes))

    # -- reading ------------------------------------------------------------------------------------------

    def _load(self, sets: list[_HeldSet]) -> Part:
        """Read the directories of one namespace; none after one that was late."""
        left = list(sets)
        trouble: MissCause | None = None
        try:
            while left and trouble is not MissCause.LATE:
                at_once = self._at_once(LOADS_IN_FLIGHT)
                some, left = left[:at_once], left[at_once:]
                came: list[CachedSet] = []
                trouble = yield from read_once(
                    self._volume,
                    self._channel,
                    [each.cached for each in some],
                    self._deadline,
                    came=came,
                    in_flight=len(some),
                )
                if came:
                    self._heard_at = self._channel.now()
                there = set(map(id, came))
                for each in some:
                    each.has_come = id(each.cached) in there
                    each.trouble = None if each.has_come else trouble
        finally:
            for each in sets:
                each.is_loading = False
                if not each.users:
                    self._release(each)

    def _is_looked_at(self, key: _Key) -> bool:
        """Look for it in its directories. False: not all of them are there."""
        sets = [self._held[place] for place in key.places]
        if not all(each.has_come for each in sets):
            self.late.update(each.cached.namespace for each in sets if each.is_loading)
            self._let_go(key)
            return False
        naming: list[_HeldSet] = []
        is_simple = True
        for each in sets:
            cached = each.cached
            with cached.guard:
                directory = cached.directory
                assert directory is not None
                if cached.in_doubt:
                    is_simple = False
                elif directory.find(key.pseudonym) is not None:
                    naming.append(each)
                elif cached.covers(key.pseudonym) or directory.marks(key.pseudonym):
                    is_simple = False
        if not is_simple:
            self._let_go(key)
            return True
        key.unwritten = len(naming)
        for each in naming:
            each.named.append(key)
        if not naming:
            self._end(key)
        return True

    def _end_unread(self, key: _Key) -> None:
        """A set of it was not there in time: refuse it, unless all came since, or were not asked."""
        troubles = [self._held[place].trouble for place in key.places]
        causes = [trouble for trouble in troubles if trouble is not None]
        if causes:
            worst = max(causes, key=lambda cause: cause.value)
            self._became[key.number] = PutRefused(NOT_REACHED, worst)
        else:
            self.busy.append(key)

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self, sets: list[_HeldSet]) -> Part:
        """Take the keys out of the sets of one namespace, volley by volley."""
        left = sorted(sets, key=lambda each: each.cached.offset)
        while left and self._channel.now() < self._deadline:
            volleys: list[_Volley] = []
            room = self._at_once(WRITES_AT_ONCE)
            while left:
                held = left[0]
                held.named = [key for key in held.named if key.unwritten]
                if not held.named:
                    left.pop(0)  # all were left, for want of another set
                    continue
                # Each key has a header, and mostly one; the directory is one more.
                if volleys and len(held.named) >= room:
                    break
                keys = held.named[: max(1, room - 1)]
                del held.named[: len(keys)]
                if not held.named:
                    left.pop(0)
                volleys.append(_Volley(held, keys))
                room -= len(keys) + 1
                if room < 2:
                    break
            yield from self._read_again(volleys)
            yield from self._take_out(volleys)
        for held in left:
            for key in held.named:
                self._leave(key)

    def _read_again(self, volleys: Sequence[_Volley]) -> Part:
        """Read those again that were read a while ago, for an image goes over what others wrote since; and
        those that may lack a key of which the header has to go."""
        volume, channel = self._volume, self._channel
        old: list[_Volley] = []
        for volley in volleys:
            cached = volley.held.cached
            with cached.guard:
                lacks_entries = cached.lacks_entries()
            if lacks_entries or not volume.is_recent(cached, channel):
                old.append(volley)
        if not old:
            return
        came: list[CachedSet] = []
        yield from read_once(
            volume,
            channel,
            [each.held.cached for each in old],
            self._deadline,
            came=came,
            in_flight=self._at_once(LOADS_IN_FLIGHT),
        )
        there = {id(cached) for cached in came if not cached.in_doubt}
        for volley in old:
            if id(volley.held.cached) not in there:
                for key in volley.keys:
                    self._leave(key)
                volley.keys.clear()

    def _take_out(self, volleys: list[_Volley]) -> Part:
        """Send what takes these keys from their sets, and wait for it."""
        channel = self._channel
        writes: list[Write] = []
        for volley in volleys:
            self._clear(volley, writes)
        volleys = [volley for volley in volleys if volley.keys]
        if not volleys:
            return
        pendings = channel.write_many(writes)
        at = 0
        try:
            for volley in volleys:
                end = at + sum(len(erase.slots) for erase in volley.erases) + 1
                causes = yield from _causes(channel, pendings[at:end], self._deadline)
                at = end
                self._ended(volley, causes)
        finally:
            if at < len(pendings):  # the call breaks off
                for pending in pendings[at:]:
                    if not pending.done:
                        channel.abandon(pending)
                for volley in volleys:
                    volley.held.cached.write_failed()

    def _clear(self, volley: _Volley, writes: list[Write]) -> None:
        """Clear the keys' entries, here, and add the writes that do so on flash."""
        volume, channel, cached = self._volume, self._channel, volley.held.cached
        directory = cached.directory
        assert directory is not None
        for key in list(volley.keys):
            with cached.guard:
                slots = directory.find_all(key.pseudonym)
            if not slots and not key.is_begun:
                # A put has the slot, or another agent has deleted it.
                self._leave(key)
            if not key.unwritten:
                volley.keys.remove(key)  # it was left, here or for want of another set
                continue
            key.is_begun = True
            erase = HeaderErase(volume, channel, cached, slots, key.pseudonym)
            volley.erases.append(erase)
            with cached.guard:
                key.marks += directory.unmark(key.pseudonym)
                for slot in erase.slots:
                    entry = directory.entry(slot)
                    if entry is not None:
                        key.generations.append(entry.generation)
                    directory.clear(slot)
            writes += erase.zeros()
        if not volley.keys:
            return  # and nobody may hold the set any more
        with cached.guard:
            image = directory.image()
        writes.append((cached.namespace, cached.offset, [image]))

    def _ended(self, volley: _Volley, causes: Sequence[MissCause | None]) -> None:
        """All of it was answered, or is late."""
        of_directory = causes[-1]
        if of_directory is not None:
            volley.held.cached.write_failed()
        at = 0
        for key, erase in zip(volley.keys, volley.erases, strict=True):
            failure: MissCause | None = None
            for cause in causes[at : at + len(erase.slots)]:
                failure = failure or cause
            at += len(erase.slots)
            failure = failure or of_directory
            erase.settle(failure)
            key.failure = key.failure or failure
            key.unwritten -= 1
            if not key.unwritten:
                self._end(key)

    def _leave(self, key: _Key) -> None:
        """It is not written any more by this call."""
        if key.is_begun:
            key.failure = key.failure or MissCause.LATE
            key.unwritten -= 1
            if not key.unwritten:
                self._end(key)
        elif key.unwritten:
            key.unwritten = 0
            self._let_go(key)

    def _end(self, key: _Key) -> None:
        """Every set that named it was written, or has failed; or there is none."""
        volume, channel = self._volume, self._channel
        was_there = key.is_begun
        if key.failure is not None:
            self._became[key.number] = PutRefused(NOT_DELETED, key.failure)
        else:
            if volume.below is not None:
                volume.removed_marks.note(
                    key.pseudonym, key.marks, channel.now(), generations=key.generations
                )
            channel.tally(volume.settings.name).deletes += was_there
            self._became[key.number] = was_there
        self._let_go(key)


def _by_namespace(sets: Sequence[_HeldSet]) -> dict[int, list[_HeldSet]]:
    of_each: dict[int, list[_HeldSet]] = {}
    for each in sets:
        of_each.setdefault(each.cached.namespace, []).append(each)
    return of_each


def _causes(
    channel: IoChannel, pendings: Sequence[Pending], deadline: float
) -> Steps[list[MissCause | None]]:
    """Of each why it failed, or None."""
    causes: list[MissCause | None] = [None] * len(pendings)
    first = channel.arrived(pendings, 0)
    while first < len(pendings):
        causes[first] = yield from wait_for(channel, pendings[first], deadline)
        first = channel.arrived(pendings, first + 1)
    return causes
