"""From a query and its tenant to the answer.

A tenant's volumes are all that its queries are looked up in. So a volume of another tenant is answered as one
that does not exist, by the same steps and in the same time.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from agent.http.gil_yield import Rests
from agent.pool.access import ServedVolume
from agent.pool.counters import MissCause
from agent.pool.format.directory import KEY_BYTES
from agent.pool.read.leading_run import LeadingRun
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.steps import IoChannel, Runner, Steps
from agent.pool.volume.bandwidth import TokenBucket
from agent.query.counters import QueryCounters
from agent.query.query_json import BadQuery, Query, answer_for, decode_query_untrusted, encode

REST_KEYS: Final = 1024
"""After so many keys the thread rests as long as they took, for threads of other doors."""
AT_ONCE_KEYS: Final = 1024
"""Of a query that is answered in the event loop where all it asks for is remembered: a hand-over to a thread
and back costs as much again. The loop waits for it, some 2 ms."""
AT_ONCE_PROMPTS: Final = 8
AT_ONCE_BYTES: Final = 48 << 10
BURST_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 1


class QueryService:
    """All queries. `answer` and `finish` are called on the door's threads, `admit` and `answer_at_once` in
    its event loop."""

    def __init__(
        self,
        volumes: Mapping[str, Sequence[ServedVolume]],
        prestage: PrestageCache | None,
        channel: Callable[[], IoChannel],
        is_away: Callable[[int], bool],
        counters: QueryCounters,
        *,
        deadline: float,
        keys_per_s: int,
        rests: Rests | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`volumes`: those of each tenant, by its name. `is_away`: whether a namespace (an index into the
        pool map) cannot be read now. `deadline`: seconds that one answer waits for directories."""
        self._volumes = {
            tenant: {each.settings.name: each for each in own} for tenant, own in volumes.items()
        }
        self._prestage = prestage
        self._channel = channel
        self._is_away = is_away
        self._counters = counters
        self._deadline = deadline
        self._rests = rests or Rests()
        self._clock = clock
        self._wall = wall
        self._buckets = {tenant: TokenBucket(keys_per_s, clock(), BURST_SECONDS) for tenant in volumes}
        self._lock = threading.Lock()
        """Guards the buckets and the counters."""

    def admit(self, tenant: str) -> None:
        """Raises BadQuery where the tenant has asked for more than its keys a second, and has to wait."""
        with self._lock:
            now = self._clock()
            if self._buckets[tenant].ready_at(now) > now:
                self._counters.over_rate += 1
                wait = [("retry-after", str(RETRY_SECONDS))]
                raise BadQuery(429, "this tenant has asked for its keys of this second", wait)

    def answer(self, tenant: str, body: bytes | bytearray, runner: Runner) -> bytes:
        """The answer to a body. Raises BadQuery."""
        return self.finish(self._asked(tenant, body), runner)

    def answer_at_once(self, tenant: str, body: bytes | bytearray) -> "bytes | Asked | None":
        """The answer to a short body, of what is remembered; or what there is of it, for `finish`. None: this
        is for `answer`, because the body is long, or threads of other doors are to have their turn. Raises
        BadQuery."""
        is_short = len(body) <= AT_ONCE_BYTES and body.count(b",") <= AT_ONCE_KEYS
        if not is_short or not self._rests.has_rested():
            return None
        began = time.thread_time()
        try:
            asked = self._asked(tenant, body)
            if asked.volume is not None and len(asked.query.prompts) <= AT_ONCE_PROMPTS:
                self._remember(asked, asked.volume)
            return self._told(asked) if asked.is_complete else asked
        finally:
            self._rests.owed(time.thread_time() - began)

    def finish(self, asked: "Asked", runner: Runner) -> bytes:
        """The answer, after what has to be read for it."""
        if asked.volume is not None:
            self._look_up(asked, asked.volume, runner)
        return self._told(asked)

    def _asked(self, tenant: str, body: bytes | bytearray) -> "Asked":
        query = decode_query_untrusted(body)
        with self._lock:
            self._buckets[tenant].charge(query.key_count, self._clock())
        volume = self._volumes[tenant].get(query.volume)
        if volume is not None and volume.erased:
            volume = None
        if volume is None:
            return Asked(query, None, [_nothing(prompt) for prompt in query.prompts])
        return Asked(query, volume, [LeadingRun() for _ in query.prompts])

    def _remember(self, asked: "Asked", volume: ServedVolume) -> None:
        """Follow the runs as far as directories are remembered."""
        away, wall = self._away(volume), self._wall()
        for number, prompt in enumerate(asked.query.prompts):
            asked.runs[number] = volume.remembered_run(prompt, wall, self._prestage, away)
            if not asked.has_ended(number):
                break

    def _look_up(self, asked: "Asked", volume: ServedVolume, runner: Runner) -> None:
        """Follow the runs to their ends."""
        until = self._clock() + self._deadline
        away = self._away(volume)
        done, began = 0, time.thread_time()
        for number, prompt in enumerate(asked.query.prompts):
            if asked.has_ended(number):
                continue
            left = max(0.0, until - self._clock())
            asked.runs[number] = runner.run(self._run_of(volume, prompt, left, away, asked.runs[number]))
            done += len(prompt) // KEY_BYTES
            if done >= REST_KEYS:
                self._rests.after(began)
                done, began = 0, time.thread_time()

    def _told(self, asked: "Asked") -> bytes:
        query, volume = asked.query, asked.volume
        told = []
        for prompt, run in zip(query.prompts, asked.runs, strict=True):
            load = compute = None
            if volume is not None and volume.gate is not None:
                load = _seconds_to_load(volume, volume.gate, run)
                compute = volume.gate.seconds_to_compute(run.value_bytes)
            told.append(answer_for(prompt, run, load, compute))
        with self._lock:
            self._counters.prompts += len(told)
            self._counters.keys += query.key_count
            for run in asked.runs:
                self._counters.keys_in_memory += run.in_memory
                self._counters.keys_on_flash += run.on_flash
                self._counters.keys_in_g4 += run.in_g4
                if run.hole is not None:
                    self._counters.holes[run.hole.name.lower()] += 1
        return encode({"volume": query.volume, "served": volume is not None, "prompts": told})

    def _away(self, volume: ServedVolume) -> frozenset[int]:
        return frozenset(each for each in _namespaces(volume) if self._is_away(each))

    def _run_of(
        self, volume: ServedVolume, prompt: bytes, seconds: float, away: frozenset[int], run: LeadingRun
    ) -> Steps[LeadingRun]:
        channel = self._channel()  # there is one while steps are driven
        until = channel.now() + seconds
        return (yield from volume.leading_run(channel, prompt, until, self._prestage, away, run))


