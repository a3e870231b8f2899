"""Write-back: a put is acknowledged once the agent has it in memory, and stored right after by a thread.

What this costs when the agent dies, or its enclosures stay away: the values that were not stored yet are
gone, and getting them is a miss (`never_stored`), as of any value that was evicted. It is never a wrong byte,
for what is stored later is sealed as any other. It is for volumes whose values can be computed again, and off
by default: `[[policies]] write = "back"`.

Bounded in bytes: a put for which there is no room goes through to flash. Bounded in time: values are stored
in the order in which they came, as fast as flash takes them, and one that cannot be stored for KEEP_SECONDS
is given up. While a value waits, this agent serves it, and names it to `exists`; other agents do not see it,
and the first of two writes is known to be the first once it is on flash.

Values wait as they came, in clear, like a value that an engine has half written; a put that is not a whole
value of a known length (a file written through /kv) goes through.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from agent.inline.scatter import Target
from agent.pool.steps import Acquire, Lanes, Runner, Steps
from agent.pool.tally import MissCause
from agent.pool.volume import Volume
from agent.pool.writing import BadPut, PutRefused, TooLong, Writing

log = logging.getLogger(__name__)

KEEP_SECONDS = 30.0
PIECE_BYTES = 1 << 20
"""A value is sealed and sent in pieces of this size; a worker's buffer holds no more."""
RETRY_SECONDS = 0.2
LOOK_SECONDS = 1.0


class Waiting:
    """One value that is acknowledged and not on flash. `lock` is held by whoever stores or removes it."""

    __slots__ = ("data", "expires", "key", "lock", "over", "pseudonym", "since", "ttl_seconds")

    def __init__(
        self, key: bytes, pseudonym: bytes, data: memoryview, ttl_seconds: int, since: float
    ) -> None:
        self.key = key
        self.pseudonym = pseudonym
        self.data = data
        self.ttl_seconds = ttl_seconds
        self.since = since
        self.lock = threading.Lock()
        self.over = False
        """It is on flash, was removed, or was given up."""


