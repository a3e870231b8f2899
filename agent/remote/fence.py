"""Writes of unknown fate, and the places that may not be written meanwhile (docs/multipath.md).

A write that was sent by one path and not answered may still be on its way: in a socket of the enclosure, or
in a controller that was cut off from us and not from its drives. If another path wrote it again, the first
could land later and undo all writes since. So it is never written again, and no other write to its place is
sent until it can no longer land.

A write that was given up may land until it is answered or its queue is gone. A worker with nothing else to do
there leaves a late answer unread. So the supervisor calls `look`, which has the answers taken that are there,
and the controller reset where a write without one is older than its bound.

All workers share one fence; a place is a range of bytes of a namespace.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.remote.enclosure import Enclosure
from nvmeof.host.command import Command

LOST_SECONDS: Final = 12.0
"""A controller that has not heard from us is to end with its keep-alive time, 5 s. One that goes by traffic
may take twice that (NVMe Base 2.0, 3.9.3), and it takes a moment to stop what it had begun."""
COMMAND_SECONDS: Final = 10.0
"""A command that was given up and is older is cleared away by resetting the controller."""
GIVEN_UP_SECONDS: Final = 60.0
"""Longer than `COMMAND_SECONDS`, a reset and `LOST_SECONDS` together: for what stands by time alone for the
sake of writes that were given up. The slot cools down for as long (agent/pool/write/put.py)."""
TIDY_SECONDS: Final = 1.0
"""How often places that are free again are taken out, at the most."""
GRAIN: Final = 1 << 20
"""Places are found by the range of so many bytes that they lie in, few of them in each."""
MOST_PLACES: Final = 4096
"""More than the queues of all workers hold; with more, the namespace as a whole is fenced."""


class Owner(Protocol):
    """The channel whose queues sent the commands (agent/remote/channel.py)."""

    def look_for_answers(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class GivenUp:
    """Commands of a write that nobody waits for any more, and the session that their queue belongs to."""

    commands: Sequence[Command]
    sessions: Enclosure
    epoch: int
    owner: Owner | None = None

    @property
    def answered(self) -> bool:
        return all(command.answered_late for command in self.commands)

    @property
    def gone(self) -> bool:
        """The queue has ended under those that are not answered, or the session that it belongs to."""
        if self.sessions.session is None or self.sessions.epoch != self.epoch:
            return True
        return all(command.answered_late or command.orphaned for command in self.commands)

    def is_older(self, than: float, now: float) -> bool:
        return any(
            now - command.submitted_at >= than for command in self.commands if not command.answered_late
        )


class _Place:
    """How long it is left alone: until a moment, and until all that was given up is answered or gone."""

    __slots__ = ("given_up", "until")

    def __init__(self, until: float, given_up: Sequence[GivenUp]) -> None:
        self.until = until
        self.given_up = given_up

    def stands(self, now: float) -> bool:
        if self.given_up:
            left = []
            for each in self.given_up:
                if each.answered:
                    continue
                if each.gone:
                    # Seen to be gone, at the latest, now.
                    self.until = max(self.until, now + LOST_SECONDS)
                else:
                    left.append(each)
            self.given_up = left
        return bool(self.given_up) or self.until > now

    @property
    def falls(self) -> float:
        return math.inf if self.given_up else self.until

    def joined(self, other: "_Place") -> "_Place":
        return _Place(max(self.until, other.until), [*self.given_up, *other.given_up])


class Fence:
    """Places that may not be written just now. `now` in the seconds of the channel's clock."""

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

    def __len__(self) -> int:
        return len(self._places)

    def put_up(
        self, nguid: bytes, offset: int, size: int, until: float, now: float, given_up: GivenUp | None = None
    ) -> None:
        """Refuse writes there until then; or until the write that was `given_up` is answered, or has been
        gone for `LOST_SECONDS`."""
        where = (nguid, offset, offset + size)
        place = _Place(until, ()) if given_up is None else _Place(now, (given_up,))
        with self._lock:
            if len(self._places) >= MOST_PLACES or now >= self._tidy_at:
                self._tidy(now)
            if (before := self._places.get(where)) is not None and before.stands(now):
                place = before.joined(place)
                self._set(where, place)
            elif len(self._places) < MOST_PLACES or before is not None:
                self._set(where, place)
            else:
                self._namespaces[nguid] = max(until, self._namespaces.get(nguid, 0.0))
                self._until = max(self._until, until)
            self._until = max(self._until, place.falls)

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

    def look(self, now: float) -> None:
        """Have the answers taken that have come, and then every controller reset that a write was given up at
        which is older than `COMMAND_SECONDS`."""
        if now >= self._until:
            return
        for owner in {each.owner for each in self._given_up(now) if each.owner is not None}:
            owner.look_for_answers()
        overdue = [each for each in self._given_up(now) if each.is_older(COMMAND_SECONDS, now)]
        for sessions, epoch in {(each.sessions, each.epoch) for each in overdue}:
            sessions.complain(epoch)

    def _given_up(self, now: float) -> list[GivenUp]:
        with self._lock:
            self._tidy(now)
            return [each for place in self._places.values() for each in place.given_up]

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
        self._namespaces = {nguid: until for nguid, until in self._namespaces.items() if until > now}
        falls = [place.falls for place in standing.values()]
        self._until = max([0.0, *falls, *self._namespaces.values()])


def _grains(offset: int, size: int) -> range:
    return range(offset // GRAIN, (offset + max(size, 1) - 1) // GRAIN + 1)
