"""What a network in memory does to datagrams: the knobs in one record, the dice in one object.

Each fault exists because RoCEv2 must survive it: UDP promises neither arrival, nor order, nor a single copy,
nor (its checksum is masked or absent) intact bytes. No I/O here, and no clock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances are per datagram, from 0 to 1; times are in seconds.

    Reordering comes of `jitter_s`: each datagram is held up by a random time up to it. `reorder` is the
    chance of being held up by a random time up to `reorder_s` besides, which lets later ones overtake even
    where there is no jitter.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    """One to four bits flip anywhere in the datagram."""
    truncate: float = 0.0
    """Some bytes of the end are missing."""
    delay_s: float = 20e-6
    jitter_s: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "corrupt", "truncate", "reorder"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a chance between 0 and 1, not {value}")
        for name in ("delay_s", "jitter_s", "reorder_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a time, not {getattr(self, name)}")

    @property
    def changes_packets(self) -> bool:
        """Whether datagrams must be looked at one by one: False if each burst has one fate."""
        return bool(
            self.loss or self.duplicate or self.corrupt or self.truncate or self.jitter_s or self.reorder
        )


CALM = Weather()
"""Everything arrives, once, intact, in order, after 20 us."""

STORM = Weather(
    loss=0.05, duplicate=0.03, corrupt=0.02, truncate=0.01, jitter_s=30e-6, reorder=0.05, reorder_s=400e-6
)
"""The worst that tests ask of every message to survive."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one datagram: a delay for each copy that arrives, and damage to the first."""

    delays: tuple[float, ...]
    flips: tuple[int, ...] = ()
    """Numbers of bits to flip, as byte * 8 + bit."""
    cut: int = 0
    """Bytes missing at the end."""


LOST = Fate(())


class Dice:
    """Fates from one seeded source of chance."""

    def __init__(self, weather: Weather, chance: random.Random) -> None:
        self.weather = weather
        self._chance = chance

    def fate(self, size: int) -> Fate:
        """The fate of a datagram of `size` bytes."""
        weather, roll = self.weather, self._chance.random
        if weather.loss and roll() < weather.loss:
            return LOST
        delays = [self._delay()]
        if weather.duplicate and roll() < weather.duplicate:
            delays.append(self._delay())
        flips: tuple[int, ...] = ()
        cut = 0
        if weather.corrupt and size and roll() < weather.corrupt:
            flips = tuple(self._chance.randrange(size * 8) for _ in range(self._chance.randint(1, 4)))
        if weather.truncate and size and roll() < weather.truncate:
            cut = self._chance.randint(1, size)
        return Fate(tuple(delays), flips, cut)

    def _delay(self) -> float:
        weather = self.weather
        delay = weather.delay_s
        if weather.jitter_s:
            delay += self._chance.random() * weather.jitter_s
        if weather.reorder and self._chance.random() < weather.reorder:
            delay += self._chance.random() * weather.reorder_s
        return delay
