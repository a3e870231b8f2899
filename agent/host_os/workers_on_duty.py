"""Which workers of a door read requests: as few as it takes.

Threads of one interpreter hand its lock to each other with every call that lets go of it, and a kernel gives
requests to sleeping threads in turn, so each finds its caches cold. Two workers that move little at a time
serve less than one. So a worker that has nobody to help rests, and the others read on.

A worker is called from its rest where one more pays, or must come:

* Where nobody reads and a request waits, a worker with a long payload calls before it waits: ciphers and
  the kernel's copies work without the interpreter's lock.
* So does one with a short payload whose requests wait longer than they work: while it waits, another works.
* A worker that has waited for `STUCK_SECONDS` calls, whatever it moves, and one that is busy after its reply.
* What calls nobody is found by the worker that rested last: it looks every `LOOK_SECONDS`.

    duty.ready()          before each read of a request; it may rest here
    duty.began()          a request was read
    duty.waits(is_long)   before each wait for an enclosure; `waited(seconds)` after it
    duty.is_stuck()       it will be long
    duty.leave()          the worker ends
"""

import threading
import time
from collections.abc import Callable
from typing import Final

STUCK_SECONDS: Final = 0.001
LOOK_SECONDS: Final = 0.1
LONG_BYTES: Final = 256 << 10
"""Of one command: from here on most of the work is the cipher's and the kernel's."""
_SHARE: Final = 1 / 16
"""What one request changes of a mean."""
_FORGOTTEN: Final = 0.98
"""While several are at short requests each wait is longer than by itself, and says nothing. What was known
fades with each such request, until one is alone and measures again."""


class Duties:
    """Of the workers of one door. Safe from any thread."""

    def __init__(self, workers: int) -> None:
        self.workers: Final = [WorkerOnDuty(self) for _ in range(workers)]
        self.lock: Final = threading.Lock()
        self.resting: Final[list[WorkerOnDuty]] = []
        """The one that rested last is called first: its caches are the warmest."""
        self.reading = 0
        """Workers that wait for a request, or are about to."""
        self.short = 0
        """Workers at a short request that are not stuck."""
        self.began = 0
        self.waits_for_work = 0.0
        """How many times as long as it works a short request waits, as far as is known."""
        self.is_closed = False

    def most_short(self) -> int:
        """How many workers short requests are worth: one works while the others wait."""
        return 1 + int(self.waits_for_work)

    def call(self) -> None:
        """With the lock held: let one of the resting read, where nobody does."""
        if self.resting and not self.reading:
            self.reading += 1
            worker = self.resting.pop()
            worker.is_reading = True
            worker.called.release()

    def close(self) -> None:
        """The door ends: nobody rests any more."""
        with self.lock:
            self.is_closed = True
            resting = list(self.resting)
            self.resting.clear()
        for worker in resting:
            worker.called.release()


class WorkerOnDuty:
    """For its worker's thread alone."""

    def __init__(self, all_of_them: Duties) -> None:
        self._all: Final = all_of_them
        self.called: Final = threading.Semaphore(0)
        self.is_reading = False
        self._is_short = False
        self._was_alone = False
        self._since = 0.0
        self._waited = 0.0
        self.requests_wait: Callable[[], bool] = lambda: True
        """Whether a request waits to be read, as it looks just now."""

    def ready(self) -> bool:
        """Before a request is read: rest until that is wanted. False: the door ends."""
        duties = self._all
        if self._is_short:
            self._measure(duties)
        with duties.lock:
            if self._is_short:
                self._is_short = False
                duties.short -= 1
            if duties.is_closed:
                return False
            if not duties.reading and duties.short < duties.most_short():
                duties.reading += 1
                self.is_reading = True
                return True
            duties.resting.append(self)
        return self._rest(duties)

    def _rest(self, duties: Duties) -> bool:
        seen = duties.began
        while not self.called.acquire(timeout=LOOK_SECONDS):
            with duties.lock:
                if self not in duties.resting:
                    continue  # called just now
                is_last = duties.resting[-1] is self
                if is_last and not duties.reading and duties.began == seen:
                    duties.resting.pop()
                    duties.reading += 1
                    self.is_reading = True
                    return True
                seen = duties.began
        return not duties.is_closed

    def began(self) -> None:
        """A request was read. It counts as short until it waits for something long."""
        duties = self._all
        with duties.lock:
            duties.reading -= 1
            duties.short += 1
            duties.began += 1
            self._was_alone = duties.short == 1
        self.is_reading = False
        self._is_short = True
        self._since = time.monotonic()
        self._waited = 0.0

    def others_rest(self) -> bool:
        """Whether nobody reads, and one could."""
        return bool(self._all.resting) and not self._all.reading

    def waits(self, *, is_long: bool) -> None:
        """Before a wait while others rest."""
        duties = self._all
        pays = is_long or duties.short < duties.most_short()
        if not (pays and self.requests_wait()):
            return
        with duties.lock:
            if is_long and self._is_short:
                self._is_short = False
                duties.short -= 1
            duties.call()

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def is_stuck(self) -> None:
        """It may take long until this worker reads again."""
        duties = self._all
        with duties.lock:
            if self._is_short:
                self._is_short = False
                duties.short -= 1
            duties.call()

    def leave(self) -> None:
        """The worker ends."""
        duties = self._all
        with duties.lock:
            if self._is_short:
                self._is_short = False
                duties.short -= 1
            if self.is_reading:
                self.is_reading = False
                duties.reading -= 1
            duties.call()

    def _measure(self, duties: Duties) -> None:
        known = duties.waits_for_work
        if not (self._was_alone and duties.short == 1):
            duties.waits_for_work = known * _FORGOTTEN
            return
        worked = time.monotonic() - self._since - self._waited
        if worked > 0:
            duties.waits_for_work = known + (min(self._waited / worked, 64.0) - known) * _SHARE
