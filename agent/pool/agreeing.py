"""One pool map out of several of one version, which writers that met have left: the same for whoever asks.

A greater version is in force whole: it was made from the others. But a version is a number that takes no key:
who can write to one namespace could give his map the last one, and there would be no change after it. So one
that is further ahead of the others than changes lead to does not count (`counting`).

Of maps of the greatest version none was made from another. The one on most copies goes first, then the one
whose bytes hash to the greatest number, and it takes from the others what must not be lost:

* a key that is gone in one of them is gone: a tenant's, and the earlier key of a rotation that has ended;
* of two data keys of a volume that of the later epoch is the volume's;
* namespaces and extents that one of them has behind those of the first stay, and so do the earlier places;
* tenants and volumes that the first does not know are kept, where there is room for them.

What is left is lost: a limit of a tenant, or a second join of other namespaces. Who made the change is told
(changing.py), and makes it again if he lives. Without I/O.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from agent.pool.pool_map import VERSIONS_AHEAD_MAX, MapTenant, MapVolume, PoolMap


def counting(maps: Iterable[PoolMap]) -> list[PoolMap]:
    """Of the maps of a pool, each as often as it comes, those whose version is not too far ahead of that
    which most of them have; of two versions that as many have, the lesser."""
    found = list(maps)
    copies = Counter(each.version for each in found)
    usual = max(copies, key=lambda version: (copies[version], -version), default=0)
    return [each for each in found if each.version <= usual + VERSIONS_AHEAD_MAX]


def agreed(maps: Iterable[PoolMap]) -> PoolMap:
    """The map that is in force by these copies, each counted as often as it comes. Its version is theirs."""
    counted: list[tuple[PoolMap, int]] = []
    for each in counting(maps):
        if counted and each.version < counted[0][0].version:
            continue
        if counted and each.version > counted[0][0].version:
            counted = []
        at = next((n for n, (known, _) in enumerate(counted) if known is each or known == each), None)
        if at is None:
            counted.append((each, 1))
        else:
            counted[at] = (counted[at][0], counted[at][1] + 1)
    if not counted:
        raise ValueError("of no copy there is no map in force")
    if len(counted) == 1:
        return counted[0][0]
    ranked = sorted(counted, key=lambda each: (each[1], hashlib.sha256(each[0].encode()).digest()))
    first, *others = [each for each, _ in reversed(ranked)]
    others = [each for each in others if each.pool_id == first.pool_id]
    for other in others:
        first = _checked(_with_rest(first, other), first)
    return _without_keys(first, others)


def _with_rest(first: PoolMap, other: PoolMap) -> PoolMap:
    """The first map and what else the other has. It may not hold together."""
    tenants = [*first.tenants]
    known = {each.tenant_id for each in tenants} | {each.name for each in tenants}
    tenants += [each for each in other.tenants if not {each.tenant_id, each.name} & known]
    volumes = {each.volume_id: each for each in first.volumes}
    names = {each.name for each in first.volumes}
    ahead = _begins_with(other.namespaces, first.namespaces)
    for each in other.volumes:
        if each.volume_id in volumes:
            volumes[each.volume_id] = _one_volume(volumes[each.volume_id], each, ahead)
        elif each.name not in names:
            volumes[each.volume_id] = each
    namespaces = other.namespaces if ahead else first.namespaces
    update = {"namespaces": namespaces, "tenants": tuple(tenants), "volumes": tuple(volumes.values())}
    return first.model_copy(update=update)


def _one_volume(first: MapVolume, other: MapVolume, ahead: bool) -> MapVolume:
    update: dict[str, object] = {}
    if other.key_epoch > first.key_epoch:
        update = {
            "wrapped_secret": other.wrapped_secret,
            "earlier_secret": other.earlier_secret,
            "key_epoch": other.key_epoch,
        }
    if ahead and _begins_with(other.extents, first.extents):
        update["extents"] = other.extents
        # To look at earlier places for too long costs a read; for too short a time, a value.
        update["settled"] = max(first.settled, other.settled)
    return first.model_copy(update=update)


def _without_keys(first: PoolMap, others: Sequence[PoolMap]) -> PoolMap:
    """The first map without the keys that are gone in another. What holds together does so without them."""
    erased = {each.tenant_id for other in others for each in other.tenants if each.is_erased}
    ended = {
        (each.volume_id, each.key_epoch)
        for other in others
        for each in other.volumes
        if not each.earlier_secret
    }

    def tenant(each: MapTenant) -> MapTenant:
        return each.model_copy(update={"wrapped_key": ""}) if each.tenant_id in erased else each

    def volume(each: MapVolume) -> MapVolume:
        over = (each.volume_id, each.key_epoch) in ended
        return each.model_copy(update={"earlier_secret": ""}) if over else each

    update = {
        "tenants": tuple(tenant(each) for each in first.tenants),
        "volumes": tuple(volume(each) for each in first.volumes),
    }
    return first.model_copy(update=update)


def _checked(pool_map: PoolMap, otherwise: PoolMap) -> PoolMap:
    try:
        return PoolMap.model_validate(pool_map.model_dump())
    except ValidationError:
        return otherwise


def _begins_with(longer: Sequence[object], shorter: Sequence[object]) -> bool:
    return list(longer[: len(shorter)]) == list(shorter)
