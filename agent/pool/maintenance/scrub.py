"""Scrub: a walk over all that is stored, which reads each slot as a get would and takes out what is bad.

`Scrubber` goes from set to set, reads the directory, and then slot by slot what it names. It keeps one
directory, and nothing of what it opens. What does not prove itself is looked at again PAUSE_SECONDS later,
twice, by `settle`, which holds the directory's writer. Only what is then still the same entry goes.

What is never held against a slot: no answer, no way there, a namespace under suspicion; another key than the
volume's (an agent that is behind a change of the pool map must not take out what it cannot open); an entry so
young that its put may be under way; a set of which not one slot opens, and a namespace that fails others too,
of those that this walk has met or of those that are asked beside the slot
(agent/pool/maintenance/cross_check.py). That says something of the drive, or of us, and nothing of its
ranges.

A block of a file is not taken out here, however bad: it is given up when a reader has met it, and by whoever
keeps the names of the files (agent/fs/files/suspects.py). Where another agent writes such blocks, nothing is
written at all (`Volume.left_to_others`): two agents
that write one directory may lose an entry of each other's, which is a hit in /kv and a block in /fs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agent.pool.format.directory import (
    DIRECTORY_BYTES,
    QUARANTINED_MAX,
    Directory,
    Entry,
    count_quarantined,
    is_quarantined,
    quarantine_entry,
)
from agent.pool.maintenance.cross_check import is_vouched_for
from agent.pool.maintenance.replication import Kept, keep_two
from agent.pool.maintenance.slot_look import READ_SECONDS, Finding, look_at
from agent.pool.steps import Acquire, Lanes, Steps, wait_for
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.media_errors import STRIKES, SlotAt
from agent.pool.volume.volume import Volume
from agent.pool.volume.writable_directory import load_writable, pause

log = logging.getLogger(__name__)

YOUNG_LEAST_SECONDS = 1.0
NOTHING_OPENS = 8
"""So many bad slots of a set without one that is good: nothing is taken out of it."""
PAUSE_SECONDS = 0.5
"""Between the first look at a slot and the next: what troubles a drive for a moment is over then."""
WALK_LEAST, WALK_REFUSED_SHARE = 100, 50
"""Once a walk has looked at so many slots of a namespace, and the medium did not give one in so many, it is
the drive: nothing more is taken out there in this walk."""


_HARMLESS = (Finding.GOOD, Finding.UNKNOWN, Finding.OTHER_KEY)


@dataclass(slots=True)
class ScrubCounters:
    """Since the start. Written by the one thread that scrubs."""

    bytes_read: int = 0
    slots_checked: int = 0
    slots_bad: int = 0
    """Did not prove themselves, three times; their entries were removed."""
    slots_stale: int = 0
    """Held something else than their entry said; removed as well."""
    slots_quarantined: int = 0
    slots_young: int = 0
    """Not looked at, for a put or a get of them was a moment ago."""
    slots_left: int = 0
    """Found bad, and left: blocks of files, which are given up by whoever keeps the files' names, or not."""
    copies_missing: int = 0
    """Values of which there was one copy where two are kept, and of which no second could be made."""
    sets_skipped: int = 0
    """Away, under suspicion, not one slot of it opened, or its namespace failed others as well."""
    passes: int = 0


def youth(volume: Volume) -> float:
    """For how many seconds an entry is not looked at: twice as long as a put may take.

    An entry goes out beside its slot, so for a moment it names what is not there yet. Last used lately, it
    was also read lately, by a get, which looks as closely.
    """
    return max(YOUNG_LEAST_SECONDS, 2 * volume.timing.write_deadline)


def is_young(volume: Volume, entry: Entry, wall: float) -> bool:
    """Whether a put of it may be under way, or its last get was a moment ago."""
    return entry.last_use_us > (wall - youth(volume)) * 1e6


def settle(
    volume: Volume,
    lanes: Lanes,
    namespace: int,
    offset: int,
    slots: Sequence[int],
    counters: ScrubCounters,
    *,
    is_given_up: bool = False,
) -> Steps[None]:
    """Look again at slots of one set that were found bad, and take out what still is. Blocks of files stay,
    unless it `is_given_up` what lies in the slots: by who keeps their names.

    The directory's writer is held from before the directory is read until it is written, so nothing of this
    agent's comes between. Another agent's write may: then the later image stays, as between two puts.
    """
    if volume.left_to_others:
        counters.slots_left += len(slots)
        return
    vouched = yield from is_vouched_for(volume, lanes, namespace, offset, slots)
    if not vouched:
        counters.sets_skipped += 1
        if vouched is not None:
            log.warning("namespace %d fails other slots as well: nothing was removed there", namespace)
        return
    cached = volume.cache.borrow(namespace, offset, volume.occupancy)
    mended: list[bytes] = []
    try:
        deadline = lanes.now() + volume.timing.write_deadline
        if not (yield Acquire(cached.writer, deadline)):
            return
        try:
            if (yield from load_writable(volume, lanes, [cached], deadline)) is not None:
                return
            changed = False
            for slot in slots:
                place = SlotAt(namespace, offset, slot)
                changed |= yield from _settle_slot(
                    volume, lanes, cached, place, counters, mended, is_given_up
                )
            if not changed:
                return
            with cached.guard:
                assert cached.directory is not None
                image = cached.directory.image()
            cause = yield from wait_for(
                lanes, lanes.write(namespace, offset, [image]), lanes.now() + READ_SECONDS
            )
            if cause is not None:
                log.warning("a directory could not be written, and keeps what is bad: %s", cause.name.lower())
        finally:
            cached.end_write()
    finally:
        volume.cache.give_back(cached)
    for pseudonym in mended:
        yield from keep_two(volume, lanes, pseudonym)


