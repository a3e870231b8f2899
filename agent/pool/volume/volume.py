"""A volume: fixed-size slots of one tenant, spread over the namespaces of the pool.

This file knows where the slots lie and how to find a key's entry; agent/pool/read/get.py and
agent/pool/write/put.py are the two halves that move values. Read slot.py and directory.py first.

A set is one directory block and 64 slots; a slot is a header block and `value_bytes`. Sets follow each
other without a gap from the extent's start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.inline.secrets import SecretKey, new_volume_secret
from agent.inline.suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET, Entry
from agent.pool.format.occupancy import Occupancy
from agent.pool.format.slot import SlotCodec
from agent.pool.steps import Lanes, Pending, Steps, wait_for
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.directory_cache import CachedSet, DirectoryCache, damage_look_seconds
from agent.pool.volume.hedging import Hedge
from agent.pool.volume.in_doubt_writes import InDoubtWrites
from agent.pool.volume.key_locks import KeyLocks
from agent.pool.volume.key_transition import GRACE_SECONDS, InForce, KeyTransition, MapAge
from agent.pool.volume.media_errors import MediaErrors
from agent.pool.volume.partial_puts import PartialPuts
from agent.pool.volume.placement import Candidate, Extent, Placement
from agent.pool.volume.quota import Quota
from agent.pool.volume.replication_backlog import ReplicationBacklog
from agent.pool.volume.settings import Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.unit_buffers import UnitBuffers
from agent.pool.volume.unit_cache import UnitCache

LOADS_IN_FLIGHT: Final = 16
"""Directory reads that one batch keeps under way; more would only queue at the drive."""


@dataclass(frozen=True, slots=True)
class Course:
    """Other settings of a volume, and the placements that follow from them."""

    settings: VolumeSettings
    placement: Placement
    earlier: Placement | None


class Found:
    """An entry that the directories hint at."""

    __slots__ = ("cached", "entry", "slot")

    def __init__(self, cached: CachedSet, slot: int, entry: Entry) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.entry: Final = entry

    def stands(self, lanes: Lanes) -> bool:
        """Whether it means that the key is stored, and stays so: its slot is not shunned."""
        cached, slot, entry = self.cached, self.slot, self.entry
        expired = entry.expiry and entry.expiry <= lanes.wall()
        shunned = cached.shunned.get(slot, 0.0) > lanes.now()
        return not expired and not shunned and cached.disproven.get(slot) != entry.generation

    def forget(self) -> None:
        """Another value of the key comes: two entries of one key in one directory would hide the newer. Flash
        learns of it with the put."""
        with self.cached.guard:
            directory = self.cached.directory
            if directory is not None and directory.entry(self.slot) == self.entry:
                directory.clear(self.slot)


class Volume:
    """One volume, opened with its secret. Shared by all workers; its operations are steps."""

    def __init__(
        self,
        settings: VolumeSettings,
        secret: SecretKey,
        cache: DirectoryCache,
        timing: Timing,
        lba_bytes: int = 4096,
        begun: PartialPuts | None = None,
    ) -> None:
        """`begun`: those of all volumes of an agent; None: it has its own."""
        self.settings = settings
        self.timing = timing
        self.cache = cache
        self.occupancy = Occupancy()
        self.turns = KeyLocks()
        self.begun = begun if begun is not None else PartialPuts()
        self.unit_buffers = UnitBuffers(settings.unit_bytes)
        self.kept_units = UnitCache(self.unit_buffers)
        self.damage = MediaErrors()
        self.owed = ReplicationBacklog()
        self.unsettled = InDoubtWrites()
        self.hedge = Hedge() if settings.copies > 1 else None
        self.quota: Quota | None = None
        self.bandwidth: Bandwidth | None = None
        """Those of its tenant; None where nobody has set them up (agent/tenancy/limits.py)."""
        self.siblings: Sequence[Volume] = ()
        """All caches of its tenant that lie in sets, itself among them, where it has a quota in common."""
        self.forgets_with_secret: list[Callable[[], None]] = []
        """What else remembers something of its keys. Filled before the volume is served."""
        self.erased = False
        """Its tenant was erased: what is read is a miss, what is written is refused."""
        self.left_to_others = False
        """Another agent writes blocks of files here, which must not be lost: a scrub only reads, and nothing
        is sealed anew."""
        self.map_age = MapAge()
        self.in_force: InForce | None = None
        """Asked before a block of a file is given up; None: the map that is known is the only one."""
        self.turn: KeyTransition | None = None
        """The rotation that is under way."""
        self._lba_bytes = lba_bytes
        self._damage_look_seconds: float = damage_look_seconds(settings.kind == "files")
        self._use(secret)
        self._extents = {extent.namespace: extent for extent in settings.extents}

    def codec_of(self, secret: SecretKey, epoch: int = 0, others: Sequence[SlotCodec] = ()) -> SlotCodec:
        """Seals with the data key of a secret of this volume."""
        settings = self.settings
        return SlotCodec(
            settings.tenant,
            settings.volume_id,
            SecretKey(secret.reveal()[32:]),
            settings.suite,
            settings.unit_bytes,
            self._lba_bytes,
            epoch=epoch,
            others=others,
        )

    def sealing_codec(self, now: float) -> SlotCodec:
        """The codec that seals what is begun at `now`."""
        turn = self.turn
        return turn.codec if turn is not None and turn.is_due(now) else self.codec

    def takes(self, codec: SlotCodec, now: float) -> bool:
        """Whether what was begun with a codec may be acknowledged at `now`: its key is there, and will be."""
        turn = self.turn
        if self.erased:
            return False
        if turn is None:
            return self.codec.opens(codec)
        if codec.fingerprint == turn.codec.fingerprint:
            return True
        return not turn.is_due(now, GRACE_SECONDS) and self.codec.opens(codec)

    def vouches(
        self, lanes: Lanes, namespace: int, codec: SlotCodec, deadline: float
    ) -> Steps[MissCause | None]:
        """As `takes`, of what lies on a namespace by now; by the pool map there, where need be.

        None: it may be acknowledged. WRONG_KEY: its key was dropped, or is about to be. Another cause: that
        cannot be told, for the map was not read by the deadline.
        """
        doubt = None
        if self.map_age.wants_look(lanes.now()):
            doubt = yield from self.map_age.refresh(lanes, namespace, deadline)
        if doubt is None and not self.takes(codec, lanes.now()):
            doubt = MissCause.WRONG_KEY
        return doubt

    def _use(self, secret: SecretKey) -> None:
        settings, raw = self.settings, secret.reveal()
        self.codec = self.codec_of(secret)
        self.placement = Placement(
            SecretKey(raw[:32]), _extents_of(settings.extents), apart=settings.copies > 1
        )
        self.earlier = self._earlier(settings)
        """Where values lay before namespaces joined, until all have moved."""

    def _earlier(self, settings: VolumeSettings) -> Placement | None:
        if not settings.settled:
            return None
        return self.placement.over(_extents_of(settings.extents[: settings.settled]))

    def course(self, settings: VolumeSettings) -> Course:
        """What it takes to go by other settings of the same volume. Nothing is changed."""
        placement = self.placement.over(_extents_of(settings.extents))
        return Course(settings, placement, self._earlier(settings))

    def follow(self, settings: VolumeSettings) -> None:
        """As `take`, of the course that these settings make."""
        self.take(self.course(settings))

    def take(self, course: Course) -> None:
        """Go by another map of the same volume, in which extents follow those that there were, or in which
        nothing lies at earlier places any more. One thread does; others may be using the volume.

        The order matters to them: whoever looks in between looks at the places of before and of now, or at
        more. What is borrowed or reserved stays good, for an extent that goes is remembered.
        """
        settings = course.settings
        self._extents = {**self._extents, **{extent.namespace: extent for extent in settings.extents}}
        if course.earlier is not None:
            self.earlier = course.earlier
        self.placement = course.placement
        self.earlier = course.earlier
        self.settings = settings

    @property
    def refusal(self) -> str:
        """Why nothing is sealed for the volume, in a few words; empty where it is."""
        if self.erased:
            return "the volume was erased"
        return "the volume's data key has sealed what one key may: rotate it" if self.codec.is_used_up else ""

    def forget_secret(self) -> None:
        """The tenant was erased. A secret that nobody keeps takes the place of the volume's, so that what is
        under way finds nothing, by the ways on which nothing is found."""
        self.erased = True
        self.turn = None
        self._use(new_volume_secret())
        self.kept_units.drop_all()
        for forget in self.forgets_with_secret:
            forget()

    def set_offset(self, candidate: Candidate) -> int:
        """Where a set's directory lies, in bytes from the namespace's start."""
        extent = self._extents[candidate.namespace]
        return extent.offset + candidate.set_number * self.settings.set_bytes

    def slot_offset(self, cached: CachedSet, slot: int) -> int:
        return cached.offset + DIRECTORY_BYTES + slot * self.settings.slot_bytes

    def place(self, cached: CachedSet, slot: int) -> Place:
        """A slot as the cipher sees it: its number counts through all sets of the namespace."""
        extent = self._extents[cached.namespace]
        set_number = (cached.offset - extent.offset) // self.settings.set_bytes
        return Place(extent.nguid, set_number * SLOTS_PER_SET + slot)

    def borrow_sets(self, pseudonym: bytes) -> tuple[CachedSet, ...]:
        """The sets that a key may lie in, one or two and those of before a join; give them back with
        `give_back_sets`."""
        return tuple(
            self.cache.borrow(place.namespace, self.set_offset(place), self.occupancy)
            for place in self.places(pseudonym)
        )

    def places(self, pseudonym: bytes) -> Sequence[Candidate]:
        """The sets that a key may lie in, each once; those that it belongs to come first."""
        earlier, (first, second) = self.earlier, self.placement.candidates(pseudonym)
        if earlier is None:
            return (first,) if first == second else (first, second)
        return list(dict.fromkeys((first, second, *earlier.candidates(pseudonym))))

    def takers(self, pseudonym: bytes, sets: Sequence[CachedSet]) -> Sequence[CachedSet]:
        """Those of a key's sets that a new value may go to: all, but for earlier places."""
        if self.earlier is None:
            return sets
        wanted = {(each.namespace, self.set_offset(each)) for each in self.placement.candidates(pseudonym)}
        # None, where the sets were borrowed before a join and are looked at after it.
        return [cached for cached in sets if (cached.namespace, cached.offset) in wanted] or sets

    def give_back_sets(self, sets: Sequence[CachedSet]) -> None:
        for cached in sets:
            self.cache.give_back(cached)

    def find(self, sets: Sequence[CachedSet], pseudonym: bytes) -> list[Found]:
        """What the remembered directories hint at, the newest generation first."""
        found = []
        for cached in sets:
            directory = cached.directory
            if directory is None:
                continue
            slot = directory.find(pseudonym)
            if slot is not None and (entry := directory.entry(slot)) is not None:
                found.append(Found(cached, slot, entry))
        if len(found) > 1:
            found.sort(key=lambda each: each.entry.generation, reverse=True)
        return found

    def is_fresh(self, cached: CachedSet, lanes: Lanes, least: float = 0.0) -> bool:
        """Whether what is remembered of a set is believed when it says that a key is absent.

        `least` seconds are granted whatever the operator has set.
        """
        age = lanes.now() - cached.loaded_at
        return cached.directory is not None and age < max(least, self.timing.directory_fresh)

    def load(
        self,
        lanes: Lanes,
        sets: Sequence[CachedSet],
        deadline: float,
        *,
        holds_writers: bool = False,
        came: list[CachedSet] | None = None,
    ) -> Steps[MissCause | None]:
        """Read the directories of `sets`, side by side. The worst that happened, None where all came.

        What came may be in doubt. Whoever writes a directory reads it by
        agent/pool/volume/writable_directory.py.

        Those that did are put into `came`: `fault` says the same, but may be another thread's by then.
        """
        worst: MissCause | None = None
        for start in range(0, len(sets), LOADS_IN_FLIGHT):
            batch: list[tuple[CachedSet, int, memoryview, Pending]] = []
            for cached in sets[start : start + LOADS_IN_FLIGHT]:
                block = memoryview(bytearray(DIRECTORY_BYTES))
                writes = cached.writes
                batch.append((cached, writes, block, lanes.read(cached.namespace, cached.offset, block)))
            for cached, writes, block, pending in batch:
                cause = yield from wait_for(lanes, pending, deadline)
                cached.fault = None if cause is None else cause.name
                if cause is None:
                    lanes.tally(self.settings.name).directory_reads += 1
                    lanes.tally(self.settings.name).corrupt_entries += cached.accept(
                        block,
                        lanes.now(),
                        writes,
                        holds_writer=holds_writers,
                        look_seconds=self._damage_look_seconds,
                    )
                    if came is not None:
                        came.append(cached)
                else:
                    worst = max(worst, cause) if worst is not None else cause
        return worst

    def absence(self, sets: Sequence[CachedSet], pseudonym: bytes, trouble: MissCause | None) -> MissCause:
        """Why a key that no directory names is not there."""
        for cached in sets:
            directory = cached.directory
            if directory is not None and pseudonym in directory.corrupt_keys:
                return MissCause.CORRUPT
        if trouble is not None:
            return trouble
        for cached in sets:
            directory = cached.directory
            if directory is not None and directory.has_ghost(pseudonym):
                return MissCause.EVICTED
        return MissCause.NEVER_STORED

    def lookup(
        self, lanes: Lanes, keys: Sequence[bytes], deadline: float, least: float = 0.0
    ) -> Steps[list[MissCause | None]]:
        """For each key None where a directory names it, else why none does: a hint. `least` of `is_fresh`."""
        pseudonyms = [self.placement.pseudonym(key) for key in keys]
        borrowed = [self.borrow_sets(pseudonym) for pseudonym in pseudonyms]
        try:
            wanted: dict[int, CachedSet] = {}
            for pseudonym, sets in zip(pseudonyms, borrowed, strict=True):
                if not self.find(sets, pseudonym):
                    stale = (cached for cached in sets if not self.is_fresh(cached, lanes, least))
                    wanted.update((id(cached), cached) for cached in stale)
            trouble: MissCause | None = None
            if wanted:
                trouble = yield from self.load(lanes, list(wanted.values()), deadline)
            now = lanes.wall()
            presences = [
                self._presence(sets, pseudonym, now, trouble)
                for pseudonym, sets in zip(pseudonyms, borrowed, strict=True)
            ]
            tally = lanes.tally(self.settings.name)
            tally.lookups += len(presences)
            tally.lookups_absent += len(presences) - presences.count(None)
            return presences
        finally:
            for sets in borrowed:
                self.give_back_sets(sets)

    def _presence(
        self, sets: Sequence[CachedSet], pseudonym: bytes, now: float, trouble: MissCause | None
    ) -> MissCause | None:
        found = self.find(sets, pseudonym)
        if not found:
            away = any(cached.fault is not None for cached in sets)
            return self.absence(sets, pseudonym, trouble if away else None)
        if any(not each.entry.expiry or each.entry.expiry > now for each in found):
            return None
        return MissCause.EXPIRED

    def usage(self) -> tuple[int, int]:
        """Slots in all, and slots taken in the directories that this agent remembers. Costs nothing."""
        return self.settings.slots, self.occupancy.taken


def _extents_of(extents: Sequence[VolumeExtent]) -> list[Extent]:
    return [Extent(extent.namespace, extent.nguid, extent.sets) for extent in extents]
