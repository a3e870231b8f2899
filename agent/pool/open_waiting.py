"""Prestaged values that wait opened: what a get of one costs is then a copy, and no decryption.

An option (`[prestage] waits = "open"`); docs/decisions/0032-sealed-or-open.md says what speaks for either.
Only what was announced is opened: a guess is a pseudonym, and a slot proves itself for a key.

What waits so was proven when it came. A get is served from it where a remembered directory still names that
very write of the key; else it goes the way of any other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from agent.inline.scatter import Target
from agent.inline.suites import Place
from agent.pool.slot import HEADER_BYTES
from agent.pool.steps import Lanes, Steps
from agent.pool.tally import MissCause
from agent.pool.volume import Volume


@dataclass(frozen=True, slots=True)
class OpenValue:
    """A value in clear, and when it expires (seconds since the epoch; 0: never)."""

    data: memoryview
    expiry: int


def opened(volume: Volume, key: bytes, place: Place, generation: int, slot: memoryview) -> OpenValue | None:
    """What a whole slot holds, in clear; None where it does not prove itself as this write of this key."""
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
    return OpenValue(clear[: proven.length], proven.expiry)


class OpenReading:
    """A value that waits opened, being read. It looks as a `Reading` does."""

    def __init__(self, volume: Volume, key: bytes, value: OpenValue) -> None:
        self.volume = volume
        self.key = key
        self.cause: MissCause | None = None
        self._value = value
        self._counting = threading.Lock()
        self._hit = False

    @property
    def length(self) -> int | None:
        return len(self._value.data) if self._hit else None

    def close(self) -> None:
        """Nothing is kept for it."""

    def give_up(self, lanes: Lanes, cause: MissCause) -> None:
        """It does not serve its reader after all: a miss, and no hit."""
        tally = lanes.tally(self.volume.settings.name)
        with self._counting:
            if self.cause is None:
                self.cause = cause
                tally.gets_hit -= self._hit
                tally.prestage_hits -= self._hit
                tally.miss(cause)

    def read(self, lanes: Lanes, offset: int, into: Target, deadline: float) -> Steps[int]:
        """Fill `into` from `offset` of the value; how many bytes were there. 0 with `cause` set is a miss."""
        yield from ()  # steps, of which there are none
        if self.cause is not None or not len(into):
            return 0
        tally, value = lanes.tally(self.volume.settings.name), self._value
        with self._counting:
            expired = bool(value.expiry) and value.expiry <= lanes.wall()
            if self.volume.erased or expired:
                self.cause = MissCause.WRONG_KEY if self.volume.erased else MissCause.EXPIRED
                tally.gets_hit -= self._hit
                tally.miss(self.cause)
                return 0
            if not self._hit:
                self._hit = True
                tally.gets_hit += 1
                tally.prestage_hits += 1
        count = max(0, min(len(into), len(value.data) - offset))
        into[:count] = value.data[offset : offset + count]
        tally.bytes_read += count
        tally.bytes_copied += count
        if self.volume.bandwidth is not None:
            self.volume.bandwidth.charge(lanes, count)
        return count
