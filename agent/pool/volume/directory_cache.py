"""The directories that an agent remembers: hints, bounded in number, safe to lose.

* `guard` protects the entries and the reservations of a `CachedSet`. It is held for microseconds and never
  across a yield, so a plain `with` is right even in steps.
* `writer` is held while a write of this directory is under way. It is taken with `Acquire`, because its
  holder waits for the fabric. So one agent never has two images of one directory in flight. Two agents may;
  the later image wins, and a lost entry is a lost hit. `end_write` gives it back, and counts, so that a read
  that crossed the write is known as old.
* A directory that came with damage is in doubt (agent/pool/format/directory.py); the damaged entries stay as
  hints. A whole block ends the doubt. So does the same damage, byte for byte, in DAMAGE_LOOKS reads with time
  between them: that is flash's own.
* A set in use is not dropped: a second copy could be loaded beside it, and the agent would lose its own
  updates.
"""

import enum
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.pool.format.directory import Directory, is_quarantined
from agent.pool.format.occupancy import Occupancy, SetPlace
from agent.pool.format.spill_mark import is_mark
from agent.pool.volume.set_versions import SetVersions, is_later, place_of

ANSWER_SECONDS: Final = 0.05
"""How long a failed put waits for the answer of its directory write: without one, the directory would be
fenced (agent/remote/fence.py)."""
COOLDOWN_SECONDS: Final = 60.0
"""How long a slot is left alone after a failed write: an abandoned write may land late, over a newer value,
and a medium that refused one write will refuse the next."""
DAMAGE_LOOKS: Final = 3
"""Reads with the same damage after which it is held to be flash's own, and not of the way."""
DAMAGE_LOOK_SECONDS: Final = 0.5
"""The least time between two such reads."""
FILES_DAMAGE_LOOK_SECONDS: Final = 5.0
"""The same where a lost entry is a block of a file. Puts can go elsewhere meanwhile, and deletions wait."""


def damage_look_seconds(of_files: bool) -> float:
    """Between two reads that weigh in, of the directories of a volume."""
    return FILES_DAMAGE_LOOK_SECONDS if of_files else DAMAGE_LOOK_SECONDS


APPROXIMATE_BYTES: Final = 4096 + 1024
"""What one cached set takes: the block, the object round it and its place in the table."""
NO_VICTIM: Final = (-1, b"")
"""The victim of a slot whose victim leaves no mark: a generation that no value has."""
LOOKS: Final = 8
"""Sets that are looked at for one to be forgotten."""


class SlotState(enum.Enum):
    """The state of a slot as an agent sees it."""

    # Each put looks it up, and an Enum's own hash is Python's.
    __hash__ = object.__hash__

    FREE = "free"
    NAMED = "named by an entry"
    RESERVED = "reserved for a write"
    COOLING = "cooling down"
    BAD = "set aside"


LEGAL: Final = {
    (SlotState.FREE, SlotState.NAMED),
    (SlotState.FREE, SlotState.RESERVED),
    (SlotState.FREE, SlotState.COOLING),
    (SlotState.FREE, SlotState.BAD),
    (SlotState.NAMED, SlotState.FREE),
    (SlotState.NAMED, SlotState.RESERVED),
    (SlotState.NAMED, SlotState.COOLING),
    (SlotState.NAMED, SlotState.BAD),
    (SlotState.RESERVED, SlotState.FREE),
    (SlotState.RESERVED, SlotState.NAMED),
    (SlotState.RESERVED, SlotState.COOLING),
    (SlotState.COOLING, SlotState.FREE),
    (SlotState.COOLING, SlotState.NAMED),
    (SlotState.COOLING, SlotState.BAD),
    (SlotState.BAD, SlotState.FREE),
    (SlotState.BAD, SlotState.NAMED),
    (SlotState.BAD, SlotState.COOLING),
}
"""A read of the directory may show what another agent did: FREE, NAMED and BAD follow each other. Only this
agent reserves a slot, and never one that cools down or is bad."""


