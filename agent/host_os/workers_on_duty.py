"""Which workers of a door read requests: as few as it takes.

Threads of one interpreter hand its lock to each other with every call that lets go of it, and a kernel gives
requests to sleeping threads in turn, so each finds its caches cold. Two workers that move little at a time
serve less than one. So a worker that has nobody to help rests, and the others read on.

A resting worker reads again where that pays, or must be:

* A request that moves much is mostly ciphers and copies, which need no interpreter. So its worker lets
  another read while it waits, and reads on itself, as long as requests wait now and then.
* Requests that move little are worth as many workers as keep the interpreter busy (`Worth`).
* A worker that waits for a lock, or for `STUCK_SECONDS` for anything, is stuck: another reads in its place.
* A worker that blocks elsewhere calls nobody. The one that rested last looks for it, every `LOOK_SECONDS`
  while somebody reads, seldom while no request comes, and soon again where nobody read.

    duty.ready()          before each read of a request; it may rest here
    duty.began()          a request was read
    duty.moves(n, m)      it has sent m more commands, which move n bytes
    duty.waits()          before each wait for an enclosure, where `may_hold_up()`
    duty.is_stuck()       it may take long
    duty.leave()          the worker ends
"""

import threading
import time
from collections.abc import Callable
from typing import Final

STUCK_SECONDS: Final = 0.001
"""A socket's time-out comes later: a kernel of 250 Hz rounds it up to two ticks."""
LOOK_SECONDS: Final = 0.1
LOOK_AGAIN_SECONDS: Final = 0.02
"""Where nobody read at the last look. Under load that is so at most looks."""
LOOK_IDLE_SECONDS: Final = 0.4
"""Where no request began since the last look: an idle agent takes next to nothing of a processor."""
LONG_BYTES: Final = 256 << 10
"""From here on most of a request is the cipher's work and the kernel's."""
LONG_EACH: Final = 48 << 10
"""The same of its commands on average, where it has many: each takes the interpreter for itself, too."""

_IN_VAIN: Final = 8
"""Clients that have just been answered take a moment to ask again: a worker rests after so many of them."""
_SAMPLED: Final = 7
"""One request of so many is timed: a thread's processor time takes 0.4 us to ask for. The number is odd, for
a program that writes a request and reads the answer makes every second one of the same kind."""
_SAMPLES: Final = 32
"""So many are looked at together."""
_BUSY: Final = 0.8
"""Of the interpreter's time: one more worker than leads to this would wait for its lock."""


