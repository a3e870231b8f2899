"""The newest pool map that this agent has seen, kept in its state folder.

What was erased must not come back because every namespace that carries the newer map is away, or because an
enclosure plays its old map back: an agent that knows better does not serve it. The file is one line of JSON,
with the pool's id and the version of its map.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agent.errors import ConfigError, G35Error
from agent.pool.pool_map import PoolMap

FILE = "pool_map.json"


def remember_map(state: Path, pool_map: PoolMap) -> None:
    """Note the map's version. What was noted of another pool is forgotten."""
    partial = state / f"{FILE}.part"
    with open(partial, "w") as file:
        json.dump({"pool": pool_map.pool_id, "version": pool_map.version}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(state / FILE)


def remembered_pool(state: Path) -> str:
    """The id of the pool that was noted; empty where there is none, or the file is damaged."""
    try:
        return str(json.loads((state / FILE).read_text())["pool"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def refuse_older_map(state: Path, pool_map: PoolMap) -> None:
    """Raises G35Error where this agent has seen a newer map of the pool, ConfigError for a damaged file."""
    file = state / FILE
    try:
        seen = json.loads(file.read_text())
        pool, version = seen["pool"], int(seen["version"])
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{file} says nothing of a pool", "remove it; a new one is made") from None
    if pool == pool_map.pool_id and version > pool_map.version:
        raise G35Error(
            f"the pool map that is there has version {pool_map.version}, and this agent has seen {version}: "
            "a tenant may have been erased since",
            f"bring back the namespaces that carry the newer map; if there are none any more, remove {file}",
        )
