"""A volume: fixed-size slots of one tenant, spread over the namespaces of the pool.

This file knows where the slots lie and how to find a key's entry; agent/pool/read/get.py and
agent/pool/write/put.py move values. Read sealed_slot.py and directory.py first. A set is one directory
block and 64 slots; a slot is a header block and `value_bytes`. Sets lie without a gap from the extent's
start on.

A `Volume` is the one record of the state that serves it, whole when it is made. `Volume.change` alone changes
it: the thread that makes the agent calls that, later the upkeep thread (tests/rules/test_volume_owner.py).
"""

# One idea in one file: the class whose state this is; what only reads that state would have to reach into it.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from agent.inline.cipher_suites import Place
from agent.inline.secrets import SecretKey, new_volume_secret
from agent.pool.counters import MissCause
from agent.pool.format.directory import KEY_BYTES, SLOTS_PER_SET, Entry
from agent.pool.format.occupancy import Occupancy, SetPlace
from agent.pool.format.sealed_slot import SlotCodec
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Pending, Steps, in_volleys
from agent.pool.volume.bandwidth import Bandwidth
from agent.pool.volume.directory_cache import Borrowed, CachedSet, DirectoryCache, damage_look_seconds
from agent.pool.volume.eviction_holds import Holds
from agent.pool.volume.hedging import Hedge
from agent.pool.volume.in_doubt_writes import InDoubtWrites
from agent.pool.volume.key_locks import KeyLocks
from agent.pool.volume.key_transition import GRACE_SECONDS, Ask, InForce, KeyTransition, MapAge
from agent.pool.volume.media_errors import MediaErrors
from agent.pool.volume.placement import Candidate, Placement, Rank
from agent.pool.volume.puts_in_pieces import PutsInPieces
from agent.pool.volume.quota import Quota
from agent.pool.volume.removed_marks import RemovedMarks
from agent.pool.volume.replication_backlog import ReplicationBacklog
from agent.pool.volume.settings import Timing, VolumeSettings
from agent.pool.volume.spill_copies import LowerTier, SpillCopies
from agent.pool.volume.unit_buffers import UnitBuffers, UnitCache
from agent.pool.volume.uses import Uses

LOADS_IN_FLIGHT: Final = 16
"""Directory reads that one batch keeps under way; more would only queue at the drive."""
RECENT_SECONDS: Final = 0.02
"""See `Volume.is_recent`."""
MANY: Final = 8
"""Keys from which on their places are computed together: for fewer the arrays cost more than they save."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Settings of a volume, and the placements that follow from them."""

    settings: VolumeSettings
    placement: Placement
    old_placement: Placement | None


@dataclass(frozen=True, slots=True)
class Keys:
    """`codec` seals and opens; `transition` is the rotation that is under way."""

    codec: SlotCodec
    transition: KeyTransition | None = None


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The limits that the volumes of a tenant have in common (agent/tenancy/limits.py)."""

    quota: Quota | None
    bandwidth: Bandwidth | None
    siblings: "Sequence[Volume]" = ()
    """The tenant's caches in sets, among which an eviction for the quota chooses."""


@dataclass(frozen=True, slots=True)
class MapCheck:
    """How the pool map on flash is asked (agent/attach/map_watch.py). Without it, the known map holds."""

    keys_hold: Ask
    newest: InForce


class Found:
    """An entry that the directories hint at."""

    __slots__ = ("cached", "entry", "slot")

    def __init__(self, cached: CachedSet, slot: int, entry: Entry) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.entry: Final = entry

    def names_the_same(self, other: "Found") -> bool:
        """Whether both are of one entry: same directory, slot and generation."""
        return self.cached is other.cached and (self.slot, self.entry.generation) == (
            other.slot,
            other.entry.generation,
        )

    def is_live(self, channel: IoChannel) -> bool:
        """Whether it means that the key is stored, and stays so: its slot is not cooling down."""
        cached, slot, entry = self.cached, self.slot, self.entry
        expired = entry.expiry and entry.expiry <= channel.wall()
        cooling = cached.cooldown_until.get(slot, 0.0) > channel.now()
        return not expired and not cooling and cached.disproven.get(slot) != entry.generation

    def drop_hint(self) -> None:
        """Another value of the key comes: two entries of one key in one directory would hide the newer. Flash
        learns of it with the put."""
        with self.cached.guard:
            directory = self.cached.directory
            if directory is not None and directory.entry(self.slot) == self.entry:
                directory.clear(self.slot)
                self.cached.dropped[self.slot] = self.entry.generation


