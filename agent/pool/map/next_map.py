"""The map that follows a map: what every change of the pool ends with."""

from __future__ import annotations

from pydantic import ValidationError

from agent.errors import ConfigError, G35Error
from agent.pool.map.document import VERSION_MAX, PoolMap
from agent.pool.map.superblock import MAP_BYTES_MAX

SEAL_BYTES = 96
"""Of a map with a seal, those that it takes up."""


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


def next_map(pool_map: PoolMap, **changes: object) -> PoolMap:
    """The next version of a map, with some fields changed. Raises ConfigError where that makes none, and
    G35Error where there is no next one."""
    update = {"version": version_after(pool_map.version), **changes}
    try:
        # A copy is not checked; the document is.
        changed = PoolMap.model_validate(pool_map.model_copy(update=update).model_dump())
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ConfigError(f"that makes no pool: {why}", "nothing was changed") from None
    if len(changed.encode()) > MAP_BYTES_MAX - SEAL_BYTES:
        raise ConfigError("the pool map would be too long", "the pool has too many volumes and namespaces")
    return changed
