"""The tenants of a pool: adding one, erasing one, changing what it may have. Each makes the next pool map.

To erase a tenant is to overwrite its wrapped key. It lies in every copy of the pool map and nowhere else,
so this takes as long for a hundred thousand slots as for none; what the slots hold opens for nobody then,
the holder of the root key included. How a new map comes into the place of the old one: commit.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from pydantic import ValidationError

from agent.errors import ConfigError, did_you_mean
from agent.inline.root_keys import RootKey
from agent.inline.secrets import new_volume_secret
from agent.pool.format.slot import HEADER_BYTES
from agent.pool.map.document import (
    TENANTS_MAX,
    ExtentLayout,
    MapTenant,
    MapVolume,
    PoolMap,
    VolumeWish,
    new_tenant,
    new_volume,
    wrapped_for,
)
from agent.pool.map.next_map import next_map
from agent.sizes import size_text


def find_tenant(pool_map: PoolMap, name: str) -> MapTenant:
    """Raises ConfigError where the pool has none of that name."""
    for tenant in pool_map.tenants:
        if tenant.name == name:
            return tenant
    known = sorted(tenant.name for tenant in pool_map.tenants)
    raise ConfigError(
        f"the pool has no tenant {name}{did_you_mean(name, known)}", f"it has {', '.join(known) or 'none'}"
    )


def volumes_of(pool_map: PoolMap, tenant: MapTenant) -> tuple[MapVolume, ...]:
    return tuple(volume for volume in pool_map.volumes if volume.tenant == tenant.tenant_id)


def without_key(pool_map: PoolMap, name: str) -> PoolMap:
    """The map in which the tenant is erased; the same one, where it is already. Raises ConfigError."""
    found = find_tenant(pool_map, name)
    if found.is_erased:
        return pool_map
    erased = found.model_copy(update={"wrapped_key": ""})
    # A secret that opens with nothing any more would only be in the way of a tenant that comes back.
    volumes = [
        each.model_copy(update={"earlier_secret": ""}) if each.tenant == found.tenant_id else each
        for each in pool_map.volumes
    ]
    return changed_map(pool_map, [erased if each is found else each for each in pool_map.tenants], volumes)


def with_tenant(
    pool_map: PoolMap, name: str, wishes: Sequence[VolumeWish], root: RootKey
) -> tuple[PoolMap, tuple[MapVolume, ...]]:
    """The map with a tenant more, and the volumes that are new in it, whose directories have to be cleared.

    A tenant that was erased gets a fresh key, and its volumes fresh ids and secrets where they lie: what was
    in them stays lost. A new one gets volumes by those of `wishes` that name it, in room that no volume has.
    Of a tenant that is there nothing changes. Raises ConfigError where a volume does not fit.
    """
    if name not in {tenant.name for tenant in pool_map.tenants}:
        if len(pool_map.tenants) >= TENANTS_MAX:
            raise ConfigError(
                f"the pool has {TENANTS_MAX} tenants, the erased ones too, and takes no more",
                "give an erased one its name back (g35 tenant add), or format another pool",
            )
        tenant, key = new_tenant(pool_map.pool_id, name, root)
        members = [
            (bytes.fromhex(each.nguid), each.bytes) for each in pool_map.namespaces if each.kind != "kv"
        ]
        layout = ExtentLayout(members, pool_map.volumes)
        fresh = []
        for wish in wishes:
            if wish.tenant != name:
                continue
            if wish.layout == "kv" or not members:
                raise ConfigError(
                    f"volume {wish.name} would lie on KV namespaces, which are given away by a format only",
                    'leave layout = "kv" away',
                )
            if any(each.name == wish.name for each in pool_map.volumes):
                raise ConfigError(f"the pool has a volume {wish.name}", "name the tenant's volumes otherwise")
            extents = layout.by_share(wish) or layout.one_set(wish)
            try:
                fresh.append(new_volume(pool_map.pool_id, wish, key, tuple(extents)))
            except ValidationError as error:
                why = error.errors()[0]["msg"]
                raise ConfigError(f"that makes no volume: {why}", "change it in the configuration") from None
        return changed_map(pool_map, [*pool_map.tenants, tenant], [*pool_map.volumes, *fresh]), tuple(fresh)
    found = find_tenant(pool_map, name)
    if not found.is_erased:
        return pool_map, ()
    tenant, key = new_tenant(pool_map.pool_id, name, root, found)
    volumes, fresh = [], []
    for volume in pool_map.volumes:
        if volume.tenant == tenant.tenant_id:
            empty = volume.model_copy(
                update={"volume_id": uuid.uuid4().hex, "earlier_secret": "", "key_epoch": 0}
            )
            wrapped = wrapped_for(pool_map.pool_id, empty, new_volume_secret(), key)
            fresh.append(empty.model_copy(update={"wrapped_secret": wrapped}))
            volumes.append(fresh[-1])
        else:
            volumes.append(volume)
    tenants = [tenant if each is found else each for each in pool_map.tenants]
    return changed_map(pool_map, tenants, volumes), tuple(fresh)


def with_limits(
    pool_map: PoolMap,
    name: str,
    *,
    quota_slots: int | None = None,
    quota_bytes: int | None = None,
    bandwidth: int | None = None,
) -> PoolMap:
    """The map in which a tenant has other limits; None leaves one as it is, 0 lifts it.

    Raises ConfigError.
    """
    found = find_tenant(pool_map, name)
    asked = {"quota_slots": quota_slots, "quota_bytes": quota_bytes, "bandwidth": bandwidth}
    update = {key: value for key, value in asked.items() if value is not None}
    if (quota_slots or quota_bytes) and any(each.kv_namespaces for each in volumes_of(pool_map, found)):
        raise ConfigError(
            f"tenant {name} has a volume on KV namespaces, where slots are not counted",
            "limit its bandwidth, or give its volumes namespaces of blocks",
        )
    slot_bytes = max((HEADER_BYTES + each.value_bytes for each in volumes_of(pool_map, found)), default=0)
    if quota_bytes and quota_bytes < slot_bytes:
        raise ConfigError(
            f"{size_text(quota_bytes)} is less than a slot of tenant {name}, of {size_text(slot_bytes)}",
            "give it more, or 0 for no limit",
        )
    limited = found.model_copy(update=update)
    if limited == found:
        return pool_map
    return changed_map(pool_map, [limited if each is found else each for each in pool_map.tenants])


def changed_map(
    pool_map: PoolMap, tenants: Sequence[MapTenant], volumes: Sequence[MapVolume] | None = None
) -> PoolMap:
    """The next version of a map, with other tenants or volumes. Raises ConfigError where that makes none."""
    if volumes is None:
        return next_map(pool_map, tenants=tuple(tenants))
    return next_map(pool_map, tenants=tuple(tenants), volumes=tuple(volumes))
