"""Pods to simulate: how large, how busy, and what they go through: see pod_simulation.py."""

import random
from typing import NamedTuple

ENCLOSURE_FAULTS = ("stop", "slow", "err", "kill")
FAULTS = (*ENCLOSURE_FAULTS, "lose", "agent", "join", "leave")


class Shape(NamedTuple):
    """What a pod consists of and what it goes through. Rates in operations a second of one agent."""

    enclosures: int
    drives_each: int
    agents: int
    writers: int
    busy: int
    """So many agents ask at `busy_rate`, the others at `rate`."""
    busy_rate: float
    rate: float
    keys: int
    seconds: float
    fault_every: float
    fault_lasts: tuple[float, ...]
    faults: tuple[str, ...] = FAULTS
    sets: tuple[int, ...] = (1, 1)
    """Of each tenant's volume on each drive."""
    whole: bool = False
    """Enclosures join and leave the pool whole, rather than one drive at a time."""
    moves: bool = False
    """The first agent moves values to drives that joined."""
    joins_at: float = 0.0
    """When some join, beside what chance brings; 0: never."""
    strays: float = 0.0
    """Part of the reads of slots that bring other bytes, at every drive and without an error."""


def small_shape(seed: object) -> Shape:
    """A pod of a few drives that lives for a second: a thousand of them make a test."""
    rng = random.Random(f"pod shape {seed}")
    agents = rng.randint(1, 4)
    shape = Shape(
        rng.randint(2, 5), rng.randint(1, 3), agents, rng.choice([1, 1, agents]), agents,
        rng.choice([40.0, 80.0]), 0.0, rng.choice([10, 40, 150]), 0.8, rng.choice([0.08, 0.2, 1e9]),
        (0.02, 0.2, 0.5), tuple(rng.sample(FAULTS, rng.randint(1, len(FAULTS)))), moves=rng.random() < 0.5,
        joins_at=rng.choice([0.0, 0.1, 0.3]),
    )  # fmt: skip
    # Values that move are read as well, and one that is not the slot's at two looks is given up.
    return shape if shape.moves else shape._replace(strays=rng.choice([0.0, 0.02]))


def full_shape(seconds: float = 4.0) -> Shape:
    """The pod that the design speaks of: 36 enclosures of 32 drives, 64 agents, four of them busy."""
    faults = ENCLOSURE_FAULTS * 4 + FAULTS
    return Shape(
        36, 32, 64, 64, 4, 500.0, 8.0, 4000, seconds, 0.4, (1.0, 3.0), faults, whole=True, moves=True
    )  # fmt: skip


def calm_shape(enclosures: int = 6, drives_each: int = 2, seconds: float = 9.0, rate: float = 250.0) -> Shape:
    """Nothing goes wrong by itself: for a test that hurts one enclosure and watches."""
    return Shape(
        enclosures, drives_each, 2, 2, 2, rate, 0.0, 1200, seconds, 1e9, (1.0,), (), sets=(2, 2)
    )  # fmt: skip
