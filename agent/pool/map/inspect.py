"""Finds the pool on its namespaces, and lays out a new one: superblocks and directories.

Steps, numbered by the namespaces as the channel knows them at the moment.
"""

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.errors import G35Error
from agent.pool.counters import MissCause
from agent.pool.late_answers import wait_for
from agent.pool.map.document import DATA_START, MapVolume, PoolMap
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.namespace_claims import claimed_by
from agent.pool.map.reconcile import agreed
from agent.pool.map.superblock import (
    ANOTHER_LAYOUT,
    BLOCK_BYTES,
    COPY_BYTES,
    COPY_OFFSETS,
    MAP_IO_SECONDS,
    Head,
    NoSuperblock,
    Superblock,
    decode_superblock_untrusted,
    head_of,
)
from agent.pool.steps import IoChannel, Steps
from nvmeof.wire.kv import KvFormat

PROBE_BYTES = 1 << 20
WRITES_IN_FLIGHT = 32
LOOK_SECONDS = 3.0
"""For the look of a serving agent, which comes again. An enclosure that takes longer serves no put either."""


NOT_BLANK = "it is not blank"
"""The word for a namespace that has data and no superblock, not even a damaged one."""


class Content(enum.Enum):
    """What a namespace carries."""

    BLANK = "blank"
    POOL = "a pool"
    FOREIGN = "something that is not g35's"
    UNREADABLE = "nothing that could be read"


@dataclass(frozen=True, slots=True)
class Inspection:
    """One namespace. `superblock`: its newest whole copy, or what several of its version agree on. `detail`:
    for people."""

    namespace: int
    content: Content
    superblock: Superblock | None = None
    detail: str = ""
    kv: KvFormat | None = None
    """The bounds of a namespace of the KV command set; None for one of blocks."""
    maps: tuple[PoolMap, ...] = ()
    """The map of each whole copy, where there may be several."""
    by_discovery: bool = False
    """Whether only a discovery controller leads to it, and no enclosure of the configuration."""
    stranger: bool = False
    """Whether it is of another pool than the one that is asked for, and does not count."""
    claimants: frozenset[str] = frozenset()
    """The pools that have begun to take it in: by their claims, where it has no superblock."""


def inspect(
    channel: IoChannel,
    namespace: int,
    nguid: bytes,
    size: int,
    deadline: float = float("inf"),
    known: dict[Head, PoolMap] | None = None,
) -> Steps[Inspection]:
    """Both superblock copies of a namespace, and otherwise its first and last mebibyte. Each is waited for
    MAP_IO_SECONDS, and none beyond the deadline.

    `known`: the maps that were read on other namespaces (`Head.of_map`), and grows. Of a copy of one of them
    the header block is enough: a pool of a thousand namespaces has two thousand copies of one map.
    """
    copies: list[Superblock] = []
    claimants: set[str] = set()
    details = []
    known = {} if known is None else known
    heads = [memoryview(bytearray(BLOCK_BYTES)) for _ in COPY_OFFSETS]
    cause = yield from _read(channel, namespace, zip(COPY_OFFSETS, heads, strict=True), deadline)
    for offset, head in zip(COPY_OFFSETS, heads, strict=True):
        if cause is not None:
            return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
        try:
            said = head_of(head)
            copy = head
            if said.of_map not in known:
                copy = memoryview(bytearray(BLOCK_BYTES + said.map_bytes + -said.map_bytes % BLOCK_BYTES))
                cause = yield from _read(channel, namespace, [(offset, copy)], deadline)
                if cause is not None:
                    return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
            found = decode_superblock_untrusted(copy, known)
        except NoSuperblock as why:
            claimant = claimed_by(head, nguid)
            claimants |= {claimant} - {""}
            details.append(str(why))
            continue
        known[head_of(copy[:BLOCK_BYTES]).of_map] = found.pool_map
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
            cause = yield from _read(channel, namespace, [(offset, data)], deadline)
            if cause is not None:
                return Inspection(namespace, Content.UNREADABLE, detail=cause.name.lower())
            if bytes(data).strip(b"\0"):  # many times as fast as any()
                return Inspection(namespace, Content.FOREIGN, detail=NOT_BLANK)
        return Inspection(namespace, Content.BLANK)
    told = next(each for each in details if each != "blank")
    if claimants:
        told = f"pool {' and '.join(sorted(claimants))} is about to take it in"
    return Inspection(namespace, Content.FOREIGN, detail=told, claimants=frozenset(claimants))


