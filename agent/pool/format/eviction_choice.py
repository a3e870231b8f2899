"""Which value goes when a set is full: `choose_slot` gives the slot of one set that a new value may take.

Eviction takes the entry with the greatest age / (1 + hits). Which of a key's two sets is taken is decided in
agent/pool/write/slot_allocation.py; what a tenant at its quota gives up, in
agent/pool/write/quota_eviction.py.
"""

import math
import struct
from collections.abc import Collection
from typing import Final, NamedTuple

from agent.pool.format.directory import (
    ENTRY,
    ENTRY_BYTES,
    EXPIRIES,
    FREE,
    SLOTS_PER_SET,
    Directory,
    Entry,
)

_USES: Final = struct.Struct("<" + f"24xQ{ENTRY_BYTES - 32}x" * SLOTS_PER_SET)
_HITS: Final = struct.Struct("<" + f"44xH{ENTRY_BYTES - 46}x" * SLOTS_PER_SET)
"""When the entries were last used, and how often: all that a full set is judged by, as a rule."""
_NOBODYS: Final = 1 << 64
"""Later than any use."""
assert _USES.size == _HITS.size == ENTRY.size * SLOTS_PER_SET


class Choice(NamedTuple):
    """A slot that a new value may take, and the entry that has to go, if any."""

    slot: int
    victim: Entry | None
    cost: float
    """age / (1 + hits) of the victim in seconds, larger is the better victim; infinite where free."""

    free_slots: int


def _choice(slot: int, victim: Entry | None, cost: float, free_slots: int) -> Choice:
    # Every put makes two, and a named tuple's own way to be made is interpreted.
    return tuple.__new__(Choice, (slot, victim, cost, free_slots))


def choose_slot(
    directory: Directory,
    taken: frozenset[int] | set[int],
    now: float,
    start: int = 0,
    held: Collection[bytes] = (),
    own: bytes = FREE,
) -> Choice | None:
    """The best slot of a set for a new value. `taken` are slots that writes under way have reserved, `held`
    the keys whose values stay until they expire, and `own` is one that stays even then.

    A free slot before an expired one before the entry with the greatest age / (1 + hits); pinned
    entries never. None where every slot is pinned or reserved, and of a directory in doubt: what looks free
    there may be somebody's. Among free slots the first from `start` on: agents whose directories are a moment
    old then seldom choose the same one for different keys.
    """
    if directory.doubted:
        return None
    raw = directory.raw
    free = SLOTS_PER_SET - directory.taken
    for slot in taken:
        free -= raw.startswith(FREE, slot * ENTRY_BYTES)
    expired = 0
    if directory.has_expiring:
        expired = sum(
            0 < expiry <= now and slot not in taken and not raw.startswith(FREE, slot * ENTRY_BYTES)
            for slot, expiry in enumerate(EXPIRIES.unpack(raw))
        )
    if free:
        found = directory.free_from(start, taken)
        if found is not None:
            return _choice(found, None, math.inf, free + expired)
    now_us = int(now * 1e6)
    if own == FREE and not held and not expired and not directory.has_pinned(now):
        return _oldest(directory, taken, now_us)
    best: tuple[float, int] | None = None
    for slot, fields in enumerate(ENTRY.iter_unpack(bytes(directory.raw))):
        if slot in taken:
            continue
        expiry, pinned_until = fields[4], fields[5]
        if fields[0] == own:
            continue
        if expiry and expiry <= now:
            score = float("inf")
        elif pinned_until > now or fields[0] in held:
            continue
        else:
            score = max(0, now_us - fields[2]) / (1 + fields[6])
        if best is None or score > best[0]:
            best = (score, slot)
    if best is None:
        return None
    return _choice(best[1], directory.entry(best[1]), best[0] / 1e6, expired)


def _oldest(directory: Directory, taken: frozenset[int] | set[int], now_us: int) -> Choice | None:
    """Of a full set in which nothing is free, expired, pinned or held: the entry with the greatest age /
    (1 + hits) that is not in `taken`. None: all are."""
    raw = directory.raw
    uses: list[int] = list(_USES.unpack(raw))
    for slot in taken:
        uses[slot] = _NOBODYS
    first = min(uses)
    if first == _NOBODYS:
        return None
    if first < now_us and not directory.has_hits():
        # As of values that were put and not yet got: all count by their age, and nothing need be computed.
        slot = uses.index(first)
        return _choice(slot, directory.entry(slot), (now_us - first) / 1e6, 0)
    hits: tuple[int, ...] = _HITS.unpack(raw)
    best, chosen = -1.0, -1
    for slot in range(SLOTS_PER_SET):
        used = uses[slot]
        if used == _NOBODYS:
            continue
        score = max(0, now_us - used) / (1 + hits[slot])
        if score > best:
            best, chosen = score, slot
    return _choice(chosen, directory.entry(chosen), best / 1e6, 0)
