"""Replace: store a short value over what its key has. The newest value of a key is the only one.

A put of a key that is there is acknowledged and forgotten, for values do not change. Here the value does, so
an older one must not come back, on any agent. Four rules hold that:

1. The directories of all sets that may have the key are read now, with their writers held, and proven whole.
   Where one cannot be, nothing is replaced: the enclosure that is away may have an older value.
2. Where an older value is, the new slot is on flash before an entry names it. So whenever the agent dies, the
   key has the older value or the new one.
3. The entry goes into a set that has the key, where that set has room. Then one write of the directory takes
   the older entry out and the new one in. Other sets lose theirs afterwards.
4. Before the answer the headers of the older slots are zeroed. So a late or stale directory, which names one
   of them again, leads to a miss.

The generation of the new entry is greater than that of the older ones, also when this clock is behind. So
while both are named, the newer one counts (agent/pool/mutable/newest.py).

Two agents that replace one key at once may both be acknowledged; one value stays. A directory of a third
agent that was read before both, and is written after both, may take the key away: a miss.
"""

from collections.abc import Callable, Sequence
from typing import Final

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused, ReplacedMeanwhile, TooLong
from agent.pool.format.eviction_choice import Choice
from agent.pool.mutable.look_ahead import Look
from agent.pool.mutable.newest import SlotAsked, top_of
from agent.pool.steps import IoChannel, Steps, beside
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import MAY_LAND, NOT_REACHED, WRITTEN_ALL_THE_TIME
from agent.pool.write.put import PUT_FRESH_SECONDS, SlotWriter, is_known
from agent.pool.write.quota_eviction import Room, room_for
from agent.pool.write.set_transaction import HeaderErase, SetTransaction
from agent.pool.write.slot_allocation import Reservation, best_choice, is_eviction
from agent.pool.write.writer_base import PutState

GENERATION_MAX: Final = 1 << 62
"""Microseconds of a year far ahead, with a byte behind them. An entry beyond that is nobody's clock: it goes,
and does not count."""
GONE: Final = "the value went meanwhile over which this was to be stored"
REPLACED: Final = "another value came under the key meanwhile"
UNREAD: Final = "the value that the key has does not come whole"
LEFT: Final = "the enclosure did not take the older value away"


def replace(
    volume: Volume,
    channel: IoChannel,
    key: bytes,
    data: bytes,
    deadline: float,
    first: Steps[None] | None = None,
    look: Look | None = None,
    only_over: Callable[[bytes | None], bool] | None = None,
) -> Steps[bool]:
    """Store `data`, of one unit at the most, over what the key has.

    `first`, what the value tells of, comes to its end before anything is written, beside the reads here.
    Where it takes longer than a put trusts a directory, the directories are read once more. It may take no
    set's writer of this volume, and where it raises, nothing is stored. With a `look` at the key that still
    holds, no directory is read (look_ahead.py). `only_over`: whether it may take the place of a value, or of
    none (None); the value is read with the writers held, which is a round trip more, and refused is
    ReplacedMeanwhile. Returns whether the key had a value.

    Raises TooLong for bytes that do not fit, and PutRefused. After that the key may have either value; where
    a write was not answered, it is refused for 60 s, as a delete is.
    """
    if len(data) > volume.codec.unit_bytes:
        most = min(volume.codec.unit_bytes, volume.settings.value_bytes)
        raise TooLong(f"{len(data)} bytes; a value that is replaced has {most} at the most")
    writing = ReplacingWriter(volume, key, length=len(data), first=first, look=look, only_over=only_over)
    yield from writing.write(channel, 0, memoryview(data), deadline)
    return writing.had_value


class _Older:
    """Entries of the key in one set."""

    __slots__ = ("cached", "generation", "slots")

    def __init__(self, cached: CachedSet, slots: list[int], generation: int) -> None:
        self.cached: Final = cached
        self.slots: Final = slots
        self.generation: Final = generation
        """The greatest that counts."""


