"""One agent of a simulated pod, and what is known of the values that it stored."""

from dataclasses import dataclass, field
from typing import NamedTuple

from agent.pool.volume.volume import Volume
from agent.remote.circuit_breaker import Health
from agent.remote.outlier_detection import OutlierDetection
from agent.sim.faulty_flash import SimChannel
from agent.sim.pod_flash import PodMap


class Stored(NamedTuple):
    """A value that was acknowledged, and the places that its writer's map gave it."""

    value: bytes
    places: frozenset[tuple[int, int]]


@dataclass(eq=False)
class PodAgent:
    """One agent. What it remembers is gone when it is killed."""

    number: int
    lives: int
    map: PodMap
    volumes: list[Volume]
    health: list[Health]
    outliers: OutlierDetection
    workers: int = 0
    channels: list[SimChannel] = field(default_factory=list)
    alive: bool = True
    suspected_at: dict[int, float] = field(default_factory=dict)