def _read(
    channel: IoChannel, namespace: int, places: Iterable[tuple[int, memoryview]], deadline: float
) -> Steps[MissCause | None]:
    """Fill these from their offsets, in one round trip; why one of them was not read."""
    until = min(deadline, channel.now() + MAP_IO_SECONDS)
    missing = None
    for pending in [channel.read(namespace, offset, into) for offset, into in places]:
        cause = yield from wait_for(channel, pending, until)
        missing = missing or cause
    return missing


def with_strangers(inspections: Sequence[Inspection], own_pool: str) -> list[Inspection]:
    """The same; those of another pool than ours that discovery brought are marked as strangers.

    Ours is the pool of the configured enclosures; where none of them carries one, `own_pool`, which this
    machine served last, even while it is away. Where neither tells, or the configured ones carry two, there
    is no stranger.
    """
    carried = [each for each in inspections if each.superblock is not None]
    ours = {_pool_of(each) for each in carried if not each.by_discovery} or {own_pool} - {""}
    if len(ours) != 1:
        return list(inspections)
    return [
        replace(each, stranger=each.superblock is not None and _pool_of(each) not in ours)
        for each in inspections
    ]


def _pool_of(inspection: Inspection) -> str:
    assert inspection.superblock is not None
    return inspection.superblock.pool_map.pool_id


def newest_map(inspections: Sequence[Inspection], seal: MapSeal | None = None) -> PoolMap:
    """The pool map in force, without strangers and copies that do not count by the `seal`. Raises G35Error
    for none, or two pools."""
    maps: list[PoolMap] = []
    configured = False
    for each in inspections:
        if each.superblock is not None and not each.stranger:
            maps += each.maps or (each.superblock.pool_map,)
            configured = configured or not each.by_discovery
    if not maps:
        raise _none_of_ours(inspections)
    if seal is not None and not (maps := seal.counting(maps)):
        raise seal.refusal()
    pools = {each.pool_id for each in maps}
    if len(pools) > 1:
        raise G35Error(
            f"the namespaces belong to {len(pools)} different pools: {', '.join(sorted(pools))}",
            "an agent serves one pool, and those of [[enclosures]] belong to several: take the enclosures of "
            "the others out (g35 pool show)"
            if configured
            else "an agent serves one pool, and discovery lists several: name an enclosure of yours in "
            "[[enclosures]]",
        )
    return agreed(maps)


def _none_of_ours(inspections: Sequence[Inspection]) -> G35Error:
    """What to say where no namespace carries a pool that counts."""
    strangers = sorted({_pool_of(each) for each in inspections if each.stranger})
    if strangers:
        return G35Error(
            f"discovery lists namespaces of pool {', '.join(strangers)}, and none of the pool that this "
            "machine has served or formatted last",
            "bring back the enclosures of that one; to go over to another pool for good, name an enclosure "
            "of it in [[enclosures]]",
        )
    others = [each for each in inspections if each.detail.startswith(ANOTHER_LAYOUT)]
    if others:
        return G35Error(
            f"{len(others)} namespaces carry {others[0].detail.partition(':')[0]}",
            "format anew (g35 pool format --force), which loses what is there, or serve them with the "
            "version that made them",
        )
    unread = [each.detail for each in inspections if each.content is Content.UNREADABLE]
    if unread:
        # As where a queue was not connected in time: a format in its place may lose a pool.
        return G35Error(
            f"no pool was seen, and {len(unread)} namespaces could not be read "
            f"({', '.join(sorted(set(unread)))})",
            "try again; if it stays so, see what keeps their enclosures from answering (g35 pool show)",
        )
    return G35Error(
        "no namespace carries a pool",
        "format one (g35 pool format), or check that the configuration names the right enclosures",
    )


def _no_guard() -> Steps[None]:
    yield from ()


def clear_directories(
    channel: IoChannel,
    volume: MapVolume,
    numbers: Mapping[str, int],
    advance: Callable[[int], None],
    guard: Callable[[], Steps[None]] = _no_guard,
) -> Steps[None]:
    """Zero every directory of a volume: an earlier pool's would read as slots in use.

    `numbers` gives each NGUID (hex) its namespace; `advance` gets the counts of done sets; `guard` runs
    before each batch of writes, and may raise.
    """
    set_bytes = volume.set_bytes
    blank = bytes(BLOCK_BYTES * (1 + volume.mark_blocks))
    # One by one: an attacker on the flash may write a map of more sets than there is memory for.
    places = (
        (numbers[extent.nguid], extent.offset + number * set_bytes)
        for extent in volume.extents
        for number in range(extent.sets)
    )
    while some := list(itertools.islice(places, WRITES_IN_FLIGHT)):
        yield from guard()
        batch = [channel.write(namespace, offset, [blank]) for namespace, offset in some]
        for pending in batch:
            cause = yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)
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
