"""Bringing values into the agent's memory before they are asked for.

A few threads with lanes of their own take keys from a bounded queue and read whole slots, sealed, into
the `PrestageCache`. A full queue refuses: prestaging that comes later than the get it was for is only
load. A value that is there, or on its way, is not read twice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from agent.pool.prestage import PrestageCache
from agent.pool.slot import HEADER_BYTES
from agent.pool.steps import Lanes, Runner, Steps
from agent.pool.volume import Volume, wait_for

log = logging.getLogger(__name__)

WAITING_MAX = 4096
THREADS = 2
READ_PIECE = 1 << 20
STOP_SECONDS = 10.0
"""How long an end waits for both threads together. A read in hand may take up to the write deadline, which an
operator may set to minutes; nothing is lost with it."""


def stage(volume: Volume, cache: PrestageCache, lanes: Lanes, key: bytes) -> Steps[bool]:
    """Read one slot, sealed, into the cache. False where no directory names it or it did not come.

    Nothing is checked here: the bytes prove themselves when they are asked for, or are a miss then.
    """
    pseudonym = volume.placement.pseudonym(key)
    sets = volume.borrow_sets(pseudonym)
    try:
        deadline = lanes.now() + volume.timing.write_deadline
        found = volume.find(sets, pseudonym)
        if not found:
            stale = [cached for cached in sets if not volume.is_fresh(cached, lanes)]
            if stale:
                yield from volume.load(lanes, stale, deadline)
                found = volume.find(sets, pseudonym)
        if not found or found[0].entry.length > volume.settings.value_bytes:
            return False
        cached, entry = found[0].cached, found[0].entry
        size = HEADER_BYTES + volume.codec.padded(entry.length)
        if size > cache.budget_bytes:
            return False
        buffer = memoryview(bytearray(size))
        offset = volume.slot_offset(cached, found[0].slot)
        for at in range(0, size, READ_PIECE):
            pending = lanes.read(cached.namespace, offset + at, buffer[at : at + READ_PIECE])
            if (yield from wait_for(lanes, pending, deadline)) is not None:
                return False
        lanes.tally(volume.settings.name).prestaged_bytes += size
        return cache.add(volume.settings.volume_id, key, entry.generation, buffer)
    finally:
        volume.give_back_sets(sets)


class Prestager:
    """The threads and their queue. `make_lanes` is called once in each thread."""

    def __init__(
        self,
        cache: PrestageCache,
        make_lanes: Callable[[int], tuple[Lanes, Runner]],
        threads: int = THREADS,
    ) -> None:
        self._cache = cache
        self._make_lanes = make_lanes
        self._waiting: queue.Queue[tuple[Volume, bytes] | None] = queue.Queue(WAITING_MAX)
        self._on_the_way: set[tuple[bytes, bytes]] = set()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"prestage-{number}", daemon=True)
            for number in range(threads if cache.budget_bytes else 0)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def request(self, volume: Volume, key: bytes) -> bool | None:
        """True: on its way. None: it is there already. False: refused, the queue is full or off."""
        place = (volume.settings.volume_id, key)
        if self._cache.holds(*place):
            return None
        if place in self._on_the_way:
            return True
        if not self._threads:
            return False
        self._on_the_way.add(place)
        try:
            self._waiting.put_nowait((volume, key))
        except queue.Full:
            self._on_the_way.discard(place)
            return False
        return True

    def stop(self) -> None:
        """End the threads; what waits is dropped. A thread that is still reading after STOP_SECONDS is left
        behind: it is a daemon, its lanes are closed under it, and all it can still do is fail its read.
        """
        for _ in self._threads:
            while True:
                try:
                    self._waiting.put_nowait(None)
                    break
                except queue.Full:
                    self._waiting.get_nowait()
        end = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("%s is still reading and is left behind", thread.name)

    def _work(self, number: int) -> None:
        lanes, runner = self._make_lanes(number)
        while True:
            item = self._waiting.get()
            if item is None:
                return
            volume, key = item
            try:
                runner.run(stage(volume, self._cache, lanes, key))
            except Exception:
                # Prestaging is a favour; a bug in it must cost neither the thread nor the get to come.
                log.exception("prestaging from volume %s failed", volume.settings.name)
            finally:
                self._on_the_way.discard((volume.settings.volume_id, key))
