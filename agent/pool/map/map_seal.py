"""The seal of a pool map: its digest, wrapped by the root key. Copies without it do not count.

A map's keys are bound to their own rows alone (document.py). The seal binds the rest: version, namespaces,
extents, copies, limits, and that a key is gone. Every change of the map seals it (commit.py); every reader
asks first which copies count. An attacker with write access to the flash can then play back old maps, and
make none.

A pool that was formatted before there was a seal gets one by its next change. So copies without a seal count
as long as no copy of their pool was seen with one (`pools`), where the root key opens something of them:
another pool's root key seals nothing.
"""

import hashlib
from collections.abc import Iterable

from agent.errors import ConfigError, G35Error
from agent.inline.secrets import Purpose, RootKey, SecretKey, WrongKey
from agent.pool.map.document import PoolMap

WITHOUT_SEAL = "a pool map without the root key's seal"


class MapSeal:
    """Seals maps, and says which ones count. For any thread."""

    def __init__(self, root: RootKey, pools: Iterable[str] = (), own: str = "") -> None:
        """`pools`: ids of the pools known to have a seal. `own`: the pool that counts alone where there are
        several, if known."""
        self._root, self._own = root, own
        self.pools = frozenset(pools)
        """The pools of which copies without a seal do not count."""
        self._last: PoolMap | None = None

    def put(self, pool_map: PoolMap) -> PoolMap:
        digest = SecretKey(_digest(pool_map))
        wrapped = self._root.wrap(Purpose.MAP, bytes.fromhex(pool_map.pool_id), digest)
        return pool_map.model_copy(update={"seal": wrapped.hex()})

    def holds(self, pool_map: PoolMap) -> bool:
        """Whether a map is as somebody with the root key has made it."""
        if not pool_map.seal:
            return False
        if pool_map == self._last:
            return True
        try:
            digest = self._root.unwrap(
                Purpose.MAP, bytes.fromhex(pool_map.pool_id), bytes.fromhex(pool_map.seal)
            )
        except WrongKey:
            return False
        if digest.reveal() != _digest(pool_map):
            return False
        self._last, self.pools = pool_map, self.pools | {pool_map.pool_id}
        return True

    def counting(self, maps: Iterable[PoolMap]) -> list[PoolMap]:
        """Those with a seal, each as often as it comes; where none has one, those of pools without any."""
        found = list(maps)
        sealed = [each for each in found if self.holds(each)]
        found = sealed or [each for each in found if each.pool_id not in self.pools and self._opens(each)]
        return [each for each in found if each.pool_id == self._own] or found

    def refusal(self) -> G35Error:
        """The refusal where maps were found and none of them counts."""
        return G35Error(
            f"the pool map that is there was not made with the root key, {self._root.describe()}",
            "use the key that the pool was formatted with. If it is that one, somebody without it has "
            "written to the enclosures: bring back the namespaces that carry the pool's own map",
        )

    def _opens(self, pool_map: PoolMap) -> bool:
        """Whether something of a map opens, or nothing in it has a key."""
        kept = [each for each in pool_map.volumes if not pool_map.is_erased(each)]
        for volume in kept:
            try:
                pool_map.secret(volume, self._root)
            except ConfigError:
                continue
            return True
        return not kept


def _digest(pool_map: PoolMap) -> bytes:
    return hashlib.sha256(pool_map.model_copy(update={"seal": ""}).encode()).digest()
