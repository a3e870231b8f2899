"""One value being read: the interface of every reader, and the base of those that read flash.

A get is counted once: as a hit when its first range was served, or as a miss with one cause. A value that
fails later becomes a miss, and its hit is taken back. Several threads may read one value at once; one of them
finds the slot for all.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from agent.inline.scatter import Target
from agent.pool.counters import MissCause, Tally
from agent.pool.format.sealed_slot import OpenSlot
from agent.pool.late_answers import has_arrived, miss_cause_of
from agent.pool.steps import Acquire, IoChannel, Pending, Steps, Wait
from agent.pool.volume.volume import PoolVolume

_NUMBERS: Final = itertools.count(1)


class GetState(IntEnum):
    OPEN = 0
    """No range was served."""
    HIT = 1
    MISS = 2
    """`cause` says why; nothing more is served."""


LEGAL: Final = {
    (GetState.OPEN, GetState.HIT),
    (GetState.OPEN, GetState.MISS),
    (GetState.HIT, GetState.MISS),
}


_OPEN: Final = GetState.OPEN
_HIT: Final = GetState.HIT


class Request:
    """One range to be read into a target until a deadline, and the counters of its worker."""

    __slots__ = ("channel", "deadline", "into", "offset", "tally")

    def __init__(self, channel: IoChannel, offset: int, into: Target, deadline: float, tally: Tally) -> None:
        self.channel: Final = channel
        self.offset: Final = offset
        self.into: Final = into
        self.deadline: Final = deadline
        self.tally: Final = tally


class Source:
    """The sealed bytes of a range: a buffer, and the read that fills it.

    What was prestaged needs no read: `pending` is None.
    """

    __slots__ = (
        "data", "data_starts_at", "first_byte", "header", "header_pending", "may_be_short", "pending",
        "with_room",
    )  # fmt: skip

    def __init__(
        self,
        header: memoryview | None,
        data: memoryview,
        first_byte: int,
        pending: Pending | None,
        header_pending: Pending | None = None,
        data_starts_at: int = 0,
        with_room: memoryview | None = None,
        *,
        may_be_short: bool = False,
    ) -> None:
        self.header: Final = header
        self.data: Final = data
        self.first_byte: Final = first_byte
        """Where in the sealed value `data` begins."""
        self.pending: Final = pending
        self.header_pending: Final = header_pending
        self.data_starts_at: Final = data_starts_at
        """Where in what `pending` reads `data` begins."""
        self.with_room: Final = with_room
        """`data` of one unit, and `PROOF_BYTES` that it may lose behind it (`SlotCipher.open_with_room`)."""

        self.may_be_short: Final = may_be_short
        """The read may end, without a fault, before its buffer is full."""

    def abandon(self, channel: IoChannel) -> None:
        for pending in (self.header_pending, self.pending):
            if pending is not None and not pending.done:
                channel.abandon(pending)


class Reader(ABC):
    """One value being read. `volume`, `key` and `cause` are for everybody to look at."""

    __slots__ = ("_counting", "_state", "cause", "key", "volume")

    def __init__(self, volume: PoolVolume, key: bytes) -> None:
        self.volume = volume
        self.key = key
        self.cause: MissCause | None = None
        """Why it is a miss; None before the first read, and after a hit."""
        self._state = GetState.OPEN
        self._counting = threading.Lock()

    @property
    @abstractmethod
    def length(self) -> int | None:
        """The length of the value in bytes, once the value was found."""

    @abstractmethod
    def close(self) -> None:
        """Nobody reads on: give back what is held for that."""

    @abstractmethod
    def read(self, channel: IoChannel, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; the number of bytes. 0 with `cause` set is a miss."""

    def give_up(self, channel: IoChannel, cause: MissCause) -> None:
        """It does not serve its reader after all: a miss, and no hit. The stored value stays as it is."""
        with self._counting:
            if self._state is GetState.MISS:
                return
            tally = channel.tally(self.volume.settings.name)
            if self._state is GetState.HIT:
                self._count_hit(tally, -1)
            self._enter(GetState.MISS)
            self.cause = cause
            tally.miss(cause)

    def _enter(self, state: GetState) -> None:
        """Called with `_counting` held."""
        assert (self._state, state) in LEGAL
        self._state = state

    def _is_lost(self) -> bool:
        """Whether the value is lost, asked anew, for another thread may say so (a method:
        tests/rules/test_compiled_narrowing.py)."""
        return self.cause is not None

    def _lost(self, channel: IoChannel, cause: MissCause) -> int:
        """The value as a whole is a miss."""
        self.give_up(channel, cause)
        return 0

    def _hit(self, tally: Tally) -> bool:
        """Count the first range that is served. False: the value is a miss by now."""
        with self._counting:
            if self._state is _OPEN:
                self._enter(_HIT)
                self._count_hit(tally, 1)
            return self._state is _HIT

    def _count_hit(self, tally: Tally, change: int) -> None:
        tally.gets_hit += change


