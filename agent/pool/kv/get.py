"""Reading values of a volume on KV namespaces: one Retrieve brings header and units, a miss is one too.

Read read/get.py first; a `KvReading` serves the same calls. The Retrieve asks for the header and for as many
bytes as the range needs, and since a value has no offsets on the wire, a range further back brings what lies
before it as well. That costs nothing where the host reads a value in one request, as engines do; a program
that reads in small pieces is served from the last unit that was opened, which is kept for it.
"""

from __future__ import annotations

import itertools
import threading
from typing import Final

from agent.inline.scatter import Target
from agent.pool.counters import MissCause
from agent.pool.format.slot import HEADER_BYTES, OpenSlot
from agent.pool.kv.commands import KvPending, kv_lanes
from agent.pool.kv.volume import KvVolume, wait_for_key
from agent.pool.steps import Acquire, Lanes, Steps
from agent.pool.volume.unit_cache import UnitCache

_numbers = itertools.count(1)
_DAMAGED: Final = (MissCause.CORRUPT, MissCause.WRONG_KEY, MissCause.EVICTED)


class KvReading:
    """One value being read. Not shared between threads at the same time, but for the first range."""

    __slots__ = ("_beginning", "_counting", "_hit", "_kept", "_number", "_open", "cause", "key", "namespace",
                 "pseudonym", "volume")  # fmt: skip

    def __init__(self, volume: KvVolume, key: bytes) -> None:
        self.volume = volume
        self.key = key
        self.pseudonym = volume.placement.pseudonym(key)
        self.namespace = volume.namespace_of(self.pseudonym)
        self.cause: MissCause | None = None
        """Why it is a miss; None before the first read, and after a hit."""
        self._number = next(_numbers)
        self._kept: UnitCache = volume.kept_units
        self._beginning = threading.Lock()
        self._counting = threading.Lock()
        self._hit = False
        self._open: OpenSlot | None = None

    def close(self) -> None:
        """Nobody reads on; what is kept for that goes."""
        self._kept.drop(self._number)

    @property
    def length(self) -> int | None:
        """The length of the value in bytes, once the header has proven it."""
        return self._open.length if self._open is not None else None

    def read(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; how many bytes were there. 0 with `cause` set is a miss."""
        if self.cause is not None or not len(into):
            return 0
        if self.volume.erased:
            return self._lost(lanes, MissCause.WRONG_KEY)
        if self._open is None:
            if not self._beginning.acquire(blocking=False) and not (yield Acquire(self._beginning, deadline)):
                return self._lost(lanes, MissCause.LATE)
            try:
                bandwidth = self.volume.bandwidth if self._found() is None else None
                if bandwidth is not None and not (yield from bandwidth.admit(lanes, deadline)):
                    return self._lost(lanes, MissCause.LATE)
                if self._found() is None and not self._is_lost():
                    return (yield from self._range(lanes, offset, into, deadline))
            finally:
                self._beginning.release()
            if self._is_lost():
                return 0
        served = self._from_kept(lanes, offset, into)
        if served is not None:
            return served
        return (yield from self._range(lanes, offset, into, deadline))

    def give_up(self, lanes: Lanes, cause: MissCause) -> None:
        """It does not serve its reader after all: a miss, and no hit. What is stored is as good as before."""
        self._count_lost(lanes, cause)

    def find_length(self, lanes: Lanes, deadline: float) -> Steps[int | None]:
        """The length of the value, from its header alone; None where there is none. It is no get."""
        header = lanes.receive_buffer(HEADER_BYTES)
        pending = kv_lanes(lanes).kv_retrieve(self.namespace, self.pseudonym, header)
        opened = yield from self._header(lanes, pending, header, HEADER_BYTES, deadline)
        return None if isinstance(opened, MissCause) else opened.length

    # -- how it is done ---------------------------------------------------------------------------

    def _found(self) -> OpenSlot | None:
        """What another thread may have found by now (a method: tests/rules/test_compiled_narrowing.py)."""
        return self._open

    def _is_lost(self) -> bool:
        return self.cause is not None

    def _lost(self, lanes: Lanes, cause: MissCause) -> int:
        """The value as a whole is a miss: counted once, and no longer as a hit if its first range was."""
        self._count_lost(lanes, cause)
        if cause in _DAMAGED:
            self.volume.disproven.note(self.pseudonym, 1)
        return 0

    def _count_lost(self, lanes: Lanes, cause: MissCause) -> None:
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self.cause is None:
                self.cause = cause
                tally.gets_hit -= self._hit
                tally.miss(cause)

    def _served(self, lanes: Lanes, count: int) -> int:
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self._is_lost():
                return 0
            if not self._hit:
                self._hit = True
                tally.gets_hit += 1
        tally.bytes_read += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, count)
        self.volume.uses.note(self.pseudonym, int(lanes.wall() * 1e6))
        return count

    def _from_kept(self, lanes: Lanes, offset: int, into: Target) -> int | None:
        """Serve a range inside of the unit that is kept for this reader; None where it is not."""
        opened = self._open
        assert opened is not None
        if offset >= opened.length:
            return 0
        unit_bytes = self.volume.codec.unit_bytes
        number, within = divmod(offset, unit_bytes)
        wanted = min(len(into), opened.length - offset)
        if within + wanted > unit_bytes:
            return None
        kept = self._kept.take(self._number, number)
        if kept is None:
            return None
        into[:wanted] = kept[within : within + wanted]
        lanes.tally(self.volume.settings.name).bytes_copied += wanted
        if offset + wanted < opened.length and within + wanted < unit_bytes:
            self._kept.keep(self._number, number, kept)
        else:
            self.volume.unit_buffers.give_back(kept)
        return self._served(lanes, wanted)

    def _range(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Retrieve up to the end of a range, prove it and serve it."""
        volume = self.volume
        unit_bytes = volume.codec.unit_bytes
        last_unit = -(-(offset + len(into)) // unit_bytes)
        size = HEADER_BYTES + volume.codec.padded(min(last_unit * unit_bytes, volume.settings.value_bytes))
        buffer = lanes.receive_buffer(size)
        pending = kv_lanes(lanes).kv_retrieve(self.namespace, self.pseudonym, buffer)
        first = min(size, HEADER_BYTES + unit_bytes)
        opened = yield from self._header(lanes, pending, buffer[:HEADER_BYTES], first, deadline)
        if isinstance(opened, MissCause):
            return self._lost(lanes, opened)
        if self._open is not None and opened.bound != self._open.bound:
            # Another write of the key since the first range was served: these are not the same bytes.
            self._give_up(lanes, pending)
            return self._lost(lanes, MissCause.EVICTED)
        if offset >= opened.length:
            self._give_up(lanes, pending)
            served: int | MissCause = 0
        else:
            served = yield from self._units(
                lanes, opened, pending, buffer[HEADER_BYTES:], offset, into, deadline
            )
        if isinstance(served, MissCause):
            return self._lost(lanes, served)
        self._open = opened
        return self._served(lanes, served)

    def _header(
        self, lanes: Lanes, pending: KvPending, header: memoryview, at_least: int, deadline: float
    ) -> Steps[OpenSlot | MissCause]:
        """Wait for the header, and for `at_least` bytes where they come; what it proves, or the cause."""
        volume = self.volume
        cause = yield from wait_for_key(lanes, pending, deadline, at_least)
        if pending.missing:
            return volume.absence(self.pseudonym)
        if cause is not None:
            return cause
        if pending.received < HEADER_BYTES:
            # Shorter than any slot. The buffer still has the header of an earlier read in it.
            self._give_up(lanes, pending)
            return MissCause.CORRUPT
        place = volume.place(self.namespace, self.pseudonym)
        opened = volume.codec.open(header, self.key, place)
        if isinstance(opened, MissCause):
            self._give_up(lanes, pending)
            # What opens as another key's slot does not lie here by anybody's right: no slot is used again.
            return MissCause.CORRUPT if opened is MissCause.EVICTED else opened
        if opened.expiry and opened.expiry <= lanes.wall():
            self._give_up(lanes, pending)
            return MissCause.EXPIRED
        if not 0 < opened.length <= volume.settings.value_bytes:
            self._give_up(lanes, pending)
            return MissCause.CORRUPT
        return opened

    def _units(
        self,
        lanes: Lanes,
        opened: OpenSlot,
        pending: KvPending,
        data: memoryview,
        offset: int,
        into: Target,
        deadline: float,
    ) -> Steps[int | MissCause]:
        """Open the units of a range as they arrive, straight into `into` wherever a whole unit fits."""
        volume = self.volume
        unit_bytes = volume.codec.unit_bytes
        first, last, _, to_byte = opened.unit_span(offset, len(into))
        wanted = min(len(into), opened.length - offset)
        for number in range(first, last):
            start = number * unit_bytes
            size = min(unit_bytes, to_byte - start)
            cause = yield from wait_for_key(lanes, pending, deadline, HEADER_BYTES + start + size)
            if cause is None and pending.received < HEADER_BYTES + start + size:
                cause = MissCause.CORRUPT  # cut short; behind the cut are bytes of an earlier read
            if cause is not None:
                self._give_up(lanes, pending)
                into[:] = bytes(len(into))
                return cause
            sealed = data[start : start + size]
            target = start - offset
            piece = into[target : target + size] if target >= 0 and target + size <= len(into) else None
            if piece is not None and (isinstance(piece, memoryview) or opened.cipher.scatters):
                proven = opened.open_unit(number, sealed, piece)
            else:
                proven = self._open_aside(lanes, opened, number, sealed, offset, into)
            if not proven:
                into[:] = bytes(
                    len(into)
                )  # it may be the GPU host's own memory: nothing unproven stays there
                self._give_up(lanes, pending)
                return MissCause.CORRUPT
        return wanted

    def _open_aside(
        self, lanes: Lanes, opened: OpenSlot, number: int, sealed: memoryview, offset: int, into: Target
    ) -> bool:
        """Open a unit of which the range needs a part, and keep it where the rest may be asked for next."""
        volume = self.volume
        start, size = number * volume.codec.unit_bytes, len(sealed)
        wanted = min(len(into), opened.length - offset)
        target = start - offset
        buffer = volume.unit_buffers.borrow()
        aside = buffer[:size]
        proven = opened.open_unit(number, sealed, aside)
        if proven:
            begin, end = max(0, -target), min(size, wanted - target)
            into[target + begin : target + end] = aside[begin:end]
            lanes.tally(volume.settings.name).bytes_copied += end - begin
        if proven and offset + wanted < min(start + size, opened.length):
            self._kept.keep(self._number, number, buffer)
        else:
            volume.unit_buffers.give_back(buffer)
        return proven

    def _give_up(self, lanes: Lanes, pending: KvPending) -> None:
        if not pending.done:
            lanes.abandon(pending)
