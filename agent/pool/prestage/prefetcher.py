"""Bringing values into the agent's memory before they are asked for.

A few threads with channels of their own take keys from two bounded queues and read whole slots, sealed, into
the `PrestageCache`: first what clients announced, and while there is none of that what was guessed
(readahead.py), at a bounded rate. A full queue refuses: prestaging that comes later than the get it was for
is only load. For the same reason a key whose get has come meanwhile, or whose deadline is over, is not read.
A value that is there, or on its way, is not read twice.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from agent.host_os.rate_limited_log import Complaints
from agent.inline.cipher_suites import Place
from agent.pool.counters import MissCause
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import wait_for
from agent.pool.read.prestage_cache import SWEEP_SECONDS, OpenValue, PrestageCache
from agent.pool.steps import IoChannel, Runner, Steps
from agent.pool.volume.bandwidth import TokenBucket
from agent.pool.volume.volume import Volume

log = logging.getLogger(__name__)

WAITING_MAX = 4096
GUESSES_MAX = 256
"""Of the learned continuations; the oldest goes, for it is the likeliest to be late."""
THREADS = 2
READ_PIECE = 1 << 20
STOP_SECONDS = 10.0
"""How long an end waits for both threads together. A read in hand may take up to the write deadline, which an
operator may set to minutes; nothing is lost with it."""


def stage(
    volume: Volume, cache: PrestageCache, channel: IoChannel, pseudonym: bytes, key: bytes | None = None
) -> Steps[bool]:
    """Read one slot into the cache, which expects it; given up where its get comes meanwhile.

    False where no directory names it or it did not come. A sealed slot is not checked: the bytes prove
    themselves in a get, or are a miss then. Without a key it is a guess.
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
        buffer = memoryview(bytearray(size))
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


class _Item(NamedTuple):
    volume: Volume
    pseudonym: bytes
    key: bytes | None
    """None where it was guessed."""
    until: float | None = None


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
        self._allowance = TokenBucket(guess_rate, time.monotonic(), 1.0) if guess_rate else None
        self._announced: deque[_Item] = deque()
        self._guesses: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._complaints = Complaints(log)
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"prestage-{number}", daemon=True)
            for number in range(threads if cache.budget_bytes else 0)
        ]

    def __len__(self) -> int:
        return len(self._announced) + len(self._guesses)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def request(self, volume: Volume, key: bytes, until: float | None = None) -> bool | None:
        """True: on its way. None: it is there already. False: refused, the queue is full or off.

        `until`: when it is of no use any more, by time.monotonic(); not begun after that.
        """
        return self._ask(_Item(volume, volume.placement.pseudonym(key), key, until))

    def guess(self, volume: Volume, pseudonym: bytes) -> bool | None:
        """As `request`, of what is likely: read when there is nothing else to do, and may be left out."""
        return self._ask(_Item(volume, pseudonym, None))

    def _ask(self, item: _Item) -> bool | None:
        if not self._threads:
            return False
        place = (item.volume.settings.volume_id, item.pseudonym)
        expected = self._cache.expect(*place, guessed=item.key is None)
        if not expected:
            return None if expected is None else True
        with self._changed:
            if item.key is None:
                if len(self._guesses) >= GUESSES_MAX:
                    self._forget(self._guesses.popleft())
                self._guesses.append(item)
            elif self._stopping or len(self._announced) >= WAITING_MAX:
                self._cache.expect_no_more(*place)
                return False
            else:
                self._announced.append(item)
            self._changed.notify()
        return True

    def stop(self) -> None:
        """End the threads; what waits is dropped. A thread that is still reading after STOP_SECONDS is left
        behind: it is a daemon, its channel is closed under it, and all it can still do is fail its read.
        """
        with self._changed:
            self._stopping = True
            for waiting in (self._announced, self._guesses):
                while waiting:
                    self._forget(waiting.popleft())
            self._changed.notify_all()
        end = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("%s is still reading and is left behind", thread.name)

    def _forget(self, item: _Item) -> None:
        volume_id = item.volume.settings.volume_id
        self._cache.expect_no_more(volume_id, item.pseudonym, guessed=item.key is None)

    def _next(self) -> _Item | None:
        """The next key that is still worth reading; None at the end."""
        with self._changed:
            while True:
                self._cache.sweep()
                while not self._announced and not self._guesses and not self._stopping:
                    self._changed.wait(SWEEP_SECONDS)
                    self._cache.sweep()
                if self._stopping:
                    return None
                item = self._announced.popleft() if self._announced else self._guesses.popleft()
                guessed = item.key is None
                if not self._cache.is_expected(
                    item.volume.settings.volume_id, item.pseudonym, guessed=guessed
                ):
                    continue  # its get has come, or it was announced since
                if self._is_in_time(item):
                    return item
                self._forget(item)

    def _is_in_time(self, item: _Item) -> bool:
        if item.key is None:
            size = item.volume.settings.slot_bytes
            return self._allowance is None or self._allowance.take(size, time.monotonic())
        return item.until is None or time.monotonic() <= item.until

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
                self._forget(item)
