"""Resync: an enclosure that was left out while values were replaced counts again.

It has missed what was stored meanwhile, so nothing that it has of such values may count (in_sync.py). One
agent that reaches all namespaces of the volume does this, a short step with each turn:

1. It writes an even mark against the namespace into the records of all others. From then on nobody stores
   anything without it who cannot read its record; who can, sees that the mark is not over.
2. It waits until every operation has ended that was begun before (`SyncTiming.settle`).
3. It empties the namespace's directories, and notes the greatest generation that they had.
4. It writes into the namespace's own record that generation as its floor, so what a late write brings back
   does not count either; and that the mark is about to be over. An agent that reads that stores nothing
   for a moment, so that no agent stores without the namespace while another stores in it.
5. It writes that the mark is over.

Two agents may do it at once: each step says the same twice, and an agent that empties a directory of a
namespace that counts again by then costs misses. Where it is killed, the next one begins anew.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from agent.pool.format.directory import is_quarantined
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import new_generation
from agent.pool.format.sync_record import NUMBER_MAX
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.in_sync import InSync
from agent.pool.volume.volume import Volume
from agent.pool.write.set_transaction import SetTransaction

SETS_PER_TURN: Final = 256
RECORDS_PER_TURN: Final = 64
"""Records that are read with a turn, though none wants resync; in a pool of more, some are read seldom."""
IO_SECONDS: Final = 1.0


class Resync:
    """The state of the work on one volume, for one thread."""

    def __init__(self, volume: Volume, in_sync: InSync) -> None:
        self._volume = volume
        self._in_sync = in_sync
        self._namespace: int | None = None
        """That is being brought back."""
        self._mark = 0
        self._marked_at = 0.0
        self._rest: Iterator[SetPlace] | None = None
        self._floor = 0
        self._next = 0
        self._said_at: float | None = None
        """When step 4 was done."""
        self._not_before = float("-inf")
        self.done = 0
        """Namespaces that were brought back."""

    def turn(self, channel: IoChannel) -> Steps[None]:
        """Read the records, and do the next step where a namespace does not count and could."""
        volume, in_sync = self._volume, self._in_sync
        if volume.erased:
            return
        namespaces = [extent.namespace for extent in volume.settings.extents]
        yield from in_sync.refresh(channel, self._some(namespaces), channel.now() + IO_SECONDS)
        waiting = [each for each in in_sync.waiting() if each in namespaces]
        if self._namespace not in waiting:
            self._namespace = None
        if not waiting:
            return
        if self._namespace is None:
            self._begin(waiting[0])
        assert self._namespace is not None
        began = yield from in_sync.refresh(channel, namespaces, channel.now() + IO_SECONDS)
        others = [each for each in namespaces if each != self._namespace]
        if not all(in_sync.is_fresh(each, began) for each in others):
            self._begin(self._namespace)
            return
        yield from self._step(channel, self._namespace, others)

    def _some(self, namespaces: Sequence[int]) -> list[int]:
        start, self._next = self._next, self._next + RECORDS_PER_TURN
        if self._next >= len(namespaces):
            self._next = 0
        return list(namespaces[start : start + RECORDS_PER_TURN])

    def _begin(self, namespace: int) -> None:
        self._namespace, self._mark, self._rest, self._floor = namespace, 0, None, 0
        self._said_at = None

    def _step(self, channel: IoChannel, namespace: int, others: Sequence[int]) -> Steps[None]:
        in_sync, now = self._in_sync, channel.now()
        stand = {in_sync.mark_on_flash(each, namespace) for each in others}
        if self._mark and stand != {self._mark}:
            # Somebody who does not reach it has left it out again.
            self._begin(namespace)
            self._not_before = now + in_sync.timing.again
        if not self._mark:
            if now >= self._not_before:
                yield from self._mark_even(channel, namespace, others)
            return
        if now - self._marked_at < in_sync.timing.settle:
            return
        if self._rest is None:
            extents = [each for each in self._volume.settings.extents if each.namespace == namespace]
            self._rest = self._volume.settings.set_places(extents)
        batch = list(itertools.islice(self._rest, SETS_PER_TURN))
        for place in batch:
            if not (yield from self._empty(channel, place)):
                self._begin(namespace)
                return
        if len(batch) == SETS_PER_TURN:
            return
        until = now + IO_SECONDS
        if self._said_at is None:
            self._floor = max(self._floor, new_generation(channel.wall()))
            if (yield from in_sync.bring_back(channel, namespace, self._mark - 1, self._floor, until)):
                self._said_at = channel.now()
        elif now - self._said_at >= in_sync.timing.known:
            if (yield from in_sync.bring_back(channel, namespace, self._mark, self._floor, until)):
                self.done += 1
            self._namespace = None

    def _mark_even(self, channel: IoChannel, namespace: int, others: Sequence[int]) -> Steps[None]:
        self._begin(namespace)
        for each in others:
            until = channel.now() + IO_SECONDS
            if not (yield from self._in_sync.mark(channel, each, [namespace], until, odd=False)):
                return
        stand = {self._in_sync.mark_on_flash(each, namespace) for each in others}
        if len(stand) == 1:
            (self._mark,) = stand
            self._marked_at = channel.now()

    def _empty(self, channel: IoChannel, place: SetPlace) -> Steps[bool]:
        """Take all entries from a directory, but those of slots that are set aside."""
        volume, until = self._volume, channel.now() + IO_SECONDS
        with (
            volume.borrowed_at(place) as (cached,),
            SetTransaction(volume, channel, cached) as change,
        ):
            if (yield from change.begin(until)) is not None:
                return False
            with cached.guard:
                directory = cached.directory
                assert directory is not None
                entries = [(slot, entry) for slot, entry in directory if not is_quarantined(entry)]
                for slot, entry in entries:
                    if self._floor < entry.generation < NUMBER_MAX:
                        self._floor = entry.generation
                    if slot not in cached.reserved:
                        directory.clear(slot)
                image = directory.image()
            if not entries:
                return True
            slots = [slot for slot, _ in entries]
            return (yield from change.write(cached, image, slots, until)) is None
