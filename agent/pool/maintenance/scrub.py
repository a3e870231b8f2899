"""Scrub: a walk over all that is stored. It reads each slot as a get would, and takes out bad ones.

`Scrubber` goes from set to set: it reads the directory, then each slot that it names. A slot that does not
prove itself is looked at twice more by `take_out_bad`, PAUSE_SECONDS later, with the directory's writer held.
Its entry goes if it is still the same.

These are never held against a slot: no answer, no way there, and a namespace under suspicion. Nor is a key
other than the volume's, for this agent may be behind a change of the pool map, or an entry so young that its
put may be under way. Neither is a set without one slot that opens, or a namespace that fails others too
(cross_check.py): that tells of the drive, or of us, and not of its ranges.

A bad block of a file stays: a reader that meets it reports it, and the database of file names decides
(agent/fs/files/suspect_blocks.py). Where another agent writes such blocks, a scrub writes nothing
(`Volume.files_elsewhere`): two agents that write one directory may lose an entry of each other's, which is a
hit in /kv and a block in /fs.
"""

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
from agent.pool.format.occupancy import SetPlace
from agent.pool.late_answers import wait_for
from agent.pool.maintenance.cross_check import is_vouched_for
from agent.pool.maintenance.replication import Kept, keep_two
from agent.pool.maintenance.slot_look import READ_SECONDS, Finding, look_at
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import LEGAL, CachedSet, SlotState
from agent.pool.volume.media_errors import STRIKES, SlotAt
from agent.pool.volume.volume import Found, Volume, all_sets
from agent.pool.volume.writable_directory import pause
from agent.pool.write.set_transaction import SetTransaction

YOUNG_LEAST_SECONDS = 1.0
NOTHING_OPENS = 8
"""With so many bad slots and no good one, a set is left as it is."""
REPORTS_AT_ONCE = 4
"""Of a volume, at one call."""
PAUSE_SECONDS = 0.5
"""Between the first look at a slot and the next: a drive's brief trouble is over then."""
WALK_LEAST, WALK_REFUSED_SHARE = 100, 50
"""Once a walk has looked at so many slots of a namespace, and the medium refused one in so many, the drive is
to blame: this walk takes out nothing more there."""

_HARMLESS = (Finding.GOOD, Finding.UNKNOWN, Finding.OTHER_KEY)


@dataclass(slots=True)
class ScrubCounters:
    """Since the start. Written by the one thread that scrubs. `SCRUB_COUNTERS` in agent/telemetry/metrics.py
    says what each counts."""

    bytes_read: int = 0
    slots_checked: int = 0
    slots_bad: int = 0
    slots_stale: int = 0
    slots_quarantined: int = 0
    slots_young: int = 0
    slots_left: int = 0
    copies_missing: int = 0
    sets_skipped: int = 0
    passes: int = 0


def youth(volume: Volume) -> float:
    """For how many seconds an entry is left alone: twice as long as a put may take.

    An entry goes out beside its slot, so for a moment it names a value that is not there yet. A get looks as
    closely as a scrub, so an entry that was used lately is left alone as well.
    """
    return max(YOUNG_LEAST_SECONDS, 2 * volume.timing.write_deadline)


def is_young(volume: Volume, entry: Entry, wall: float) -> bool:
    """Whether a put of it may be under way, or its last get was a moment ago."""
    return entry.last_use_us > (wall - youth(volume)) * 1e6


def take_out_bad(
    volume: Volume,
    channel: IoChannel,
    namespace: int,
    offset: int,
    slots: Sequence[int],
    counters: ScrubCounters,
    *,
    is_given_up: bool = False,
) -> Steps[None]:
    """Look again at bad slots of one set, and take out those that still are. Blocks of files stay, unless the
    database of file names has given them up (`is_given_up`).

    It is one transaction. Another agent's write may come between: then the later image stays, as between two
    puts.
    """
    if volume.files_elsewhere:
        counters.slots_left += len(slots)
        return
    vouched = yield from is_vouched_for(volume, channel, namespace, offset, slots)
    if not vouched:
        counters.sets_skipped += 1
        if vouched is not None:
            name = _name(volume, namespace, offset)
            what = f"namespace {name} fails other slots as well, and nothing was removed there"
            volume.media_errors.complaints.world(what, f"the set at {offset}")
        return
    mended: list[bytes] = []
    with volume.borrowed_at((namespace, offset)) as (cached,):
        deadline = channel.now() + volume.timing.write_deadline
        with SetTransaction(volume, channel, cached) as change:
            if (yield from change.begin(deadline)) is not None:
                return
            changed = []
            for slot in slots:
                place = SlotAt(namespace, offset, slot)
                if (yield from _settle_slot(volume, channel, cached, place, counters, mended, is_given_up)):
                    changed.append(slot)
            if not changed:
                return
            with cached.guard:
                assert cached.directory is not None
                image = cached.directory.image()
            cause = yield from change.write(cached, image, changed, channel.now() + READ_SECONDS)
            if cause is not None:
                volume.media_errors.complaints.world(
                    f"a directory could not be written in namespace {_name(volume, namespace, offset)}",
                    f"the set at {offset} keeps its bad entries, {cause.name.lower()}",
                )
    for pseudonym in mended:
        yield from keep_two(volume, channel, pseudonym)