class WriteBack:
    """The values of one volume that wait. Safe from any thread."""

    def __init__(
        self,
        volume: Volume,
        bytes_max: int,
        came: threading.Event | None = None,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        """`came` is set when there is something to store."""
        self.volume = volume
        self.bytes_max = bytes_max
        self.keep_seconds = keep_seconds
        self.bytes_held = 0
        """Of values that wait and of those that are on their way in."""
        self._values: OrderedDict[bytes, Waiting] = OrderedDict()
        self._lock = threading.Lock()
        self._came = came or threading.Event()

    def __len__(self) -> int:
        return len(self._values)

    def set_aside(self, size: int) -> bool:
        """Room for a value that is coming; False where there is none."""
        with self._lock:
            if self.bytes_held + size > self.bytes_max:
                return False
            self.bytes_held += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.bytes_held -= size

    def add(self, value: Waiting) -> bool:
        """Take a value, for which room was set aside. False where one of its key waits already."""
        with self._lock:
            if value.pseudonym in self._values:
                self.bytes_held -= len(value.data)
                return False
            self._values[value.pseudonym] = value
        self._came.set()
        return True

    def find(self, pseudonym: bytes) -> Waiting | None:
        return self._values.get(pseudonym)

    def oldest(self) -> Waiting | None:
        """The value whose turn it is."""
        with self._lock:
            return next(iter(self._values.values()), None)

    def postpone(self, value: Waiting) -> None:
        """Flash did not take it; the others come first."""
        with self._lock:
            if value.pseudonym in self._values:
                self._values.move_to_end(value.pseudonym)

    def store(self, lanes: Lanes, value: Waiting, deadline: float) -> Steps[bool]:
        """Bring a value to flash, if that is still to be done. False where it could not be and waits on."""
        if not (yield Acquire(value.lock, deadline)):
            return False
        try:
            if value.over:
                return True
            try:
                yield from self._write(lanes, value, deadline)
            except (PutRefused, BadPut) as refused:
                # No slot, no room, an erased volume: that will not be otherwise later.
                final = isinstance(refused, BadPut) or refused.cause in (None, MissCause.WRONG_KEY)
                if not final and lanes.now() - value.since < self.keep_seconds:
                    return False
                self.give_up(value, lanes)
                return True
            self._remove(value)
            return True
        finally:
            value.lock.release()

    def _write(self, lanes: Lanes, value: Waiting, deadline: float) -> Steps[None]:
        length = len(value.data)
        writing = Writing(self.volume, value.key, length=length, ttl_seconds=value.ttl_seconds)
        try:
            for at in range(0, length, PIECE_BYTES):
                yield from writing.write(lanes, at, value.data[at : at + PIECE_BYTES], deadline)
        finally:
            if not writing.finished:
                yield from writing.drop(lanes)

    def remove(self, value: Waiting, deadline: float) -> Steps[bool]:
        """Forget a value before it is stored. False where it is being stored, or was meanwhile."""
        if not (yield Acquire(value.lock, deadline)):
            return False
        try:
            if value.over:
                return False
            self._remove(value)
            return True
        finally:
            value.lock.release()

    def give_up(self, value: Waiting, lanes: Lanes) -> None:
        """It was acknowledged, and will not be stored."""
        lanes.tally(self.volume.settings.name).puts_lost += 1
        self._remove(value)

    def _remove(self, value: Waiting) -> None:
        value.over = True
        with self._lock:
            if self._values.pop(value.pseudonym, None) is not None:
                self.bytes_held -= len(value.data)


class BackWriting:
    """One put into memory. It looks as a `Writing` does; `begin` makes one where there is room."""

    def __init__(self, back: WriteBack, key: bytes, length: int, ttl_seconds: int) -> None:
        self.volume = back.volume
        self.key = key
        self.pseudonym = back.volume.placement.pseudonym(key)
        self.already_there = False
        self.finished = False
        self.stored = False
        self.received = 0
        self._back = back
        self._length = length
        self._ttl_seconds = ttl_seconds
        self._holds_room = True
        self._data: memoryview | None = None

    @classmethod
    def begin(cls, back: WriteBack, key: bytes, length: int, ttl_seconds: int) -> BackWriting | None:
        """None where there is no room for the value: it has to go through."""
        if not back.set_aside(length):
            return None
        return cls(back, key, length, ttl_seconds)

    def write(self, lanes: Lanes, offset: int, data: memoryview, deadline: float) -> Steps[bool]:
        """Take bytes of the value, in their order. True when that completed it: it waits for its storing."""
        if offset + len(data) > self._length:
            raise TooLong(f"bytes up to {offset + len(data)} of a value that ends at {self._length}")
        if self.finished or not len(data):
            return self.finished
        if self.volume.erased:
            yield from self.drop(lanes)
            raise PutRefused("the volume was erased", MissCause.WRONG_KEY)
        if offset != self.received:
            yield from self.drop(lanes)
            raise BadPut("a value is written from its start on")
        if self._data is None:
            self._data = memoryview(bytearray(self._length))
        self._data[offset : offset + len(data)] = data
        self.received += len(data)
        if self.received < self._length:
            return False
        waiting, self._data, self._holds_room = self._data, None, False
        value = Waiting(self.key, self.pseudonym, waiting, self._ttl_seconds, lanes.now())
        tally = lanes.tally(self.volume.settings.name)
        if self._back.add(value):
            tally.puts_written_back += 1
            self.stored = True
        else:
            tally.puts_already_there += 1
            self.already_there = True
        self.finished = True
        return True

    def finish(self, lanes: Lanes, deadline: float) -> Steps[None]:
        """What is not complete by now is not stored."""
        if not self.finished:
            yield from self.drop(lanes)
            raise BadPut(f"{self.received} bytes of a value of {self._length}")

    def drop(self, lanes: Lanes) -> Steps[None]:
        """Give up what came so far."""
        self.finished = True
        self._data = None
        if self._holds_room:
            self._holds_room = False
            self._back.give_back(self._length)
        return
        yield


class BackReading:
    """A value that waits for its storing, being read. It looks as a `Reading` does."""

    def __init__(self, volume: Volume, value: Waiting) -> None:
        self.volume = volume
        self.key = value.key
        self.cause: MissCause | None = None
        self._data = value.data
        self._counting = threading.Lock()
        self._hit = False

    @property
    def length(self) -> int | None:
        return len(self._data) if self._hit else None

    def close(self) -> None:
        """Nothing is kept for it."""

    def read(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; how many bytes were there."""
        tally = lanes.tally(self.volume.settings.name)
        if self.cause is not None or not len(into):
            return 0
        with self._counting:
            if self.volume.erased:
                self.cause = MissCause.WRONG_KEY
                tally.gets_hit -= self._hit
                tally.miss(self.cause)
                return 0
            tally.gets_hit += not self._hit
            self._hit = True
        count = max(0, min(len(into), len(self._data) - offset))
        into[:count] = self._data[offset : offset + count]
        tally.bytes_read += count
        tally.bytes_copied += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, count)
        return count
        yield


class Storing:
    """The thread that brings what waits to flash. `came` is set by every `WriteBack` of `backs`."""

    def __init__(self, backs: Sequence[WriteBack], came: threading.Event) -> None:
        self._backs = list(backs)
        self._came = came
        self._stopping = threading.Event()

    def work(self, lanes: Lanes, runner: Runner) -> None:
        """Until `stop` was called and nothing waits any more: it was stored, or it was given up."""
        while True:
            self._came.clear()
            stored = [self._oldest(back, lanes, runner) for back in self._backs]
            if any(stored):
                continue
            if any(len(back) for back in self._backs):
                time.sleep(RETRY_SECONDS)  # flash does not take it; nobody can say when it will
            elif self._stopping.is_set():
                return
            else:
                self._came.wait(LOOK_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        self._came.set()

    def _oldest(self, back: WriteBack, lanes: Lanes, runner: Runner) -> bool:
        value = back.oldest()
        if value is None:
            return False
        try:
            if runner.run(back.store(lanes, value, lanes.now() + back.volume.timing.write_deadline)):
                return True
        except Exception:
            log.exception("a value of volume %s could not be stored", back.volume.settings.name)
            back.give_up(value, lanes)
            return True
        back.postpone(value)
        return False
