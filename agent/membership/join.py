"""Namespaces that join a pool: which may, the map with them, and the map once all values lie where they
belong.

Adding goes in steps, and may be cut short after each; adding again completes it.

1. All namespaces of the pool are reached, and carry the newest map; one that does not gets it now. 2. The
newcomers are claimed (namespace_claims.py), so that no other pool takes them, and their directories are
cleared. No map names them yet, so nobody looks. Before each batch of writes, and at the end, it is checked
that the map has not changed and the claims still stand. 3. The new map is written to the namespaces of
before, in their order. With its first whole copy it is in force for a reader of that namespace; agents that
read another go by the map of before until they see it. Agents find newcomers by NGUID, so these are usable
already. 4. The new map is written to the newcomers, last. A namespace outside of the map of before must not
be the only one that carries the new one, for the next operator would not know that it has to be asked.

Other programs that change the map at the same time: commit.py.

In the new map every volume has an extent on each newcomer, after those that it had, and says how many it had
(`MapVolume.settled`). Values lie where these alone would have them until a mover (rebalance.py) has brought
them to where all of them do; agents look at both places. A second join waits until the first is settled.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from agent.errors import ConfigError, G35Error, UserError, did_you_mean
from agent.inline.secrets import SecretKey
from agent.pool.format.directory import Directory, is_quarantined
from agent.pool.map.commit import Guard, change_map, simply
from agent.pool.map.document import (
    DATA_START,
    ExtentLayout,
    MapExtent,
    MapNamespace,
    MapVolume,
    PoolMap,
)
from agent.pool.map.inspect import NOT_BLANK, Content, Inspection, clear_directories, newest_map
from agent.pool.map.key_epochs import count_in_directories
from agent.pool.map.map_seal import MapSeal
from agent.pool.map.namespace_claims import claim_namespaces, want_claimed
from agent.pool.map.tenant_changes import next_map
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.placement import Placement


def unsettled(pool_map: PoolMap) -> list[MapVolume]:
    """The volumes whose values may lie at earlier places."""
    return [volume for volume in pool_map.volumes if volume.settled]


def with_namespaces(pool_map: PoolMap, newcomers: Sequence[tuple[bytes, int]]) -> PoolMap:
    """The map with more namespaces of blocks, NGUID and bytes. Raises ConfigError where that makes none.

    A volume gets the share of a newcomer that it has of the other namespaces; none, where that is less than a
    set.
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
        set_bytes = volume.set_bytes
        share = sum(extent.sets for extent in volume.extents) * set_bytes / room
        fresh: list[MapExtent] = []
        for nguid, size in newcomers:
            # A share was rounded down to whole sets when it was given; that is not done twice.
            sets = int((size - DATA_START) * share / set_bytes + 0.5)
            extent = layouts[nguid].up_to(nguid, set_bytes, sets)
            fresh += [] if extent is None else [extent]
        changes = {"extents": (*volume.extents, *fresh), "settled": len(volume.extents) if fresh else 0}
        volumes.append(volume.model_copy(update=changes))
    return next_map(pool_map, namespaces=listed, volumes=volumes)


def as_settled(pool_map: PoolMap) -> PoolMap:
    """The map by which nobody looks at earlier places any more."""
    volumes = [volume.model_copy(update={"settled": 0}) for volume in pool_map.volumes]
    return next_map(pool_map, volumes=volumes)


Seen = Sequence[tuple[bytes, int, Inspection]]
"""Every namespace that is reached: NGUID, bytes, what it carries; numbered in the channel as they come."""