class Named:
    """What a get needs of an entry that the directories hint at."""

    __slots__ = ("cached", "expiry", "generation", "length", "slot")

    def __init__(self, cached: CachedSet, slot: int, generation: int, length: int, expiry: int) -> None:
        self.cached: Final = cached
        self.slot: Final = slot
        self.generation: Final = generation
        self.length: Final = length
        self.expiry: Final = expiry


class PoolVolume(ABC):
    """A volume of either kind, in sets of slots or on KV namespaces, opened with its secret.

    Shared by all workers; its operations are steps.
    """

    used_up: ClassVar[str] = "the volume's data key has sealed what one key may"

    def __init__(
        self,
        settings: VolumeSettings,
        secret: SecretKey,
        timing: Timing,
        puts_in_pieces: PutsInPieces | None,
    ) -> None:
        """`puts_in_pieces`: those of all volumes of an agent; None: it has its own."""
        self.settings = settings
        self.timing = timing
        self.key_locks = KeyLocks()
        self.puts_in_pieces = puts_in_pieces if puts_in_pieces is not None else PutsInPieces()
        self.unit_buffers = UnitBuffers(settings.unit_bytes)
        self.unit_cache = UnitCache(self.unit_buffers)
        self.in_doubt_writes = InDoubtWrites()
        # From here on `change` alone writes.
        self.bandwidth: Bandwidth | None = None
        """See `TenantShare`."""
        self.erased = False
        """Its tenant was erased: every get is a miss, every put is refused."""
        self._on_erasure: list[Callable[[], None]] = []
        self._use(secret)

    def change(self, *, tenant: TenantShare | None = None, erased: bool = False) -> None:
        """Serve by the given parts from now on; the others stay. For one thread (see the module's docstring),
        while other threads use the volume. `erased`: for good."""
        if tenant is not None:
            self.bandwidth = tenant.bandwidth
        if erased:
            self._forget_secret()

    def codec_of(self, secret: SecretKey, epoch: int = 0, others: Sequence[SlotCodec] = ()) -> SlotCodec:
        """Seals with the data key of a secret of this volume."""
        settings = self.settings
        return SlotCodec(
            settings.tenant,
            settings.volume_id,
            SecretKey(secret.reveal()[32:]),
            settings.suite,
            settings.unit_bytes,
            epoch=epoch,
            others=others,
        )

    def _use(self, secret: SecretKey) -> None:
        self.codec = self.codec_of(secret)
        self.placement = self._place_keys(SecretKey(secret.reveal()[:32]))

    @abstractmethod
    def _place_keys(self, placement_key: SecretKey) -> Placement:
        """Where keys belong, by the settings."""

    @property
    def refusal(self) -> str:
        """Why nothing is sealed for the volume, in a few words; empty where it is."""
        if self.erased:
            return "the volume was erased"
        return self.used_up if self.codec.is_used_up else ""

    def _forget_secret(self) -> None:
        """Replace the volume's secret by one that nobody keeps: operations under way end as misses do."""
        self.erased = True
        self._use(new_volume_secret())
        self.unit_cache.drop_all()
        for forget in self._on_erasure:
            forget()

    @abstractmethod
    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, least: float = 0.0
    ) -> Steps[list[MissCause | None]]:
        """For each key None where it is there, else why it is not: a hint. `least`: see `Volume.is_fresh`."""

    def table_sizes(self) -> dict[str, int]:
        """How much the tables hold, by the names of their limits (agent/service/watched_memory.py)."""
        return {
            "kept-units": len(self.unit_cache),
            "spare-units": len(self.unit_buffers),
            "proven-headers": len(self.codec.proven_headers),
            "unsettled-keys": len(self.in_doubt_writes),
        }

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Slots in all, and slots taken, as far as this agent knows. Costs nothing."""


class Volume(PoolVolume):
    used_up: ClassVar[str] = PoolVolume.used_up + ": rotate it"

    def __init__(
        self,
        settings: VolumeSettings,
        secret: SecretKey,
        cache: DirectoryCache,
        timing: Timing,
        puts_in_pieces: PutsInPieces | None = None,
    ) -> None:
        super().__init__(settings, secret, timing, puts_in_pieces)
        self.cache = cache
        self.occupancy = Occupancy()
        self.media_errors = MediaErrors()
        self.replication_backlog = ReplicationBacklog()
        self.holds = Holds()
        self.spill_copies = SpillCopies()
        self.removed_marks = RemovedMarks()
        self.hedge = Hedge() if settings.copies > 1 else None
        self.map_age = MapAge()
        # From here on `change` alone writes.
        self.quota: Quota | None = None
        self.siblings: Sequence[Volume] = ()
        """See `TenantShare`."""
        self.files_elsewhere = settings.kind == "files"
        """Another agent may write blocks of files here, which must not be lost: a scrub only reads, and
        nothing is sealed anew. True until this agent has files here (agent/service/repair.py)."""
        self.below: LowerTier | None = None
        """Where values lie that were evicted and had a copy made first; None: no such place is configured."""
        self.newest_map: InForce | None = None
        """Asked before a block of a file is given up; None: the known map is the only one."""
        self.key_transition: KeyTransition | None = None
        self.uses_elsewhere: Uses | None = None
        """Where another process of the agent writes directories: the uses that it is told of."""
        self._damage_look_seconds: float = damage_look_seconds(settings.kind == "files")
        self._extents = {extent.namespace: extent for extent in settings.extents}

    def change(
        self,
        *,
        layout: Layout | None = None,
        keys: Keys | None = None,
        tenant: TenantShare | None = None,
        map_check: MapCheck | None = None,
        files_elsewhere: bool | None = None,
        on_erasure: Callable[[], None] | None = None,
        below: LowerTier | None = None,
        uses: Uses | None = None,
        erased: bool = False,
    ) -> None:
        """See `PoolVolume`. `layout`: extents that follow those of before, or no old placement any more.
        `on_erasure` forgets what is remembered of the keys elsewhere."""
        if layout is not None:
            self._take_layout(layout)
        if keys is not None:
            self.codec, self.key_transition = keys.codec, keys.transition
        if tenant is not None:
            self.quota, self.siblings = tenant.quota, tenant.siblings
        if map_check is not None:
            self.map_age.watch(map_check.keys_hold)
            self.newest_map = map_check.newest
        if files_elsewhere is not None:
            self.files_elsewhere = files_elsewhere
        if below is not None:
            self.below = below
        if uses is not None:
            self.uses_elsewhere = uses
        if on_erasure is not None:
            self._on_erasure.append(on_erasure)
        super().change(tenant=tenant, erased=erased)

    def sealing_codec(self, now: float) -> SlotCodec:
        """The codec that seals what is begun at `now`."""
        transition = self.key_transition
        return transition.codec if transition is not None and transition.is_due(now) else self.codec

    def takes(self, codec: SlotCodec, now: float) -> bool:
        """Whether what was begun with a codec may be acknowledged at `now`: its key is there, and will be."""
        transition = self.key_transition
        if self.erased:
            return False
        if transition is None:
            return self.codec.opens(codec)
        if codec.fingerprint == transition.codec.fingerprint:
            return True
        return not transition.is_due(now, GRACE_SECONDS) and self.codec.opens(codec)

    def vouches_at_once(self, channel: IoChannel, codec: SlotCodec) -> bool:
        """Whether `vouches` would say yes without a look. Each value of a batch asks twice."""
        now = channel.now()
        return not self.map_age.wants_look(now) and self.takes(codec, now)

    def vouches(
        self, channel: IoChannel, namespace: int, codec: SlotCodec, deadline: float
    ) -> Steps[MissCause | None]:
        """As `takes`, of what lies on a namespace by now; by the pool map there, where need be.

        None: it may be acknowledged. WRONG_KEY: its key was dropped, or is about to be. Another cause: that
        cannot be told, for the map was not read by the deadline.
        """
        doubt = None
        if self.map_age.wants_look(channel.now()):
            doubt = yield from self.map_age.refresh(channel, namespace, deadline)
        if doubt is None and not self.takes(codec, channel.now()):
            doubt = MissCause.WRONG_KEY
        return doubt

    def _use(self, secret: SecretKey) -> None:
        super()._use(secret)
        self.old_placement = self._old_placement(self.settings)
        """Where values lay before namespaces joined, until all have moved."""

    def _place_keys(self, placement_key: SecretKey) -> Placement:
        settings = self.settings
        return Placement(
            placement_key, settings.extents, apart=settings.copies > 1, local_first=settings.local_first
        )

    def _old_placement(self, settings: VolumeSettings) -> Placement | None:
        if not settings.settled_extents:
            return None
        return self.placement.over(settings.old_extents)

    def layout(self, settings: VolumeSettings) -> Layout:
        """The layout for other settings of the same volume. Nothing is changed."""
        placement = self.placement.over(settings.extents)
        return Layout(settings, placement, self._old_placement(settings))

    def _take_layout(self, layout: Layout) -> None:
        # The order matters to other threads: they look at the places of before and of now, or at more. A
        # borrowed set or a reserved slot stays good, for an extent that goes is remembered.
        settings = layout.settings
        self._extents = {**self._extents, **{extent.namespace: extent for extent in settings.extents}}
        if layout.old_placement is not None:
            self.old_placement = layout.old_placement
        self.placement = layout.placement
        self.old_placement = layout.old_placement
        self.settings = settings

    def _forget_secret(self) -> None:
        self.key_transition = None
        self.below = None
        self.spill_copies.forget()
        self.removed_marks.forget()
        super()._forget_secret()

    def set_offset(self, candidate: Candidate) -> int:
        """Where a set's directory lies, in bytes from the namespace's start."""
        extent = self._extents[candidate.namespace]
        return extent.offset + candidate.set_number * self.settings.set_bytes

    def slot_offset(self, cached: CachedSet, slot: int) -> int:
        return cached.offset + self.settings.directory_bytes + slot * self.settings.slot_bytes

    def place(self, cached: CachedSet, slot: int) -> Place:
        """A slot as the cipher sees it: its number counts through all sets of the namespace."""
        extent = self._extents[cached.namespace]
        set_number = (cached.offset - extent.offset) // self.settings.set_bytes
        return Place(extent.nguid, set_number * SLOTS_PER_SET + slot)

    def borrowed(self, pseudonym: bytes) -> Borrowed:
        """The sets that a key may lie in, for as long as the block runs; see `borrow_sets`."""
        return Borrowed(self.cache, self.borrow_sets(pseudonym))

    def borrowed_at(self, place: SetPlace) -> Borrowed:
        """The one set of a place, likewise."""
        return Borrowed(self.cache, (self.cache.borrow(*place, self.occupancy),))

    def borrow_sets(self, pseudonym: bytes) -> tuple[CachedSet, ...]:
        """The sets that a key may lie in, one or two and those of before a join; give them back with
        `give_back_sets`."""
        # By one turn of the table's lock, for each operation borrows several times.
        places, extents, set_bytes = self.places(pseudonym), self._extents, self.settings.set_bytes
        namespaces = [place.namespace for place in places]
        offsets = [extents[place.namespace].offset + place.set_number * set_bytes for place in places]
        return tuple(self.cache.borrow_many(namespaces, offsets, self.occupancy))

    def places(self, pseudonym: bytes) -> Sequence[Candidate]:
        """The sets that a key may lie in, each once; those that it belongs to come first."""
        old, (first, second) = self.old_placement, self.placement.candidates(pseudonym)
        if old is None:
            return (first,) if first == second else (first, second)
        return list(dict.fromkeys((first, second, *old.candidates(pseudonym))))

    def places_of_many(self, pseudonyms: bytes) -> list[Rank]:
        """The sets of many keys, those that each belongs to first. A key with fewer sets than others has its
        last one again."""
        if self.old_placement is None:
            return self.placement.places(pseudonyms, self.settings.set_bytes)
        of_each = [
            [(place.namespace, self.set_offset(place)) for place in self.places(pseudonym)]
            for pseudonym in _each(pseudonyms)
        ]
        most = max(map(len, of_each), default=0)
        ranks = [[places[min(rank, len(places) - 1)] for places in of_each] for rank in range(most)]
        return [([place[0] for place in rank], [place[1] for place in rank]) for rank in ranks]

    def pseudonyms(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of several keys, by one call of the cipher."""
        return _each(self.placement.pseudonyms(b"".join(keys)))

    def borrow_sets_of_many(self, pseudonyms: bytes) -> list[tuple[CachedSet, ...]]:
        """As `borrow_sets`, of each of the pseudonyms, that lie one behind the other."""
        if self.old_placement is not None or len(pseudonyms) < MANY * KEY_BYTES:
            return [self.borrow_sets(pseudonym) for pseudonym in _each(pseudonyms)]
        (first_in, first_at), (second_in, second_at) = self.placement.places(
            pseudonyms, self.settings.set_bytes
        )
        firsts = self.cache.borrow_many(first_in, first_at, self.occupancy)
        seconds = self.cache.borrow_many(second_in, second_at, self.occupancy)
        if self.settings.slots == SLOTS_PER_SET:
            self.cache.give_back_many(seconds)
            return [(first,) for first in firsts]
        return list(zip(firsts, seconds, strict=True))

    def write_targets(self, pseudonym: bytes, sets: Sequence[CachedSet]) -> Sequence[CachedSet]:
        """Those of a key's sets that a new value may go to: all, but for earlier places."""
        # A call may have borrowed its sets before the pool was settled: earlier places are among them yet.
        if self.old_placement is None and len(sets) < 3:
            return sets
        wanted = {(each.namespace, self.set_offset(each)) for each in self.placement.candidates(pseudonym)}
        # None, where the sets were borrowed before a join and are looked at after it.
        return [cached for cached in sets if (cached.namespace, cached.offset) in wanted] or sets

    def give_back_sets(self, sets: Sequence[CachedSet]) -> None:
        self.cache.give_back_many(sets)

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

    def find_newest(self, sets: Sequence[CachedSet], pseudonym: bytes) -> Named | None:
        """The first of what `find` gives, without what a get has no use for."""
        newest: Named | None = None
        for cached in sets:
            directory = cached.directory
            if directory is None:
                continue
            slot, generation, length, expiry = directory.find_named(pseudonym)
            if slot >= 0 and (newest is None or generation > newest.generation):
                newest = Named(cached, slot, generation, length, expiry)
        return newest

    def is_fresh(self, cached: CachedSet, channel: IoChannel, least: float = 0.0) -> bool:
        """Whether what is remembered of a set is believed when it says that a key is absent.

        `least` seconds are granted whatever the operator has set.
        """
        age = channel.now() - cached.loaded_at
        is_young = cached.directory is not None and age < max(least, self.timing.directory_fresh)
        return is_young and not cached.is_overtaken()

    def knows(self, channel: IoChannel, key: bytes) -> bool:
        """Whether the directories that a key may lie in are remembered, and believed."""
        places = self.places(self.placement.pseudonym(key))
        # A look at once, so nothing is borrowed.
        looked_at = self.cache.look([each.namespace for each in places], map(self.set_offset, places))
        return all(cached is not None and self.is_fresh(cached, channel) for cached in looked_at)

    def touch(self, cached: CachedSet, slot: int, pseudonym: bytes, generation: int, now_us: int) -> None:
        """A get was served by the entry of this pseudonym and generation at `now_us`, microseconds since the
        epoch. Flash learns of it with the next write of the directory."""
        with cached.guard:
            directory = cached.directory
            if directory is not None and directory.names(slot, pseudonym):
                directory.touch(slot, now_us)
        if self.uses_elsewhere is not None:
            self.uses_elsewhere.note(cached.namespace, cached.offset, slot, generation)

    def is_recent(self, cached: CachedSet, channel: IoChannel) -> bool:
        """Whether a set was read within RECENT_SECONDS, for an image that goes over what others wrote. A
        write of ours since then tells nothing of others, so `loaded_at` is not what counts."""
        return cached.directory is not None and channel.now() - cached.asked_at < RECENT_SECONDS

    def may_write(self, cached: CachedSet, channel: IoChannel) -> bool:
        """Whether an image may go over what others wrote since a set was read: that was within
        RECENT_SECONDS, or the operator says that no other agent writes.

        A write of ours is no read: who writes a set all the time would never hear of others, and take each
        entry of theirs from flash."""
        return channel.now() - cached.read_at < RECENT_SECONDS or self.is_fresh(cached, channel)

    def load(
        self,
        channel: IoChannel,
        sets: Sequence[CachedSet],
        deadline: float,
        *,
        holds_writers: bool = False,
        came: list[CachedSet] | None = None,
        in_flight: int = LOADS_IN_FLIGHT,
        more: bool = False,
    ) -> Steps[MissCause | None]:
        """Read the directories of `sets`, side by side. The worst that happened, None where all came.

        A directory may be in doubt; its writers read it by writable_directory.py. Those that came are put
        into `came`: `fault` says the same, but may be another thread's by then. `more`: another read follows
        all of these at once, of the last one's namespace; as of `IoChannel.read`.
        """
        worst: MissCause | None = None
        for start in range(0, len(sets), in_flight):
            batch: list[tuple[CachedSet, int, int, memoryview, Pending]] = []
            asked_at = channel.now()
            some = sets[start : start + in_flight]
            for number, together in in_volleys([(each.namespace, each.offset) for each in some]):
                cached = some[number]
                block = memoryview(bytearray(self.settings.directory_bytes))
                writes, version = cached.writes, cached.shared_version()
                pending = channel.read(cached.namespace, cached.offset, block, more=more or together)
                batch.append((cached, writes, version, block, pending))
            for cached, writes, version, block, pending in batch:
                cause = yield from wait_for(channel, pending, deadline)
                cached.fault = None if cause is None else cause.name
                if cause is None:
                    channel.tally(self.settings.name).directory_reads += 1
                    channel.tally(self.settings.name).corrupt_entries += cached.accept(
                        block,
                        channel.now(),
                        writes,
                        holds_writer=holds_writers,
                        look_seconds=self._damage_look_seconds,
                        asked_at=asked_at,
                        version=version,
                    )
                    if came is not None:
                        came.append(cached)
                else:
                    worst = cause if worst is None or cause.value > worst.value else worst
        return worst

    def catch_up(
        self, channel: IoChannel, sets: Sequence[CachedSet], deadline: float
    ) -> Steps[MissCause | None]:
        """Read those of `sets` again that another process has written since; why not all came, None where
        they did. A value that it took out of a directory (an eviction, a move) may lie whole in its slot, so
        a get goes by no entry of before."""
        overtaken = {id(cached): cached for cached in sets if cached.is_overtaken()}
        return (yield from self.load(channel, list(overtaken.values()), deadline))

    def marks(self, sets: Sequence[CachedSet], pseudonym: bytes) -> list[tuple[CachedSet, int]]:
        """The places (`Directory.marks`) of marks that say that the key is in G4: mostly none, seldom a
        foreign one."""
        found = []
        for cached in sets:
            directory = cached.directory
            if directory is not None:
                found += [(cached, slot) for slot in directory.marks(pseudonym)]
        return found

    def live_marks(
        self, sets: Sequence[CachedSet], pseudonym: bytes, now: float
    ) -> list[tuple[CachedSet, int]]:
        """As `marks`, without those that this agent took out lately, and that came back."""
        return [
            (cached, slot)
            for cached, slot in self.marks(sets, pseudonym)
            if cached.directory is not None
            and not self.removed_marks.is_removed(pseudonym, cached.directory.mark(slot), now)
        ]

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
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, least: float = 0.0
    ) -> Steps[list[MissCause | None]]:
        together = self.placement.pseudonyms(b"".join(keys))
        pseudonyms = _each(together)
        borrowed = self.borrow_sets_of_many(together)
        try:
            found = list(map(self.find, borrowed, pseudonyms))
            believed_since = channel.now() - max(least, self.timing.directory_fresh)
            wanted: dict[int, CachedSet] = {}
            for sets, of_key in zip(borrowed, found, strict=True):
                if of_key and not self.cache.follows:
                    continue
                for cached in sets:
                    is_old = cached.directory is None or cached.loaded_at <= believed_since
                    if (is_old and not of_key) or cached.is_overtaken():
                        wanted[id(cached)] = cached
            trouble: MissCause | None = None
            if wanted:
                trouble = yield from self.load(channel, list(wanted.values()), deadline)
                found = list(map(self.find, borrowed, pseudonyms))
            now, wall = channel.now(), channel.wall()
            presences = [
                self._presence(of_key, sets, pseudonym, now, wall, trouble)
                for of_key, sets, pseudonym in zip(found, borrowed, pseudonyms, strict=True)
            ]
            tally = channel.tally(self.settings.name)
            tally.lookups += len(presences)
            tally.lookups_absent += len(presences) - presences.count(None)
            return presences
        finally:
            for sets in borrowed:
                self.give_back_sets(sets)

    def _presence(
        self,
        found: Sequence[Found],
        sets: Sequence[CachedSet],
        pseudonym: bytes,
        now: float,
        wall: float,
        trouble: MissCause | None,
    ) -> MissCause | None:
        for each in found:
            if not each.entry.expiry or each.entry.expiry > wall:
                return None
        if found:
            return MissCause.EXPIRED
        if self.below is not None and self.live_marks(sets, pseudonym, now) and self.below.pays():
            return None
        away = trouble is not None and any(cached.fault is not None for cached in sets)
        return self.absence(sets, pseudonym, trouble if away else None)

    def table_sizes(self) -> dict[str, int]:
        owed = self.replication_backlog
        tables = {
            "damaged-slots": len(self.media_errors),
            "owed-copies": len(owed) + owed.doubtful,
            "spill-copies": len(self.spill_copies),
            "spill-uses": len(self.below) if self.below is not None else 0,
            "removed-marks": len(self.removed_marks),
        }
        return super().table_sizes() | tables

    def usage(self) -> tuple[int, int]:
        return self.settings.slots, self.occupancy.taken


def _each(pseudonyms: bytes) -> list[bytes]:
    """Those that lie one behind the other."""
    return [pseudonyms[at : at + KEY_BYTES] for at in range(0, len(pseudonyms), KEY_BYTES)]


def all_sets(volumes: Iterable[Volume], *, old: bool = False) -> Iterator[tuple[Volume, SetPlace]]:
    """Every set of some volumes; of `old` extents, which were there before others joined."""
    for volume in volumes:
        settings = volume.settings
        for place in settings.set_places(settings.old_extents if old else settings.extents):
            yield volume, place


def in_sets(volumes: Iterable[PoolVolume]) -> list[Volume]:
    """The volumes in sets of slots, without those on KV namespaces."""
    return [volume for volume in volumes if isinstance(volume, Volume)]
