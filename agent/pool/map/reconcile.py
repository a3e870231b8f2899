"""One pool map out of several of one version, which writers that met have left: the same for every reader.

A greater version is in force: it was made from the others. But a version takes no key. An attacker with write
access to one namespace could give a map the last version, and no change could follow it. So a version that is
further ahead of the others than changes lead to does not count (`counting`).

The end of a key counts from every copy, whatever its version (`with_key_ends`): a forged version would
otherwise hide an erasure. Epochs of keys only grow, so a copy that is merely old ends nothing.

Of maps of the greatest version none was made from another. The one on most copies goes first, then the one
whose bytes hash to the greatest number. It takes from the others what must not be lost:

* a key that is gone in one of them is gone: a tenant's, and the earlier key of a rotation that has ended;
* of two data keys of a volume that of the later epoch is the volume's;
* namespaces and extents that one of them has behind those of the first stay, and so do the old placements;
* tenants and volumes that the first does not know are kept, where there is room for them.

The rest is lost: a limit of a tenant, or a second join of other namespaces. The program that made the change
is told (commit.py) and makes it again. Without I/O.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from pydantic import ValidationError

from agent.pool.map.document import EPOCHS_AHEAD_MAX, VERSIONS_AHEAD_MAX, MapTenant, MapVolume, PoolMap

Opens: TypeAlias = Callable[[PoolMap, MapVolume], bool]
"""Whether the root key opens the keys that a map gives a volume."""


def counting(maps: Iterable[PoolMap]) -> list[PoolMap]:
    """The maps whose version is not too far ahead of the most frequent one; of two as frequent versions, the
    lesser."""
    found = list(maps)
    copies = Counter(each.version for each in found)
    usual = max(copies, key=lambda version: (copies[version], -version), default=0)
    return [each for each in found if each.version <= usual + VERSIONS_AHEAD_MAX]


def agreed(maps: Iterable[PoolMap]) -> PoolMap:
    """The map that is in force by these copies, each counted as often as it comes. Its version is theirs."""
    found = list(maps)
    counted: list[tuple[PoolMap, int]] = []
    for each in counting(found):
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
    first = counted[0][0] if len(counted) == 1 else _agreed_of_one_version(counted)
    ended: list[PoolMap] = []
    for each in found:
        if each.version != first.version and not any(each is known or each == known for known in ended):
            ended.append(each)
            first = with_key_ends(first, each)
    return first


def with_key_ends(first: PoolMap, other: PoolMap, opens: Opens = lambda _, __: True) -> PoolMap:
    """A map, with the ends of keys that another copy tells of; the same one, where it tells of none.

    A tenant's key ends by an erasure of its epoch, or by a later epoch. A data key ends by a later epoch of
    its volume, or by a row of its own epoch without the earlier key. The later key comes with its row, where
    it `opens`; one that does not open is an attacker's number. No key vouches for an erasure, so each counts,
    but for an epoch more than `EPOCHS_AHEAD_MAX` ahead of the known one.
    """
    if other.pool_id != first.pool_id:
        return first
    for theirs in other.tenants:
        ours = next((each for each in first.tenants if each.tenant_id == theirs.tenant_id), None)
        if ours is None or (theirs.key_epoch, theirs.is_erased) <= (ours.key_epoch, ours.is_erased):
            continue
        if theirs.is_erased:
            is_near = theirs.key_epoch <= ours.key_epoch + EPOCHS_AHEAD_MAX
            first = _with_erased(first, ours, theirs.key_epoch if is_near else ours.key_epoch)
        elif any(opens(other, each) for each in other.volumes if each.tenant == theirs.tenant_id):
            first = _with_later_life(first, other, ours, theirs)
    rows = {each.volume_id: each for each in other.volumes}
    volumes = tuple(_with_later_key(first, each, rows.get(each.volume_id), opens) for each in first.volumes)
    if volumes == first.volumes:
        return first
    return _checked(first.model_copy(update={"volumes": volumes}), first)


def _with_erased(pool_map: PoolMap, tenant: MapTenant, epoch: int) -> PoolMap:
    erased = tenant.model_copy(update={"wrapped_key": "", "key_epoch": epoch})
    tenants = tuple(erased if each is tenant else each for each in pool_map.tenants)
    volumes = tuple(
        each.model_copy(update={"earlier_secret": ""}) if each.tenant == tenant.tenant_id else each
        for each in pool_map.volumes
    )
    return pool_map.model_copy(update={"tenants": tenants, "volumes": volumes})


def _with_later_life(first: PoolMap, other: PoolMap, ours: MapTenant, theirs: MapTenant) -> PoolMap:
    """The tenant was erased and has another key since: its row and its volumes are those of the other map."""
    tenants = tuple(theirs if each is ours else each for each in first.tenants)
    volumes = [each for each in first.volumes if each.tenant != ours.tenant_id]
    volumes += [each for each in other.volumes if each.tenant == ours.tenant_id]
    later = first.model_copy(update={"tenants": tenants, "volumes": tuple(volumes)})
    # Where there is no room for these, its earlier key is over all the same.
    return _checked(later, _with_erased(first, ours, ours.key_epoch))


def _with_later_key(pool_map: PoolMap, ours: MapVolume, theirs: MapVolume | None, opens: Opens) -> MapVolume:
    if theirs is None or theirs.tenant != ours.tenant or pool_map.is_erased(ours):
        return ours
    if theirs.key_epoch > ours.key_epoch:
        later = _one_volume(ours, theirs, False)
        return later if opens(pool_map, later) else ours
    if theirs.key_epoch == ours.key_epoch and ours.earlier_secret and not theirs.earlier_secret:
        return ours.model_copy(update={"earlier_secret": ""})
    return ours


def _agreed_of_one_version(counted: Sequence[tuple[PoolMap, int]]) -> PoolMap:
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
