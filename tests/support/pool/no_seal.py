"""A map's seal of which no copy is short: for tests of what happens to maps that nobody has sealed."""

from __future__ import annotations

from collections.abc import Iterable

from agent.pool.map.document import PoolMap
from agent.pool.map.map_seal import MapSeal


class EveryCopyCounts(MapSeal):
    def counting(self, maps: Iterable[PoolMap]) -> list[PoolMap]:
        return list(maps)
