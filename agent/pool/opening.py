"""Finding the pool on its namespaces, and laying out a new one: superblocks and directories.

Steps, like everything that touches flash. A namespace is numbered as the lanes know it at the moment;
nothing here assumes an order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.errors import G35Error
from agent.pool.agreeing import agreed
from agent.pool.pool_map import DATA_START, MapVolume, PoolMap, set_size
from agent.pool.steps import Lanes, Steps
from agent.pool.superblock import (
    BLOCK_BYTES,
    COPY_BYTES,
    COPY_OFFSETS,
    NoSuperblock,
    Superblock,
    decode_superblock_untrusted,
)
from agent.pool.volume import wait_for
from nvmeof.wire.kv import KvFormat

PROBE_BYTES = 1 << 20
WRITES_IN_FLIGHT = 32
SECONDS = 10.0
"""For one read or write of a superblock or directory; an operator waits here, no inference engine."""
LOOK_SECONDS = 1.0
"""For the look of a serving agent, which comes again."""


NOT_BLANK = "it is not blank"
"""Of a namespace that has data and no superblock, not even a damaged one."""


class Content(enum.Enum):
    """What a namespace carries."""

    BLANK = "blank"
    POOL = "a pool"
    FOREIGN = "something that is not g35's"
    UNREADABLE = "nothing that could be read"


@dataclass(frozen=True, slots=True)
class Inspection:
    """One namespace looked at. `superblock` is the newest whole copy, or what several of its version agree
    on; `detail` says more for people."""

    namespace: int
    content: Content
    superblock: Superblock | None = None
    detail: str = ""
    kv: KvFormat | None = None
    """The bounds of a namespace of the KV command set; None for one of blocks."""
    maps: tuple[PoolMap, ...] = ()
    """Of each whole copy, where there may be several."""
    by_discovery: bool = False
    """Whether only a discovery controller leads to it, and no enclosure of the configuration."""
    stranger: bool = False
    """Whether it is of another pool than the one that is asked for, and does not count."""


def inspect(lanes: Lanes, namespace: int, nguid: bytes, size: int) -> Steps[Inspection]:
    """What lies on a namespace: both superblock copies, and otherwise its first and last mebibyte."""
    copies: list[Superblock] = []
    details = []
    for offset in COPY_OFFSETS:
        data = memoryview(bytearray(COPY_BYTES))
        cause = yield from wait_for(lanes, lanes.read(namespace, offset, data), lanes.now() + SECONDS)
        if cause is not None:
            return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
        try:
            found = decode_superblock_untrusted(data)
        except NoSuperblock as why:
            details.append(str(why))
            continue
        if found.nguid != nguid:
            details.append(f"a superblock written for namespace {found.nguid.hex()}")
        else:
            copies.append(found)
    if copies:
        maps = tuple(each.pool_map for each in copies)
        newest = Superblock(nguid, agreed(maps))
        return Inspection(namespace, Content.POOL, newest, newest.pool_map.pool_id, maps=maps)
    if all(detail == "blank" for detail in details):
        for offset in {0, max(0, size - PROBE_BYTES) // BLOCK_BYTES * BLOCK_BYTES}:
            data = memoryview(bytearray(min(PROBE_BYTES, size - offset)))
            cause = yield from wait_for(lanes, lanes.read(namespace, offset, data), lanes.now() + SECONDS)
            if cause is not None:
                return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
            if bytes(data).strip(b"\0"):  # many times as fast as any()
                return Inspection(namespace, Content.FOREIGN, detail=NOT_BLANK)
        return Inspection(namespace, Content.BLANK)
    return Inspection(namespace, Content.FOREIGN, detail=next(each for each in details if each != "blank"))


def with_strangers(inspections: Sequence[Inspection], own_pool: str) -> list[Inspection]:
    """The same, those marked as strangers that discovery brought and that carry another pool than ours.

    Ours is the pool of the configured enclosures, and with them or without any `own_pool`, the one that this
    machine remembers. Where that tells nothing, or the configured ones carry two, there is no stranger.
    """
    carried = [each for each in inspections if each.superblock is not None]
    pools = {_pool_of(each) for each in carried}
    ours = {_pool_of(each) for each in carried if not each.by_discovery} | ({own_pool} & pools)
    if len(pools) < 2 or len(ours) != 1:
        return list(inspections)
    return [
        replace(each, stranger=each.superblock is not None and _pool_of(each) not in ours)
        for each in inspections
    ]


def _pool_of(inspection: Inspection) -> str:
    assert inspection.superblock is not None
    return inspection.superblock.pool_map.pool_id


def newest_map(inspections: Sequence[Inspection]) -> PoolMap:
    """The pool map in force; strangers do not count.

    Raises G35Error where there is none, or where there are two pools.
    """
    maps: list[PoolMap] = []
    for each in inspections:
        if each.superblock is not None and not each.stranger:
            maps += each.maps or (each.superblock.pool_map,)
    if not maps:
        raise G35Error(
            "no namespace carries a pool",
            "format one (g35 pool format), or check that the configuration names the right enclosures",
        )
    pools = {each.pool_id for each in maps}
    if len(pools) > 1:
        raise G35Error(
            f"the namespaces belong to {len(pools)} different pools: {', '.join(sorted(pools))}",
            "an agent serves one pool; take the other's enclosures out of the configuration, or name one of "
            "yours in it where discovery finds both",
        )
    return agreed(maps)


def write_superblock(lanes: Lanes, namespace: int, nguid: bytes, pool_map: PoolMap) -> Steps[None]:
    """Write both copies, the second after the first is on flash. Raises G35Error where that fails.

    All of their room is written, so that nothing stays of an earlier map that was longer: keys that were
    erased would lie there.
    """
    for offset in COPY_OFFSETS:
        yield from write_superblock_copy(lanes, namespace, nguid, pool_map, offset)


def write_superblock_copy(
    lanes: Lanes, namespace: int, nguid: bytes, pool_map: PoolMap, offset: int
) -> Steps[None]:
    """Write the copy at one of COPY_OFFSETS, and wait until it is on flash. Raises G35Error."""
    data = Superblock(nguid, pool_map).encode().ljust(COPY_BYTES, b"\0")
    pending = lanes.write(namespace, offset, [data])
    cause = yield from wait_for(lanes, pending, lanes.now() + SECONDS)
    if cause is None:
        flushing = lanes.flush(namespace)
        cause = yield from wait_for(lanes, flushing, lanes.now() + SECONDS)
    if cause is not None:
        raise G35Error(
            f"cannot write the superblock of namespace {nguid.hex()}: {pending.fault or 'no answer'}",
            "look at the enclosure; the pool is not usable until every namespace has its superblock",
        )


def superblock_copies_are(lanes: Lanes, namespace: int, nguid: bytes, pool_map: PoolMap) -> Steps[bool]:
    """Whether both copies, read back to their ends, are this map and nothing else."""
    wanted = Superblock(nguid, pool_map).encode().ljust(COPY_BYTES, b"\0")
    for offset in COPY_OFFSETS:
        data = memoryview(bytearray(COPY_BYTES))
        cause = yield from wait_for(lanes, lanes.read(namespace, offset, data), lanes.now() + SECONDS)
        if cause is not None or bytes(data) != wanted:
            return False
    return True


def newer_of(found: Inspection, pool_map: PoolMap) -> PoolMap | None:
    """The map that was found, where it is of the same pool and newer."""
    newer = found.superblock.pool_map if found.superblock is not None else pool_map
    return newer if newer.pool_id == pool_map.pool_id and newer.version > pool_map.version else None


def _no_guard() -> Steps[None]:
    yield from ()


def clear_directories(
    lanes: Lanes,
    volume: MapVolume,
    numbers: Mapping[str, int],
    advance: Callable[[int], None],
    guard: Callable[[], Steps[None]] = _no_guard,
) -> Steps[None]:
    """Zero every directory of a volume. What an earlier pool left there would read as slots in use.

    `numbers` gives each NGUID (hex) its namespace; `advance` is told how many sets are done; `guard` is run
    before each batch of writes, and may raise.
    """
    set_bytes = set_size(volume.value_bytes)
    blank = bytes(BLOCK_BYTES)
    places = [
        (numbers[extent.nguid], extent.offset + number * set_bytes)
        for extent in volume.extents
        for number in range(extent.sets)
    ]
    for start in range(0, len(places), WRITES_IN_FLIGHT):
        yield from guard()
        batch = [
            lanes.write(namespace, offset, [blank])
            for namespace, offset in places[start : start + WRITES_IN_FLIGHT]
        ]
        for pending in batch:
            cause = yield from wait_for(lanes, pending, lanes.now() + SECONDS)
            if cause is not None:
                raise G35Error(
                    f"cannot clear a directory of volume {volume.name}: {pending.fault or 'no answer'}",
                    "look at the enclosure and format again",
                )
        advance(len(batch))


def sets_of(pool_map: PoolMap) -> int:
    """How many directories a format writes."""
    return sum(extent.sets for volume in pool_map.volumes for extent in volume.extents)


assert DATA_START == 2 * COPY_BYTES
