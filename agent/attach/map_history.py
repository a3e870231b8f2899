"""What this agent has seen of the maps of pools, kept in its state folder: an erased or dropped key stays
gone.

The key must not come back because all namespaces with the newer map are away, or because an enclosure plays
its old map back, under a greater version if it likes. So the agent notes of each pool the version of the
newest map; of each tenant its key epoch, and whether it is erased; of each volume the epoch of its data key,
and of the oldest key that opens. These numbers only grow, and a key is bound to its epoch
(agent/pool/map/document.py). A version is bound to nothing, so one that is further ahead than changes lead to
(`VERSIONS_AHEAD_MAX`) is not noted: the agent would refuse all later maps.

A pool is noted after the root key has opened its keys, and never forgotten, so an attacker without the key
removes no note. The file is one line of JSON. Where it cannot be written, the notes in memory hold until the
agent ends, one warning says so, and it is tried again. For one thread.
"""

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent.errors import ConfigError, G35Error
from agent.host_os.whole_file import write_whole
from agent.inline.secrets import RootKey
from agent.pool.map.document import EPOCHS_AHEAD_MAX, VERSION_MAX, VERSIONS_AHEAD_MAX, MapVolume, PoolMap
from agent.pool.map.map_seal import MapSeal
from agent.pool.volume.volume import PoolVolume

log = logging.getLogger(__name__)

FILE = "pool_map.json"
AGAIN_SECONDS = 10.0
"""How soon a file that could not be written is tried again."""
POOLS_MAX = 256
"""Beyond that, only pools of which something was opened are noted."""
ROWS_MAX = 1024
"""Tenants and volumes of a pool, each. A pool has 64 tenants in its life; the earliest volumes, of erased
tenants, go."""


@dataclass(slots=True)
class _Seen:
    """Of one pool, by hex id: epochs of tenants and whether they are erased, newest and oldest epochs of
    volumes."""

    version: int = 0
    tenants: dict[str, tuple[int, bool]] = field(default_factory=dict)
    volumes: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_seal: bool = False

    def take(self, other: "_Seen") -> None:
        """Whatever is later in the other."""
        if other.version <= self.version + VERSIONS_AHEAD_MAX:
            self.version = max(self.version, other.version)
        self.has_seal = self.has_seal or other.has_seal
        for tenant, (epoch, erased) in other.tenants.items():
            if tenant in self.tenants or len(self.tenants) < ROWS_MAX:
                known: tuple[int, bool] = self.tenants.get(tenant, (0, False))
                # Nothing vouches for the epoch of an erased one: that it is erased is what counts.
                is_near = not erased or epoch <= known[0] + EPOCHS_AHEAD_MAX
                self.tenants[tenant] = max(known, (epoch if is_near else known[0], erased))
        for volume, (newest, oldest) in other.volumes.items():
            had = self.volumes.get(volume, (0, 0))
            self.volumes[volume] = (max(had[0], newest), max(had[1], oldest))
        for volume in list(self.volumes)[:-ROWS_MAX]:
            del self.volumes[volume]

    @classmethod
    def of(cls, pool_map: PoolMap, opened: Collection[str]) -> "_Seen":
        """Of what nobody has opened only that it is erased is taken for true: anybody may write a number."""
        volumes = [each for each in pool_map.volumes if each.volume_id in opened]
        known = {each.tenant for each in volumes}
        return cls(
            pool_map.version,
            {
                each.tenant_id: (each.key_epoch, each.is_erased)
                for each in pool_map.tenants
                if each.is_erased or each.tenant_id in known
            },
            {each.volume_id: (each.key_epoch, _oldest(each)) for each in volumes},
        )


def _oldest(volume: MapVolume) -> int:
    return volume.key_epoch - 1 if volume.earlier_secret else volume.key_epoch


def opens(root: RootKey, pool_map: PoolMap, volume: MapVolume) -> bool:
    """Whether the root key opens all keys that a map gives a volume."""
    try:
        pool_map.secret(volume, root)
        pool_map.earlier_secret(volume, root)
    except ConfigError:
        return False
    return True