def _settle_slot(
    volume: Volume,
    lanes: Lanes,
    cached: CachedSet,
    place: SlotAt,
    counters: ScrubCounters,
    mended: list[bytes],
    is_given_up: bool,
) -> Steps[bool]:
    """The later looks at one slot, and what follows. True where the remembered directory was changed."""
    assert cached.directory is not None
    entry, finding = cached.directory.entry(place.slot), Finding.BAD
    if entry is None:
        if volume.damage.strikes(place) < STRIKES:
            return False
    else:
        # The entry of a put that failed names nothing, however young it is.
        failed = cached.disproven.get(place.slot) == entry.generation
        if is_quarantined(entry) or (is_young(volume, entry, lanes.wall()) and not failed):
            return False
        first = yield from look_at(volume, lanes, place, entry)
        counters.bytes_read += first.bytes_read
        if first.finding in _HARMLESS:
            return False
        look = yield from look_at(volume, lanes, place, entry)
        counters.bytes_read += look.bytes_read
        finding = look.finding
        # The tenant may have been erased meanwhile, and then nothing opens: that is asked after the look.
        if finding in _HARMLESS or volume.erased:
            return False
        if (finding, look.wrong) != (first.finding, first.wrong):
            return False  # It was damaged on its way: a medium gives the same each time.
        if volume.settings.kind == "files" and not is_given_up:
            counters.slots_left += 1
            return False
    with cached.guard:
        directory = cached.directory
        assert directory is not None
        now = directory.entry(place.slot)
        if place.slot in cached.reserved or (now and now.generation) != (entry and entry.generation):
            return False
        if entry is not None:
            directory.clear(place.slot)
        if finding is Finding.GONE and volume.damage.strikes(place) < STRIKES:
            counters.slots_stale += 1
            return True
        if entry is not None:
            counters.slots_bad += 1
            mended.append(entry.pseudonym)
        # What the medium refuses each time is bad. Of what it gave and was wrong it may not be the cause.
        blamed = finding is Finding.UNREADABLE or (entry is None or volume.damage.strike(place) >= STRIKES)
        if blamed and count_quarantined(directory) < QUARANTINED_MAX:
            directory.install(place.slot, quarantine_entry(lanes.wall()))
            volume.damage.forgive(place)
            counters.slots_quarantined += 1
            log.warning(
                "slot %d of the set at %d of namespace %d is set aside: its medium is bad",
                place.slot, place.offset, place.namespace,
            )  # fmt: skip
        return True


def look_into_reports(
    volumes: Sequence[Volume], lanes: Lanes, counters: ScrubCounters, most: int = 4
) -> Steps[None]:
    """What gets and puts have met, `most` slots of each volume."""
    for volume in volumes:
        for _ in range(most):
            place = volume.damage.next_report(lanes.now(), PAUSE_SECONDS)
            if place is None or volume.erased:
                break
            if volume.settings.kind == "files" and volume.damage.strikes(place) < STRIKES:
                continue  # A block stays, and its reader has noted it with who keeps the files' names.
            if lanes.trusts(place.namespace):
                yield from settle(volume, lanes, place.namespace, place.offset, [place.slot], counters)


@dataclass(slots=True)
class _Met:
    """What a walk has met in a namespace."""

    looked_at: int = 0
    refused: int = 0
    is_told: bool = False

    @property
    def is_the_drive(self) -> bool:
        return self.looked_at >= WALK_LEAST and self.refused * WALK_REFUSED_SHARE > self.looked_at


@dataclass(slots=True)
class _SetAtHand:
    volume: Volume
    namespace: int
    offset: int
    due: list[tuple[int, Entry]]
    bad: list[int]
    good: int = 0


