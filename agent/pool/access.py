"""The entrance to the pool: a volume with the policies by which this agent serves it, and its operations.

A `ServedVolume` is whole when it is made (agent/service/volume_policies.py) and stays as it is, so any thread
may use it. Policies (docs/prestaging.md) are for volumes in sets of slots alone.
"""
# One idea in one file: `ServedVolume`, what may be done with a volume, and its two kinds.

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from agent.host_os.per_user_bounds import Holder
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.format.directory import KEY_BYTES
from agent.pool.kv.get import KvReader
from agent.pool.kv.put import KvWriter, delete_key
from agent.pool.kv.volume import KvVolume
from agent.pool.mutable.look_ahead import Look, look_ahead
from agent.pool.mutable.lookup_and_hold import are_named, hold, keep
from agent.pool.mutable.newest import newest
from agent.pool.mutable.replace import replace
from agent.pool.read.batch import read_together
from agent.pool.read.get import SlotReader, length_below, remembered_length
from agent.pool.read.leading_run import LeadingRun, extend_run
from agent.pool.read.prestage_cache import OpenValue, PrestageCache
from agent.pool.read.reader_base import MemoryReader, Reader
from agent.pool.read.recompute_gate import GatedReader, RecomputeGate
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.eviction_holds import Hold
from agent.pool.volume.placement import Rank
from agent.pool.volume.settings import Timing, VolumeSettings
from agent.pool.volume.volume import PoolVolume, Volume
from agent.pool.write.admission import SecondUse, SecondUseWriter
from agent.pool.write.batch import UNTRIED, Became, Untried, write_together
from agent.pool.write.borrowed_slots import SlotLinks, write_borrowed
from agent.pool.write.delete_and_pin import delete, pin
from agent.pool.write.delete_together import Deleted, delete_together
from agent.pool.write.name_together import UnnamedWriter, name_all
from agent.pool.write.put import SlotWriter
from agent.pool.write.write_back import AlreadyWaiting, BackWriter, Waiting, WriteBack
from agent.pool.write.writer_base import Writer

IN_SETS_ONLY: Final = "a volume on KV namespaces has no values that are replaced or held"
LOOKED_UP_AT_ONCE: Final = 256
"""Keys of one batch whose directories are in use at a time: none of them is forgotten meanwhile."""
PLACED_AT_ONCE: Final = 1024
"""Keys of one question whose places are computed together: of arrays so short a call costs most."""


