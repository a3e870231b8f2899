"""Down: copies of the values that a set would evict next, in bundles, made before their eviction.

A put waits for nothing here. When one evicts, its set is noted (agent/pool/volume/spill_copies.py); a spill
thread then copies the set's next victims, as they lie on flash, into the bundle that it is filling. What a
full bundle holds is noted once it is stored. A victim whose copy was not stored in time leaves a plain ghost,
and nobody hears of it but the counters.

Nothing is opened: an item that was torn, or whose key was dropped, does not prove itself when it comes up.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import DIRECTORY_BYTES, Entry, is_quarantined
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.format.spill_mark import SpillMark
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Volume
from agent.pool.write.slot_copy import PIECE_BYTES
from agent.pool.write.unmark import look_again
from agent.spill.bundle import BundleBuilder
from agent.spill.names import bundle_name, new_number
from agent.spill.put_back import ReturnWriter
from agent.spill.read_up import Below, Returning
from agent.spill.room import Room
from agent.spill.target import Taken, Target, TargetError

log = logging.getLogger(__name__)

AHEAD: Final = 8
"""Victims of a set that are copied at most before they are evicted."""
BUNDLE_SECONDS: Final = 30.0
"""A bundle that is not full is stored after so long."""
URGENT_SECONDS: Final = 0.25
"""Where a set's very next victim, or all of those ahead, are in a bundle that is not stored yet, it is stored
after so long: else a pool of few sets evicts most of them before."""
IO_SECONDS: Final = 2.0
NAME_TRIES: Final = 8
"""Numbers that are drawn for a bundle where one is taken."""


@dataclass(slots=True)
class DownCounts:
    """Of one volume since the agent's start. Bytes are those of objects."""

    bundles: int = 0
    bytes: int = 0
    values: int = 0
    bundles_dropped: int = 0
    """The place did not take them, or has no room."""
    returned: int = 0
    """Values that went back to flash."""


class _Copied(NamedTuple):
    place: SetPlace
    slot: int
    entry: Entry
    mark: SpillMark


