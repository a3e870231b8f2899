"""Write-back: a put is acknowledged once the agent has it in memory, and stored right after by a thread.

What this costs when the agent dies, or its enclosures stay away: the values that were not stored yet are
gone, and getting them is a miss (`never_stored`), as of any value that was evicted. It is never a wrong byte,
for what is stored later is sealed as any other. It is for volumes whose values can be computed again, and off
by default: `[[policies]] write = "back"`.

Bounded in bytes, with those that readers still have: a put for which there is no room goes through to flash.
Bounded in time: values are stored in the order in which they came, as fast as flash takes them, and one that
cannot be stored for KEEP_SECONDS is given up. While a value waits, this agent serves it, and names it to
`exists`; other agents do not see it, and the first of two writes is the first once it is on flash.

Values wait as they came, in clear, like a value that an engine has half written; a put that is not a whole
value of a known length (a file written through /kv) goes through.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.host_os.rate_limited_log import Complaints
from agent.pool.counters import MissCause
from agent.pool.errors import BadPut, PutRefused
from agent.pool.steps import Acquire, Held, IoChannel, Runner, Steps
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete, pin
from agent.pool.write.put import MARK_STAYS, SlotWriter
from agent.pool.write.unmark import unmark
from agent.pool.write.writer_base import PutState, Writer

log = logging.getLogger(__name__)

KEEP_SECONDS: Final = 30.0
VALUE_COST: Final = 1024
"""Memory of a value that waits, beside its bytes."""
PIECE_BYTES: Final = 1 << 20
"""A value is sealed and sent in pieces of this size; a worker's buffer holds no more."""
RETRY_SECONDS: Final = 0.2
LOOK_SECONDS: Final = 1.0
TELL_SECONDS: Final = 10.0
"""How often the log tells of values that were lost, at the most."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One value that is acknowledged and not on flash. A thread that stores or removes it holds `lock`."""

    key: bytes
    pseudonym: bytes
    data: memoryview
    expires: int
    """In seconds since the epoch, counted from the put; 0: never."""
    since: float
    pinned_until: int = 0
    """The pin that it gets on flash; what waits is not evicted."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    """It is on flash, was removed, or was given up."""
    readers: int = 0
    """Those who have it open: its memory is held for as long. Changed by `WriteBack`."""

    def has_expired(self, wall: float) -> bool:
        return bool(self.expires) and self.expires <= wall


class _Storing(SlotWriter):
    """The put to flash of a value that waited: its time to live began when it was acknowledged."""

    def __init__(self, volume: Volume, value: Waiting) -> None:
        super().__init__(volume, value.key, length=len(value.data))
        self._expires = value.expires

    def _expiry(self, wall: float) -> int:
        return self._expires


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
        """Of values that wait, of those that are on their way in, and of those that readers still have."""
        self._held = 0
        """How many they are."""
        self.lost = 0
        self.last_refusal = "they waited too long"
        """Values that were given up. Written by the thread that stores."""
        self._values: OrderedDict[bytes, Waiting] = OrderedDict()
        self._lock = threading.Lock()
        self._came = came or threading.Event()

    def __len__(self) -> int:
        return len(self._values)

    def set_aside(self, size: int) -> bool:
        """Room for a value that is coming; False where there is none."""
        with self._lock:
            if self.bytes_held + size + (self._held + 1) * VALUE_COST > self.bytes_max:
                return False
            self._change(1, size)
            return True

    def give_back(self, size: int) -> None:
        """That room, of a value that did not come."""
        with self._lock:
            self._change(-1, -size)

    def _change(self, values: int, size: int) -> None:
        """Called with the lock held."""
        self._held += values
        self.bytes_held += size

    def forget_expired(self, pseudonym: bytes, wall: float) -> None:
        """Make way for a new put of a key, unless the old value is being stored just now."""
        value = self._values.get(pseudonym)
        if value is not None and value.has_expired(wall) and value.lock.acquire(blocking=False):
            try:
                self._remove(value)
            finally:
                value.lock.release()

    def add(self, value: Waiting) -> bool:
        """Take a value, for which room was set aside. False where one of its key waits already."""
        with self._lock:
            if value.pseudonym in self._values:
                self._change(-1, -len(value.data))
                return False
            self._values[value.pseudonym] = value
        self._came.set()
        return True

    def find(self, pseudonym: bytes) -> Waiting | None:
        return self._values.get(pseudonym)

    def find_to_read(self, pseudonym: bytes) -> Waiting | None:
        """As `find`; the value's memory is the reader's until `let_go`."""
        with self._lock:
            value = self._values.get(pseudonym)
            if value is not None:
                value.readers += 1
            return value

    def let_go(self, value: Waiting) -> None:
        """A reader is done."""
        with self._lock:
            value.readers -= 1
            self._count_out(value)

    def _count_out(self, value: Waiting) -> None:
        """Its memory is free, once it neither waits nor is read. Called with the lock held."""
        if not value.readers and self._values.get(value.pseudonym) is not value:
            self._change(-1, -len(value.data))

    def oldest(self) -> Waiting | None:
        """The value whose turn it is."""
        with self._lock:
            return next(iter(self._values.values()), None)

    def postpone(self, value: Waiting) -> None:
        """Flash did not take it; the others come first."""
        with self._lock:
            if self._values.get(value.pseudonym) is value:
                self._values.move_to_end(value.pseudonym)

    def store(self, channel: IoChannel, value: Waiting, deadline: float) -> Steps[bool]:
        """Bring a value to flash, if that is still to be done. False where it could not be and waits on."""
        if not (yield Acquire(value.lock, deadline)):
            return False
        with Held(value.lock):
            if value.over:
                return True
            if value.has_expired(channel.wall()):
                self._remove(value)
                return True
            tally = channel.tally(self.volume.settings.name)
            refused_before = tally.puts_refused
            try:
                yield from self._write(channel, value, deadline)
            except (PutRefused, BadPut) as refused:
                # The put was acknowledged; if it comes to nothing it is one that was lost.
                tally.puts_refused = refused_before
                # No slot, no room, an erased volume: that will not be otherwise later. It will be where an
                # enclosure is away, for nothing is evicted meanwhile, and where a key was rotated away: the
                # next try seals with the new one.
                may_pass = not isinstance(refused, BadPut) and (refused.cause is not None or refused.passes)
                in_time = channel.now() - value.since < self.keep_seconds
                if may_pass and in_time and not self.volume.erased:
                    return False
                self.last_refusal = str(refused)
                self.give_up(value, channel)
                return True
            if value.pinned_until:
                yield from pin(self.volume, channel, value.key, value.pinned_until, deadline)
            self._remove(value)
            return True

    def _write(self, channel: IoChannel, value: Waiting, deadline: float) -> Steps[None]:
        length = len(value.data)
        writing = _Storing(self.volume, value)
        try:
            for at in range(0, length, PIECE_BYTES):
                yield from writing.write(channel, at, value.data[at : at + PIECE_BYTES], deadline)
        finally:
            if not writing.finished:
                writing.drop()

    def delete(self, channel: IoChannel, value: Waiting, deadline: float) -> Steps[bool]:
        """Delete a key whose value waits, here and on flash, where a try to store it may have left it.

        Raises PutRefused where that cannot be done; then the value waits on, for its key is not gone.
        """
        if not (yield Acquire(value.lock, deadline, gives_way=True)):
            raise PutRefused("the value is being stored", MissCause.LATE)
        with Held(value.lock):
            was_there = not value.over and not value.has_expired(channel.wall())
            there = yield from delete(self.volume, channel, value.key, deadline)
            self._remove(value)
            return was_there or there

    def pin(self, value: Waiting, until: int, deadline: float) -> Steps[bool]:
        """Have a value pinned when it is stored. False where it does not wait any more."""
        if not (yield Acquire(value.lock, deadline, gives_way=True)):
            raise PutRefused("the value is being stored", MissCause.LATE)
        with Held(value.lock):
            if not value.over:
                value.pinned_until = until
            return not value.over

    def give_up(self, value: Waiting, channel: IoChannel) -> None:
        """It was acknowledged, and will not be stored. The caller holds its lock."""
        if not value.over:
            channel.tally(self.volume.settings.name).puts_lost += 1
            self.lost += 1
            self._remove(value)

    def give_up_idle(self, value: Waiting, channel: IoChannel) -> bool:
        """As `give_up`; False where somebody is storing or removing it just now."""
        if not value.lock.acquire(blocking=False):
            return False
        with Held(value.lock):
            self.give_up(value, channel)
            return True

    def _remove(self, value: Waiting) -> None:
        value.over = True
        with self._lock:
            # By now another value of the key may be waiting, which was put after this one was deleted.
            if self._values.get(value.pseudonym) is value:
                del self._values[value.pseudonym]
                self._count_out(value)


class BackWriter(Writer):
    """One put into memory, for which room was set aside."""

    def __init__(self, back: WriteBack, key: bytes, length: int, ttl_seconds: int) -> None:
        super().__init__(back.volume, key, length=length, ttl_seconds=ttl_seconds)
        self._back = back
        self._room = length
        self._data: memoryview | None = None

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        """Take bytes of the value, in their order."""
        if offset != self._end:
            self._refuse(channel, BadPut("a value is written from its start on"))
        if self._data is None:
            self._data = memoryview(bytearray(self._room))
            self._enter(PutState.TAKING)
        self._data[offset : offset + len(data)] = data
        self._end += len(data)
        if self._end < len(self._data):
            return
        volume = self._back.volume
        if volume.below is not None:
            doubt = yield from unmark(volume, channel, self.pseudonym, deadline)
            if doubt is not None:
                self._refuse(channel, PutRefused(MARK_STAYS, doubt))
        wall, waiting = channel.wall(), self._data
        value = Waiting(self.key, self.pseudonym, waiting, self._expiry(wall), channel.now())
        self._back.forget_expired(self.pseudonym, wall)
        self._room = 0  # The room is the value's now.
        if self._back.add(value):
            channel.tally(self.volume.settings.name).puts_written_back += 1
            self._enter(PutState.STORED)
        else:
            self._found_there(channel)

    def _release(self) -> None:
        self._data = None
        if self._room:
            room, self._room = self._room, 0
            self._back.give_back(room)


class AlreadyWaiting(Writer):
    """A put that cannot wait, of a key whose value does. It is taken and forgotten: the first put stays."""

    def _take(self, channel: IoChannel, offset: int, data: memoryview, deadline: float) -> Steps[None]:
        yield from ()  # steps, of which there are none
        self._found_there(channel)


class Storing:
    """The thread that brings what waits to flash. `came` is set by every `WriteBack` of `backs`."""

    def __init__(self, backs: Sequence[WriteBack], came: threading.Event) -> None:
        self._backs = list(backs)
        self._came = came
        self._stopping = threading.Event()
        self._next_try = [0.0] * len(self._backs)
        self._complaints = Complaints(log)
        """After a try that failed its volume rests for as long as that took, and the others have a turn."""
        self._lost_told = 0
        self._lost_told_at = float("-inf")

    def work(self, channel: IoChannel, runner: Runner) -> None:
        """Until `stop` was called and nothing waits any more: it was stored, or it was given up."""
        while True:
            self._came.clear()
            stored = [self._oldest(number, channel, runner) for number in range(len(self._backs))]
            if time.monotonic() - self._lost_told_at >= TELL_SECONDS:
                self._tell_lost()
            if any(stored):
                continue
            if any(len(back) for back in self._backs):
                time.sleep(RETRY_SECONDS)  # flash does not take it; nobody can say when it will
            elif self._stopping.is_set():
                self._tell_lost()
                return
            else:
                self._came.wait(LOOK_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        self._came.set()

    def _tell_lost(self) -> None:
        lost = {back.volume.settings.name: back.lost for back in self._backs if back.lost}
        total = sum(lost.values())
        if total > self._lost_told:
            log.warning(
                "%d acknowledged values could not be stored and are lost (by volume, in all: %s): %s",
                total - self._lost_told,
                lost,
                {back.volume.settings.name: back.last_refusal for back in self._backs if back.lost},
            )
            self._lost_told, self._lost_told_at = total, time.monotonic()

    def _oldest(self, number: int, channel: IoChannel, runner: Runner) -> bool:
        back = self._backs[number]
        value, began = back.oldest(), time.monotonic()
        if value is None or began < self._next_try[number]:
            return False
        bandwidth = back.volume.bandwidth
        if bandwidth is not None and not bandwidth.is_ready(channel):
            # The thread is everybody's: it does not wait for what one tenant may move.
            if channel.now() - value.since < back.keep_seconds:
                return False
            return back.give_up_idle(value, channel)
        try:
            if runner.run(back.store(channel, value, channel.now() + back.volume.timing.write_deadline)):
                return True
        except Exception as error:
            what = f"storing an acknowledged value of volume {back.volume.settings.name}"
            self._complaints.bug(what, error, "could not be stored")
            return back.give_up_idle(value, channel)
        back.postpone(value)
        self._next_try[number] = 2 * time.monotonic() - began
        return False