def _name(volume: Volume, namespace: int, offset: int) -> str:
    """The NGUID of the namespace that has a set of the volume at `offset`."""
    return volume.place(CachedSet(namespace, offset), 0).nguid.hex()


def _settle_slot(
    volume: Volume,
    channel: IoChannel,
    cached: CachedSet,
    place: SlotAt,
    counters: ScrubCounters,
    mended: list[bytes],
    is_given_up: bool,
) -> Steps[bool]:
    """The later looks at one slot, and their consequence. True: the remembered directory was changed."""
    assert cached.directory is not None
    entry, finding = cached.directory.entry(place.slot), Finding.BAD
    if entry is None:
        if volume.media_errors.strikes(place) < STRIKES:
            return False
    else:
        # The entry of a put that failed names nothing, however young it is.
        failed = cached.disproven.get(place.slot) == entry.generation
        if is_quarantined(entry) or (is_young(volume, entry, channel.wall()) and not failed):
            return False
        found = Found(cached, place.slot, entry)
        first = yield from look_at(volume, channel, found)
        counters.bytes_read += first.bytes_read
        if first.finding in _HARMLESS:
            return False
        look = yield from look_at(volume, channel, found)
        counters.bytes_read += look.bytes_read
        finding = look.finding
        # Nothing opens once the tenant was erased, so `erased` is asked after the look.
        if finding in _HARMLESS or volume.erased:
            return False
        if (finding, look.wrong) != (first.finding, first.wrong):
            return False  # It was damaged on its way: a medium gives the same bytes each time.
        if volume.settings.kind == "files" and not is_given_up:
            counters.slots_left += 1
            return False
    with cached.guard:
        directory = cached.directory
        assert directory is not None
        now = directory.entry(place.slot)
        state = cached.slot_state(place.slot, channel.now())
        if (state, SlotState.BAD) not in LEGAL or (now and now.generation) != (entry and entry.generation):
            return False
        if entry is not None:
            directory.clear(place.slot)
        if finding is Finding.GONE and volume.media_errors.strikes(place) < STRIKES:
            counters.slots_stale += 1
            return True
        if entry is not None:
            counters.slots_bad += 1
            mended.append(entry.pseudonym)
        # A slot that the medium refuses each time is bad. Wrong bytes may have another cause.
        blamed = finding is Finding.UNREADABLE or (
            entry is None or volume.media_errors.strike(place) >= STRIKES
        )
        if blamed and count_quarantined(directory) < QUARANTINED_MAX:
            directory.install(place.slot, quarantine_entry(channel.wall()))
            volume.media_errors.forgive(place)
            counters.slots_quarantined += 1
            volume.media_errors.complaints.world(
                f"a slot of namespace {_name(volume, place.namespace, place.offset)} is set aside",
                f"its medium is bad, slot {place.slot} of the set at {place.offset}",
            )
        return True


def look_into_reports(volumes: Sequence[Volume], channel: IoChannel, counters: ScrubCounters) -> Steps[None]:
    """Look at slots that gets and puts reported, a few of each volume."""
    for volume in volumes:
        for _ in range(REPORTS_AT_ONCE):
            place = volume.media_errors.next_report(channel.now(), PAUSE_SECONDS)
            if place is None or volume.erased:
                break
            if volume.settings.kind == "files" and volume.media_errors.strikes(place) < STRIKES:
                continue  # A block stays, and its reader has reported it (agent/fs/files/suspect_blocks.py).
            if channel.trusts(place.namespace):
                yield from take_out_bad(
                    volume, channel, place.namespace, place.offset, [place.slot], counters
                )


