"""A volume's data key is rotated by two pool maps: one that adds a key, and one that drops the earlier.

A volume's secret is its placement key and its data key. A rotation changes the data key alone, so every value
stays in its place. Between the two maps agents seal anew what is left under the earlier key
(agent/tenancy/key_rotation.py). They may write with the earlier key for a while after the first map is on
every namespace, so a verb that finds nothing left looks once more, QUIET_SECONDS later, before it drops the
earlier key. Why that is long enough: key_transition.py.
"""

import itertools
import os
from collections.abc import Callable, Mapping

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.directory import DIRECTORY_BYTES, left_in, taken_in
from agent.pool.late_answers import wait_for
from agent.pool.map.document import MapVolume, PoolMap, tenant_key, wrapped_for
from agent.pool.map.inspect import WRITES_IN_FLIGHT
from agent.pool.map.superblock import MAP_IO_SECONDS
from agent.pool.map.tenant_changes import find_tenant, next_map, volumes_of
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.writable_directory import is_certain

_PLACEMENT_BYTES, _DATA_BYTES = 32, 64


def rotating(pool_map: PoolMap, name: str) -> tuple[MapVolume, ...]:
    """The volumes of a tenant that have an earlier key still. Raises ConfigError."""
    return tuple(
        volume for volume in volumes_of(pool_map, find_tenant(pool_map, name)) if volume.earlier_secret
    )


def with_new_data_keys(pool_map: PoolMap, name: str, root: RootKey) -> PoolMap:
    """The map in which each volume of a tenant has a new data key beside the one it had.

    Raises ConfigError where the tenant was erased, is amid a rotation, or has nothing that can be rotated.
    """
    tenant = find_tenant(pool_map, name)
    if tenant.is_erased:
        raise ConfigError(f"tenant {name} was erased", "it has no keys any more")
    if rotating(pool_map, name):
        raise ConfigError(f"the keys of tenant {name} are being rotated", "end that first")
    if not volumes_of(pool_map, tenant):
        raise ConfigError(f"tenant {name} has no volumes, and so no keys to rotate", "there is nothing to do")
    own = {volume.volume_id for volume in volumes_of(pool_map, tenant) if volume.extents}
    if not own:
        raise ConfigError(
            f"tenant {name} has no volume whose key can be rotated",
            "on KV namespaces keys are replaced by erasing the tenant",
        )
    # A secret that opens shows that the tenant's key does.
    secrets = {
        each.volume_id: pool_map.secret(each, root) for each in pool_map.volumes if each.volume_id in own
    }
    key = tenant_key(pool_map.pool_id, tenant, root)
    volumes = []
    for each in pool_map.volumes:
        volume = each
        if volume.volume_id in own:
            placement = secrets[volume.volume_id].reveal()[:_PLACEMENT_BYTES]
            secret = SecretKey(placement + os.urandom(_DATA_BYTES))
            volume = volume.model_copy(
                update={"earlier_secret": volume.wrapped_secret, "key_epoch": volume.key_epoch + 1}
            )
            wrapped = wrapped_for(pool_map.pool_id, volume, secret, key)
            volume = volume.model_copy(update={"wrapped_secret": wrapped})
        volumes.append(volume)
    return next_map(pool_map, volumes=volumes)


def without_earlier_keys(pool_map: PoolMap, ended: set[str]) -> PoolMap:
    """The map in which the volumes with these ids have no earlier key any more."""
    volumes = [
        volume.model_copy(update={"earlier_secret": ""}) if volume.volume_id in ended else volume
        for volume in pool_map.volumes
    ]
    return next_map(pool_map, volumes=volumes)


def has_keys_of(mine: PoolMap, other: PoolMap, volume_id: str) -> bool:
    """Whether two maps give a volume the same keys; not where it is in one of them only."""
    found = [
        (volume.wrapped_secret, volume.earlier_secret, pool_map.is_erased(volume))
        for pool_map in (mine, other)
        for volume in pool_map.volumes
        if volume.volume_id == volume_id
    ]
    return len(found) == 2 and found[0] == found[1]


def left_under_earlier(channel: IoChannel, volume: MapVolume, numbers: Mapping[str, int]) -> Steps[int]:
    """How many values are under another key than the volume's newest. See `count_in_directories`."""
    return (
        yield from count_in_directories(
            channel, volume, numbers, lambda _, __, block: left_in(block, volume.key_epoch)
        )
    )


def slots_taken(channel: IoChannel, volume: MapVolume, numbers: Mapping[str, int]) -> Steps[int]:
    """How many slots of a volume its directories name values in. See `count_in_directories`."""
    return (yield from count_in_directories(channel, volume, numbers, lambda _, __, block: taken_in(block)))


def count_in_directories(
    channel: IoChannel,
    volume: MapVolume,
    numbers: Mapping[str, int],
    of: Callable[[str, int, memoryview], int],
) -> Steps[int]:
    """The sum of what `of` finds in each directory of a volume: by NGUID (hex), number of the set, and block.

    `numbers` gives each NGUID its namespace. Raises G35Error where a directory cannot be read whole.
    """
    found, set_bytes = 0, volume.set_bytes
    sets = ((extent, number) for extent in volume.extents for number in range(extent.sets))
    while some := list(itertools.islice(sets, WRITES_IN_FLIGHT)):
        batch = []
        for extent, number in some:
            place = numbers[extent.nguid], extent.offset + number * set_bytes
            block = memoryview(bytearray(DIRECTORY_BYTES))
            batch.append((extent.nguid, number, place, block, channel.read(*place, block)))
        for nguid, number, place, block, pending in batch:
            if (yield from wait_for(channel, pending, channel.now() + MAP_IO_SECONDS)) is not None:
                raise G35Error(
                    f"cannot read a directory of volume {volume.name}: {pending.fault or 'no answer'}",
                    "look at the enclosure; nothing was changed",
                )
            if not (yield from is_certain(channel, *place, block)):
                raise G35Error(
                    f"a directory of volume {volume.name} comes damaged: nobody can tell what it names",
                    "look at the enclosure, and try again; nothing was changed",
                )
            found += of(nguid, number, block)
    return found