class Worth:
    """How many workers small requests are worth. A worker with a request has the interpreter for as much of
    the time as it has a processor. As many such parts as fit into the whole is the answer, and it is found
    step by step, up to twice as many or one less at a time: with each worker, the requests take longer."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self.workers = 1
        self._samples = self._votes = 0
        self._processor = self._took = 0.0

    def add(self, processor: float, took: float, vote: int) -> None:
        """A request: seconds of processor and in all. `vote`: 1 where others waited to be read while it
        waited, -1 where none did, 0 where it did not wait or somebody read anyway."""
        self._samples += 1
        self._processor += processor
        self._took += took
        self._votes += vote
        if self._samples < _SAMPLES:
            return
        if self.workers * self._processor > self._took:
            self.workers = max(1, self.workers - 1)
        elif self._votes > 0 and (self.workers + 1) * self._processor < _BUSY * self._took:
            fit = int(_BUSY * self._took / max(self._processor, 1e-6))
            self.workers = min(self._most, 2 * self.workers, fit)
        self._samples = self._votes = 0
        self._processor = self._took = 0.0


class Roster:
    """Of the workers of one door. Safe from any thread."""

    def __init__(self, workers: int) -> None:
        self.workers: Final = [WorkerOnDuty(self) for _ in range(workers)]
        self.lock: Final = threading.Lock()
        self.resting: Final[list[WorkerOnDuty]] = []
        """The one that rested last is called first: its caches are the warmest."""
        self.reading = 0
        """Workers that wait for a request, or are about to."""
        self.small = 0
        """Workers at a request that moves little and is not stuck."""
        self.worth: Final = Worth(workers)
        self.began = 0
        self.is_closed = False

    def call(self) -> None:
        """With the lock held: let one of the resting read, where nobody does."""
        if self.resting and not self.reading:
            self.reading += 1
            worker = self.resting.pop()
            worker.is_reading = True
            worker.called.release()

    def all_are_stuck(self) -> None:
        """With the lock held: all who are at a request have been for long, and count no more."""
        for worker in self.workers:
            worker.is_small = False
        self.small = 0

    def close(self) -> None:
        """The door ends: nobody rests any more."""
        with self.lock:
            self.is_closed = True
            resting = list(self.resting)
            self.resting.clear()
        for worker in resting:
            worker.called.release()


class WorkerOnDuty:
    """One worker's part, for its thread alone."""

    def __init__(self, roster: Roster) -> None:
        self._all: Final = roster
        self.called: Final = threading.Lock()
        """Held until somebody calls."""
        self.called.acquire()
        self.is_reading = False
        self.is_small = False
        """The request at hand counts among the small ones. The lock guards it."""
        self._is_long = False
        """It moves much."""
        self._moved = self._commands = 0
        """Bytes and commands of the request so far."""
        self._in_vain = 0
        """So many ended, one after the other, with no request waiting."""
        self._until_sample = 0
        self._is_sampled = False
        self._vote = 0
        self._since = self._processor = 0.0
        self.requests_wait: Callable[[], bool] = lambda: True
        """Whether a request waits to be read, as it looks just now."""

    def ready(self) -> bool:
        """Before a request is read: rest until that is wanted. False: the door ends."""
        roster = self._all
        if self._is_sampled:
            self._end_sample(roster)
        reads_on = self._is_long and roster.reading > 0 and self._finds_work()
        with roster.lock:
            if self.is_small:
                self.is_small = False
                roster.small -= 1
            if roster.is_closed:
                return False
            may_read = self._is_long or roster.small < roster.worth.workers
            if reads_on or (may_read and not roster.reading):
                roster.reading += 1
                self.is_reading = True
                return True
            roster.resting.append(self)
        return self._rest(roster)

    def _finds_work(self) -> bool:
        """Whether requests waited lately when one that moves much was at its end."""
        self._in_vain = 0 if self.requests_wait() else self._in_vain + 1
        return self._in_vain < _IN_VAIN

    def _rest(self, roster: Roster) -> bool:
        seen, look = roster.began, LOOK_SECONDS
        while not self.called.acquire(timeout=look):
            with roster.lock:
                is_last = bool(roster.resting) and roster.resting[-1] is self
                if is_last and not roster.reading and roster.began == seen:
                    roster.all_are_stuck()
                    roster.resting.pop()
                    roster.reading += 1
                    self.is_reading = True
                    return True
                if roster.reading:
                    look = LOOK_IDLE_SECONDS if roster.began == seen else LOOK_SECONDS
                else:
                    look = LOOK_AGAIN_SECONDS if is_last else LOOK_SECONDS
                seen = roster.began
        return not roster.is_closed

    def began(self, *, is_long: bool) -> None:
        """A request was read. It counts as small until it turns out to move much, or is stuck."""
        roster = self._all
        with roster.lock:
            roster.reading -= 1
            roster.began += 1
            if not is_long:
                roster.small += 1
                self.is_small = True
        self.is_reading = False
        self._is_long = is_long
        self._moved = self._commands = 0
        self._until_sample -= 1
        if self._until_sample < 0 and not is_long:
            self._until_sample = _SAMPLED - 1
            self._is_sampled, self._vote = True, 0
            self._since, self._processor = time.monotonic(), time.thread_time()

    def _end_sample(self, roster: Roster) -> None:
        self._is_sampled = False
        processor, took = time.thread_time() - self._processor, time.monotonic() - self._since
        with roster.lock:
            roster.worth.add(processor, took, self._vote)

    def moves(self, size: int, commands: int) -> None:
        """The request has sent so many more commands, which move `size` bytes together."""
        self._moved += size
        self._commands += commands
        if self._moved >= LONG_BYTES and self._moved >= LONG_EACH * self._commands and not self._is_long:
            self._is_long = True
            self._is_sampled = False
            self._is_small_no_more()

    def _is_small_no_more(self) -> None:
        with self._all.lock:
            if self.is_small:
                self.is_small = False
                self._all.small -= 1

    def may_hold_up(self) -> bool:
        """Whether nobody reads while one could, or others would come to rest for this worker's request."""
        roster = self._all
        return (bool(roster.resting) and not roster.reading) or (self.is_small and len(roster.workers) > 1)

    def waits(self) -> None:
        """Before a wait for an enclosure."""
        roster = self._all
        if roster.reading or not roster.resting:
            return
        pays = self._is_long or roster.small < roster.worth.workers
        if pays or self._is_sampled:
            more_wait = self.requests_wait()
            if self._vote <= 0:
                self._vote = 1 if more_wait else -1
            if pays and more_wait:
                with roster.lock:
                    roster.call()

    def is_stuck(self) -> None:
        """It may take long until this worker reads again."""
        self._is_small_no_more()
        with self._all.lock:
            self._all.call()

    def leave(self) -> None:
        """The worker ends."""
        roster = self._all
        self._is_small_no_more()
        with roster.lock:
            if self.is_reading:
                self.is_reading = False
                roster.reading -= 1
            roster.call()


def reads_always() -> WorkerOnDuty:
    """The duty of a worker whose waits nobody knows: it never rests, whatever others do."""
    return Roster(1).workers[0]
