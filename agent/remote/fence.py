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
from collections.abc import Sequence

from nvmeof.host.command import Command

LOST_SECONDS = 12.0
"""A controller that has not heard from us is to end with its keep-alive time, 5 s; one that goes by traffic
may take twice that (NVMe Base 2.0, 3.9.3), and it takes a moment to stop what it had begun."""
GIVEN_UP_SECONDS = 60.0
"""A write that was given up may be answered for as long as its queue lives, 10 s at the most, and then is as
one that was lost; with its answer the fence falls. The slot is shunned for as long as this
(agent/pool/writing.py)."""
TIDY_SECONDS = 1.0
"""How often places that are free again are taken out, at the most."""
GRAIN = 1 << 20
"""Places are found by the range of so many bytes that they lie in, few of them in each."""
MOST_PLACES = 4096
"""More than the queues of all workers hold; with more, the namespace as a whole is fenced."""


class _Place:
    """How long it is left alone: until a moment, or until all the commands are answered, if there are any."""

    __slots__ = ("_commands", "until")

    def __init__(self, until: float, commands: Sequence[Command]) -> None:
        self.until = until
        self._commands = commands

    def stands(self, now: float) -> bool:
        commands = self._commands
        return self.until > now and not (commands and all(command.answered_late for command in commands))

    def joined(self, other: _Place) -> _Place:
        by_answers = self._commands and other._commands
        commands = [*self._commands, *other._commands] if by_answers else ()
        return _Place(max(self.until, other.until), commands)


class Fence:
    """Places that may not be written just now. `now` in the seconds of the lanes' clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[bytes, int, int], _Place] = {}
        """By NGUID, first byte and end."""
        self._grains: dict[tuple[bytes, int], dict[tuple[int, int], _Place]] = {}
        """The same by NGUID and grain, each place in every grain that it reaches into."""
        self._tidy_at = float("-inf")
        self._namespaces: dict[bytes, float] = {}
        self._until = 0.0
        """When the last of them falls: what a write looks at first."""
        self.raised = 0

    def put_up(
        self,
        nguid: bytes,
        offset: int,
        size: int,
        until: float,
        now: float,
        given_up: Sequence[Command] = (),
    ) -> None:
        """Let nobody write there until then, or until all of `given_up` were answered after all."""
        where, place = (nguid, offset, offset + size), _Place(until, given_up)
        with self._lock:
            if len(self._places) >= MOST_PLACES or now >= self._tidy_at:
                self._tidy(now)
            if (before := self._places.get(where)) is not None and before.stands(now):
                self._set(where, before.joined(place))
            elif len(self._places) < MOST_PLACES or before is not None:
                self._set(where, place)
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
                first < offset + size and offset < end and place.stands(now)
                for grain in _grains(offset, size)
                for (first, end), place in self._grains.get((nguid, grain), {}).items()
            )

    def _set(self, where: tuple[bytes, int, int], place: _Place) -> None:
        nguid, first, end = where
        self._places[where] = place
        for grain in _grains(first, end - first):
            self._grains.setdefault((nguid, grain), {})[first, end] = place

    def _tidy(self, now: float) -> None:
        self._tidy_at = now + TIDY_SECONDS
        standing = {where: place for where, place in self._places.items() if place.stands(now)}
        if len(standing) < len(self._places):
            self._places, self._grains = {}, {}
            for where, place in standing.items():
                self._set(where, place)


def _grains(offset: int, size: int) -> range:
    return range(offset // GRAIN, (offset + max(size, 1) - 1) // GRAIN + 1)
