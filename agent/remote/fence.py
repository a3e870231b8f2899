"""Writes whose fate is unknown, and what may not be written meanwhile.

A write that was sent by one path and not answered may still be on its way: in a socket of the enclosure's,
or in a controller that was cut off from us and not from its drives. Written again by another path, and
acknowledged, it could later be undone by the first, which lands behind everything that was written since. So
it is never written again, and nothing else is written over the place that it was meant for, until it can no
longer land: those writes are refused, and so is the put that they belong to (docs/multipath.md).

One fence is shared by all workers; a place is a range of bytes of a namespace.
"""

from __future__ import annotations

import threading

LOST_SECONDS = 12.0
"""A controller that has not heard from us is to end with its keep-alive time, 5 s; one that goes by traffic
may take twice that (NVMe Base 2.0, 3.9.3), and it takes a moment to stop what it had begun."""
GIVEN_UP_SECONDS = 60.0
"""A write that was given up may be answered for as long as its queue lives, 10 s at the most, and then is as
one that was lost. The slot is shunned for as long as this (agent/pool/writing.py)."""
TIDY_SECONDS = 1.0
"""How often places that are free again are taken out, at the most."""
GRAIN = 1 << 20
"""Places are found by the range of so many bytes that they lie in, few of them in each."""
MOST_PLACES = 4096
"""More than the queues of all workers hold; with more, the namespace as a whole is fenced."""


class Fence:
    """Places that may not be written just now. `now` in the seconds of the lanes' clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[bytes, int, int], float] = {}
        """Until when, by NGUID, first byte and end."""
        self._grains: dict[tuple[bytes, int], dict[tuple[int, int], float]] = {}
        """The same by NGUID and grain, each place in every grain that it reaches into."""
        self._tidy_at = float("-inf")
        self._namespaces: dict[bytes, float] = {}
        self._until = 0.0
        """When the last of them falls: what a write looks at first."""
        self.raised = 0

    def put_up(self, nguid: bytes, offset: int, size: int, until: float, now: float) -> None:
        """Let nobody write there until then."""
        place = (nguid, offset, offset + size)
        with self._lock:
            if len(self._places) >= MOST_PLACES or now >= self._tidy_at:
                self._tidy(now)
            if len(self._places) < MOST_PLACES or place in self._places:
                self._set(place, max(until, self._places.get(place, 0.0)))
            else:
                self._namespaces[nguid] = max(until, self._namespaces.get(nguid, 0.0))
            self._until = max(self._until, until)
            self.raised += 1

    def stands(self, nguid: bytes, offset: int, size: int, now: float) -> bool:
        """Whether a write there has to be refused."""
        if now >= self._until:
            return False
        with self._lock:
            if self._namespaces.get(nguid, 0.0) > now:
                return True
            return any(
                first < offset + size and offset < end and until > now
                for grain in _grains(offset, size)
                for (first, end), until in self._grains.get((nguid, grain), {}).items()
            )

    def _set(self, place: tuple[bytes, int, int], until: float) -> None:
        nguid, first, end = place
        self._places[place] = until
        for grain in _grains(first, end - first):
            self._grains.setdefault((nguid, grain), {})[first, end] = until

    def _tidy(self, now: float) -> None:
        self._tidy_at = now + TIDY_SECONDS
        standing = {place: end for place, end in self._places.items() if end > now}
        if len(standing) < len(self._places):
            self._places, self._grains = {}, {}
            for place, until in standing.items():
                self._set(place, until)


def _grains(offset: int, size: int) -> range:
    return range(offset // GRAIN, (offset + max(size, 1) - 1) // GRAIN + 1)
