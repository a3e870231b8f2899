"""The volumes of a pool, opened: for the agent, and for verbs that look into a pool beside it."""

import logging

from agent.config.configuration import Configuration
from agent.errors import G35Error
from agent.inline.secrets import RootKey
from agent.pool.kv.volume import KvVolume
from agent.pool.map.document import PoolMap
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.puts_in_pieces import PutsInPieces
from agent.pool.volume.volume import PoolVolume, Volume

log = logging.getLogger(__name__)


def open_volumes(
    pool_map: PoolMap, root: RootKey, configuration: Configuration, cache: DirectoryCache
) -> list[PoolVolume]:
    """Every volume of the map but those of erased tenants, opened. Raises ConfigError for another pool's root
    key."""
    volumes: list[PoolVolume] = []
    puts_in_pieces = PutsInPieces()
    for entry in pool_map.volumes:
        if pool_map.is_erased(entry):
            log.info("volume %s is not served: its tenant was erased", entry.name)
            continue
        if entry.suite == "plain+crc64" and not configuration.pool.allow_plain:
            raise G35Error(
                f"volume {entry.name} stores values in the clear, and pool.allow_plain is not set",
                "set it if that is meant",
            )
        secret = pool_map.secret(entry, root)
        settings, timing = pool_map.settings(entry), configuration.agent.timing
        if settings.shares:
            volumes.append(KvVolume(settings, secret, timing, puts_in_pieces=puts_in_pieces))
        else:
            volumes.append(Volume(settings, secret, cache, timing, puts_in_pieces=puts_in_pieces))
    return volumes