def complete_map(
    channel: IoChannel, pool_map: PoolMap, seen: Seen, seal: MapSeal | None = None
) -> Steps[int]:
    """Bring every member with another map than the newest, or none, to it; how many those are.

    Raises G35Error where one cannot be written, or where it carries something else.
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
        changed = yield from change_map(channel, pool_map, numbers_of(seen), simply(lambda it: it), seal=seal)
        _want_none(changed.left)
    return lacking


def numbers_of(seen: Seen) -> dict[str, int]:
    """By their NGUIDs, as hex."""
    return {nguid.hex(): number for number, (nguid, _, _) in enumerate(seen)}


def join(
    channel: IoChannel,
    pool_map: PoolMap,
    newcomers: Sequence[tuple[bytes, int]],
    numbers: Mapping[str, int],
    advance: Callable[[int], None] = lambda _: None,
    overwrite: Set[str] = frozenset(),
    seal: MapSeal | None = None,
) -> Steps[PoolMap]:
    """Steps 2 to 4 of the module's docstring; the new map.

    `numbers` gives NGUIDs (hex) their numbers in `channel`; `advance` gets the counts of cleared directories;
    newcomers (hex) in `overwrite` need not be blank. Raises ConfigError, Taken where another pool takes one,
    or G35Error where a part could not be written.
    """
    cleared: set[tuple[str, MapExtent]] = set()
    yield from claim_namespaces(
        channel, pool_map.pool_id, [nguid for nguid, _ in newcomers], numbers, overwrite
    )

    def change(base: PoolMap, guard: Guard) -> Steps[PoolMap]:
        members = {each.nguid for each in base.namespaces}
        # In one order for all: two programs that let in the same ones make the same map.
        fresh = sorted(each for each in newcomers if each[0].hex() not in members)
        if not fresh:
            return base
        changed = with_namespaces(base, fresh)
        names = {nguid.hex(): nguid for nguid, _ in fresh}

        def still_ours(nguid: bytes) -> Steps[None]:
            yield from guard()
            yield from want_claimed(channel, base.pool_id, [nguid], numbers, places=1)

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
                yield from clear_directories(channel, part, numbers, advance, guarded)
                cleared.add((volume.volume_id, extent))
        yield from want_claimed(channel, base.pool_id, list(names.values()), numbers)
        return changed

    listed = [MapNamespace(nguid=nguid.hex(), bytes=size) for nguid, size in newcomers]
    changed = yield from change_map(channel, pool_map, numbers, change, newcomers=listed, seal=seal)
    _want_none(changed.left)
    return changed.pool_map


def settle(
    channel: IoChannel, pool_map: PoolMap, numbers: Mapping[str, int], seal: MapSeal | None = None
) -> Steps[PoolMap]:
    """End the looks at old placements, once all values lie where they belong; the new map. Raises G35Error
    where the pool has changed meanwhile, or not all could be written."""
    places = {each.volume_id: (each.extents, each.settled) for each in pool_map.volumes}

    def change(base: PoolMap) -> PoolMap:
        waiting = unsettled(base)
        if any(places.get(each.volume_id) != (each.extents, each.settled) for each in waiting):
            raise G35Error("the pool has changed meanwhile", "settle it again")
        return as_settled(base) if waiting else base

    changed = yield from change_map(channel, pool_map, numbers, simply(change), seal=seal)
    _want_none(changed.left)
    return changed.pool_map


def _want_none(left: Mapping[str, str]) -> None:
    if left:
        told = ", ".join(f"{nguid} ({why})" for nguid, why in left.items())
        raise G35Error(f"the new map is not everywhere: {told}", "look at the enclosures, and say it again")


def misplaced_values(
    channel: IoChannel, pool_map: PoolMap, volume: MapVolume, secret: SecretKey, numbers: Mapping[str, int]
) -> Steps[tuple[int, int]]:
    """(values in all sets, those at old placements) of a volume, by the directories on flash. Raises
    G35Error."""
    settings = pool_map.settings(volume)
    placement_key = SecretKey(secret.reveal()[:32])
    placement = Placement(
        placement_key, settings.extents, apart=settings.copies > 1, local_first=settings.local_first
    )
    namespaces = {extent.nguid.hex(): extent.namespace for extent in settings.extents}
    values = 0

    def wrong_in(nguid: str, number: int, block: memoryview) -> int:
        nonlocal values
        entries = [entry for _, entry in Directory(block) if not is_quarantined(entry)]
        values += len(entries)
        place = namespaces[nguid], number
        return sum(place not in placement.candidates(entry.pseudonym) for entry in entries)

    wrong = yield from count_in_directories(channel, volume, numbers, wrong_in)
    return values, wrong


def is_blank(inspection: Inspection, pool_id: str) -> bool:
    """Whether it is of blocks, without a superblock, even a damaged one, and with zeros in its first and last
    mebibyte; or carries the claim of this pool, which was about to take it in."""
    if inspection.kv is not None:
        return False
    return inspection.content is Content.BLANK or inspection.claimants == {pool_id}


def why_not(inspection: Inspection, pool_id: str) -> str:
    """Why a namespace does not join by itself; empty where it does."""
    if is_blank(inspection, pool_id):
        return ""
    if inspection.kv is not None:
        return "one of keys, which a format gives away"
    if inspection.claimants:
        return inspection.detail
    said = inspection.detail or inspection.content.value
    return f"it carries {inspection.content.value} ({said})"


def pool_of(seen: Seen, overwritten: Set[str] = frozenset(), seal: MapSeal | None = None) -> PoolMap:
    """The map in force; another pool on namespaces that are to be overwritten (NGUIDs as hex) does not count.

    A map of the pool itself counts there as ever: it may be the newest, and an older one would bring back
    what was erased. Raises G35Error where there is no pool, or two.
    """
    kept = [each for nguid, _, each in seen if nguid.hex() not in overwritten]
    if all(each.superblock is None or each.stranger for each in kept):
        kept = [each for _, _, each in seen]
    ours = newest_map(kept, seal).pool_id
    return newest_map(
        [each for _, _, each in seen if each.superblock and each.superblock.pool_map.pool_id == ours], seal
    )


def newcomers_in(pool_map: PoolMap, seen: Seen, named: Set[str], force: bool) -> list[tuple[bytes, int]]:
    """NGUID and bytes of the namespaces to join: the named ones, or all blank ones. Raises UserError."""
    members = {each.nguid for each in pool_map.namespaces}
    strangers = {nguid.hex(): (nguid, size, each) for nguid, size, each in seen if nguid.hex() not in members}
    if missing := named - strangers.keys() - members:
        named_so = ", ".join(f"{each}{did_you_mean(each, strangers)}" for each in sorted(missing))
        raise UserError(f"no enclosure shows namespace {named_so}", "see g35 pool show")
    found = []
    for text, (nguid, size, inspection) in strangers.items():
        blank = is_blank(inspection, pool_map.pool_id)
        if inspection.kv is not None or not (text in named or (not named and blank)):
            if text in named:
                raise UserError(
                    f"namespace {text} is one of keys, which a format gives away",
                    "leave it out, or format a new pool with it",
                )
            continue
        if inspection.content is Content.UNREADABLE or not (blank or force):
            what = inspection.detail or inspection.content.value
            raise UserError(
                f"namespace {text} carries {inspection.content.value} ({what}); it was not touched",
                "--force overwrites it, and whatever is there is lost",
            )
        found.append((nguid, size))
    return found
