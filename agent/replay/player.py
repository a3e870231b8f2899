"""Playing requests as an inference engine would, several at a time.

For each request: look up the prefix in one round trip, prestage and read its leading blocks, stop at the
first hole (attention needs a prefix without one), and store the others. Every byte read is judged.

A block that is longer than a value of the volume lies in several, as a connector would cut it. It is there
where all of them are. One is read or written at a time, so memory is that of one value.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from agent.host_os.hung_agent import HUNG_SECONDS, CallClock
from agent.replay.absence import ANSWERED_MAX, Absence
from agent.replay.content import BlockContent
from agent.replay.lru import LruBaseline
from agent.replay.tally import Cause, Tally, cause_of
from agent.replay.trace_lines import TraceRequest
from host_shim.control_wire import KEYS_MAX, Outcome
from host_shim.pool import Fetched

T = TypeVar("T")


class BlockStore(Protocol):
    """What a player needs of a `host_shim.pool.Volume`."""

    def lookup(self, keys: Sequence[bytes]) -> list[Outcome | None]: ...

    def prestage(self, keys: Sequence[bytes]) -> list[bool]: ...

    def fetch(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Fetched]: ...

    def put(self, key: bytes, data: memoryview) -> bool: ...


@dataclass(slots=True, eq=False)
class Schedule:
    """Hands out the trace's requests in order, each when its time has come.

    `time_scale` 0 is as fast as possible, 1 the trace's own pace, 10 ten times that.
    """

    _requests: Iterator[TraceRequest]
    time_scale: float = 0.0
    _baseline: LruBaseline | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began: float | None = None
    _first_ms: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def next_request(self) -> TraceRequest | None:
        """The next request, or None at the end and after `stopping` was set."""
        with self._lock:
            if self.stopping.is_set():
                return None
            request = next(self._requests, None)
            if request is None:
                return None
            if self._baseline is not None:
                self._baseline.play(request.hash_ids)
            if self._began is None:
                self._began, self._first_ms = time.monotonic(), request.timestamp_ms
        if self.time_scale:
            due = self._began + (request.timestamp_ms - self._first_ms) / 1000 / self.time_scale
            if self.stopping.wait(max(0.0, due - time.monotonic())):
                return None
        return request


class Player:
    """One thread's worth of playing: a buffer, a tally, one request at a time."""

    def __init__(
        self,
        store: BlockStore,
        content: BlockContent,
        schedule: Schedule,
        *,
        parts: int = 1,
        prestage: bool = True,
        absence: Absence | None = None,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        """`parts`: values of each block."""
        self.tally = Tally()
        self.clock = CallClock(hung_seconds)
        self._absence = absence
        self._store = store
        self._content = content
        self._schedule = schedule
        self._parts = parts
        self._prestage = prestage
        self._words = np.zeros(content.value_bytes // 8, np.uint64)
        self._bytes = memoryview(self._words.data).cast("B")

    def run(self) -> None:
        """Play until the trace is at its end. What goes wrong ends all players, by `Schedule.failure`."""
        try:
            while (request := self._schedule.next_request()) is not None:
                self.play(request)
        except Exception as error:
            self._schedule.failure = error
            self._schedule.stopping.set()

    def play(self, request: TraceRequest) -> None:
        tally, hash_ids = self.tally, request.hash_ids
        there = self._look_up(hash_ids)
        promised = next((at for at, seen in enumerate(there) if seen is not Outcome.HIT), len(hash_ids))
        if self._prestage and promised > 1:
            for some in self._together(hash_ids[1:promised]):
                self._store.prestage(self._keys(some))
        read = 0
        while read < promised and self._read(hash_ids[read], there, read):
            read += 1
        for at in range(read, len(hash_ids)):
            seen = there[at]
            if seen is Outcome.HIT:
                tally.misses[Cause.BEHIND_A_HOLE] += 1
                continue
            if at != read or promised <= read:  # the block that broke the promise was counted by _read
                tally.misses[cause_of(seen)] += 1
            self._write(hash_ids[at])
        tally.requests += 1
        tally.blocks += len(hash_ids)
        tally.hits += read
        tally.tokens += request.input_length
        tally.tokens_saved += request.tokens_of(read)

    def _keys(self, hash_ids: Sequence[int]) -> list[bytes]:
        """Those of all values of some blocks, block by block."""
        return [self._content.key(each, part) for each in hash_ids for part in range(self._parts)]

    def _together(self, hash_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The blocks that one call is about: all, or as many as a round trip takes where each is several
        values."""
        few = max(1, KEYS_MAX // self._parts) if self._parts > 1 else max(1, len(hash_ids))
        for start in range(0, len(hash_ids), few):
            yield hash_ids[start : start + few]

    def _look_up(self, hash_ids: Sequence[int]) -> list[Outcome | None]:
        """Of each block HIT where all of its values are there; else what was said of the first that is
        not."""
        found: list[Outcome | None] = []
        for some in self._together(hash_ids):
            seen = self._seen(self._keys(some))
            for start in range(0, len(seen), self._parts):
                of_block = seen[start : start + self._parts]
                found.append(next((one for one in of_block if one is not Outcome.HIT), Outcome.HIT))
        return found

    def _seen(self, keys: list[bytes]) -> list[Outcome | None]:
        found, _ = self._asked(
            lambda: self._store.lookup(keys), lambda seen: bool(seen) and set(seen) == {None}
        )
        return found

    def _read(self, hash_id: int, there: list[Outcome | None], at: int) -> bool:
        """Read and judge one block. False: it is a hole after all, counted, and `there` knows."""
        return all(self._read_part(hash_id, part, there, at) for part in range(self._parts))

    def _read_part(self, hash_id: int, part: int, there: list[Outcome | None], at: int) -> bool:
        tally, key = self.tally, self._content.key(hash_id, part)
        found, took = self._asked(
            lambda: self._store.fetch([key], [self._bytes])[0],
            lambda one: one.length is None and one.outcome is None,
        )
        if found.length is None:
            tally.misses[cause_of(found.outcome)] += 1
            there[at] = found.outcome if found.outcome is not Outcome.HIT else None
            return False
        tally.get_latencies.add(took)
        tally.bytes_read += found.length
        wrong = self._content.wrong_bytes(hash_id, self._words, part)
        if found.length != self._content.value_bytes:
            wrong = max(wrong, 1)
        if wrong:
            tally.wrong_bytes += wrong
            tally.wrong_blocks += 1
            tally.misses[Cause.WRONG_BYTES] += 1
            there[at] = None
            return False
        return True

    def _write(self, hash_id: int) -> None:
        """Store a block; once one of its values was refused, the others are of no use."""
        tally = self.tally
        for part in range(self._parts):
            key = self._content.key(hash_id, part)
            self._content.fill(hash_id, self._words, part)
            stored, took = self._put(key)
            tally.puts += 1
            if not stored:
                tally.puts_refused += 1
                break
            tally.put_latencies.add(took)
            tally.bytes_written += len(self._bytes)

    def _put(self, key: bytes) -> tuple[bool, float]:
        return self._asked(
            lambda: self._store.put(key, self._bytes), lambda one: not one and not self._is_there()
        )

    def _asked(self, call: Callable[[], T], found_nobody: Callable[[T], bool]) -> tuple[T, float]:
        """What a call returned, and how long that took: made again for as long as it found no agent and one
        comes back. The time is that of the last try, and the waiting is counted by `Absence`."""
        answered = 0
        while True:
            began = self.clock.begin()
            try:
                result = call()
            finally:
                took = self.clock.end() - began
            if self._absence is None or not found_nobody(result) or answered == ANSWERED_MAX:
                return result, took
            if not self._absence.is_back():
                return result, took
            answered += 1

    def _is_there(self) -> bool:
        return self._absence is None or self._absence.answers()
