"""Which namespaces may join a pool: blank ones, others by name and force. One rule for operator and agent."""

from __future__ import annotations

from collections.abc import Set

from agent.errors import UserError, did_you_mean
from agent.membership.join import Seen
from agent.pool.map.document import PoolMap
from agent.pool.map.inspect import Content, Inspection, newest_map
from agent.pool.map.seal import MapSeal


def is_blank(inspection: Inspection, pool_id: str) -> bool:
    """Whether it is of blocks and carries nothing of anybody else's: no superblock, not even a damaged one,
    and zeros in its first and its last mebibyte; or the claim of this pool, which was about to take it in."""
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

    Where one of these is of the pool itself its map counts as ever: it may be the newest, and to go on from
    an older one would bring back what was erased. Raises G35Error where there is no pool, or two.
    """
    kept = [each for nguid, _, each in seen if nguid.hex() not in overwritten]
    if all(each.superblock is None or each.stranger for each in kept):
        kept = [each for _, _, each in seen]
    ours = newest_map(kept, seal).pool_id
    return newest_map(
        [each for _, _, each in seen if each.superblock and each.superblock.pool_map.pool_id == ours], seal
    )


def newcomers_in(pool_map: PoolMap, seen: Seen, named: Set[str], force: bool) -> list[tuple[bytes, int]]:
    """NGUID and bytes of those that are to join: the named ones, or all that are blank.

    Raises UserError where a named one cannot.
    """
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
                raise UserError(f"namespace {text} is one of keys, which a format gives away")
            continue
        if inspection.content is Content.UNREADABLE or not (blank or force):
            what = inspection.detail or inspection.content.value
            raise UserError(
                f"namespace {text} carries {inspection.content.value} ({what}); it was not touched",
                "--force overwrites it, and whatever is there is lost",
            )
        found.append((nguid, size))
    return found
