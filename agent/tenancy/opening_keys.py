"""The data keys of a process that opens values and seals none: a reader (agent/service/reader.py).

It opens by the keys that the pool map has: amid a rotation, by the new one and by the earlier one. Which of
them seals, and when, is the matter of the process that writes (key_rotation.py).
"""

from collections.abc import Sequence

from agent.inline.secrets import RootKey
from agent.pool.map.document import PoolMap
from agent.pool.volume.volume import Keys, Volume


class OpeningKeys:
    """For one thread."""

    def __init__(self, pool_map: PoolMap, volumes: Sequence[Volume], root: RootKey) -> None:
        self._root = root
        self._volumes = {volume.settings.volume_id.hex(): volume for volume in volumes}
        self._known: dict[str, tuple[int, bool]] = {}
        """By volume: the epoch of its key, and whether there is an earlier one."""
        self.follow(pool_map)

    def follow(self, pool_map: PoolMap) -> None:
        """Open by the keys of another map."""
        for entry in pool_map.volumes:
            volume = self._volumes.get(entry.volume_id)
            if volume is None or volume.erased or pool_map.is_erased(entry):
                continue
            found = (entry.key_epoch, bool(entry.earlier_secret))
            if self._known.get(entry.volume_id) == found:
                continue
            secret, earlier = pool_map.secret(entry, self._root), pool_map.earlier_secret(entry, self._root)
            others = () if earlier is None else (volume.codec_of(earlier, entry.key_epoch - 1),)
            volume.change(keys=Keys(volume.codec_of(secret, entry.key_epoch, others)))
            self._known[entry.volume_id] = found