class Scrubber:
    """One walk after the other over some volumes. One thread drives it; the cursor is in memory alone."""

    def __init__(self, volumes: Sequence[Volume], counters: ScrubCounters | None = None) -> None:
        self._volumes = volumes
        self.counters = ScrubCounters() if counters is None else counters
        self.sets_done = 0
        """Of the pass under way."""
        self._walk: Iterator[tuple[Volume, int, int]] | None = None
        self._set: _SetAtHand | None = None
        self._met: dict[int, _Met] = {}
        """By namespace, of the pass under way."""

    @property
    def sets(self) -> int:
        """How many a pass looks at."""
        return sum(extent.sets for volume in self._volumes for extent in volume.settings.extents)

    @property
    def is_between_passes(self) -> bool:
        return self._walk is None

    def _places(self) -> Iterator[tuple[Volume, int, int]]:
        for volume in self._volumes:
            for extent in volume.settings.extents:
                for number in range(extent.sets):
                    yield volume, extent.namespace, extent.offset + number * volume.settings.set_bytes

    def advance(self, lanes: Lanes) -> Steps[int]:
        """One slot, or one directory, further; how many bytes were read. After the last the pass is over."""
        before = self.counters.bytes_read
        at_hand = self._set
        if at_hand is None:
            yield from self._begin_set(lanes)
        elif at_hand.due:
            yield from self._look(lanes, at_hand)
        else:
            self._set = None
            self.sets_done += 1
            yield from self._end_set(lanes, at_hand)
        return self.counters.bytes_read - before

    def _begin_set(self, lanes: Lanes) -> Steps[None]:
        if self._walk is None:
            self._walk, self.sets_done, self._met = self._places(), 0, {}
        volume, namespace, offset = next(self._walk, (None, 0, 0))
        if volume is None:
            self._walk = None
            self.counters.passes += 1
            return
        if volume.erased or not lanes.trusts(namespace):
            self._skip()
            return
        block = memoryview(bytearray(DIRECTORY_BYTES))
        pending = lanes.read(namespace, offset, block)
        cause = yield from wait_for(lanes, pending, lanes.now() + READ_SECONDS)
        self.counters.bytes_read += len(block)
        if cause is not None:
            self._skip()
            return
        wall = lanes.wall()
        due = [
            (slot, entry)
            for slot, entry in Directory(block)
            if not is_quarantined(entry) and not (entry.expiry and entry.expiry <= wall)
        ]
        young = [each for each in due if is_young(volume, each[1], wall)]
        self.counters.slots_young += len(young)
        if young:
            due = [each for each in due if each not in young]
        self._set = _SetAtHand(volume, namespace, offset, due, [])

    def _skip(self) -> None:
        self.sets_done += 1
        self.counters.sets_skipped += 1

    def _look(self, lanes: Lanes, at_hand: _SetAtHand) -> Steps[None]:
        slot, entry = at_hand.due.pop()
        place = SlotAt(at_hand.namespace, at_hand.offset, slot)
        look = yield from look_at(at_hand.volume, lanes, place, entry)
        finding = look.finding
        self.counters.bytes_read += look.bytes_read
        if finding in (Finding.UNKNOWN, Finding.OTHER_KEY) or at_hand.volume.erased:
            # Away by now, or too slow: the rest of the set would only be more of the same.
            at_hand.due.clear()
            self.counters.sets_skipped += 1
            return
        self.counters.slots_checked += 1
        met = self._met.setdefault(at_hand.namespace, _Met())
        met.looked_at += 1
        met.refused += finding is Finding.UNREADABLE
        if finding is not Finding.GOOD:
            at_hand.bad.append(slot)
            return
        at_hand.good += 1
        kept = yield from keep_two(at_hand.volume, lanes, entry.pseudonym)
        self.counters.copies_missing += kept is Kept.ONE

    def _end_set(self, lanes: Lanes, at_hand: _SetAtHand) -> Steps[None]:
        if not at_hand.bad or not lanes.trusts(at_hand.namespace):
            return
        if not at_hand.good and len(at_hand.bad) >= NOTHING_OPENS:
            self.counters.sets_skipped += 1
            log.warning(
                "not one of %d slots opens in the set at %d of namespace %d: nothing was removed there",
                len(at_hand.bad), at_hand.offset, at_hand.namespace,
            )  # fmt: skip
            return
        met = self._met[at_hand.namespace]
        if met.is_the_drive:
            self.counters.sets_skipped += 1
            if not met.is_told:
                met.is_told = True
                log.warning(
                    "namespace %d did not give %d of %d slots: nothing was removed there",
                    at_hand.namespace, met.refused, met.looked_at,
                )  # fmt: skip
            return
        yield from pause(lanes, PAUSE_SECONDS)
        yield from settle(
            at_hand.volume, lanes, at_hand.namespace, at_hand.offset, at_hand.bad, self.counters
        )


class Pace:
    """So many bytes a second, and an eighth of that while others are at work. `now` in seconds."""

    BUSY_SHARE = 1 / 8
    BUSY_BYTES = 64 << 10
    """What others move between two steps of ours without being in the way: looks at the pool map, pings."""

    def __init__(self, bytes_per_second: int, moved_by_others: Callable[[], int]) -> None:
        """`moved_by_others` tells how many bytes all others have moved since the start."""
        self._rate = bytes_per_second
        self._moved_by_others = moved_by_others
        self._moved = 0
        self._free_at = 0.0

    def spend(self, count: int, now: float) -> float:
        """`count` bytes were read; how many seconds to wait before any more are."""
        moved = self._moved_by_others()
        is_busy, self._moved = moved - self._moved > self.BUSY_BYTES, moved
        rate = self._rate * (self.BUSY_SHARE if is_busy else 1.0)
        self._free_at = max(self._free_at, now) + count / rate
        return self._free_at - now
