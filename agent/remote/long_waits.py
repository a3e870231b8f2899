"""How many workers of one door may wait long: never all of them, so that others are served.

A put waits until the write deadline (5 s by default) for a drive that hangs. Other requests of the door wait
in the kernel meanwhile, where no deadline of ours counts. So a wait of a put is *long* once it has taken
`patience` seconds, and its namespace has answered nobody in that time. A long wait needs a place. Half of the
workers may have one at the same namespace, and all but one at all namespaces and locks together. Where there
is none, the wait ends as at its deadline. While a namespace has let somebody wait in vain and the half waits
there, further puts are not sent to it.

Only steps that said so give way (`WorkerChannel.gives_way`): puts and deletes of values. Those that
read a file do (`comes_again`) where their door puts the request aside: it is served later, for a file is no
cache. Writers of files wait as long as they always did. An agent with one worker has nobody to keep free: it
waits too.
"""

import threading
from typing import Final

from agent.remote.circuit_breaker import Health

PATIENCE_LEAST: Final = 0.25
"""Seconds. Flash that erases a block may say nothing for a tenth of that."""


class LongWaits:
    """Of the workers of one door. Safe from any thread. Times are in seconds of the channel's clock."""

    def __init__(self, workers: int, patience: float) -> None:
        """`workers`: 0 for steps that never wait long. `patience`: the read deadline; PATIENCE_LEAST where
        that is shorter."""
        self.patience: Final = max(patience, PATIENCE_LEAST)
        self.most: Final = max(min(1, workers), workers - 1)
        self.most_of_one: Final = max(min(1, workers), workers // 2)
        self._places: dict[Health | None, int] = {}
        """How many wait at each namespace, and, under None, for a lock; no more entries than workers."""
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, health: Health | None) -> bool:
        """A place for a long wait at a namespace, or (None) for a lock, until `give_back`."""
        with self._lock:
            here = self._places.get(health, 0)
            if self._taken >= self.most or (health is not None and here >= self.most_of_one):
                return False
            self._places[health] = here + 1
            self._taken += 1
            return True

    def give_back(self, health: Health | None) -> None:
        with self._lock:
            self._taken -= 1
            self._places[health] -= 1
            if not self._places[health]:
                del self._places[health]

    def has_room(self) -> bool:
        """Whether one worker more may wait long somewhere, as it looks just now."""
        return self._taken < self.most

    def is_full(self, health: Health) -> bool:
        """Whether a put that is sent to a namespace now would wait there with too many, all in vain."""
        if not self.most_of_one:
            # Each waits for its patience alone. One late answer, as of a get, is no reason to send nothing
            # there: on a busy machine there often is one. A drive that hangs is the circuit breaker's matter.
            return False
        return health.breaker.late_in_a_row > 0 and self._places.get(health, 0) >= self.most_of_one


class WorkersWait:
    """What one worker waits for, while its steps give way. It belongs to the worker's thread."""

    __slots__ = ("_all", "_at", "_has_place", "_since", "is_on")

    def __init__(self, of_door: LongWaits) -> None:
        self._all: Final = of_door
        self.is_on = False
        self._since = 0.0
        """The last time that the steps got on."""
        self._has_place = False
        self._at: Health | None = None

    def begin(self, now: float) -> None:
        """The steps give way, until `end`."""
        self.is_on = True
        self._since = now

    def end(self) -> None:
        self.is_on = False
        self._let_go()

    def got_on(self, now: float) -> None:
        """What was waited for is there."""
        self._since = now
        self._let_go()

    def until(self, health: Health | None, asked: float, deadline: float, now: float) -> float:
        """How long to wait before `may_wait_on` is asked; `deadline`: it need not be asked.

        `asked`: when the request was sent. Patience that another namespace used up is not this one's fault.
        """
        if not self._has_place and health is not None and health.breaker.late_in_a_row:
            # It has let others wait in vain: from the beginning no more than have a place wait for it.
            self._take(health)
        return deadline if self._has_place else min(deadline, self._patience_ends(health, asked))

    def may_wait_on(self, health: Health | None, asked: float, now: float) -> bool:
        """Patience has ended. False: others wait already, as many as may."""
        return now < self._patience_ends(health, asked) or self._take(health)

    def is_full(self, health: Health) -> bool:
        return self.is_on and self._all.is_full(health)

    def _patience_ends(self, health: Health | None, asked: float) -> float:
        heard = self._since if health is None else max(self._since, asked, health.answered_at)
        return heard + self._all.patience

    def _take(self, health: Health | None) -> bool:
        self._has_place = self._all.take(health)
        self._at = health
        return self._has_place

    def _let_go(self) -> None:
        if self._has_place:
            self._has_place = False
            self._all.give_back(self._at)
            self._at = None