class Asked:
    """A query on its way to its answer."""

    __slots__ = ("query", "runs", "volume")

    def __init__(self, query: Query, volume: ServedVolume | None, runs: list[LeadingRun]) -> None:
        """`volume`: None where the tenant has none of that name. `runs`: of each prompt, as far as known."""
        self.query = query
        self.volume = volume
        self.runs = runs

    def has_ended(self, number: int) -> bool:
        """Whether all is known of a prompt."""
        run = self.runs[number]
        return run.has_ended() or run.length * KEY_BYTES == len(self.query.prompts[number])

    @property
    def is_complete(self) -> bool:
        return all(map(self.has_ended, range(len(self.runs))))


def _namespaces(volume: ServedVolume) -> set[int]:
    """Those that the volume's values lie in, by their indexes."""
    settings = volume.settings
    return {each.namespace for each in settings.extents} | {each.namespace for each in settings.shares}


def _seconds_to_load(volume: ServedVolume, gate: RecomputeGate, run: LeadingRun) -> float | None:
    """How long a run takes to come: what is on flash, then what is in G4, each by its own measure. None: one
    of those that it wants has not been measured."""
    from_flash = gate.seconds_to_load(run.flash_bytes) if run.on_flash else 0.0
    from_g4 = volume.seconds_from_below(run.g4_bytes) if run.in_g4 else 0.0
    return None if from_flash is None or from_g4 is None else from_flash + from_g4


def _nothing(prompt: bytes) -> LeadingRun:
    """Of a volume that the tenant has not: another one's, or nobody's."""
    run = LeadingRun()
    run.hole = MissCause.NEVER_STORED if prompt else None
    return run
