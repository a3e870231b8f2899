"""The work of another store's client for the bench, told by lines of JSON on standard input and output.

    {"do": "prepare", "bytes": 1048576, "values": 64, "puts": 128}     store the values, compare each byte
    {"do": "get", "bytes": 1048576, "in_flight": 4, "seconds": 0.5}    threads that get them, one a call
    {"do": "put", "bytes": 1048576, "in_flight": 4, "seconds": 0.5}    threads that put up to `puts` others

Only the calls are timed. Outside of the time all values are compared once, then the last that each thread got
and the first that was put. What an engine prints goes to standard error.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from agent.bench.contents import Contents
from agent.bench.rounds import Timed, TogetherFor, Turn, in_bursts, together_clocked

READY_VALUES = 16
"""Different values that are put again and again."""


class PeerFailed(Exception):
    """The other store did not do what it was asked to, or returned something else than was stored."""


class Lane(Protocol):
    """One thread's way to the store."""

    def get(self, name: str) -> memoryview:
        """The value, which may be looked at until the next call. Raises PeerFailed where it is not there."""

    def put(self, name: str, value: Any) -> None:
        """Store what `Store.made_ready` returned, under a name that is free or may be overwritten. When it
        returns, the store has all of it."""

    def remove(self, name: str) -> None:
        """Forget a value, where the store can do that."""


class Store(Protocol):
    """A store by its own client."""

    def new_buffer(self, size: int) -> memoryview:
        """Memory of the kind that it likes values to lie in."""

    def made_ready(self, value: memoryview) -> Any:
        """A value as its `put` wants it, so that no more than an engine would do is done in the time."""

    def done_with(self, ready: Any) -> None:
        """What was made ready is not needed any more."""

    def lane(self, value_bytes: int) -> Lane: ...

    def close(self) -> None: ...


class Sized:
    """The values of one size in a store."""

    def __init__(self, store: Store, value_bytes: int, values: int, puts: int) -> None:
        self._store, self._bytes, self._values, self._puts = store, value_bytes, values, puts
        self._contents = Contents(value_bytes, store.new_buffer)
        self._ready = [store.made_ready(self._contents.value(number)) for number in range(READY_VALUES)]
        self._lanes = [store.lane(value_bytes)]
        self._stored: dict[int, int] = {}
        for number in range(values):
            ready = store.made_ready(self._contents.value(number))
            self._lanes[0].put(self._name("get", number), ready)
            store.done_with(ready)
        for number in range(values):
            self._compare(self._lanes[0], "get", number, number)

    def get(
        self, in_flight: int, seconds: float, least: int = 0, how: TogetherFor = together_clocked
    ) -> Timed:
        readers = [
            _Reader(lane, [(n, self._name("get", n)) for n in range(first, self._values, in_flight)])
            for first, lane in enumerate(self._some_lanes(in_flight))
        ]
        timed = how([self._checked(reader) for reader in readers], seconds, least)
        for reader in readers:
            if reader.last is not None and reader.got != self._contents.value(reader.last):
                raise PeerFailed(f"wrong bytes in value {reader.last}")
        return timed

    def put(self, in_flight: int, seconds: float) -> Timed:
        return in_bursts(lambda left: self._burst(self._some_lanes(in_flight), left), seconds)

    def _burst(self, lanes: list[Lane], seconds: float) -> Timed:
        plans = [range(first, self._puts, len(lanes)) for first in range(len(lanes))]
        writers = [self._writer(lane, list(plan)) for lane, plan in zip(lanes, plans, strict=True)]
        timed = together_clocked(writers, seconds)
        self._compare(lanes[0], "put", 0, 0)
        for lane, plan in zip(lanes, plans, strict=True):
            # As many as each thread has stored: it began with its first.
            for number in plan[: self._stored[id(lane)]]:
                lane.remove(self._name("put", number))
        return timed

    def _some_lanes(self, count: int) -> list[Lane]:
        while len(self._lanes) < count:
            self._lanes.append(self._store.lane(self._bytes))
        return self._lanes[:count]

    def _checked(self, reader: "_Reader") -> Turn:
        size = self._bytes

        def turn() -> int:
            if reader.next() != size:
                raise PeerFailed("a value came back with another length")
            return size

        return turn

    def _writer(self, lane: Lane, numbers: list[int]) -> Turn:
        steps = iter([(self._name("put", number), self._ready[number % READY_VALUES]) for number in numbers])
        self._stored[id(lane)] = 0

        def turn() -> int | None:
            step = next(steps, None)
            if step is None:
                return None
            lane.put(*step)
            self._stored[id(lane)] += 1
            return self._bytes

        return turn

    def _compare(self, lane: Lane, prefix: str, number: int, value: int) -> None:
        if lane.get(self._name(prefix, number)) != self._contents.value(value):
            raise PeerFailed(f"value {number} did not come back as it was stored")

    def _name(self, prefix: str, number: int) -> str:
        return f"{prefix}-{self._bytes}-{number}"


class _Reader:
    """One thread's names, round and round, and what it got last."""

    def __init__(self, lane: Lane, names: list[tuple[int, str]]) -> None:
        self._get = lane.get
        self._round_about = itertools.cycle(names)
        self.last: int | None = None
        self.got = memoryview(b"")

    def next(self) -> int:
        self.last, name = next(self._round_about)
        self.got = self._get(name)
        return len(self.got)


class Talk:
    """Answers what is asked of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sized: dict[int, Sized] = {}

    def answer_to(self, asked: dict[str, Any]) -> dict[str, Any]:
        size = int(asked["bytes"])
        if asked["do"] == "prepare":
            if size not in self._sized:
                self._sized[size] = Sized(self._store, size, int(asked["values"]), int(asked["puts"]))
            return {"prepared": size}
        work = {"get": self._sized[size].get, "put": self._sized[size].put}[asked["do"]]
        timed = work(int(asked["in_flight"]), float(asked["seconds"]))
        return {
            "operations": timed.operations,
            "bytes": timed.bytes,
            "seconds": timed.seconds,
            "latencies": [round(one, 7) for one in timed.latencies],
        }


def talk(open_store: Callable[[], Store]) -> None:
    """Open the store and answer until standard input ends."""
    answers = _own_output()
    store = open_store()
    try:
        print('{"ready": true}', file=answers, flush=True)
        work = Talk(store)
        for line in sys.stdin:
            try:
                answer = work.answer_to(json.loads(line))
            except Exception as error:  # of an engine's client, which may raise anything
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        store.close()


def _own_output() -> TextIO:
    """Standard output for answers alone; who else prints, in any language, prints to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