class UnitReader(Reader):
    """A reader of sealed units, which finds the slot with its first range."""

    __slots__ = ("_beginning", "_number", "_open", "_since_admitted", "pseudonym")

    def __init__(self, volume: PoolVolume, key: bytes) -> None:
        super().__init__(volume, key)
        self.pseudonym = volume.placement.pseudonym(key)
        self._number = next(_NUMBERS)
        """The number under which the volume keeps a unit for this reader."""
        self._beginning = threading.Lock()
        self._open: OpenSlot | None = None
        self._since_admitted = 0
        """Bytes that were moved since its tenant's bandwidth was asked."""

    @property
    def length(self) -> int | None:
        return self._open.length if self._open is not None else None

    def close(self) -> None:
        self.volume.unit_cache.drop(self._number)

    def read(self, channel: IoChannel, offset: int, into: Target, deadline: float) -> Steps[int]:
        if self.cause is not None or not len(into):
            return 0
        if self.volume.erased:
            return self._lost(channel, MissCause.WRONG_KEY)
        request = Request(channel, offset, into, deadline, channel.tally(self.volume.settings.name))
        if self._open is None:
            if not self._beginning.acquire(blocking=False) and not (
                yield Acquire(self._beginning, deadline, gives_way=True)
            ):
                return self._lost(channel, MissCause.LATE)
            try:
                if self._found() is None:
                    return (yield from self._begin(request))
            finally:
                self._beginning.release()
        opened = self._open
        if opened is None or offset >= opened.length:
            return 0
        bandwidth = self.volume.bandwidth
        if bandwidth is not None and self._since_admitted >= opened.length:
            # All of the value passes once it was admitted; who reads it again asks again.
            self._since_admitted = 0
            if not (yield from bandwidth.admit(channel, deadline)):
                return self._lost(channel, MissCause.LATE)
        kept = self._from_cache(request, opened)
        if kept is not None:
            return self._moved(request, kept)
        served = yield from self._next(request, opened)
        if isinstance(served, MissCause):
            return self._lost(channel, served)
        return self._moved(request, served)

    @abstractmethod
    def _first(self, request: Request) -> Steps[int | MissCause]:
        """Find the slot, prove its header and serve a range; sets `_open`."""

    @abstractmethod
    def _next(self, request: Request, opened: OpenSlot) -> Steps[int | MissCause]:
        """Serve a range of the slot that was found."""

    def _found(self) -> OpenSlot | None:
        """What another thread may have found by now (a method: tests/rules/test_compiled_narrowing.py)."""
        return self._open

    def _begin(self, request: Request) -> Steps[int]:
        if self._is_lost():
            return 0
        bandwidth = self.volume.bandwidth
        if bandwidth is not None and not (yield from bandwidth.admit(request.channel, request.deadline)):
            return self._lost(request.channel, MissCause.LATE)
        served = yield from self._first(request)
        if isinstance(served, MissCause):
            return self._lost(request.channel, served)
        return self._moved(request, served) if self._hit(request.tally) else 0

    def _moved(self, request: Request, count: int) -> int:
        request.tally.bytes_read += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(request.channel, count)
            self._since_admitted += count
        return count

    def _from_cache(self, request: Request, opened: OpenSlot) -> int | None:
        """Serve a range inside of the unit that is kept for this reader; None where it is not."""
        into, volume = request.into, self.volume
        unit_bytes = volume.codec.unit_bytes
        number, within = divmod(request.offset, unit_bytes)
        wanted = min(len(into), opened.length - request.offset)
        if not within or within + wanted > unit_bytes:
            return None
        kept = volume.unit_cache.take(self._number, number)
        if kept is None:
            return None
        into[:wanted] = kept[within : within + wanted]
        request.tally.bytes_copied += wanted
        if request.offset + wanted < opened.length and within + wanted < unit_bytes:
            volume.unit_cache.keep(self._number, number, kept)
        else:
            volume.unit_buffers.give_back(kept)
        return wanted

    def _serve(self, request: Request, opened: OpenSlot, source: Source) -> Steps[int | MissCause]:
        """Open the units of a range as they arrive, straight into its target wherever a whole unit fits."""
        into, offset, unit_bytes = request.into, request.offset, self.volume.codec.unit_bytes
        if offset >= opened.length:
            source.abandon(request.channel)
            return 0
        first, last, _, to_byte = opened.unit_span(offset, len(into))
        wanted = min(len(into), opened.length - offset)
        for number in range(first, last):
            start = number * unit_bytes
            size = min(unit_bytes, to_byte - start)
            at = start - source.first_byte
            pending = source.pending
            if pending is not None:
                enough = source.data_starts_at + at + size
                came = has_arrived(pending, enough) or (yield Wait(pending, request.deadline, enough))
                cause = miss_cause_of(request.channel, pending, came)
                if source.may_be_short and cause is None and pending.received < enough:
                    cause = MissCause.CORRUPT  # Cut short: behind the cut are bytes of an earlier read.
                if cause is not None:
                    source.abandon(request.channel)
                    return cause
            target = start - offset
            piece = into[target : target + size] if target >= 0 and target + size <= len(into) else None
            if source.with_room is not None and isinstance(piece, memoryview):
                proven = opened.open_with_room(number, source.with_room, piece)
            elif piece is not None and (isinstance(piece, memoryview) or opened.cipher.scatters):
                proven = opened.open_unit(number, source.data[at : at + size], piece)
            else:
                # The range ends inside this unit, its padding does not fit, or it lies in several places
                # and the cipher cannot: open it aside.
                buffer = self.volume.unit_buffers.borrow()
                aside = buffer[:size]
                proven = opened.open_unit(number, source.data[at : at + size], aside)
                if proven:
                    begin, end = max(0, -target), min(size, wanted - target)
                    into[target + begin : target + end] = aside[begin:end]
                    request.tally.bytes_copied += end - begin
                if proven and offset + wanted < min(start + size, opened.length):
                    self.volume.unit_cache.keep(self._number, number, buffer)
                else:
                    self.volume.unit_buffers.give_back(buffer)
            if not proven:
                into[:] = bytes(len(into))  # It may be the host's own memory: nothing unproven stays in it.
                source.abandon(request.channel)
                return MissCause.CORRUPT
        return wanted


