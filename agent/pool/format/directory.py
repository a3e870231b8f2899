"""The directory block that a set begins with: 64 entries of 64 bytes, one for each slot. In some volumes a
block of marks lies behind it (mark_block.py).

Layout of an entry, little-endian:
     0 16  pseudonym of the key (agent/pool/volume/placement.py); zero where the slot is free
    16  8  generation of the write
    24  8  last use, microseconds since the epoch
    32  4  length of the value in bytes
    36  4  expiry, seconds since the epoch; 0: none
    40  4  pinned until, seconds since the epoch; 0: not pinned
    44  2  hits, saturating
    46  2  flags: the upper 8 bits are those of the epoch of the data key that the slot is sealed under
    48  8  ghost of the value that this slot held before and lost by eviction: the first half of its pseudonym
           with the highest bit zero, or, where the value was spilled first, its mark (spill_mark.py)
    56  4  tag of the identity: it tells a torn mix of two entries from either
    60  4  CRC-32 (IEEE 802.3) of the 60 bytes before

A directory is a hint. Nothing is served because an entry says so; the slot proves itself (sealed_slot.py).
So a stale, lost or damaged entry costs a hit. An entry with a wrong CRC names nothing; its key, where it is
readable, counts as corrupt.

A hint is enough to read by, and not enough to write by: the image of a directory that was damaged on its way
would take from flash what it still names, for good. So a directory with a wrong CRC is *in doubt*: no new
value takes a slot of it, and it makes no image (`InDoubt`). The doubt ends when flash gives the directory
whole, or has given the same damage so often that the damage is flash's own
(agent/pool/volume/directory_cache.py, writable_directory.py there).

Ghosts tell an evicted key from one that was never stored: for every agent, after a restart too, for as many
keys as there are slots, and in no memory of their own.
"""

# One idea in one file: the bytes of one block, and every way to read or change them.

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from agent.pool.format.mark_block import MarkBlock, wide_mark
from agent.pool.format.occupancy import Occupancy
from agent.pool.format.spill_mark import IS_MARK, MARK_BYTES, could_be, decode

KEY_BYTES: Final = 16
ENTRY: Final = struct.Struct("<16sQQIIIHH8sII")
ENTRY_BYTES: Final = 64
SLOTS_PER_SET: Final = 64
DIRECTORY_BYTES: Final = 4096
assert ENTRY.size == ENTRY_BYTES
assert ENTRY_BYTES * SLOTS_PER_SET == DIRECTORY_BYTES

TIME_MAX: Final = (1 << 32) - 1
"""Seconds since the epoch, in the 32 bits that header and entry have for it."""
EPOCH_SHIFT: Final = 8
"""The upper half of an entry's flags."""
QUARANTINE_NAME: Final = b"g35 quarantined!"
QUARANTINE_FLAG: Final = 1
"""The bit of `Entry.flags` for a bad slot. The upper half of the flags has the epoch of the key."""
QUARANTINED_MAX: Final = SLOTS_PER_SET // 4
"""The most bad slots of one set: bad ranges must not stop a volume from taking values. More is a bad
drive."""
assert len(QUARANTINE_NAME) == KEY_BYTES

_CHECKED_BYTES: Final = 60
_HITS_MAX: Final = 0xFFFF
FREE: Final = bytes(KEY_BYTES)
_EMPTY_ENTRY: Final = bytes(ENTRY_BYTES)
_EMPTY: Final = bytes(DIRECTORY_BYTES)
"""The pseudonym of a slot that is free."""
_GHOST_AT: Final = 48
_GHOST_BYTES: Final = 8
assert MARK_BYTES == _GHOST_BYTES
_LAST_OF_GHOST: Final = _GHOST_AT + _GHOST_BYTES - 1
"""The byte whose highest bit tells a mark from a plain ghost."""
_LAST_USE_AT: Final = 24
_HITS_AT: Final = 44
_EXPIRY_AT: Final = 36
_NEVER: Final = bytes(4)
"""An expiry: none."""
_PINNED_AT: Final = 40
_CRC_AT: Final = 60
_HINT: Final = struct.Struct(f"<{KEY_BYTES}s16xII")
"""Pseudonym, length and expiry."""
_NAMED: Final = struct.Struct(f"<{KEY_BYTES}sQ8xII")
"""Pseudonym, generation, length and expiry."""
_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_U16: Final = struct.Struct("<H")
_ENTRIES: Final = struct.Struct(f"{ENTRY_BYTES}s" * SLOTS_PER_SET)
_PSEUDONYMS: Final = struct.Struct(f"{KEY_BYTES}s{ENTRY_BYTES - KEY_BYTES}x" * SLOTS_PER_SET)
EXPIRIES: Final = struct.Struct("<" + f"36xI{ENTRY_BYTES - 40}x" * SLOTS_PER_SET)
PINS: Final = struct.Struct("<" + f"40xI{ENTRY_BYTES - 44}x" * SLOTS_PER_SET)
assert _ENTRIES.size == _PSEUDONYMS.size == EXPIRIES.size == PINS.size == DIRECTORY_BYTES


