"""Namespaces that join a pool: the map with them in it, and the map once all values lie where they belong.

Adding goes in steps, and may be cut short after each; adding again completes it.

1. All namespaces of the pool are reached, and carry the newest map; one that does not gets it now.
2. The newcomers are claimed (claims.py), so that no other pool takes them as well, and their directories
   are cleared. No map names them yet, so nobody looks; whether that is still so, and whose claim they carry,
   is looked up before each batch of writes, and at the end.
3. The new map is written to the namespaces of before, in their order. With the first copy of it that is whole
   it is in force for whoever reads that namespace; agents that read another go by the map of before until
   they see it. Its newcomers are usable already, for agents find them by NGUID and not by their superblocks.
4. The new map is written to the newcomers, last: a namespace outside of the map of before must not be the
   only one that carries the new one, for the next operator would not know that it has to be asked.

What becomes of it where others change the map at the same time: commit.py.

In the new map every volume has an extent on each newcomer, after those that it had, and says how many it
had (`MapVolume.settled`). Values lie where these alone would have them until a mover (rebalance.py) has
brought them to where all of them do; both are looked at. A second join waits until the first is settled, so
two are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import SecretKey
from agent.pool.format.directory import DIRECTORY_BYTES, Directory, is_quarantined
from agent.pool.map.claims import claim_namespaces, want_claimed
from agent.pool.map.commit import Guard, change_map, simply
from agent.pool.map.document import (
    DATA_START,
    ExtentLayout,
    MapExtent,
    MapNamespace,
    MapVolume,
    PoolMap,
    set_size,
)
from agent.pool.map.inspect import NOT_BLANK, Content, Inspection, clear_directories
from agent.pool.map.next_map import next_map
from agent.pool.map.seal import MapSeal
from agent.pool.map.superblock import MAP_IO_SECONDS
from agent.pool.steps import Lanes, Steps, wait_for
from agent.pool.volume.placement import Extent, Placement
from agent.pool.volume.writable_directory import is_certain

READS_IN_FLIGHT = 32


def unsettled(pool_map: PoolMap) -> list[MapVolume]:
    """The volumes whose values may lie at earlier places."""
    return [volume for volume in pool_map.volumes if volume.settled]


def with_namespaces(pool_map: PoolMap, newcomers: Sequence[tuple[bytes, int]]) -> PoolMap:
    """The map with namespaces of blocks more, NGUID and bytes. Raises ConfigError where that cannot be.

    Each volume gets the share of a newcomer that it has of the namespaces of before; one whose share is less
    than a set there does not lie on it.
    """
    if waiting := unsettled(pool_map):
        names = ", ".join(volume.name for volume in waiting)
        raise ConfigError(
            f"values of volume {names} may still have to move to the namespaces that joined before",
            "let an agent move them (pool.rebalance), and settle the pool (g35 pool settle)",
        )
    room = sum(each.bytes - DATA_START for each in pool_map.namespaces if each.kind == "blocks")
    if not room:
        raise ConfigError(
            "the pool has namespaces of keys alone, which are given away by a format",
            "format it anew with all of them",
        )
    listed = [*pool_map.namespaces, *(MapNamespace(nguid=n.hex(), bytes=size) for n, size in newcomers)]
    volumes = []
    layouts = {nguid: ExtentLayout([(nguid, size)]) for nguid, size in newcomers}
    for volume in pool_map.volumes:
        if not volume.extents:
            volumes.append(volume)
            continue
        set_bytes = set_size(volume.value_bytes)
        share = sum(extent.sets for extent in volume.extents) * set_bytes / room
        fresh: list[MapExtent] = []
        for nguid, size in newcomers:
            # A share was rounded down to whole sets when it was given; that is not done twice.
            sets = int((size - DATA_START) * share / set_bytes + 0.5)
            extent = layouts[nguid].up_to(nguid, volume.value_bytes, sets)
            fresh += [] if extent is None else [extent]
        changes = {"extents": (*volume.extents, *fresh), "settled": len(volume.extents) if fresh else 0}
        volumes.append(volume.model_copy(update=changes))
    return next_map(pool_map, namespaces=tuple(listed), volumes=tuple(volumes))


def as_settled(pool_map: PoolMap) -> PoolMap:
    """The map by which nobody looks at earlier places any more."""
    volumes = [volume.model_copy(update={"settled": 0}) for volume in pool_map.volumes]
    return next_map(pool_map, volumes=tuple(volumes))


Seen = Sequence[tuple[bytes, int, Inspection]]
"""Every namespace that is reached: NGUID, bytes, what it carries; numbered in the lanes as they come."""


def members_missing(pool_map: PoolMap, seen: Seen) -> list[str]:
    """The namespaces of the map that are not reached, NGUIDs as hex."""
    reached = {nguid.hex() for nguid, _, _ in seen}
    return [each.nguid for each in pool_map.namespaces if each.nguid not in reached]


def complete_map(lanes: Lanes, pool_map: PoolMap, seen: Seen, seal: MapSeal | None = None) -> Steps[int]:
    """Bring every member that carries another map than the newest, or none, to it; how many those are.

    Raises G35Error where one cannot be written, or carries something else: it would be overwritten.
    """
    members = {each.nguid for each in pool_map.namespaces}
    lacking = 0
    for nguid, _, inspection in seen:
        if nguid.hex() not in members:
            continue
        found = inspection.superblock
        if found is not None and all(each == pool_map for each in (found.pool_map, *inspection.maps)):
            continue
        ours = found is not None and found.pool_map.pool_id == pool_map.pool_id
        # Agents may have stored values on a newcomer before it got its superblock.
        blank = inspection.content is Content.BLANK or inspection.detail == NOT_BLANK
        blank = blank or pool_map.pool_id in inspection.claimants
        if not ours and not blank:
            raise G35Error(
                f"namespace {nguid.hex()} belongs to the pool and carries {inspection.content.value}",
                "look at what it is; nothing was changed",
            )
        lacking += 1
    if lacking:
        changed = yield from change_map(lanes, pool_map, numbers_of(seen), simply(lambda it: it), seal=seal)
        _want_none(changed.left)
    return lacking


def numbers_of(seen: Seen) -> dict[str, int]:
    """By their NGUIDs, as hex."""
    return {nguid.hex(): number for number, (nguid, _, _) in enumerate(seen)}


def join(
    lanes: Lanes,
    pool_map: PoolMap,
    newcomers: Sequence[tuple[bytes, int]],
    numbers: Mapping[str, int],
    advance: Callable[[int], None] = lambda _: None,
    overwrite: Set[str] = frozenset(),
    seal: MapSeal | None = None,
) -> Steps[PoolMap]:
    """Steps 2 to 4 of the module's docstring; the new map.

    `numbers` gives the NGUIDs (hex) of members and newcomers their numbers in `lanes`; `advance` is told of
    directories that were cleared; `overwrite` has the newcomers (hex) that need not be blank. Raises
    ConfigError, Taken where another pool takes one, or G35Error where not all of it could be written.
    """
    cleared: set[tuple[str, MapExtent]] = set()
    yield from claim_namespaces(
        lanes, pool_map.pool_id, [nguid for nguid, _ in newcomers], numbers, overwrite
    )

    def change(base: PoolMap, guard: Guard) -> Steps[PoolMap]:
        members = {each.nguid for each in base.namespaces}
        # In an order that is the same for everybody: two who let in the same ones make the same map.
        fresh = sorted(each for each in newcomers if each[0].hex() not in members)
        if not fresh:
            return base
        changed = with_namespaces(base, fresh)
        names = {nguid.hex(): nguid for nguid, _ in fresh}

        def still_ours(nguid: bytes) -> Steps[None]:
            yield from guard()
            yield from want_claimed(lanes, base.pool_id, [nguid], numbers, places=1)

        for volume in changed.volumes:
            # What was cleared in a round before may have got values since, by the map of that round.
            extents = tuple(
                each
                for each in volume.extents
                if each.nguid in names and (volume.volume_id, each) not in cleared
            )
            for extent in extents:
                part = volume.model_copy(update={"extents": (extent,)})
                guarded = partial(still_ours, names[extent.nguid])
                yield from clear_directories(lanes, part, numbers, advance, guarded)
                cleared.add((volume.volume_id, extent))
        yield from want_claimed(lanes, base.pool_id, list(names.values()), numbers)
        return changed

    listed = [MapNamespace(nguid=nguid.hex(), bytes=size) for nguid, size in newcomers]
    changed = yield from change_map(lanes, pool_map, numbers, change, newcomers=listed, seal=seal)
    _want_none(changed.left)
    return changed.pool_map


def settle(
    lanes: Lanes, pool_map: PoolMap, numbers: Mapping[str, int], seal: MapSeal | None = None
) -> Steps[PoolMap]:
    """Have agents look at no earlier places any more, once all values lie where they belong; the new map.

    Raises G35Error where the pool is not the one any more that was looked at, or not all could be written.
    """
    places = {each.volume_id: (each.extents, each.settled) for each in pool_map.volumes}

    def change(base: PoolMap) -> PoolMap:
        waiting = unsettled(base)
        if any(places.get(each.volume_id) != (each.extents, each.settled) for each in waiting):
            raise G35Error("the pool has changed meanwhile", "settle it again")
        return as_settled(base) if waiting else base

    changed = yield from change_map(lanes, pool_map, numbers, simply(change), seal=seal)
    _want_none(changed.left)
    return changed.pool_map


def _want_none(left: Mapping[str, str]) -> None:
    if left:
        told = ", ".join(f"{nguid} ({why})" for nguid, why in left.items())
        raise G35Error(f"the new map is not everywhere: {told}", "look at the enclosures, and say it again")


def misplaced_values(
    lanes: Lanes, pool_map: PoolMap, volume: MapVolume, secret: SecretKey, numbers: Mapping[str, int]
) -> Steps[tuple[int, int]]:
    """(values in all sets, those at earlier places) of a volume, by the directories on flash.

    Raises G35Error where one cannot be read.
    """
    settings = pool_map.settings(volume)
    placement = Placement(
        SecretKey(secret.reveal()[:32]),
        [Extent(extent.namespace, extent.nguid, extent.sets) for extent in settings.extents],
        apart=settings.copies > 1,
    )
    values = wrong = 0
    for extent in settings.extents:
        number = numbers[extent.nguid.hex()]
        for start in range(0, extent.sets, READS_IN_FLIGHT):
            batch = []
            for each in range(start, min(start + READS_IN_FLIGHT, extent.sets)):
                block = memoryview(bytearray(DIRECTORY_BYTES))
                offset = extent.offset + each * settings.set_bytes
                batch.append((each, block, lanes.read(number, offset, block)))
            for each, block, pending in batch:
                if (yield from wait_for(lanes, pending, lanes.now() + MAP_IO_SECONDS)) is not None:
                    raise G35Error(
                        f"cannot read a directory of volume {volume.name}: {pending.fault or 'no answer'}",
                        "look at the enclosure, and try again",
                    )
                offset = extent.offset + each * settings.set_bytes
                if not (yield from is_certain(lanes, number, offset, block)):
                    raise G35Error(
                        f"a directory of volume {volume.name} comes damaged",
                        "look at the enclosure, and try again",
                    )
                for _, entry in Directory(block):
                    if is_quarantined(entry):
                        continue
                    values += 1
                    candidates = placement.candidates(entry.pseudonym)
                    wrong += (extent.namespace, each) not in candidates
    return values, wrong