class MapHistory:
    """The notes of one agent. `state`: its folder. Raises ConfigError for a damaged file."""

    def __init__(self, state: Path, *, is_kept: bool = True) -> None:
        """`is_kept`: false for a process beside the one that writes the notes."""
        self._file = state / FILE
        self._is_kept = is_kept
        self._has_failed = False
        self._try_at: float | None = None
        try:
            self.served, self._pools = _decoded(self._file.read_text())
        except FileNotFoundError:
            self.served, self._pools = "", {}
        except (OSError, ValueError):
            raise ConfigError(
                f"{self._file} says nothing of a pool", "remove it; a new one is made"
            ) from None

    def refuse(self, pool_map: PoolMap) -> None:
        """Raises G35Error where this agent has seen a successor of this map, or after a part of it."""
        remedy = (
            "bring back the namespaces that carry the newer map; if there are none any more, remove "
            f"{self._file}"
        )
        if self.is_behind(pool_map):
            raise G35Error(
                f"the pool map that is there has version {pool_map.version}, and this agent has seen "
                f"{self._seen_version(pool_map)}: a tenant may have been erased since",
                remedy,
            )
        for over in self.over(pool_map):
            volume = next(each for each in pool_map.volumes if each.volume_id == over)
            raise G35Error(
                f"the pool map that is there brings back a key of volume {volume.name} (tenant "
                f"{pool_map.tenant_of(volume).name}) that this agent has seen erased or rotated away",
                f"erase that tenant again (g35 tenant erase), or {remedy}",
            )

    def is_behind(self, pool_map: PoolMap) -> bool:
        """Whether this agent has seen a later map on most namespaces."""
        return pool_map.version < self._seen_version(pool_map)

    def _seen_version(self, pool_map: PoolMap) -> int:
        return self._pools.get(pool_map.pool_id, _Seen()).version

    def believed(self, pool_map: PoolMap) -> PoolMap:
        """The same map; with the version that was seen, where its own is too far ahead of that: the pool's
        own map has to count as a later one."""
        seen = self._seen_version(pool_map)
        if not seen or pool_map.version <= seen + VERSIONS_AHEAD_MAX:
            return pool_map
        log.warning(
            "the pool map that is there bears version %d, and this agent has seen %d: no change leads to "
            "that. Somebody without the root key has written it: look at who writes to the enclosures",
            pool_map.version,
            seen,
        )
        return pool_map.model_copy(update={"version": seen})

    def over(self, pool_map: PoolMap) -> list[str]:
        """The ids of the volumes that a map gives keys that were erased, or dropped by a rotation."""
        seen = self._pools.get(pool_map.pool_id, _Seen())
        found = []
        for volume in pool_map.volumes:
            tenant = pool_map.tenant_of(volume)
            if tenant.is_erased:
                continue
            newest, oldest = seen.volumes.get(volume.volume_id, (0, 0))
            is_back = (tenant.key_epoch, False) < seen.tenants.get(tenant.tenant_id, (0, False))
            if is_back or volume.key_epoch < newest or _oldest(volume) < oldest:
                found.append(volume.volume_id)
        return found

    def distrusted(self, volumes: Iterable[PoolVolume], root: RootKey, newer: PoolMap) -> set[str]:
        """The ids of served volumes to which a newer map gives keys that are over, or that the root key does
        not open."""
        served = {each.settings.volume_id.hex() for each in volumes if not each.erased}
        found = served & {*self.over(newer)}
        for entry in newer.volumes:
            if entry.volume_id in served and not newer.is_erased(entry) and not opens(root, newer, entry):
                found.add(entry.volume_id)
        return found

    def note(
        self, pool_map: PoolMap, opened: Collection[str], *, is_on_most: bool = True, has_seal: bool = False
    ) -> None:
        """Note a map. `opened`: ids of the volumes that the root key opened by it. `has_seal`: its pool's
        maps bear one.

        Its version is noted where the map `is_on_most` namespaces. An enclosure may show a map to this agent
        alone, and the pool's own would be older than that for ever.
        """
        known = pool_map.pool_id in self._pools
        if not opened and not known and len(self._pools) >= POOLS_MAX:
            return
        if opened or not self.served:
            self.served = pool_map.pool_id
        noted = _Seen.of(pool_map, opened)
        noted.version, noted.has_seal = noted.version if is_on_most else 0, has_seal
        self._pools.setdefault(pool_map.pool_id, _Seen()).take(noted)
        self._write()

    def write_again(self, now: float) -> None:
        """Where the file could not be written: try, now and then. `now` is in seconds."""
        if self._has_failed and (self._try_at is None or now >= self._try_at):
            self._try_at = now + AGAIN_SECONDS
            self._write()

    def _write(self) -> None:
        if not self._is_kept:
            return
        try:
            self._take_others()
            pools = {pool: asdict(seen) for pool, seen in self._pools.items()}
            write_whole(self._file, json.dumps({"served": self.served, "pools": pools}), durable=True)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "%s cannot be written (%s): started again, this agent would not know what was erased "
                    "meanwhile. Make room; it is tried again",
                    self._file,
                    error.strerror,
                )
            self._has_failed = True
            return
        self._has_failed = False

    def _take_others(self) -> None:
        """What `g35 pool format` has noted beside this agent."""
        try:
            _, pools = _decoded(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return
        for pool, seen in pools.items():
            self._pools.setdefault(pool, _Seen()).take(seen)


def remembered_pool(state: Path) -> str:
    """The id of the pool that was served or formatted last; empty where none was, or the file is damaged."""
    try:
        return _decoded((state / FILE).read_text())[0]
    except (OSError, ValueError):
        return ""


def map_seal(root: RootKey, state: Path) -> MapSeal:
    """The seal of pool maps. By the notes in `state` it knows which pools have one."""
    try:
        served, pools = _decoded((state / FILE).read_text())
    except (OSError, ValueError):
        return MapSeal(root)
    return MapSeal(root, (pool for pool, seen in pools.items() if seen.has_seal), served)


def _decoded(text: str) -> tuple[str, dict[str, _Seen]]:
    """Raises ValueError for what is no notes."""
    try:
        document = json.loads(text)
        served, pools = document["served"], document["pools"]
        if not isinstance(served, str):
            raise ValueError("no pool")
        found = {}
        for pool, noted in pools.items():
            tenants = {each: (int(epoch), bool(over)) for each, (epoch, over) in noted["tenants"].items()}
            volumes = {each: (int(new), int(old)) for each, (new, old) in noted["volumes"].items()}
            version = int(noted["version"])
            # Noted by a g35 that knew no bound: nothing of the pool could ever be newer.
            version = version if 0 <= version <= VERSION_MAX else 0
            found[pool] = _Seen(version, tenants, volumes, bool(noted.get("has_seal")))
    except (TypeError, KeyError, AttributeError) as wrong:
        raise ValueError(f"no notes of pools: {wrong}") from None
    return served, found