@dataclass(slots=True)
class _Met:
    """A walk's findings in one namespace."""

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
    """One walk after the other over some volumes, for one thread. The cursor is in memory alone."""

    def __init__(self, volumes: Sequence[Volume], counters: ScrubCounters | None = None) -> None:
        self._volumes = volumes
        self.counters = ScrubCounters() if counters is None else counters
        self.sets_done = 0
        """The sets that the pass under way has done."""
        self._walk: Iterator[tuple[Volume, SetPlace]] | None = None
        self._set: _SetAtHand | None = None
        self._met: dict[int, _Met] = {}
        """What the pass under way has met, by namespace."""

    @property
    def sets(self) -> int:
        return sum(extent.sets for volume in self._volumes for extent in volume.settings.extents)

    @property
    def is_between_passes(self) -> bool:
        return self._walk is None

    def advance(self, channel: IoChannel) -> Steps[int]:
        """One slot, or one directory, further; how many bytes were read. After the last the pass is over."""
        before = self.counters.bytes_read
        at_hand = self._set
        if at_hand is None:
            yield from self._begin_set(channel)
        elif at_hand.due:
            yield from self._look(channel, at_hand)
        else:
            self._set = None
            self.sets_done += 1
            yield from self._end_set(channel, at_hand)
        return self.counters.bytes_read - before

    def _begin_set(self, channel: IoChannel) -> Steps[None]:
        if self._walk is None:
            self._walk, self.sets_done, self._met = all_sets(self._volumes), 0, {}
        found = next(self._walk, None)
        if found is None:
            self._walk = None
            self.counters.passes += 1
            return
        volume, (namespace, offset) = found
        if volume.erased or not channel.trusts(namespace):
            self._skip()
            return
        block = memoryview(bytearray(DIRECTORY_BYTES))
        pending = channel.read(namespace, offset, block)
        cause = yield from wait_for(channel, pending, channel.now() + READ_SECONDS)
        self.counters.bytes_read += len(block)
        if cause is not None:
            self._skip()
            return
        wall = channel.wall()
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

    def _look(self, channel: IoChannel, at_hand: _SetAtHand) -> Steps[None]:
        slot, entry = at_hand.due.pop()
        found = Found(CachedSet(at_hand.namespace, at_hand.offset), slot, entry)
        look = yield from look_at(at_hand.volume, channel, found)
        finding = look.finding
        self.counters.bytes_read += look.bytes_read
        if finding in (Finding.UNKNOWN, Finding.OTHER_KEY) or at_hand.volume.erased:
            # Away by now, or too slow: so would the rest of the set be.
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
        kept = yield from keep_two(at_hand.volume, channel, entry.pseudonym)
        self.counters.copies_missing += kept is Kept.ONE

    def _end_set(self, channel: IoChannel, at_hand: _SetAtHand) -> Steps[None]:
        if not at_hand.bad or not channel.trusts(at_hand.namespace):
            return
        if not at_hand.good and len(at_hand.bad) >= NOTHING_OPENS:
            self.counters.sets_skipped += 1
            self._complain(
                at_hand,
                "not one of the slots of a set opens in",
                f"the set at {at_hand.offset}, {len(at_hand.bad)} slots",
            )
            return
        met = self._met[at_hand.namespace]
        if met.is_the_drive:
            self.counters.sets_skipped += 1
            if not met.is_told:
                met.is_told = True
                self._complain(
                    at_hand, "too many slots are refused by", f"{met.refused} of {met.looked_at} so far"
                )
            return
        yield from pause(channel, PAUSE_SECONDS)
        yield from take_out_bad(
            at_hand.volume, channel, at_hand.namespace, at_hand.offset, at_hand.bad, self.counters
        )

    def _complain(self, at_hand: _SetAtHand, what: str, why: str) -> None:
        volume = at_hand.volume
        name = _name(volume, at_hand.namespace, at_hand.offset)
        volume.media_errors.complaints.world(f"{what} namespace {name}, and nothing was removed there", why)


class Pace:
    """So many bytes a second, and an eighth of that while others are at work. `now` in seconds."""

    BUSY_SHARE = 1 / 8
    BUSY_BYTES = 64 << 10
    """Others may move so much between two of our steps (looks at the pool map, pings) without being at
    work."""

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
