"""The tenants of a pool: adding one, erasing one, changing its limits. Each makes the next pool map.

To erase a tenant is to overwrite its wrapped key, which lies in the copies of the pool map and nowhere else.
So it takes the same time for any number of slots, and nobody opens them afterwards, the holder of the root
key included. How a new map replaces the old one: commit.py.
"""

import uuid
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from agent.errors import ConfigError, G35Error, did_you_mean, expected_there
from agent.inline.secrets import RootKey, new_volume_secret
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.map.document import (
    TENANTS_MAX,
    VERSION_MAX,
    ExtentLayout,
    MapTenant,
    MapVolume,
    PoolMap,
    VolumeWish,
    new_tenant,
    new_volume,
    parts_of,
    wrapped_for,
)
from agent.pool.map.superblock import MAP_BYTES_MAX
from agent.sizes import size_text

SEAL_BYTES = 96
"""The bytes that the seal of a map takes up."""


def version_after(version: int) -> int:
    """The next version. Raises G35Error where it is the last."""
    if version >= VERSION_MAX:
        raise G35Error(
            f"the pool map that is there bears version {version}, after which there is none: no change leads "
            "to that, so somebody without the root key has written it to the enclosures",
            "look at who writes to them; bring back the namespaces that carry the pool's own map. If most of "
            "them carry that one, there is only a new format (g35 pool format --force), which costs all "
            "values and files",
        )
    return version + 1


def next_map(pool_map: PoolMap, **changes: Sequence[BaseModel]) -> PoolMap:
    """The next version of a map, with other tenants, volumes or namespaces.

    Raises ConfigError where they make no map, and G35Error where there is no next version.
    """
    update = {
        "version": version_after(pool_map.version),
        **{key: tuple(rows) for key, rows in changes.items()},
    }
    try:
        # A copy is not checked; the document is.
        changed = PoolMap.model_validate(pool_map.model_copy(update=update).model_dump())
    except ValidationError as error:
        why = expected_there(error.errors()[0])
        raise ConfigError(f"that makes no pool: {why}", "nothing was changed") from None
    if len(changed.encode()) > MAP_BYTES_MAX - SEAL_BYTES:
        raise ConfigError("the pool map would be too long", "the pool has too many volumes and namespaces")
    return changed


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
    return next_map(
        pool_map, tenants=[erased if each is found else each for each in pool_map.tenants], volumes=volumes
    )


def with_tenant(
    pool_map: PoolMap, name: str, wishes: Sequence[VolumeWish], root: RootKey
) -> tuple[PoolMap, tuple[MapVolume, ...]]:
    """The map with one more tenant, and its new volumes, whose directories have to be cleared.

    An erased tenant gets a fresh key, and its volumes fresh ids and secrets: what was in them stays lost. A
    new tenant gets the volumes of `wishes` that name it, in free room. An existing one stays. Raises
    ConfigError where a volume does not fit.
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
        fresh: list[MapVolume] = []
        for wish in parts_of(each for each in wishes if each.tenant == name):
            if wish.layout == "kv" or not members:
                raise ConfigError(
                    f"volume {wish.name} would lie on KV namespaces, which are given away by a format only",
                    'leave layout = "kv" away',
                )
            if any(each.name == wish.name for each in pool_map.volumes):
                raise ConfigError(f"the pool has a volume {wish.name}", "name the tenant's volumes otherwise")
            extents = layout.by_share(wish) or layout.one_set(wish)
            try:
                fresh.append(new_volume(pool_map.pool_id, wish, key, tuple(extents), made=fresh))
            except ValidationError as error:
                why = expected_there(error.errors()[0])
                raise ConfigError(f"that makes no volume: {why}", "change it in the configuration") from None
        return next_map(
            pool_map, tenants=[*pool_map.tenants, tenant], volumes=[*pool_map.volumes, *fresh]
        ), tuple(fresh)
    found = find_tenant(pool_map, name)
    if not found.is_erased:
        return pool_map, ()
    tenant, key = new_tenant(pool_map.pool_id, name, root, found)
    volumes, fresh = [], []
    ids = {volume.volume_id: uuid.uuid4().hex for volume in volumes_of(pool_map, tenant)}
    for volume in pool_map.volumes:
        if volume.tenant == tenant.tenant_id:
            empty = volume.model_copy(
                update={
                    "volume_id": ids[volume.volume_id],
                    "names_of": ids.get(volume.names_of, ""),
                    "earlier_secret": "",
                    "key_epoch": 0,
                }
            )
            wrapped = wrapped_for(pool_map.pool_id, empty, new_volume_secret(), key)
            fresh.append(empty.model_copy(update={"wrapped_secret": wrapped}))
            volumes.append(fresh[-1])
        else:
            volumes.append(volume)
    tenants = [tenant if each is found else each for each in pool_map.tenants]
    return next_map(pool_map, tenants=tenants, volumes=volumes), tuple(fresh)


def with_limits(
    pool_map: PoolMap,
    name: str,
    *,
    quota_slots: int | None = None,
    quota_bytes: int | None = None,
    bandwidth: int | None = None,
) -> PoolMap:
    """The map in which a tenant has other limits; None leaves one, 0 lifts it. Raises ConfigError."""
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
    return next_map(pool_map, tenants=[limited if each is found else each for each in pool_map.tenants])