class Entry(NamedTuple):
    """One slot's entry. Times as in the layout; eight zero bytes are no `ghost`."""

    pseudonym: bytes
    generation: int
    last_use_us: int
    length: int
    expiry: int = 0
    pinned_until: int = 0
    hits: int = 0
    flags: int = 0
    ghost: bytes = bytes(_GHOST_BYTES)
    tag: int = 0

    def encode(self) -> bytes:
        body = ENTRY.pack(
            self.pseudonym,
            self.generation,
            self.last_use_us,
            self.length,
            self.expiry,
            self.pinned_until,
            self.hits,
            self.flags,
            self.ghost,
            self.tag,
            0,
        )
        return body[:_CHECKED_BYTES] + _U32.pack(zlib.crc32(body[:_CHECKED_BYTES]))


class InDoubt(Exception):
    """An image was wanted of a directory in doubt. A fault of ours: writers ask writable_directory.py
    first."""


class Directory:
    """The 64 entries of one set, kept as the bytes of the block.

    Single calls are safe from any thread: each is one operation on the bytes, or guarded by the owner's lock
    (agent/pool/volume/directory_cache.py).
    """

    __slots__ = (
        "_expiring", "_first_bytes", "_occupancy", "_repinned", "_uncounted",
        "corrupt_keys", "doubted", "mark_block", "raw", "taken",
    )  # fmt: skip

    def __init__(
        self,
        block: bytes | bytearray | memoryview | None = None,
        suspects: Iterable[int] | None = None,
    ) -> None:
        """`block`: what a set begins with, and its block of marks where it has one. `suspects`: the slots
        whose CRC is checked; None: all."""
        self.mark_block: MarkBlock | None = None
        if block is not None and len(block) > DIRECTORY_BYTES:
            self.mark_block = MarkBlock(block[DIRECTORY_BYTES:])
            block = block[:DIRECTORY_BYTES]
        self.raw = bytearray(block) if block is not None else bytearray(DIRECTORY_BYTES)
        self.corrupt_keys: frozenset[bytes] = frozenset()
        self.doubted: dict[int, bytes] = {}
        """Slots whose entry came with a wrong CRC, with its bytes."""
        self.taken = 0
        """Slots that are not free."""
        self._occupancy: Occupancy | None = None
        self._uncounted: set[int] = set()
        """Slots changed in place since their CRC was made: a hit must not cost a CRC."""
        self._repinned: set[int] = set()
        """Slots whose pin was changed here, and which flash may not know of yet."""
        if block is not None and self.raw != _EMPTY:
            self._forget_damaged(range(SLOTS_PER_SET) if suspects is None else suspects)
            self.taken = SLOTS_PER_SET - _PSEUDONYMS.unpack(self.raw).count(FREE)
        self._expiring = 0 if block is None else -1
        """Entries with a time of expiry; -1: nobody has asked."""
        self._first_bytes = bytearray(SLOTS_PER_SET) if block is None else self.raw[::ENTRY_BYTES]
        """Of each slot's pseudonym. A question about many keys would fetch all of a directory from memory for
        each; of this it needs a line, and another one where the byte is right."""

    def _forget_damaged(self, slots: Iterable[int]) -> None:
        damaged = []
        view = memoryview(self.raw)
        for slot in slots:
            start = slot * ENTRY_BYTES
            stored = _U32.unpack_from(view, start + _CRC_AT)[0]
            # A free entry is all zeros, and has no CRC.
            if not stored and self.raw.startswith(_EMPTY_ENTRY, start):
                continue
            if zlib.crc32(view[start : start + _CHECKED_BYTES]) != stored:
                damaged.append(bytes(view[start : start + KEY_BYTES]))
                self.doubted[slot] = bytes(view[start : start + ENTRY_BYTES])
                view[start : start + ENTRY_BYTES] = bytes(ENTRY_BYTES)
        self.corrupt_keys = frozenset(damaged)

    def count_in(self, occupancy: Occupancy | None) -> None:
        """Count the taken slots there from now on, and nowhere else."""
        if self._occupancy is not None:
            self._occupancy.add(-self.taken)
        self._occupancy = occupancy
        if occupancy is not None:
            occupancy.add(self.taken)

    def _store(self, slot: int, entry: bytes | bytearray) -> None:
        start = slot * ENTRY_BYTES
        was_free = self.raw.startswith(FREE, start)
        if self._expiring >= 0:
            expires = not entry.startswith(_NEVER, _EXPIRY_AT)
            self._expiring += expires - (not self.raw.startswith(_NEVER, start + _EXPIRY_AT))
        self.raw[start : start + ENTRY_BYTES] = entry
        self._first_bytes[slot] = entry[0]
        more = was_free - entry.startswith(FREE)
        if more:
            self.taken += more
            if self._occupancy is not None:
                self._occupancy.add(more)

    @property
    def has_expiring(self) -> bool:
        """Whether an entry has a time of expiry. Each put asks, and most values have none."""
        if self._expiring < 0:
            expiries = EXPIRIES.unpack(self.raw)
            self._expiring = SLOTS_PER_SET - expiries.count(0)
        return self._expiring > 0

    def has_pinned(self, now: float) -> bool:
        """Whether an entry is pinned at `now`. Each put to a full set asks, and mostly none is."""
        return self._has_any(_PINNED_AT, 4) and max(PINS.unpack(self.raw)) > now

    def has_hits(self) -> bool:
        """Whether a value was got since it was put."""
        return self._has_any(_HITS_AT, 2)

    def _has_any(self, start: int, size: int) -> bool:
        """Whether a byte of this field is not zero in some entry. To compare bytes makes no numbers."""
        raw = self.raw
        return any(raw[at::ENTRY_BYTES].count(0) != SLOTS_PER_SET for at in range(start, start + size))

    def free_from(self, first: int, reserved: Collection[int]) -> int | None:
        """The first slot from `first` on, and round about, that neither an entry takes nor a write."""
        first_bytes, raw = self._first_bytes, self.raw
        for begin, end in ((first, SLOTS_PER_SET), (0, first)):
            slot = first_bytes.find(0, begin, end)
            while slot >= 0:
                if slot not in reserved and raw.startswith(FREE, slot * ENTRY_BYTES):
                    return slot
                slot = first_bytes.find(0, slot + 1, end)
        return None

    def unlike(self, block: bytes | bytearray | memoryview) -> list[int]:
        """The slots of a block of flash whose bytes differ from this copy, or whose CRC is not made here."""
        block = block[:DIRECTORY_BYTES]
        # A bytearray on the left compares memory; a memoryview there would go byte by byte.
        if self.raw == block:
            return list(self._uncounted)
        mine, theirs = _ENTRIES.unpack(self.raw), _ENTRIES.unpack(block)
        return [
            slot for slot in range(SLOTS_PER_SET) if mine[slot] != theirs[slot] or slot in self._uncounted
        ]

    def find(self, pseudonym: bytes, first: int = 0) -> int | None:
        """The slot from `first` on whose entry has this pseudonym."""
        likely = self._first_bytes.find(pseudonym[0], first)
        if likely < 0 or self.raw.startswith(pseudonym, likely * ENTRY_BYTES):
            return likely if likely >= 0 else None
        # By one operation, as a walk through the slots might miss an entry that moves meanwhile.
        start = self.raw.find(pseudonym, first * ENTRY_BYTES)
        while start >= 0:
            if start % ENTRY_BYTES == 0:
                return start // ENTRY_BYTES
            start = self.raw.find(pseudonym, start + 1)
        return None

    def names(self, slot: int, pseudonym: bytes) -> bool:
        return self.raw.startswith(pseudonym, slot * ENTRY_BYTES)

    def find_all(self, pseudonym: bytes) -> list[int]:
        """Every slot whose entry has this pseudonym: more than one after two puts that raced."""
        slots = []
        slot = self.find(pseudonym)
        while slot is not None:
            slots.append(slot)
            slot = self.find(pseudonym, slot + 1)
        return slots

    def entry(self, slot: int) -> Entry | None:
        """The entry of a slot; None where it is free."""
        fields = ENTRY.unpack_from(self.raw, slot * ENTRY_BYTES)
        if fields[0] == FREE:
            return None
        # Every request makes one, and a named tuple's own way to be made is interpreted.
        return tuple.__new__(Entry, fields[:10])

    def find_length(self, pseudonym: bytes, wall: float) -> int:
        """The length in the first entry with this pseudonym, where that has not expired at `wall`, seconds
        since the epoch; else -1. It is what a question needs of the entry, and no more.

        A change amid it may hide an entry that moves.
        """
        first_bytes, raw, wanted = self._first_bytes, self.raw, pseudonym[0]
        slot = first_bytes.find(wanted)
        while slot >= 0:
            named: bytes
            length: int
            expiry: int
            named, length, expiry = _HINT.unpack_from(raw, slot * ENTRY_BYTES)
            if named == pseudonym:
                return length if not expiry or expiry > wall else -1
            slot = first_bytes.find(wanted, slot + 1)
        return -1

    def find_named(self, pseudonym: bytes) -> tuple[int, int, int, int]:
        """Slot, generation, length and expiry of the entry that `find` finds: what a get needs of it.
        Slot -1: there is none."""
        named: bytes
        generation: int
        length: int
        expiry: int
        slot = self.find(pseudonym)
        if slot is not None:
            named, generation, length, expiry = _NAMED.unpack_from(self.raw, slot * ENTRY_BYTES)
            if named == pseudonym:  # else it has moved since
                return slot, generation, length, expiry
        return -1, 0, 0, 0

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        """The slots that are taken, with their entries."""
        for slot, fields in enumerate(ENTRY.iter_unpack(bytes(self.raw))):
            if fields[0] != FREE:
                yield slot, Entry(*fields[:10])

    def install(self, slot: int, entry: Entry) -> None:
        self._store(slot, entry.encode())

    @property
    def in_doubt(self) -> bool:
        """Whether an entry came with a wrong CRC: then flash may have more."""
        return bool(self.doubted)

    def believe(self) -> None:
        """The damage was proven to be flash's own: the entries that are left are all."""
        self.doubted = {}

    def keep_in_doubt(self, earlier: "Directory") -> None:
        """For slots in doubt, take the entries of `earlier`, our copy of the same block."""
        for slot in self.doubted:
            start = slot * ENTRY_BYTES
            self._store(slot, earlier.raw[start : start + ENTRY_BYTES])
            if slot in earlier._uncounted:
                self._uncounted.add(slot)
            if slot in earlier._repinned:
                self._repinned.add(slot)

    def take_over(self, slot: int, earlier: "Directory") -> None:
        """Keep the slot's entry of `earlier`."""
        self.doubted.pop(slot, None)
        self._store(slot, earlier.raw[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
        if slot in earlier._uncounted:
            self._uncounted.add(slot)

    def clear(self, slot: int, *, ghost: bytes | None = None) -> None:
        """Free a slot. `ghost` is what the value leaves that it lost by eviction: a pseudonym, or a mark of
        eight bytes, which goes to the block of marks where there is one. Without it an older ghost stays."""
        if ghost is not None and len(ghost) == MARK_BYTES and self.mark_block is not None:
            start = slot * ENTRY_BYTES
            victim = bytes(self.raw[start : start + KEY_BYTES])
            self.mark_block.add(wide_mark(decode(ghost), slot, victim))
            ghost = victim
        kept = self.ghost(slot) if ghost is None else _ghost_of(ghost)
        body = bytearray(ENTRY_BYTES)
        body[_GHOST_AT : _GHOST_AT + _GHOST_BYTES] = kept
        if any(kept):
            _U32.pack_into(body, _CRC_AT, zlib.crc32(body[:_CHECKED_BYTES]))
        self._store(slot, body)

    def free_slots(self) -> set[int]:
        """Slots that no entry takes; those in doubt are not among them."""
        keys = _PSEUDONYMS.unpack(self.raw)
        free = {slot for slot in EVERY_SLOT if keys[slot] == FREE}
        return free.difference(self.doubted) if self.doubted else free

    def ghost(self, slot: int) -> bytes:
        start = slot * ENTRY_BYTES + _GHOST_AT
        return bytes(self.raw[start : start + _GHOST_BYTES])

    def marks(self, pseudonym: bytes) -> list[int]:
        """The places of the marks that this key may have left: mostly none, seldom a foreign one. A place is
        a slot whose ghost is a mark, or lies in the block of marks, counted from SLOTS_PER_SET on."""
        block = self.mark_block
        if block is not None:
            return [SLOTS_PER_SET + place for place in block.find(pseudonym)]
        lasts, wanted = self.raw[_LAST_OF_GHOST::ENTRY_BYTES], pseudonym[-1] | IS_MARK
        found: list[int] = []
        slot = lasts.find(wanted)
        while slot >= 0:
            if could_be(self.ghost(slot), pseudonym):
                found.append(slot)
            slot = lasts.find(wanted, slot + 1)
        return found

    def mark(self, place: int) -> bytes:
        """The mark at a place; zeros where there is none."""
        if place < SLOTS_PER_SET:
            return self.ghost(place)
        return self.mark_block.at(place - SLOTS_PER_SET) if self.mark_block is not None else b""

    def unmark(self, pseudonym: bytes) -> list[bytes]:
        """Take out the marks that this key may have left. The entries stay."""
        return self.unmark_at(self.marks(pseudonym))

    def unmark_at(self, places: Iterable[int]) -> list[bytes]:
        """Take out the marks at some places, and return them."""
        marks = []
        for place in places:
            marks.append(self.mark(place))
            if place < SLOTS_PER_SET:
                self.unmark_slot(place)
            elif self.mark_block is not None:
                self.mark_block.take_out(place - SLOTS_PER_SET)
        return marks

    def unmark_slot(self, slot: int) -> None:
        """Take out a slot's ghost. The entry stays."""
        start = slot * ENTRY_BYTES + _GHOST_AT
        self.raw[start : start + _GHOST_BYTES] = bytes(_GHOST_BYTES)
        self._uncounted.add(slot)

    def has_ghost(self, pseudonym: bytes) -> bool:
        """Whether a slot of this set lost this key by eviction, as far as ghosts reach back."""
        if self.marks(pseudonym):
            return True
        half, raw = _ghost_of(pseudonym), self.raw
        first_bytes = raw[_GHOST_AT::ENTRY_BYTES]
        slot = first_bytes.find(half[0])
        while slot >= 0:
            if raw.startswith(half, slot * ENTRY_BYTES + _GHOST_AT):
                return True
            slot = first_bytes.find(half[0], slot + 1)
        return False

    def touch(self, slot: int, now_us: int) -> None:
        """Count a hit. Flash learns of it with the next write of this directory."""
        raw, start = self.raw, slot * ENTRY_BYTES
        _U64.pack_into(raw, start + _LAST_USE_AT, now_us)
        low = raw[start + _HITS_AT]
        if low < 0xFF:
            raw[start + _HITS_AT] = low + 1
        else:
            hits: int = _U16.unpack_from(raw, start + _HITS_AT)[0]
            if hits < _HITS_MAX:
                _U16.pack_into(raw, start + _HITS_AT, hits + 1)
        self._uncounted.add(slot)

    def pin(self, slot: int, until: int) -> None:
        self._uncounted.add(slot)
        self._repinned.add(slot)
        _U32.pack_into(self.raw, slot * ENTRY_BYTES + _PINNED_AT, until)

    def count_kept(self, held: Collection[bytes], now: float) -> int:
        """How many entries no eviction may take at `now`, seconds since the epoch: pinned ones, and those of
        the keys in `held`."""
        pins, keys = PINS.unpack(self.raw), _PSEUDONYMS.unpack(self.raw)
        if pins.count(0) == SLOTS_PER_SET:
            return sum(map(held.__contains__, keys))
        return sum(
            key in held or (pin > now and key != QUARANTINE_NAME) for pin, key in zip(pins, keys, strict=True)
        )

    def image(self) -> bytes:
        """The block as it is to be written: the same entries, each with its CRC made right. Raises
        InDoubt."""
        self._prove_entries()
        return bytes(self.raw) if self.mark_block is None else bytes(self.raw) + self.mark_block.image()

    def _prove_entries(self) -> None:
        """Make each CRC right. Raises InDoubt."""
        if self.doubted:
            raise InDoubt(f"{len(self.doubted)} entries did not prove themselves")
        while self._uncounted:
            start = self._uncounted.pop() * ENTRY_BYTES
            crc = zlib.crc32(memoryview(self.raw)[start : start + _CHECKED_BYTES])
            _U32.pack_into(self.raw, start + _CRC_AT, crc)

    def copy(self) -> "Directory":
        """The same entries, each with its CRC made right; changing one leaves the other as it is. Raises
        InDoubt."""
        self._prove_entries()
        other = Directory()
        other.raw[:] = self.raw
        if self.mark_block is not None:
            other.mark_block = MarkBlock()
            other.mark_block.raw[:] = self.mark_block.raw
        other._first_bytes[:] = self._first_bytes
        other._expiring = self._expiring
        other.taken = self.taken
        return other

    def merge_uses(self, earlier: "Directory", slots: Iterable[int] = range(SLOTS_PER_SET)) -> None:
        """Take over the hits and pins that `earlier`, our copy of the same block, never wrote. `slots`
        differ."""
        for slot in slots:
            known, mine = earlier.entry(slot), self.entry(slot)
            if known is None or mine is None or mine.generation != known.generation:
                continue
            if mine.last_use_us < known.last_use_us:
                start = slot * ENTRY_BYTES
                _U64.pack_into(self.raw, start + _LAST_USE_AT, known.last_use_us)
                _U16.pack_into(self.raw, start + _HITS_AT, max(mine.hits, known.hits))
                self._uncounted.add(slot)
            if slot in earlier._repinned and mine.pinned_until != known.pinned_until:
                self.pin(slot, known.pinned_until)


EVERY_SLOT: Final = tuple(range(SLOTS_PER_SET))


def _ghost_of(left: bytes) -> bytes:
    """The eight bytes for a pseudonym; a mark is its own."""
    if len(left) == MARK_BYTES:
        return left
    return left[: _GHOST_BYTES - 1] + bytes((left[_GHOST_BYTES - 1] & ~IS_MARK,))


def taken_in(block: bytes | bytearray | memoryview) -> int:
    """How many slots are not free in a directory as it lies on flash, damaged entries among them."""
    return SLOTS_PER_SET - _PSEUDONYMS.unpack(block).count(FREE)


def flags_of(epoch: int) -> int:
    """The epoch of a slot's key, as flags of its entry."""
    return (epoch & 0xFF) << EPOCH_SHIFT


def is_under(entry: Entry, epoch: int) -> bool:
    """Whether an entry says that its slot is sealed under the key of this epoch.

    Only neighbouring epochs are ever on flash together, so that eight bits tell them apart.
    """
    return entry.flags & flags_of(0xFF) == flags_of(epoch)


def is_under_dropped(entry: Entry, oldest: int) -> bool:
    """Whether an entry says that its slot is under a key from before `oldest`, the first epoch that opens.

    That is the half of the numbers behind it: an agent that is behind the map meets newer epochs.
    """
    return 0 < (oldest - (entry.flags >> EPOCH_SHIFT)) & 0xFF < 0x80


def left_in(block: bytes | bytearray | memoryview, epoch: int) -> int:
    """Of a directory as it lies on flash: values that are not sealed under the key of `epoch`."""
    entries = (Entry(*fields[:10]) for fields in ENTRY.iter_unpack(block[:DIRECTORY_BYTES]))
    return sum(
        entry.pseudonym != FREE and entry.length > 0 and not is_under(entry, epoch) for entry in entries
    )


def quarantine_entry(wall: float) -> Entry:
    """The entry of a slot that was set aside at `wall`, seconds since the epoch."""
    now_us = int(wall * 1e6)
    return Entry(
        QUARANTINE_NAME, now_us << 8, now_us, 0, pinned_until=TIME_MAX, hits=_HITS_MAX, flags=QUARANTINE_FLAG
    )


def is_quarantined(entry: Entry) -> bool:
    return entry.pseudonym == QUARANTINE_NAME and bool(entry.flags & QUARANTINE_FLAG)


def count_quarantined(directory: Directory) -> int:
    return len(directory.find_all(QUARANTINE_NAME))
