"""The map that follows a map: what every change of the pool ends with."""

from __future__ import annotations

from pydantic import ValidationError

from agent.errors import ConfigError
from agent.pool.pool_map import PoolMap
from agent.pool.superblock import MAP_BYTES_MAX


def next_map(pool_map: PoolMap, **changes: object) -> PoolMap:
    """The next version of a map, with some fields changed. Raises ConfigError where that makes none."""
    update = {"version": pool_map.version + 1, **changes}
    try:
        # A copy is not checked; the document is.
        changed = PoolMap.model_validate(pool_map.model_copy(update=update).model_dump())
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ConfigError(f"that makes no pool: {why}", "nothing was changed") from None
    if len(changed.encode()) > MAP_BYTES_MAX:
        raise ConfigError("the pool map would be too long", "the pool has too many volumes and namespaces")
    return changed
