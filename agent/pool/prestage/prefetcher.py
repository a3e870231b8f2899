"""Bringing values into the agent's memory before they are asked for.

A few threads with channels of their own take keys from a bounded queue (staging_queue.py) and read whole
slots, sealed, into the `PrestageCache`. A value that is there, or on its way, is not read twice.
"""

import logging
import threading
import time
from collections.abc import Callable

from agent.host_os.rate_limited_log import Complaints
from agent.inline.cipher_suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.prestage.staging_queue import Item, StagingQueue
from agent.pool.read.prestage_cache import SWEEP_SECONDS, OpenValue, PrestageCache
from agent.pool.steps import IoChannel, Runner, Steps
from agent.pool.volume.volume import Volume

log = logging.getLogger(__name__)

THREADS = 2
READ_PIECE = 1 << 20
STOP_SECONDS = 10.0
"""How long an end waits for both threads together. A read in hand may take up to the write deadline, which an
operator may set to minutes; nothing is lost with it."""


def _memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


def stage(
    volume: Volume,
    cache: PrestageCache,
    channel: IoChannel,
    pseudonym: bytes,
    key: bytes | None = None,
    memory: Callable[[int], memoryview] = _memory,
) -> Steps[bool]:
    """Read one slot into the cache, which expects it; given up where its get comes meanwhile.

    False where no directory names it or it did not come. A sealed slot is not checked: the bytes prove
    themselves in a get, or are a miss then. Without a key it is a guess. `memory` gives so many bytes for a
    slot.
    """
    volume_id = volume.settings.volume_id
    with volume.borrowed(pseudonym) as sets:
        deadline = channel.now() + volume.timing.write_deadline
        found = volume.find(sets, pseudonym)
        if not found:
            stale = [cached for cached in sets if not volume.is_fresh(cached, channel)]
            if stale:
                yield from volume.load(channel, stale, deadline)
                found = volume.find(sets, pseudonym)
        if not found or found[0].entry.length > volume.settings.value_bytes:
            return False
        cached, entry = found[0].cached, found[0].entry
        size = HEADER_BYTES + volume.codec.padded(entry.length)
        if size > cache.budget_bytes:
            return False
        buffer = memory(size)
        offset = volume.slot_offset(cached, found[0].slot)
        for at in range(0, size, READ_PIECE):
            if at and not cache.is_expected(volume_id, pseudonym):
                return False
            pending = channel.read(cached.namespace, offset + at, buffer[at : at + READ_PIECE])
            if (yield from wait_for(channel, pending, deadline)) is not None:
                return False
        channel.tally(volume.settings.name).prestaged_bytes += size
        clear = None
        if cache.waits_open and key is not None:
            place = volume.place(cached, found[0].slot)
            clear = _opened(volume, key, place, entry.generation, buffer)
        return cache.bring(volume_id, pseudonym, entry.generation, buffer, guessed=key is None, clear=clear)


def _opened(volume: Volume, key: bytes, place: Place, generation: int, slot: memoryview) -> OpenValue | None:
    """The value of a whole slot, in clear; None where it does not prove itself as this write of this key.

    Only an announced value waits open: a guess has no key, and a slot proves itself for a key. A get is
    served from an open value where a remembered directory still names that very write of the key.
    """
    header, data = slot[:HEADER_BYTES], slot[HEADER_BYTES:]
    proven = volume.codec.open(header, key, place, generation)
    if isinstance(proven, MissCause) or volume.codec.padded(proven.length) > len(data):
        return None
    clear = memoryview(bytearray(len(data)))
    first, last, from_byte, to_byte = proven.unit_span(0, proven.length)
    for number in range(first, last):
        start = number * volume.codec.unit_bytes - from_byte
        end = min(start + volume.codec.unit_bytes, to_byte - from_byte)
        if not proven.open_unit(number, data[start:end], clear[start:end]):
            return None
    return OpenValue(clear[: proven.length], proven.expiry, len(slot))


class Prefetcher:
    """The threads and their queues. `make_channel` is called once in each thread.

    `guess_rate`: bytes a second that are read for guesses; 0: as many as there is time for.
    """

    def __init__(
        self,
        cache: PrestageCache,
        make_channel: Callable[[int], tuple[IoChannel, Runner]],
        threads: int = THREADS,
        guess_rate: int = 0,
    ) -> None:
        self._cache = cache
        self._make_channel = make_channel
        self._queue = StagingQueue(cache, guess_rate, time.monotonic())
        self._changed = threading.Condition()
        self._stopping = False
        self._complaints = Complaints(log)
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"prestage-{number}", daemon=True)
            for number in range(threads if cache.budget_bytes else 0)
        ]

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def request(self, volume: Volume, key: bytes, until: float | None = None) -> bool | None:
        """True: on its way. None: it is there already. False: refused, the queue is full or off.

        `until`: when it is of no use any more, by time.monotonic(); not begun after that.
        """
        return self._ask(Item(volume, volume.placement.pseudonym(key), key, until))

    def guess(self, volume: Volume, pseudonym: bytes) -> bool | None:
        """As `request`, of what is likely: read when there is nothing else to do, and may be left out."""
        return self._ask(Item(volume, pseudonym, None))

    def _ask(self, item: Item) -> bool | None:
        if not self._threads:
            return False
        with self._changed:
            if self._stopping:
                return False
            asked = self._queue.ask(item)
            self._changed.notify()
        return asked

    def stop(self) -> None:
        """End the threads; what waits is dropped. A thread that is still reading after STOP_SECONDS is left
        behind: it is a daemon, its channel is closed under it, and all it can still do is fail its read.
        """
        with self._changed:
            self._stopping = True
            self._queue.drop_all()
            self._changed.notify_all()
        end = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("%s is still reading and is left behind", thread.name)

    def _next(self) -> Item | None:
        """The next key that is still worth reading; None at the end."""
        with self._changed:
            while True:
                self._cache.sweep()
                while not len(self._queue) and not self._stopping:
                    self._changed.wait(SWEEP_SECONDS)
                    self._cache.sweep()
                if self._stopping:
                    return None
                item = self._queue.next(time.monotonic())
                if item is not None:
                    return item

    def _work(self, number: int) -> None:
        channel, runner = self._make_channel(number)
        while (item := self._next()) is not None:
            try:
                runner.run(stage(item.volume, self._cache, channel, item.pseudonym, item.key))
            except Exception as error:
                # Prestaging is a favour; a bug in it must cost neither the thread nor the get to come.
                settings = item.volume.settings
                self._cache.count_failed(settings.volume_id)
                self._complaints.bug(f"prestaging from volume {settings.name}", error, "nothing was read")
            finally:
                self._queue.forget(item)