class ReplacingWriter(SlotWriter):
    """One short value that comes in one piece, and replaces what its key has."""

    def __init__(
        self,
        volume: Volume,
        key: bytes,
        *,
        length: int,
        first: Steps[None] | None = None,
        look: Look | None = None,
        only_over: Callable[[bytes | None], bool] | None = None,
    ) -> None:
        super().__init__(volume, key, length=length)
        self._first = first
        self._only_over = only_over
        self._look = look
        self._sets: tuple[CachedSet, ...] = ()
        self._change: SetTransaction | None = None
        self._older: list[_Older] = []

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        try:
            yield from super()._take(channel, offset, data, deadline)
        finally:
            if self._change is not None:
                self._change.end()
                self._change = None
            self._volume.give_back_sets(self._sets)
            self._sets = ()
            if self._state is PutState.NEW:
                # What `first` raised came past every refusal: the room in the tenant's quota goes back.
                self._release()

    def _begin(self, channel: IoChannel, deadline: float) -> Steps[None]:
        volume = self._volume
        # All of these directories are needed, so what a get does not wait for is waited for here.
        channel.waits_for_slow()
        self._sets = sets = volume.borrow_sets(self.pseudonym)
        # An eviction for the quota locks other sets, so it comes before these are locked.
        exchange = yield from self._make_room(channel, sets, deadline)
        self._change = change = SetTransaction(volume, channel, *sets)
        if not (yield from change.lock(deadline)):
            self._turn_away(channel, PutRefused(WRITTEN_ALL_THE_TIME, MissCause.LATE))
        if volume.in_doubt_writes.may_land(self.pseudonym, channel.now()):
            self._turn_away(channel, PutRefused(MAY_LAND, MissCause.LATE))
        trouble = yield from self._load(channel, change, deadline)
        if trouble is not None:
            self._turn_away(channel, PutRefused(NOT_REACHED, trouble))
        self._older = self._all_older()
        if self._only_over is not None:
            yield from self._judge_older(channel, change, self._only_over, deadline)
        targets = list(volume.write_targets(self.pseudonym, sets))
        self._reserve(channel, targets, everywhere=True, exchange=exchange)

    def _load(self, channel: IoChannel, change: SetTransaction, deadline: float) -> Steps[MissCause | None]:
        """Read the directories, whose writers are held, unless a look at them still holds; `first` beside."""
        first, look, began = self._first, self._look, channel.now()
        is_known = look is not None and look.holds(self._volume, channel, self.pseudonym, self._sets)
        if first is None:
            return None if is_known else (yield from change.load(deadline))
        if is_known:
            yield from first
            trouble: MissCause | None = None
        else:
            _, trouble = yield from beside(first, change.load(deadline))
        if channel.now() - began > PUT_FRESH_SECONDS:
            # `first` may have waited for seconds, and other agents have stored names meanwhile.
            trouble = yield from change.load(deadline)
        return trouble

    def _judge_older(
        self,
        channel: IoChannel,
        change: SetTransaction,
        only_over: Callable[[bytes | None], bool],
        deadline: float,
    ) -> Steps[None]:
        """Raises PutRefused where what the key has is not to be replaced, or does not come."""
        if not self._older:
            if not only_over(None):
                self._turn_away(channel, ReplacedMeanwhile(GONE))
            return
        began, found = channel.now(), top_of(self._sets, self.pseudonym)
        value = yield from SlotAsked(self._volume, channel, found).open(self.key, deadline)
        if isinstance(value, MissCause):
            if value is not MissCause.EXPIRED:
                self._turn_away(channel, PutRefused(UNREAD, value))
        elif not only_over(value):
            self._turn_away(channel, ReplacedMeanwhile(REPLACED))
        if channel.now() - began <= PUT_FRESH_SECONDS:
            return
        trouble = yield from change.load(deadline)
        if trouble is not None:
            self._turn_away(channel, PutRefused(NOT_REACHED, trouble))
        judged, self._older = self._older, self._all_older()
        if _greatest(judged) != _greatest(self._older):
            self._turn_away(channel, ReplacedMeanwhile(REPLACED))

    def _make_room(self, channel: IoChannel, sets: tuple[CachedSet, ...], deadline: float) -> Steps[bool]:
        """Room in the tenant's quota, where it has one. True: for the slot of another value of these sets."""
        volume, quota = self._volume, self._volume.quota
        if quota is None or not quota.limits.of_room:
            return False
        unread = [each for each in sets if each.fault or not is_known(volume, each, channel)]
        if unread:
            yield from volume.load(channel, unread, (channel.now() + deadline) / 2)
        if volume.find(sets, self.pseudonym):
            # The older value goes right after. Where it is gone by then, upkeep evicts what is too much.
            quota.exchange(volume.settings.slot_bytes)
            room = Room.SET_ASIDE
        else:
            room = yield from room_for(volume, channel, sets, may_evict=self._may_evict, deadline=deadline)
        if room is Room.NONE:
            used_up = f"the tenant of volume {volume.settings.name} has used up its quota"
            self._turn_away(channel, PutRefused(used_up))
        self._room_set_aside = True
        return room is Room.EXCHANGE

    @property
    def had_value(self) -> bool:
        """Whether the key had a value that was replaced."""
        return bool(self._older)

    def _all_older(self) -> list[_Older]:
        found = [self._older_in(cached) for cached in self._sets]
        return [older for older in found if older is not None]

    def _older_in(self, cached: CachedSet) -> _Older | None:
        with cached.guard:
            directory = cached.directory
            assert directory is not None
            slots = directory.find_all(self.pseudonym)
            entries = [directory.entry(slot) for slot in slots]
        if not slots:
            return None
        greatest = 0
        for entry in entries:
            if entry is not None and greatest < entry.generation < GENERATION_MAX:
                greatest = entry.generation
        return _Older(cached, slots, greatest)

    def _best(
        self, channel: IoChannel, sets: list[CachedSet], exchange: bool
    ) -> tuple[CachedSet, Choice] | None:
        """A slot without a live value in a set that has the key, else as a put chooses. Never the key's own:
        it would be lost before the new one is named."""
        held = self._volume.holds.held
        holding = [each.cached for each in self._older if each.cached in sets]
        for some in (holding, sets):
            best = best_choice(some, channel, self.pseudonym, held, exchange=exchange, replaces=True)
            if best is not None and (some is sets or not is_eviction(best[1])):
                return best
        return None

    def _new_generation(self, wall: float) -> int:
        generation = super()._new_generation(wall)
        for older in self._older:
            generation = max(generation, older.generation + 1)
        return generation

    def _commit(
        self,
        channel: IoChannel,
        reservation: Reservation,
        parts: list[memoryview] | list[bytes],
        length: int,
        deadline: float,
    ) -> Steps[None]:
        volume, cached, change = self._volume, reservation.cached, self._change
        assert change is not None
        yield from self._vouched_for(channel, reservation, deadline)
        writes = self._send_last(channel)
        writes.append(channel.write(cached.namespace, reservation.offset, parts, more=not self._older))
        if self._older:
            yield from self._wait_for_all(channel, writes, deadline)
        beside: list[HeaderErase] = []
        for older in self._older:
            if older.cached is cached:
                beside.append(HeaderErase(volume, channel, cached, older.slots, self.pseudonym))
        is_named = False
        try:
            yield from self._name(channel, reservation, writes, length, deadline)
            is_named = True
        finally:
            if not is_named:
                for each in beside:
                    each.restore()
        for each in beside:
            each.send()
        erased = beside
        for older in self._older:
            if older.cached is not cached:
                erased.append(change.erase(older.cached, older.slots, self.pseudonym))
        failed: MissCause | None = None
        for each in erased:
            cause = yield from each.end(deadline)
            failed = failed or cause
        if failed is not None:
            self._refuse(channel, PutRefused(LEFT, failed))
        self._count_stored(channel, length)


def _greatest(older: Sequence[_Older]) -> int:
    return max((each.generation for each in older), default=0)
