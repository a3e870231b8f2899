"""What an operator does with a place by hand: see what is there, check it, delete it. Blocks; for verbs.

Nothing here has a key, so a bundle is checked by its own table and checksums. What passes may still fail to
prove itself to a get, and is a miss then.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from agent.config.spill_section import BUNDLE_BYTES_MAX
from agent.inline.crc64 import crc64
from agent.spill.bundle import TABLE_BYTES, Damaged, items_untrusted
from agent.spill.names import age_of, pool_prefix, volume_of
from agent.spill.target import Gone, Stored, Target, TargetError

RANGE_SECONDS: Final = 60.0
LEFTOVER_SECONDS: Final = 3600.0
"""A half-written file that was not written to for so long is a crash's. The file server and this machine may
differ in time by less than that."""


@dataclass(slots=True)
class Usage:
    """What one volume has at a place."""

    bundles: int = 0
    bytes: int = 0
    oldest_generations: int = 0
    """Age of the oldest bundle, in generations of some six days."""


@dataclass(slots=True)
class Checked:
    """What a check found."""

    bundles: int = 0
    bytes: int = 0
    values: int = 0
    bad_values: int = 0
    bad_bundles: list[str] = field(default_factory=list)
    """Names, 1,000 at the most; none of their values can be served."""
    bad_count: int = 0
    leftovers: int = 0
    """Files that a crash left half written, and objects that are no bundles; they were deleted."""
    being_written: int = 0
    """Half-written files that may be an agent's that writes them now; they stay."""


BAD_NAMED_MAX: Final = 1000


def usage(target: Target, pool_id: str, wall: float) -> dict[str, Usage]:
    """By hexadecimal volume id, what a pool has at a place. Raises TargetError."""
    found: dict[str, Usage] = {}
    for stored in target.names(pool_prefix(pool_id)):
        each = found.setdefault(volume_of(stored.name, pool_id), Usage())
        each.bundles += 1
        each.bytes += stored.size
        if volume_of(stored.name, pool_id):
            each.oldest_generations = max(each.oldest_generations, age_of(stored.name, wall))
    return found


def check(target: Target, pool_id: str) -> Checked:
    """Read all bundles of a pool. Those that no value can come from are deleted. Raises TargetError."""
    found = Checked()
    for stored in target.names(pool_prefix(pool_id)):
        if not volume_of(stored.name, pool_id):
            since = stored.unfinished_since
            if since is not None and time.time() - since < LEFTOVER_SECONDS:
                found.being_written += 1
                continue
            target.delete(stored.name)
            found.leftovers += 1
            continue
        found.bundles += 1
        found.bytes += stored.size
        try:
            good, bad = _items_in(target, stored)
        except Gone:
            continue  # Another agent deleted it meanwhile.
        except Damaged:
            good, bad = 0, 0
        found.values += good
        found.bad_values += bad
        if not good:
            target.delete(stored.name)
            found.bad_count += 1
            if len(found.bad_bundles) < BAD_NAMED_MAX:
                found.bad_bundles.append(stored.name)
    return found


def _items_in(target: Target, stored: Stored) -> tuple[int, int]:
    """How many items of a bundle prove themselves, and how many do not. Raises Damaged and TargetError."""
    # No bundle is longer, so what a longer object has beyond is no value of it.
    whole = _range(target, stored.name, 0, max(1, min(stored.size, BUNDLE_BYTES_MAX)))
    good = bad = 0
    for item in items_untrusted(bytes(whole[:TABLE_BYTES])):
        data = whole[item.offset : item.offset + item.size]
        if len(data) == item.size > 0 and crc64(data) == item.checksum:
            good += 1
        else:
            bad += 1
    return good, bad


def _range(target: Target, name: str, offset: int, size: int) -> memoryview:
    asked = target.fetch(name, offset, size)
    try:
        return memoryview(asked.result(RANGE_SECONDS))
    except TimeoutError:
        target.give_up(asked)
        raise TargetError(f"no answer within {RANGE_SECONDS:g} s") from None


def drop(target: Target, prefix: str) -> Iterator[Stored]:
    """Delete what begins with a prefix; each as it goes. Raises TargetError."""
    for stored in target.names(prefix):
        target.delete(stored.name)
        yield stored
