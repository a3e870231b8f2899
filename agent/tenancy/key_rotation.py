"""The data keys of a serving agent's volumes: which one seals, which ones open, and how a rotation goes on.

`g35 tenant rotate` writes a pool map in which a volume has a new data key beside its earlier one. An agent
that sees it opens with both at once, and seals with the new one SETTLE_SECONDS later: by then the other
agents have seen the map too. An agent that starts amid a rotation, or was not looking for a while, seals with
it at once (key_transition.py). Upkeep then seals anew the values under the earlier key, some at a time. An
entry says under which key its slot is, so an agent that was ended goes on without a note. A map without the
earlier key ends the rotation.

The one agent that has files in a volume of blocks seals it anew (agent/service/repair.py), beside its own
puts and deletes. Two agents that write one directory may lose an entry of each other's, which is a hit in /kv
and a file here. At the end of a walk it removes entries that no file has and that do not open.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.inline.key_use import KeyUseBook, writes_max
from agent.inline.secrets import RootKey, SecretKey
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import SlotCodec
from agent.pool.maintenance.orphans import Unnamed, clear_leftovers
from agent.pool.maintenance.rekey import ResealCounts, reseal_set
from agent.pool.map.document import MapVolume, PoolMap
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.key_transition import MAP_AGE_SECONDS, SETTLE_SECONDS, KeyTransition
from agent.pool.volume.volume import Keys, PoolVolume, Volume, in_sets

log = logging.getLogger(__name__)

SETS_PER_LOOK = 32
VALUES_PER_LOOK = 32
"""After so many values a round of upkeep lets the others have their turn."""
LEFTOVERS_SECONDS = 10.0
"""Between two looks for entries that no file has: each reads all names of blocks."""


@dataclass(slots=True)
class _Keys:
    """Of one volume."""

    volume: Volume
    epoch: int
    waits: bool = False
    """For the time from which on the new key seals."""
    earlier: bytes = b""
    """The fingerprint of the earlier key."""
    is_resealing: bool = False
    rest: Iterator[SetPlace] = field(default_factory=lambda: iter(()))
    counts: ResealCounts = field(default_factory=ResealCounts)
    leftovers_at: float = float("-inf")
    """When it is time to look for what no file has."""


class KeyRotation:
    """One for each agent. `follow` and `look` are for one thread, `snapshot` for any."""

    def __init__(
        self,
        pool_map: PoolMap,
        volumes: Sequence[PoolVolume],
        root: RootKey,
        book: KeyUseBook,
        clock: Callable[[], float],
        unnamed: Unnamed | None = None,
    ) -> None:
        """`clock` gives the seconds of the channel's `now`. `unnamed` knows this agent's files; without it no
        entry of them is removed."""
        self._root, self._book, self._clock, self.unnamed = root, book, clock, unnamed
        self._keys: dict[str, _Keys] = {}
        rotated = in_sets(volumes)
        self._others = [volume for volume in volumes if volume not in rotated]
        for other in self._others:
            self._count(other.codec, other)
        entries = {entry.volume_id: entry for entry in pool_map.volumes}
        for volume in rotated:
            entry = entries.get(volume.settings.volume_id.hex())
            if entry is not None:
                self._keys[entry.volume_id] = keys = _Keys(volume, entry.key_epoch)
                self._adopt(keys, pool_map, entry, float("-inf"))

    def close(self) -> None:
        """Nothing is sealed any more: the counts of the keys are noted as they are."""
        self._book.close()

    def follow(self, pool_map: PoolMap) -> None:
        for entry in pool_map.volumes:
            keys = self._keys.get(entry.volume_id)
            if keys is None or keys.volume.erased or pool_map.is_erased(entry):
                continue
            ended = not entry.earlier_secret and (keys.waits or keys.is_resealing)
            if keys.epoch != entry.key_epoch or ended:
                # The map may have come right after it was last looked at.
                now = self._clock()
                known_since = now - max(0.0, keys.volume.map_age.age(now) - MAP_AGE_SECONDS)
                self._adopt(keys, pool_map, entry, known_since + SETTLE_SECONDS)

    def _adopt(self, keys: _Keys, pool_map: PoolMap, entry: MapVolume, seals_at: float) -> None:
        volume, secret = keys.volume, pool_map.secret(entry, self._root)
        earlier = pool_map.earlier_secret(entry, self._root)
        keys.epoch, keys.waits, keys.is_resealing = entry.key_epoch, False, False
        if earlier is None:
            volume.change(keys=Keys(self._codec(volume, secret, entry.key_epoch)))
            if keys.earlier:
                self._book.forget(keys.earlier)
                keys.earlier = b""
            return
        older = self._codec(volume, earlier, entry.key_epoch - 1)
        newer = self._codec(volume, secret, entry.key_epoch, older)
        keys.earlier = older.fingerprint
        codec = newer
        if self._clock() >= seals_at:
            keys.is_resealing = True
        else:
            codec, keys.waits = self._codec(volume, earlier, entry.key_epoch - 1, newer), True
        volume.change(keys=Keys(codec, KeyTransition(newer, seals_at)))

    def _codec(self, volume: Volume, secret: SecretKey, epoch: int, *others: SlotCodec) -> SlotCodec:
        codec = volume.codec_of(secret, epoch, others)
        self._count(codec, volume)
        return codec

    def _count(self, codec: SlotCodec, volume: PoolVolume) -> None:
        most = writes_max(volume.settings.suite, volume.settings.value_bytes)
        codec.count_in(self._book.use_of(codec.fingerprint, most))

    def look(self, channel: IoChannel) -> Steps[None]:
        """Seal with new keys whose time has come, and seal some values anew."""
        for keys in self._keys.values():
            if keys.volume.erased:
                continue
            transition = keys.volume.key_transition
            if keys.waits and transition is not None and transition.is_due(channel.now()):
                keys.volume.change(keys=Keys(transition.codec, transition))
                keys.waits, keys.is_resealing = False, True
                log.info("volume %s is sealed with its new data key", keys.volume.settings.name)
            if keys.is_resealing and not keys.volume.files_elsewhere:
                yield from self._reseal_some(keys, channel)

    def _reseal_some(self, keys: _Keys, channel: IoChannel) -> Steps[None]:
        looked_at = 0
        batch = list(itertools.islice(keys.rest, SETS_PER_LOOK))
        if not batch:
            keys.rest = keys.volume.settings.set_places(keys.volume.settings.extents)
            yield from self._clear_leftovers(keys, channel)
        for place in batch:
            if looked_at >= VALUES_PER_LOOK:
                keys.rest = itertools.chain([place], keys.rest)
                continue
            looked_at += yield from reseal_set(keys.volume, channel, place, keys.counts)

    def _clear_leftovers(self, keys: _Keys, channel: IoChannel) -> Steps[None]:
        found, keys.counts.unopened = keys.counts.unopened, []
        if not found or self.unnamed is None or channel.now() < keys.leftovers_at:
            return
        keys.leftovers_at = channel.now() + LEFTOVERS_SECONDS
        cleared = yield from clear_leftovers(keys.volume, channel, found, self.unnamed)
        if cleared:
            log.info(
                "volume %s: %d entries of blocks that no file has, and that do not open, were removed",
                keys.volume.settings.name, cleared,
            )  # fmt: skip

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By the name of each volume: the epoch of its key, and what a rotation has done."""
        rows = {
            keys.volume.settings.name: {
                "key_epoch": keys.volume.codec.epoch,
                "key_used_part": keys.volume.codec.used_part,
                "rotating": keys.waits or keys.is_resealing,
                "resealed": keys.counts.resealed,
                "reseals_dropped": keys.counts.dropped,
                "reseals_left": keys.counts.left,
            }
            for keys in self._keys.values()
        }
        for other in self._others:
            rows[other.settings.name] = {
                "key_epoch": 0, "key_used_part": other.codec.used_part, "rotating": False, "resealed": 0,
                "reseals_dropped": 0, "reseals_left": 0,
            }  # fmt: skip
        return rows
