"""How long a get takes under a fixed load: requests arrive by a clock, whether or not earlier ones are done.

Threads that ask again when they have their answer ask less while a store is slow, so its worst moments are
hardly seen (coordinated omission). Here each request has a moment at which it arrives, drawn beforehand as
those of many independent clients (a Poisson process), and its time counts from that moment. While IN_FLIGHT
requests are under way the next one waits, and its wait counts.

The load is a share of the rate at which as many threads get values one after the other. That is measured in
the same round, right before: a busy neighbour makes both less.
"""

import ctypes
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

from agent.bench.contents import Contents
from agent.bench.names_and_units import Entry
from agent.bench.peers.lines import Sized
from agent.bench.pool_probes import Gets, shape_for, store, values_got
from agent.bench.redis_probes import RedisStore, explained
from agent.bench.rounds import Sample, Timed, TogetherFor, Turn, percentile, together, together_clocked
from agent.bench.sites import IN_FLIGHT, Sites
from agent.errors import G35Error

CLOSED_SHARE: Final = 0.25
"""Of a round's time, for the rate that a load is a share of."""
SEED: Final = 35
ARRIVALS_MIN: Final = 20
_PR_SET_TIMERSLACK: Final = 29
_TIMERSLACK_NS: Final = 1000
"""A thread that sleeps until its request arrives wakes 50 us late otherwise, and the store gets the blame."""


class Arrivals:
    """Moments at which requests arrive, by seconds from the first one's due time, for any thread to take."""

    def __init__(
        self,
        moments: Sequence[float],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._left: Iterator[float] = iter(moments)
        self._clock, self._sleep = clock, sleep
        self._began: float | None = None
        self._lock = threading.Lock()

    def next(self) -> float | None:
        """Sleep until the next request arrives; when it did, by the clock. None: there is none left."""
        with self._lock:
            if self._began is None:
                self._began = self._clock()
            moment = next(self._left, None)
        if moment is None:
            return None
        due = self._began + moment
        wait = due - self._clock()
        if wait > 0:
            self._sleep(wait)
        return due

    def since(self, due: float) -> float:
        return self._clock() - due


def poisson(rate: float, seconds: float, dice: random.Random) -> list[float]:
    """Moments of `rate` requests a second on the average, for `seconds`; at least ARRIVALS_MIN of them."""
    moments: list[float] = []
    at = 0.0
    while at < seconds or len(moments) < ARRIVALS_MIN:
        moments.append(at)
        at += dice.expovariate(rate)
    return moments


class Arriving:
    """A turn that waits for a request to arrive, and writes down how long after that it was done."""

    def __init__(self, turn: Turn, arrivals: Arrivals) -> None:
        self._turn, self._arrivals = turn, arrivals
        self._is_woken_in_time = False
        self.taken: list[float] = []

    def __call__(self) -> int | None:
        if not self._is_woken_in_time:
            self._is_woken_in_time = True
            _wake_in_time()
        due = self._arrivals.next()
        if due is None:
            return None
        moved = self._turn()
        self.taken.append(self._arrivals.since(due))
        return moved


def together_as_they_arrive(turns: Sequence[Turn], arrivals: Arrivals) -> Timed:
    """Serve all arrivals, a thread for each of the turns; times count from the arrival."""
    arriving = [Arriving(turn, arrivals) for turn in turns]
    timed = together(arriving, math.inf)
    return replace(timed, latencies=tuple(one for each in arriving for one in each.taken))


def _wake_in_time() -> None:
    """Let this thread's sleeps end when they should. Where that cannot be had, they end a little later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMERSLACK_NS))


class GetsUnderLoad(Protocol):
    """The values of one size in a store."""

    def get(self, seconds: float, how: TogetherFor) -> Timed:
        """Have IN_FLIGHT threads get them as `how` says."""


class _KvGets:
    """/kv, one key a call, into registered memory."""

    def __init__(self, sites: Sites, value_bytes: int) -> None:
        site, contents = sites.pool(shape_for(value_bytes)), Contents(value_bytes)
        store(site, contents, "get", values_got(value_bytes))
        self._gets = Gets(site, contents, 1, site.memory)

    def get(self, seconds: float, how: TogetherFor) -> Timed:
        timed = self._gets.timed(seconds, how=how)
        self._gets.compare_last()
        return timed


class _RedisGets:
    """A client of redis-py with hiredis for each thread."""

    def __init__(self, sites: Sites, value_bytes: int) -> None:
        with explained():
            self._sized = Sized(RedisStore(sites.redis, tls=False), value_bytes, values_got(value_bytes), 0)

    def get(self, seconds: float, how: TogetherFor) -> Timed:
        with explained():
            return self._sized.get(IN_FLIGHT, seconds, how=how)


STORES: Final[dict[str, Callable[[Sites, int], GetsUnderLoad]]] = {"kv": _KvGets, "redis": _RedisGets}


class LoadProbe:
    """Gets that arrive at a share of the highest rate: the 99th percentile of their times, in ms."""

    def __init__(self, sites: Sites, entry: Entry) -> None:
        self._sites, self._entry = sites, entry
        self._dice = random.Random(f"{SEED} {entry.value_bytes} {entry.load}")
        self._gets: GetsUnderLoad

    def prepare(self) -> None:
        self._gets = STORES[self._entry.name.partition("_")[0]](self._sites, self._entry.value_bytes)

    def round(self, seconds: float) -> Sample:
        highest = self._gets.get(seconds * CLOSED_SHARE, together_clocked)
        if not highest.operations:
            raise G35Error("no get ended in time, so there is no rate to take a share of")
        rate = self._entry.load / 100 * highest.operations / highest.seconds
        arrivals = Arrivals(poisson(rate, seconds * (1 - CLOSED_SHARE), self._dice))
        timed = self._gets.get(0, lambda turns, _seconds, _least: together_as_they_arrive(turns, arrivals))
        taken = sorted(timed.latencies)
        return Sample(
            percentile(taken, 99), timed.operations, timed.bytes, timed.seconds, timed.latencies,
            {"offered_per_s": rate, "done_per_s": timed.operations / timed.seconds},
        )  # fmt: skip