@dataclass(slots=True, eq=False)
class CachedSet:
    """One set's directory as this agent last saw it; `directory` is None until it was read once."""

    namespace: int
    offset: int
    occupancy: Occupancy | None = None
    """Where the taken slots of its directory are counted for as long as it is remembered."""
    directory: Directory | None = None
    loaded_at: float = float("-inf")
    """When it was read or written here last."""
    read_at: float = float("-inf")
    """When the read was answered that brought `directory`. A write of ours since tells nothing of others."""
    asked_at: float = float("-inf")
    """When the read went out that brought `directory`: what others did before is in there. Never, where a
    write of ours failed since."""
    fault: str | None = None
    reserved: set[int] = field(default_factory=set)
    victims: dict[int, tuple[int, bytes]] | None = None
    """Reserved slots whose victims leave a mark (spill_mark.py), with the victims' generations and the marks
    as a block has them (mark_block.py). None: there was none yet, as where no place in G4 is configured."""
    unnamed: dict[int, bool] = field(default_factory=dict)
    """Reserved slots whose value is on flash and waits to be named, by no write that is under way. True:
    another agent has named a value of its own there since."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Slots whose entry of this generation was taken out here alone, for a put that is to say so on flash."""
    covered: dict[int, bytes] | None = None
    """Reserved slots in which flash names a key that is not named there here, by its pseudonym: mostly the
    victim of a put under way. None: there are none."""
    guard: threading.Lock = field(default_factory=threading.Lock)
    writer: threading.Lock = field(default_factory=threading.Lock)
    writes: int = 0
    """Writes of this directory that ended."""
    users: int = 0
    disproven: dict[int, int] = field(default_factory=dict)
    """Slots that did not hold the value of their entry, of this generation. A get may try again; for a put
    the key is not there, or an entry that a crash left without its value would keep the key out for ever."""
    cooldown_until: dict[int, float] = field(default_factory=dict)
    """Slots that a write failed on, and until when: it may yet land, or the medium be bad there."""
    damage: dict[int, bytes] = field(default_factory=dict)
    """Entries with a wrong CRC in the block that was read last."""
    damage_looks: int = 0
    """Reads that had this damage, each at least some time after the one before."""
    damage_seen_at: float = float("-inf")
    versions: SetVersions | None = None
    """The versions by which this process and others of the agent learn of each other's writes; None: there
    are no others."""
    version: int = 0
    """The version of the remembered directory, where another process writes it."""

    @property
    def in_doubt(self) -> bool:
        """Whether what is remembered may be less than what flash has: nothing is written by it."""
        return self.directory is not None and self.directory.in_doubt

    def accept(
        self,
        block: memoryview,
        now: float,
        writes: int,
        *,
        holds_writer: bool = False,
        look_seconds: float = DAMAGE_LOOK_SECONDS,
        asked_at: float = float("-inf"),
        version: int = 0,
    ) -> int:
        """Take over a block read from flash; how many damaged entries it had.

        `writes` is `self.writes` of when the read went out: a block that crossed a write of ours may be
        either image, so ours stays. Reserved slots stay as well: flash has the entry that went, or one that
        is not acknowledged yet. In a slot of `unnamed` an entry that did not go is another agent's: it is
        taken over, so no image of ours takes it from flash. `look_seconds` lie between two reads that speak
        for damage of flash's own. `version`: `shared_version` of when the read went out.
        """
        with self.guard:
            ours = self.directory
            if ours is not None and self._knows_newer(version):
                return 0
            if ours is None:
                fresh = Directory(block)
                doubted = fresh.doubted
                if self.occupancy is not None:
                    self.occupancy.note_forgotten((self.namespace, self.offset), 0)
            elif self.was_written(writes) if not holds_writer else self.writes != writes:
                return 0
            else:
                # Mostly flash says what we know. What is the same was checked when we first read it.
                differing = ours.unlike(block)
                fresh = Directory(block, differing)
                fresh.merge_uses(ours, differing)
                fresh.keep_in_doubt(ours)
                # Of flash as it is: a put that has reserved a slot whose entry is damaged changes no flash.
                doubted = dict(fresh.doubted)
                self.covered = None
                for slot in self.reserved:
                    if slot not in self.unnamed or not self._is_anothers(fresh, slot):
                        self._take_reserved(fresh, slot, ours)
                if self.dropped:
                    self.dropped = {
                        slot: generation for slot, generation in self.dropped.items() if slot in self.reserved
                    }
                ours.count_in(None)
            self._weigh(fresh, doubted, now, look_seconds)
            fresh.count_in(self.occupancy)
            self.directory = fresh
            self.version = version
            # Of a damaged directory it is not believed that what it does not name is absent.
            self.loaded_at = now if not fresh.corrupt_keys else float("-inf")
            self.read_at, self.asked_at = now, asked_at
            if self.disproven:
                standing = (
                    (slot, generation, fresh.entry(slot)) for slot, generation in self.disproven.items()
                )
                self.disproven = {
                    slot: generation
                    for slot, generation, entry in standing
                    if entry is not None and entry.generation == generation
                }
        return len(fresh.corrupt_keys)

    def _is_anothers(self, fresh: Directory, slot: int) -> bool:
        """Whether another agent has named a value in a slot of `unnamed`, now or before."""
        if self.unnamed[slot]:
            return True
        entry = fresh.entry(slot)
        is_anothers = entry is not None and entry.generation != self.dropped.get(slot)
        self.unnamed[slot] = is_anothers
        return is_anothers

    def _take_reserved(self, fresh: Directory, slot: int, ours: Directory) -> None:
        """Keep our entry of a reserved slot. Its mark stays only where flash has that, or names the victim
        that is to leave it: else a delete through another agent has taken it, or the victim."""
        victim, mark = self.victims.get(slot, NO_VICTIM) if self.victims is not None else NO_VICTIM
        named, own = fresh.entry(slot), ours.entry(slot)
        if named is not None and (own is None or own.pseudonym != named.pseudonym):
            self.covered = self.covered or {}
            self.covered[slot] = named.pseudonym
        is_there = named is not None and named.generation == victim
        if fresh.mark_block is not None:
            if is_there and mark:
                fresh.mark_block.add(mark)
            fresh.take_over(slot, ours)
            return
        ghost, on_flash = ours.ghost(slot), fresh.ghost(slot)
        fresh.take_over(slot, ours)
        if is_mark(ghost) and on_flash != ghost and not is_there:
            fresh.unmark_slot(slot)

    def _weigh(self, fresh: Directory, doubted: dict[int, bytes], now: float, look_seconds: float) -> None:
        """What a read says of the damage that it came with, `doubted`."""
        if not doubted:
            if self.damage_looks:
                self.damage, self.damage_looks = {}, 0
            return
        if doubted != self.damage:
            self.damage, self.damage_looks, self.damage_seen_at = dict(doubted), 1, now
        elif now - self.damage_seen_at >= look_seconds and self.damage_looks < DAMAGE_LOOKS:
            self.damage_looks, self.damage_seen_at = self.damage_looks + 1, now
        if self.damage_looks >= DAMAGE_LOOKS:
            fresh.believe()

    def end_reservation(self, slot: int) -> None:
        """The value is named in the slot, or the slot is free or another agent's."""
        with self.guard:
            self.reserved.discard(slot)
            self.unnamed.pop(slot, None)
            if self.victims is not None:
                self.victims.pop(slot, None)
            if self.covered is not None:
                self.covered.pop(slot, None)

    def covers(self, pseudonym: bytes) -> bool:
        """Whether flash may name the key in a slot where it is not named here. Called with `guard` held."""
        return self.lacks_entries() or (self.covered is not None and pseudonym in self.covered.values())

    def lacks_entries(self) -> bool:
        """Whether flash may have entries that were taken out here alone, since the last read, for a put that
        came to nothing; whose they were is not known any more. Called with `guard` held."""
        return bool(self.dropped) and not self.dropped.keys() <= self.reserved

    def was_written(self, writes: int) -> bool:
        """Whether a write of ours has crossed a read that went out at `writes`. Then `accept` has left the
        block alone, and what another agent wrote is not known."""
        return self.writes != writes or self.writer.locked()

    def shared_version(self) -> int:
        """The version that the processes of this agent share; 0 where there is one process alone."""
        versions = self.versions
        return 0 if versions is None else versions.of(place_of(self.namespace, self.offset))

    def is_overtaken(self) -> bool:
        """Whether another process of this agent may have written the directory since it was read here."""
        versions = self.versions
        return versions is not None and not versions.is_writer and self.version != self.shared_version()

    def _knows_newer(self, version: int) -> bool:
        """Whether a read of a later version was answered before one that went out at `version`."""
        return self.versions is not None and not self.versions.is_writer and is_later(self.version, version)

    def end_write(self) -> None:
        if self.versions is not None:
            self.versions.raise_at(place_of(self.namespace, self.offset))
        self.writes += 1
        self.writer.release()

    def write_failed(self) -> None:
        """Flash may have entries yet that were taken out here."""
        with self.guard:
            self.asked_at = float("-inf")

    def disprove(self, slot: int, generation: int) -> None:
        """The slot does not hold what its entry of this generation says."""
        with self.guard:
            self.disproven[slot] = generation

    def bear_out(self, slot: int) -> None:
        """The slot holds what its entry says."""
        if self.disproven:
            with self.guard:
                self.disproven.pop(slot, None)

    def cool_down(self, slot: int, now: float) -> None:
        """A write of the slot failed, and may land yet."""
        with self.guard:
            self.cooldown_until[slot] = now + COOLDOWN_SECONDS

    def restore_cooldown(self, slot: int, until: float, now: float) -> None:
        """The slot takes values again, unless it was cooling down before for another reason: `until` then."""
        with self.guard:
            if until > now:
                self.cooldown_until[slot] = until
            else:
                self.cooldown_until.pop(slot, None)

    def slot_state(self, slot: int, now: float) -> SlotState:
        """Called with `guard` held."""
        if slot in self.reserved:
            return SlotState.RESERVED
        if self.cooldown_until.get(slot, 0.0) > now:
            return SlotState.COOLING
        entry = self.directory.entry(slot) if self.directory is not None else None
        if entry is None:
            return SlotState.FREE
        return SlotState.BAD if is_quarantined(entry) else SlotState.NAMED

    def unavailable(self, now: float) -> set[int]:
        """Slots that no new value may take at the moment. Called with `guard` held."""
        if not self.cooldown_until:
            return self.reserved
        self.cooldown_until = {slot: until for slot, until in self.cooldown_until.items() if until > now}
        return self.reserved.union(self.cooldown_until)