class Spiller:
    """One volume's way down, and the values that come back from there. For one thread."""

    def __init__(
        self,
        volume: Volume,
        pool_id: str,
        target: Target,
        room: Room,
        bundle_bytes: int,
        *,
        all_values: bool = False,
        below: Below | None = None,
        number_at: Callable[[float], int] = new_number,
    ) -> None:
        """`room` is the volume's at the target. `number_at` draws the number of a bundle."""
        self._number_at = number_at
        self.volume: Final = volume
        self.room: Final = room
        self.counts = DownCounts()
        self.last_error = ""
        """Why the last bundle was dropped; empty once one is stored."""
        self._pool_id = pool_id
        self._target = target
        self._bundle_bytes = bundle_bytes
        self._all_values = all_values
        self._below = below
        self._bundle: BundleBuilder | None = None
        self._since = 0.0
        self._copied: list[_Copied] = []
        volume.spill_copies.wanted = True

    @property
    def memory(self) -> int:
        """Bytes of the bundle that is being filled."""
        return self._bundle.memory if self._bundle is not None else 0

    def turn(self, channel: IoChannel) -> Steps[int | None]:
        """One set's next victims, or one value back to flash; the bytes that it moved. None: there is
        nothing to do."""
        if self.volume.erased:
            self._drop_bundle()
            return None
        if looked := (yield from self.look_again(channel)):
            return looked
        returning = self._below.next_return() if self._below is not None else None
        if returning is not None:
            return (yield from self._put_back(channel, returning))
        moved = 0
        place = self.volume.spill_copies.next_set()
        if place is not None:
            with self.volume.borrowed_at(place) as (cached,):
                moved = yield from self._copy_next(channel, place, cached)
        if self._bundle is not None and channel.now() - self._since > BUNDLE_SECONDS:
            self.store(channel.wall())
        return moved if place is not None else None

    def look_again(self, channel: IoChannel) -> Steps[int]:
        """Look whether a mark is back that was taken out lately; the bytes that were read."""
        pseudonym = self.volume.removed_marks.next_due(channel.now())
        if pseudonym is None:
            return 0
        yield from look_again(self.volume, channel, pseudonym, channel.now() + IO_SECONDS)
        return 2 * DIRECTORY_BYTES

    def _copy_next(self, channel: IoChannel, place: SetPlace, cached: CachedSet) -> Steps[int]:
        moved = 0
        victims, next_waits = self._next_victims(channel, place, cached)
        if (next_waits or not victims) and channel.now() - self._since > URGENT_SECONDS:
            self.store(channel.wall())
        for slot, entry in victims:
            size = HEADER_BYTES + self.volume.codec.padded(entry.length)
            if self._bundle is not None and not self._bundle.has_room(size):
                self.store(channel.wall())
            if self._bundle is None:
                self._bundle = BundleBuilder(self.volume.settings.slot_bytes, self._bundle_bytes)
                self._since = channel.now()
            if not self._bundle.has_room(size):
                continue  # It fits into none, and stays without a copy.
            into = self._bundle.room(size)
            pending = channel.read(cached.namespace, self.volume.slot_offset(cached, slot), into)
            cause = yield from wait_for(channel, pending, channel.now() + IO_SECONDS)
            moved += size
            if cause is None and self._stands(channel, cached, slot, entry):
                self._copied.append(_Copied(place, slot, entry, self._bundle.add(size)))
        return moved

    def _next_victims(
        self, channel: IoChannel, place: SetPlace, cached: CachedSet
    ) -> tuple[list[tuple[int, Entry]], bool]:
        """The set's next victims that are worth a copy and have none; whether the first of all waits for its
        bundle to be stored."""
        wall, volume = channel.wall(), self.volume
        waiting = {(each.place, each.slot, each.entry.generation) for each in self._copied}
        with cached.guard:
            directory = cached.directory
            if directory is None or directory.in_doubt:
                return [], False
            taken = cached.unavailable(channel.now())
            ranked = sorted(
                ((wall - entry.last_use_us / 1e6) / (1 + entry.hits), slot, entry)
                for slot, entry in directory
                if slot not in taken
                and 0 < entry.length <= volume.settings.value_bytes
                and not is_quarantined(entry)
                and not 0 < entry.expiry <= wall + BUNDLE_SECONDS
            )
        victims = ranked[::-1][:AHEAD]
        worth_it = [
            (slot, entry)
            for _, slot, entry in victims
            if (self._all_values or entry.hits or entry.pinned_until)
            and not volume.spill_copies.has(place, slot, entry.generation)
            and (place, slot, entry.generation) not in waiting
        ]
        next_waits = any((place, slot, entry.generation) in waiting for _, slot, entry in victims[:1])
        return worth_it, next_waits

    def _stands(self, channel: IoChannel, cached: CachedSet, slot: int, entry: Entry) -> bool:
        """Whether the slot was the entry's for the whole read, as far as this agent knows."""
        with cached.guard:
            directory = cached.directory
            present = directory.entry(slot) if directory is not None else None
            return (
                present is not None
                and present.generation == entry.generation
                and slot not in cached.unavailable(channel.now())
            )

    def store(self, wall: float) -> None:
        """Store the bundle, full or not; then its values' marks are known. Blocks."""
        bundle, copied, self._bundle, self._copied = self._bundle, self._copied, None, []
        if bundle is None or not copied or self.volume.erased:
            return
        volume_id = self.volume.settings.volume_id
        try:
            number, size = self._store(bundle, volume_id, wall)
        except TargetError as error:
            self.last_error = str(error)
            self.counts.bundles_dropped += 1
            return
        self.last_error = ""
        self.counts.bundles += 1
        self.counts.bytes += size
        self.counts.values += len(copied)
        for each in copied:
            mark = each.mark._replace(bundle=number)
            self.volume.spill_copies.note(each.place, each.slot, each.entry, mark)

    def _store(self, bundle: BundleBuilder, volume_id: bytes, wall: float) -> tuple[int, int]:
        """The number that a bundle is stored under, and its bytes. Raises TargetError."""
        size = 0
        try:
            for _ in range(NAME_TRIES):
                number = self._number_at(wall)
                data = bundle.finish(self._pool_id, volume_id, number)
                if not size and not self.room.take(len(data)):
                    raise TargetError("the room that is configured is used up")
                size = len(data)
                with contextlib.suppress(Taken):
                    self._target.put(bundle_name(self._pool_id, volume_id, number), data)
                    return number, size
            raise TargetError("every name that was drawn is taken")
        except Exception:
            # A place that stores a bundle and says that it did not is found out by the next listing.
            self.room.give_back(size)
            raise

    def _drop_bundle(self) -> None:
        self._bundle, self._copied = None, []

    def _put_back(self, channel: IoChannel, returning: Returning) -> Steps[int]:
        """Open a value and put it in its mark's own set, if the mark still stands then. It may evict."""
        volume, sealed = self.volume, memoryview(returning.sealed)
        opened = volume.codec.open(sealed[:HEADER_BYTES], returning.key, returning.place)
        if isinstance(opened, MissCause) or 0 < opened.expiry <= channel.wall() + 1:
            return 0
        plain = memoryview(bytearray(volume.codec.padded(opened.length)))
        unit = volume.codec.unit_bytes
        for number, start in enumerate(range(0, len(plain), unit)):
            end = min(start + unit, len(plain))
            part = sealed[HEADER_BYTES + start : HEADER_BYTES + end]
            if not opened.open_unit(number, part, plain[start:end]):
                return 0
        writing = ReturnWriter(volume, returning, opened)
        deadline, tally = channel.now() + volume.timing.write_deadline, channel.tally(volume.settings.name)
        refused_before = tally.puts_refused
        try:
            for start in range(0, opened.length, PIECE_BYTES):
                piece = plain[start : min(start + PIECE_BYTES, opened.length)]
                yield from writing.write(channel, start, piece, deadline)
            self.counts.returned += not writing.already_there
        except PutRefused:
            # The value stays where it is, and the next get may bring it back. No engine's put was refused.
            tally.puts_refused = refused_before
        finally:
            if not writing.finished:
                writing.drop()
            plain[:] = bytes(len(plain))
        return opened.length
