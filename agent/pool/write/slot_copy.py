"""A slot, read and proven unit by unit, and its value sealed into another slot.

`SlotVerifier` is the one reader of whole slots outside of gets: nothing is trusted that does not prove itself
as the write that an entry names. `SlotCopy` seals what a reader opened for its new place. Scrub, rekey,
replication and rebalance use them; each says by itself which slot is read, which is written, and when it is
named.
"""

import math
from collections.abc import Sequence
from typing import Final

from agent.inline.cipher_suites import PROOF_BYTES, UNIT_BYTES_MAX
from agent.pool.counters import MissCause
from agent.pool.format.directory import Entry, flags_of
from agent.pool.format.sealed_slot import HEADER_BYTES, OpenSlot, SlotCodec, SlotSealer
from agent.pool.late_answers import wait_for
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.volume import Found, Volume

PIECE_BYTES: Final = UNIT_BYTES_MAX
"""Read and written at a time: whole units. A worker's buffer holds a header and more than that."""


class SlotVerifier:
    """Reads the slot that an entry names, in a `with` block, which ends with the plain bytes overwritten.

    Each read and write ends at `deadline`, and `io_seconds` after it was sent. A `whole` value stays in
    memory, a longer one is held a piece at a time.
    """

    def __init__(
        self,
        volume: Volume,
        channel: IoChannel,
        found: Found,
        deadline: float = math.inf,
        *,
        io_seconds: float = math.inf,
        whole: bool = False,
    ) -> None:
        self.volume: Final = volume
        self.channel: Final = channel
        self.found: Final = found
        self.entry: Final = found.entry
        self.opened: OpenSlot | None = None
        """What the header has proven."""
        self.wrong: memoryview | None = None
        """The bytes that did not prove themselves; None where all did, or a read failed."""
        self.bytes_read = 0
        length = found.entry.length
        fits = 0 < length <= volume.settings.value_bytes
        self.size: Final[int] = volume.codec.padded(length) if fits else 0
        self._deadline: Final = deadline
        self._io_seconds: Final = io_seconds
        self._is_whole: Final = whole
        self._plain: Final = memoryview(bytearray(self.size if whole else min(self.size, PIECE_BYTES)))
        self._end = 0
        """One past the last byte that was opened."""

    def __enter__(self) -> "SlotVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        self._plain[:] = bytes(len(self._plain))

    @property
    def deadline(self) -> float:
        """Of a read or write that is sent now."""
        return min(self._deadline, self.channel.now() + self._io_seconds)

    @property
    def pieces(self) -> Sequence[int]:
        """Where the pieces of the value begin."""
        return range(0, self.size, PIECE_BYTES)

    def open(self) -> Steps[MissCause | None]:
        """Read the header alone. None: it proves the entry's write; otherwise why not."""
        self.opened = None
        return (yield from self._read(0, 0))

    def verify(self) -> Steps[MissCause | None]:
        """Read and open all of the slot. None: every unit proves itself."""
        for at in self.pieces:
            cause = yield from self.read(at)
            if cause is not None:
                return cause
        return None if self.size else MissCause.CORRUPT

    def read(self, at: int) -> Steps[MissCause | None]:
        """Read and open the piece at `at`; with the first one the header, unless that is open."""
        size = min(PIECE_BYTES, self.size - at)
        if self._is_whole and at + size <= self._end:
            return None
        return (yield from self._read(at, size))

    def plain(self, at: int) -> memoryview:
        """The piece at `at`, which was read last, or any of a `whole` value; without its padding."""
        start = at if self._is_whole else 0
        return self._plain[start : start + min(PIECE_BYTES, self.entry.length - at)]

    def _read(self, at: int, size: int) -> Steps[MissCause | None]:
        volume, channel, opened = self.volume, self.channel, self.opened
        cached, slot, lead = self.found.cached, self.found.slot, HEADER_BYTES if opened is None else 0
        buffer = channel.receive_buffer(lead + size)
        offset = volume.slot_offset(cached, slot) + HEADER_BYTES + at - lead
        pending = channel.read(cached.namespace, offset, buffer)
        cause = yield from wait_for(channel, pending, self.deadline)
        self.bytes_read += len(buffer)
        if cause is not None:
            return cause
        if opened is None:
            self.wrong = buffer[:HEADER_BYTES]
            key, place = volume.placement.key_of(self.entry.pseudonym), volume.place(cached, slot)
            proven = volume.codec.open(self.wrong, key, place, self.entry.generation)
            if isinstance(proven, MissCause):
                return proven
            if proven.length != self.entry.length:
                return MissCause.CORRUPT
            opened = self.opened = proven
        start, unit = at if self._is_whole else 0, volume.codec.unit_bytes
        for within in range(0, size, unit):
            end = min(within + unit, size)
            self.wrong = buffer[lead + within : lead + end]
            into = self._plain[start + within : start + end]
            if not opened.open_unit((at + within) // unit, self.wrong, into):
                return MissCause.CORRUPT
        self.wrong, self._end = None, at + size
        return None


class SlotCopy:
    """A value on its way from a reader into a slot that the caller has reserved.

    A write without an answer may land late, so the slot cools down then.
    """

    def __init__(
        self, reader: SlotVerifier, target: CachedSet, slot: int, codec: SlotCodec, generation: int
    ) -> None:
        volume, key = reader.volume, reader.volume.placement.key_of(reader.entry.pseudonym)
        self.last = memoryview(b"")
        """The bytes at the slot's start, header first, that `send` leaves to be written; a put's last
        write."""
        self._reader: Final = reader
        self._target: Final = target
        self._slot: Final = slot
        self._sealer: Final[SlotSealer] = codec.seal(key, generation, volume.place(target, slot))

    @property
    def entry(self) -> Entry:
        """What names the copy: hits and pins are those of the value that was read."""
        entry, sealer, opened = self._reader.entry, self._sealer, self._reader.opened
        assert opened is not None
        return entry._replace(
            generation=sealer.generation,
            expiry=opened.expiry,
            flags=entry.flags & 0xFF | flags_of(sealer.codec.epoch),
            tag=sealer.tag(),
        )

    def send(self) -> Steps[MissCause | None]:
        """Copy all but `last`. None: what was sent is on flash; otherwise why the copy failed."""
        reader, length = self._reader, self._reader.entry.length
        unit, is_one_piece = reader.volume.codec.unit_bytes, reader.size <= PIECE_BYTES
        out = reader.channel.send_buffer(HEADER_BYTES + min(reader.size, PIECE_BYTES) + PROOF_BYTES)
        filled = 0
        for at in reader.pieces:
            cause = yield from reader.read(at)
            if cause is not None:
                return cause
            filled = self._sealer.seal(at // unit, reader.plain(at), out[HEADER_BYTES:])
            if not is_one_piece:
                cause = yield from self._write(HEADER_BYTES + at, out[HEADER_BYTES : HEADER_BYTES + filled])
                if cause is not None:
                    return cause
        opened = reader.opened
        if opened is None:
            return MissCause.CORRUPT
        out[:HEADER_BYTES] = self._sealer.header(length, expiry=opened.expiry, stored_us=opened.stored_us)
        self.last = out[: HEADER_BYTES + (filled if is_one_piece else 0)]
        return None

    def write(self) -> Steps[MissCause | None]:
        """Copy all of it. None: the slot is on flash."""
        cause = yield from self.send()
        return cause if cause is not None else (yield from self._write(0, self.last))

    def _write(self, at: int, data: memoryview) -> Steps[MissCause | None]:
        channel, target = self._reader.channel, self._target
        offset = self._reader.volume.slot_offset(target, self._slot) + at
        pending = channel.write(target.namespace, offset, [data])
        cause = yield from wait_for(channel, pending, self._reader.deadline)
        if cause is not None and cause is not MissCause.ENCLOSURE_DOWN:
            target.cool_down(self._slot, channel.now())
        return cause