class DirectoryCache:
    """Cached sets by place, the least recently used dropped first."""

    def __init__(self, budget_bytes: int, versions: SetVersions | None = None) -> None:
        self.capacity = max(16, budget_bytes // APPROXIMATE_BYTES)
        self._versions = versions
        self.follows: Final[bool] = versions is not None and not versions.is_writer
        """Whether another process of the agent writes the directories."""
        self._sets: OrderedDict[tuple[int, int], CachedSet] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sets)

    def borrow(self, namespace: int, offset: int, occupancy: Occupancy | None = None) -> CachedSet:
        """The set at a byte offset of a namespace, read or not, to be given back. `occupancy` is its
        volume's."""
        place = (namespace, offset)
        with self._lock:
            cached = self._sets.get(place)
            if cached is None:
                cached = self._sets[place] = CachedSet(namespace, offset, occupancy, versions=self._versions)
                cached.users = 1
                while len(self._sets) > self.capacity and self._drop_one():
                    pass
                return cached
            self._sets.move_to_end(place)
            cached.users += 1
            return cached

    def borrow_many(
        self, namespaces: Sequence[int], offsets: Sequence[int], occupancy: Occupancy | None = None
    ) -> list[CachedSet]:
        """As `borrow`, for many places at once."""
        with self._lock:
            sets, borrowed = self._sets, []
            for place in zip(namespaces, offsets, strict=True):
                cached = sets.get(place)
                if cached is None:
                    cached = sets[place] = CachedSet(*place, occupancy, versions=self._versions)
                else:
                    sets.move_to_end(place)
                cached.users += 1
                borrowed.append(cached)
            while len(sets) > self.capacity and self._drop_one():
                pass
            return borrowed

    def give_back(self, cached: CachedSet) -> None:
        self.give_back_many((cached,))

    def give_back_many(self, borrowed: Iterable[CachedSet]) -> None:
        with self._lock:
            for cached in borrowed:
                cached.users -= 1
            while len(self._sets) > self.capacity and self._drop_one():
                pass

    def _drop_one(self) -> bool:
        # A set in use counts as used just now. Where all are, it is left at a few looks: what is beyond the
        # bound is forgotten when they are given back.
        for _ in range(min(LOOKS, len(self._sets))):
            place, cached = next(iter(self._sets.items()))
            if cached.users:
                self._sets.move_to_end(place)
            else:
                del self._sets[place]
                if cached.directory is not None:
                    if cached.occupancy is not None:
                        cached.occupancy.note_forgotten(place, cached.directory.taken)
                    cached.directory.count_in(None)
                return True
        return False

    def remembers(self, place: SetPlace) -> bool:
        """Whether a set is remembered that is not empty."""
        cached = self._sets.get(place)
        return cached is not None and cached.directory is not None and cached.directory.taken > 0

    def look(self, namespaces: Iterable[int], offsets: Iterable[int]) -> list[CachedSet | None]:
        """The sets at some places where they are remembered, for a look at once: they are neither in use nor
        used by that."""
        return list(map(self._sets.get, zip(namespaces, offsets, strict=True)))

    def borrow_remembered(self, place: SetPlace) -> CachedSet | None:
        """The set, to be given back, where it is remembered; it is not more recently used for that."""
        with self._lock:
            cached = self._sets.get(place)
            if cached is not None:
                cached.users += 1
            return cached

    def note_forgotten(self, place: SetPlace, taken: int, occupancy: Occupancy) -> None:
        """A look at flash found so many slots taken in a set; it counts unless the set is remembered now."""
        with self._lock:
            if place not in self._sets:
                occupancy.note_forgotten(place, taken)

    def snapshot(self) -> list[CachedSet]:
        """All that is remembered now."""
        with self._lock:
            return list(self._sets.values())


class Borrowed:
    """Borrowed sets, which the end of a `with` block gives back."""

    __slots__ = ("_cache", "_sets")

    def __init__(self, cache: DirectoryCache, sets: tuple[CachedSet, ...]) -> None:
        self._cache: Final = cache
        self._sets: Final = sets

    def __enter__(self) -> tuple[CachedSet, ...]:
        return self._sets

    def __exit__(self, *_: object) -> None:
        self._cache.give_back_many(self._sets)