class ServedVolume(ABC):
    """A volume as this agent serves it; `serve` makes one."""

    def __init__(
        self,
        volume: PoolVolume,
        in_sets: Volume | None = None,
        gate: RecomputeGate | None = None,
        admission: SecondUse | None = None,
        back: WriteBack | None = None,
        slots: SlotLinks | None = None,
    ) -> None:
        self.volume: Final = volume
        self.in_sets: Final = in_sets
        """The volume where it lies in sets of slots: only such values are prestaged."""
        self.gate: Final = gate
        self.admission: Final = admission
        self.back: Final = back
        self.slots: Final = slots
        """Where this process writes no directory: by what another lends it slots."""

    @property
    def lends_slots(self) -> bool:
        """Whether another process of the agent may write values of the volume, which this one names."""
        return False

    def seconds_from_below(self, size: int) -> float | None:
        """How long so many bytes would take to come from G4; None: not measured, or no such place."""
        below = None if self.in_sets is None else self.in_sets.below
        return None if below is None else below.seconds_to_load(size)

    @property
    def settings(self) -> VolumeSettings:
        return self.volume.settings

    @property
    def timing(self) -> Timing:
        return self.volume.timing

    @property
    def erased(self) -> bool:
        return self.volume.erased

    @property
    def waiting(self) -> int:
        """Puts that wait for their next piece, or to be named, each with a slot of its own."""
        return self.volume.puts_in_pieces.waiting(self.settings.volume_id)

    def pseudonym(self, key: bytes) -> bytes:
        return self.volume.placement.pseudonym(key)

    @abstractmethod
    def reader(self, key: bytes, prestage: PrestageCache | None = None) -> Reader:
        """One value to be read."""

    def read_together(
        self,
        channel: IoChannel,
        keys: Sequence[bytes],
        targets: Sequence[memoryview],
        prestage: PrestageCache | None,
    ) -> Steps[list[int | MissCause | None]] | None:
        """Read many short values, each into its target; see batch.py. None: readers of their own must look,
        as for those with None in the list."""
        return None

    def write_together(
        self, channel: IoChannel, keys: Sequence[bytes], values: Sequence[memoryview], ttl_seconds: int
    ) -> Steps[list[Became]] | None:
        """Store many short values; see write/batch.py. None: writers of their own must take them. Raises
        TooLong, and PutElsewhere where `slots` has none to be lent."""
        return None

    @abstractmethod
    def writer(self, key: bytes, *, length: int | None = None, ttl_seconds: int = 0) -> Writer:
        """One value to be written. Raises TooLong."""

    def unnamed_writer(self, key: bytes, *, length: int | None) -> Writer:
        """One value of a key that nobody else puts: it is on flash with its last byte, and there by
        `name_all`; or there at once, as by any other writer. Raises TooLong."""
        return self.writer(key, length=length)

    def name_all(self, channel: IoChannel, writers: Sequence[Writer], deadline: float) -> Steps[None]:
        """Name the values of `unnamed_writer`: those that are not there yet. Raises PutRefused where one
        could not be named."""
        yield from ()  # steps, of which there are none: any other writer names its own

    @abstractmethod
    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float
    ) -> Steps[list[MissCause | None]]:
        """For each key None where it is there, else why it is not; a hint, as all such answers."""

    def remembered_run(
        self, keys: bytes, wall: float, prestage: PrestageCache | None, away: frozenset[int]
    ) -> LeadingRun:
        """As far as `leading_run` comes without a round trip, for a thread without a channel. It goes on with
        what this returns. `wall`: seconds since the epoch."""
        return LeadingRun()

    @abstractmethod
    def leading_run(
        self,
        channel: IoChannel,
        keys: bytes,
        deadline: float,
        prestage: PrestageCache | None,
        away: frozenset[int],
        run: LeadingRun,
    ) -> Steps[LeadingRun]:
        """How far the keys (one behind the other) can be served from the first on. `away`: namespaces that
        cannot be read now. `run`: what is known of that, a new one at first; it is what comes back."""

    @abstractmethod
    def find_length(self, channel: IoChannel, key: bytes) -> Steps[int | None]:
        """The length of a value, for a stat that must not move it; None where there is none."""

    @abstractmethod
    def delete(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
        """Remove a key. True where it was there. Raises PutRefused where an enclosure does not answer."""

    def delete_many(
        self, channel: IoChannel, keys: Sequence[bytes], wait_seconds: float
    ) -> Steps[list[bool | PutRefused]]:
        """As `delete` of each, which has `wait_seconds`; why it was refused, where it was."""
        return (yield from self._delete_each(channel, keys, [UNTRIED] * len(keys), wait_seconds))

    def _delete_each(
        self, channel: IoChannel, keys: Sequence[bytes], became: Sequence[Deleted], wait_seconds: float
    ) -> Steps[list[bool | PutRefused]]:
        """Delete those that were not tried, one after the other."""
        ended: list[bool | PutRefused] = []
        for key, one in zip(keys, became, strict=True):
            if not isinstance(one, Untried):
                ended.append(one)
                continue
            try:
                ended.append((yield from self.delete(channel, key, channel.now() + wait_seconds)))
            except PutRefused as refused:
                ended.append(refused)
        return ended

    @abstractmethod
    def pin(self, channel: IoChannel, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
        """Keep a key from eviction; see `delete_and_pin.pin`."""

    def replace(
        self,
        channel: IoChannel,
        key: bytes,
        data: bytes,
        deadline: float,
        first: Steps[None] | None = None,
        look: Look | None = None,
        only_over: Callable[[bytes | None], bool] | None = None,
    ) -> Steps[bool]:
        """Store a short value, one unit at the most, over what the key has, after `first`, with what
        `look_ahead` told of the key; see `replace.py`.

        Raises PutRefused, also where a candidate set cannot be read, and TooLong. In sets of slots alone;
        elsewhere BadPut, as the two below.
        """
        raise BadPut(IN_SETS_ONLY)

    def knows(self, channel: IoChannel, key: bytes) -> bool:
        """Whether a put of the key would read no directory. False: a `lookup` may spare it that."""
        return False

    def look_ahead(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[Look | None]:
        """Read now what `replace` of the key would read; see `look_ahead.py`. None: it has to read itself."""
        yield from ()  # steps, of which there are none
        return None

    def newest(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bytes | MissCause]:
        """The value of a key by directories that are read now, or why it is not there; see `newest.py`. A
        value that waits to be written back is not seen. In sets of slots alone."""
        raise BadPut(IN_SETS_ONLY)

    def hold(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, holder: Holder = 0
    ) -> Steps[Hold | MissCause]:
        """Whether all keys (HELD_AT_ONCE at the most) are there, by directories that are read now; this
        agent does not evict them until `Hold.let_go`. The cause of the first that is not there. In sets of
        slots alone."""
        raise BadPut(IN_SETS_ONLY)

    def new_hold(self, holder: Holder) -> Hold:
        """One that holds nothing yet, for `keep`. In sets of slots alone."""
        raise BadPut(IN_SETS_ONLY)

    def keep(self, channel: IoChannel, pseudonyms: Sequence[bytes], held: Hold) -> bool:
        """Hold keys that were just stored, too, by their pseudonyms; whether all are held. Reads nothing."""
        return False

    def are_named(self, channel: IoChannel, keys: Sequence[bytes]) -> bool | None:
        """Whether all keys are there by what is remembered; None where that is too little. Reads nothing."""
        return None


class _OnKv(ServedVolume):
    """A volume on KV namespaces. Its values are neither prestaged nor pinned."""

    def __init__(self, volume: KvVolume) -> None:
        super().__init__(volume)
        self._volume: Final = volume

    def reader(self, key: bytes, prestage: PrestageCache | None = None) -> Reader:
        return KvReader(self._volume, key)

    def writer(self, key: bytes, *, length: int | None = None, ttl_seconds: int = 0) -> Writer:
        return KvWriter(self._volume, key, length=length, ttl_seconds=ttl_seconds)

    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float
    ) -> Steps[list[MissCause | None]]:
        return self._volume.lookup(channel, keys, deadline)

    def leading_run(
        self,
        channel: IoChannel,
        keys: bytes,
        deadline: float,
        prestage: PrestageCache | None,
        away: frozenset[int],
        run: LeadingRun,
    ) -> Steps[LeadingRun]:
        while not run.has_ended() and (asked := _keys_from(keys, run.length, LOOKED_UP_AT_ONCE)):
            causes = yield from self._volume.lookup(channel, asked, deadline)
            there = _before_the_first_hole(causes)
            run.add_from_flash(self.settings.value_bytes, there)
            if there < len(asked):
                run.hole = causes[there]
        return run

    def find_length(self, channel: IoChannel, key: bytes) -> Steps[int | None]:
        """The length that the header of the value proves."""
        deadline = channel.now() + self.timing.read_deadline
        return KvReader(self._volume, key).find_length(channel, deadline)

    def delete(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
        return delete_key(self._volume, channel, key, deadline)

    def pin(self, channel: IoChannel, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
        yield from ()  # steps, of which there are none
        return False


class _InSets(ServedVolume):
    """A volume in sets of slots, with its policies."""

    def __init__(
        self,
        volume: Volume,
        gate: RecomputeGate | None,
        admission: SecondUse | None,
        back: WriteBack | None,
        slots: SlotLinks | None,
    ) -> None:
        super().__init__(volume, volume, gate, admission, back, slots)
        self._volume: Final = volume
        if admission is not None:
            volume.change(on_erasure=admission.forget)

    def reader(self, key: bytes, prestage: PrestageCache | None = None) -> Reader:
        volume, back = self._volume, self.back
        if back is not None and len(back):
            waiting = back.find_to_read(self.pseudonym(key))
            if waiting is not None:
                let_go = functools.partial(back.let_go, waiting)
                return MemoryReader(volume, key, waiting.data, waiting.expires, let_go, prestaged=False)
        if prestage is not None and prestage.waits_open:
            value = _opened(volume, key, prestage)
            if value is not None:
                let_go = functools.partial(prestage.let_go, value)
                return MemoryReader(volume, key, value.data, value.expiry, let_go, prestaged=True)
        if self.gate is None:
            return SlotReader(volume, key, prestage)
        return GatedReader(volume, key, prestage, self.gate)

    def read_together(
        self,
        channel: IoChannel,
        keys: Sequence[bytes],
        targets: Sequence[memoryview],
        prestage: PrestageCache | None,
    ) -> Steps[list[int | MissCause | None]] | None:
        volume, back = self._volume, self.back
        waits_in_memory = (back is not None and len(back)) or (prestage is not None and prestage.bytes_held)
        if volume.erased or volume.hedge is not None or self.gate is not None or waits_in_memory:
            return None
        return read_together(volume, channel, keys, targets, volume.timing.read_deadline)

    def write_together(
        self, channel: IoChannel, keys: Sequence[bytes], values: Sequence[memoryview], ttl_seconds: int
    ) -> Steps[list[Became]] | None:
        volume = self._volume
        if not self._stores_together():
            return None
        if self.slots is not None:
            return write_borrowed(
                volume, channel, self.slots, keys, values, volume.timing.write_deadline, ttl_seconds
            )
        return write_together(volume, channel, keys, values, volume.timing.write_deadline, ttl_seconds)

    def _stores_together(self) -> bool:
        volume = self._volume
        return not (
            volume.erased or volume.below is not None or self.back is not None or self.admission is not None
        )

    @property
    def lends_slots(self) -> bool:
        settings = self.settings
        return settings.kind == "kv" and settings.copies == 1 and self._stores_together()

    def writer(self, key: bytes, *, length: int | None = None, ttl_seconds: int = 0) -> Writer:
        volume, back = self._volume, self.back
        fits = length is not None and 0 < length <= volume.settings.value_bytes
        if back is not None and length is not None and fits and back.set_aside(length):
            return BackWriter(back, key, length, ttl_seconds)
        if self._waiting(key) is not None:
            # It would be on flash first, and the first put would be the second.
            return AlreadyWaiting(volume, key, length=length)
        if self.admission is None:
            return SlotWriter(volume, key, length=length, ttl_seconds=ttl_seconds)
        return SecondUseWriter(volume, key, self.admission, length=length, ttl_seconds=ttl_seconds)

    def unnamed_writer(self, key: bytes, *, length: int | None) -> Writer:
        if self.back is not None or self.admission is not None:
            return self.writer(key, length=length)
        return UnnamedWriter(self._volume, key, length=length)

    def name_all(self, channel: IoChannel, writers: Sequence[Writer], deadline: float) -> Steps[None]:
        unnamed = [writing for writing in writers if isinstance(writing, UnnamedWriter)]
        return name_all(self._volume, channel, unnamed, deadline)

    def _waiting(self, key: bytes) -> Waiting | None:
        """The value of a key that was acknowledged and is not on flash yet."""
        if self.back is None or not len(self.back):
            return None
        return self.back.find(self.pseudonym(key))

    def lookup(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float
    ) -> Steps[list[MissCause | None]]:
        causes: list[MissCause | None] = []
        began = channel.now()
        for start in range(0, len(keys), LOOKED_UP_AT_ONCE):
            part = keys[start : start + LOOKED_UP_AT_ONCE]
            # A directory that was read since is not read again.
            causes += yield from self._look_up(channel, part, deadline, channel.now() - began)
        return causes

    def _look_up(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, least: float
    ) -> Steps[list[MissCause | None]]:
        """As `Volume.lookup`, with what was acknowledged and is not on flash yet."""
        waiting = [self._waiting(key) for key in keys] if self.back is not None else []
        causes = yield from self._volume.lookup(channel, keys, deadline, least)
        wall = channel.wall()
        for at, value in enumerate(waiting):
            if value is not None:
                causes[at] = MissCause.EXPIRED if value.has_expired(wall) else None
        return causes

    def leading_run(
        self,
        channel: IoChannel,
        keys: bytes,
        deadline: float,
        prestage: PrestageCache | None,
        away: frozenset[int],
        run: LeadingRun,
    ) -> Steps[LeadingRun]:
        volume, began = self._volume, channel.now()
        while not run.has_ended() and (part := _part(keys, run.length)):
            pseudonyms = volume.placement.pseudonyms(part)
            places, count, done = volume.places_of_many(pseudonyms), len(part) // KEY_BYTES, 0
            while True:
                done += self._extend(run, prestage, pseudonyms, places, done, count, channel.wall(), away)
                if done == count or run.has_ended():
                    break
                # As for `exists`: a directory that was read since the question came is not read again.
                asked = _keys_from(part, done, LOOKED_UP_AT_ONCE)
                causes = yield from self._look_up(channel, asked, deadline, channel.now() - began)
                there = _before_the_first_hole(causes)
                end = done + there
                wall, now = channel.wall(), channel.now()
                grown = self._extend(run, prestage, pseudonyms, places, done, end, wall, away, now)
                if run.has_ended():
                    break
                # Directories that were forgotten already, for want of room, tell no length.
                run.add_from_flash(volume.settings.value_bytes, there - grown)
                if there < len(causes):
                    run.hole = causes[there]
                    break
                done = end
        return run

    def remembered_run(
        self, keys: bytes, wall: float, prestage: PrestageCache | None, away: frozenset[int]
    ) -> LeadingRun:
        volume, run = self._volume, LeadingRun()
        while not run.has_ended() and (part := _part(keys, run.length)):
            pseudonyms = volume.placement.pseudonyms(part)
            places, count = volume.places_of_many(pseudonyms), len(part) // KEY_BYTES
            if self._extend(run, prestage, pseudonyms, places, 0, count, wall, away) < count:
                break
        return run

    def _extend(
        self,
        run: LeadingRun,
        prestage: PrestageCache | None,
        pseudonyms: bytes,
        places: Sequence[Rank],
        start: int,
        end: int,
        wall: float,
        away: frozenset[int],
        now: float = -1.0,
    ) -> int:
        """As `extend_run`, with what was acknowledged and is not on flash yet."""
        back, at = self.back, start
        while at < end:
            at += extend_run(run, self._volume, prestage, pseudonyms, places, at, end, wall, away, now)
            waiting = None
            if back is not None and len(back) and at < end:
                waiting = back.find(pseudonyms[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if waiting is None or waiting.has_expired(wall):
                break
            run.hole = None
            run.add_from_memory(len(waiting.data))
            at += 1
        return at - start

    def knows(self, channel: IoChannel, key: bytes) -> bool:
        return self._volume.knows(channel, key)

    def find_length(self, channel: IoChannel, key: bytes) -> Steps[int | None]:
        """The length that a directory hints at, or that of a value in G4."""
        volume, deadline = self._volume, channel.now() + self.timing.read_deadline
        waiting = self._waiting(key)
        if waiting is not None:
            return len(waiting.data) if not waiting.has_expired(channel.wall()) else None
        pseudonym = volume.placement.pseudonym(key)
        sets = volume.borrow_sets(pseudonym)
        try:
            length = remembered_length(volume, pseudonym, sets)
            stale = [
                cached
                for cached in sets
                if cached.is_overtaken() or (length is None and not volume.is_fresh(cached, channel))
            ]
            if stale:
                yield from volume.load(channel, stale, deadline)
                length = remembered_length(volume, pseudonym, sets)
        finally:
            volume.give_back_sets(sets)
        if length is None and volume.below is not None:
            length = yield from length_below(volume, channel, key, deadline)
        return length

    def delete(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bool]:
        waiting = self._waiting(key)
        if waiting is not None and self.back is not None:
            return (yield from self.back.delete(channel, waiting, deadline))
        return (yield from delete(self._volume, channel, key, deadline))

    def delete_many(
        self, channel: IoChannel, keys: Sequence[bytes], wait_seconds: float
    ) -> Steps[list[bool | PutRefused]]:
        if self.back is not None or len(keys) < 2:
            return (yield from super().delete_many(channel, keys, wait_seconds))
        became = yield from delete_together(self._volume, channel, keys, wait_seconds)
        return (yield from self._delete_each(channel, keys, became, wait_seconds))

    def replace(
        self,
        channel: IoChannel,
        key: bytes,
        data: bytes,
        deadline: float,
        first: Steps[None] | None = None,
        look: Look | None = None,
        only_over: Callable[[bytes | None], bool] | None = None,
    ) -> Steps[bool]:
        waiting = self._waiting(key)
        if waiting is not None and self.back is not None:
            # It would be on flash later, over the newer one.
            yield from self.back.delete(channel, waiting, deadline)
        return (yield from replace(self._volume, channel, key, data, deadline, first, look, only_over))

    def look_ahead(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[Look | None]:
        return look_ahead(self._volume, channel, key, deadline)

    def newest(self, channel: IoChannel, key: bytes, deadline: float) -> Steps[bytes | MissCause]:
        return newest(self._volume, channel, key, deadline)

    def hold(
        self, channel: IoChannel, keys: Sequence[bytes], deadline: float, holder: Holder = 0
    ) -> Steps[Hold | MissCause]:
        return hold(self._volume, channel, keys, deadline, holder)

    def new_hold(self, holder: Holder) -> Hold:
        return self._volume.holds.take((), holder)

    def keep(self, channel: IoChannel, pseudonyms: Sequence[bytes], held: Hold) -> bool:
        return keep(self._volume, channel, pseudonyms, held)

    def are_named(self, channel: IoChannel, keys: Sequence[bytes]) -> bool | None:
        return are_named(self._volume, channel, keys)

    def pin(self, channel: IoChannel, key: bytes, until: int, deadline: float) -> Steps[bool | None]:
        waiting = self._waiting(key)
        back = self.back if waiting is not None and not waiting.has_expired(channel.wall()) else None
        if waiting is not None and back is not None and (yield from back.pin(waiting, until, deadline)):
            return True
        return (yield from pin(self._volume, channel, key, until, deadline))


def serve(
    volume: PoolVolume,
    gate: RecomputeGate | None = None,
    admission: SecondUse | None = None,
    back: WriteBack | None = None,
    slots: SlotLinks | None = None,
) -> ServedVolume:
    """A volume with the policies that the configuration wants for it; those on KV namespaces have none."""
    if isinstance(volume, KvVolume):
        return _OnKv(volume)
    assert isinstance(volume, Volume)
    return _InSets(volume, gate, admission, back, slots)


def _part(keys: bytes, first: int) -> bytes:
    """Those of the joined keys whose places are computed together, from number `first` on."""
    return keys[first * KEY_BYTES : (first + PLACED_AT_ONCE) * KEY_BYTES]


def _keys_from(keys: bytes, first: int, most: int) -> list[bytes]:
    """Of the joined keys those from number `first` on, `most` of them at the most."""
    end = min(len(keys), (first + most) * KEY_BYTES)
    return [keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, end, KEY_BYTES)]


def _before_the_first_hole(causes: Sequence[MissCause | None]) -> int:
    for at, cause in enumerate(causes):
        if cause is not None:
            return at
    return len(causes)


def _opened(volume: Volume, key: bytes, prestage: PrestageCache) -> OpenValue | None:
    """The value that waits in clear, if a remembered directory names that write of the key."""
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    try:
        found = volume.find(sets, pseudonym)
        if not found:
            return None
        return prestage.find_open(volume.settings.volume_id, pseudonym, found[0].entry.generation)
    finally:
        volume.give_back_sets(sets)