class MemoryReader(Reader):
    """A value in the agent's memory: one that waits for its store (write_back.py), or one that was prestaged
    and waits open. Safe from any thread.

    Its memory counts against the bound of its owner until the reader is done, also where the value is stored,
    dropped or deleted meanwhile. Without that, open values had no bound but their number.
    """

    def __init__(
        self,
        volume: PoolVolume,
        key: bytes,
        data: memoryview,
        expires: int,
        let_go: Callable[[], None],
        *,
        prestaged: bool,
    ) -> None:
        """`expires`: seconds since the epoch, 0: never. `let_go` is called once, when nobody reads on."""
        super().__init__(volume, key)
        self._data = data
        self._expires = expires
        self._let_go: Callable[[], None] | None = let_go
        self._prestaged = prestaged

    @property
    def length(self) -> int | None:
        return len(self._data) if self._state is GetState.HIT else None

    def close(self) -> None:
        with self._counting:
            let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

    def read(self, channel: IoChannel, offset: int, into: Target, deadline: float) -> Steps[int]:
        yield from ()  # steps, of which there are none
        if self.cause is not None or not len(into):
            return 0
        if self.volume.erased or 0 < self._expires <= channel.wall():
            return self._lost(channel, MissCause.WRONG_KEY if self.volume.erased else MissCause.EXPIRED)
        tally = channel.tally(self.volume.settings.name)
        if not self._hit(tally):
            return 0
        count = max(0, min(len(into), len(self._data) - offset))
        into[:count] = self._data[offset : offset + count]
        tally.bytes_read += count
        tally.bytes_copied += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(channel, count)
        return count

    def _count_hit(self, tally: Tally, change: int) -> None:
        tally.gets_hit += change
        tally.prestage_hits += change if self._prestaged else 0
