"""A fabric whose pool has one namespace, which some enclosures show."""

from __future__ import annotations

from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from tests.support.pool.memory_pool import nguid_of

NGUID = nguid_of(1)


def used(fabric: Fabric) -> list[str]:
    """The enclosures that are asked for the namespace, in their order."""
    fabric.refresh()
    return [way.enclosure.name for way in fabric.ways[0]]


def pool_on(*enclosures: Enclosure) -> Fabric:
    fabric = Fabric(enclosures)
    fabric.adopt([NGUID])
    return fabric
