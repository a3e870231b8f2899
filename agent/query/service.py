"""From a query and its tenant to the answer.

A tenant's volumes are all that its queries are looked up in. So a volume of another tenant is answered as one
that does not exist, by the same steps and in the same time.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agent.http.gil_yield import Rests
from agent.pool.access import ServedVolume
from agent.pool.counters import MissCause
from agent.pool.read.leading_run import LeadingRun
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Runner, Steps
from agent.pool.volume.bandwidth import TokenBucket
from agent.query.counters import QueryCounters
from agent.query.query_json import BadQuery, Query, answer_for, decode_query_untrusted, encode

REST_KEYS: Final = 1024
"""After so many keys the thread rests as long as they took, for threads of other doors."""
BURST_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 1


class QueryService:
    """All queries. `answer` is called on the door's threads, `admit` in its event loop."""

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
        query = decode_query_untrusted(body)
        with self._lock:
            self._buckets[tenant].charge(query.key_count, self._clock())
        volume = self._volumes[tenant].get(query.volume)
        if volume is not None and volume.erased:
            volume = None
        if volume is None:
            told = [answer_for(prompt, _nothing(prompt), None, None) for prompt in query.prompts]
        else:
            told = self._looked_up(query, volume, runner)
        with self._lock:
            self._counters.prompts += len(told)
            self._counters.keys += query.key_count
            for each in told:
                self._counters.keys_in_memory += each["memory"]
                self._counters.keys_on_flash += each["flash"]
                if each["hole"] is not None:
                    self._counters.holes[each["hole"]["cause"]] += 1
        return encode({"volume": query.volume, "served": volume is not None, "prompts": told})

    def _looked_up(self, query: Query, volume: ServedVolume, runner: Runner) -> list[Any]:
        until = self._clock() + self._deadline
        away = frozenset(each for each in _namespaces(volume) if self._is_away(each))
        told, done, began = [], 0, time.thread_time()
        for prompt in query.prompts:
            left = max(0.0, until - self._clock())
            run = runner.run(self._run_of(volume, prompt, left, away))
            load = compute = None
            if volume.gate is not None:
                load = volume.gate.seconds_to_load(run.flash_bytes) if run.on_flash else 0.0
                compute = volume.gate.seconds_to_compute(run.memory_bytes + run.flash_bytes)
            told.append(answer_for(prompt, run, load, compute))
            done += len(prompt)
            if done >= REST_KEYS:
                self._rests.after(began)
                done, began = 0, time.thread_time()
        return told

    def _run_of(
        self, volume: ServedVolume, prompt: Sequence[bytes], seconds: float, away: frozenset[int]
    ) -> Steps[LeadingRun]:
        channel = self._channel()  # there is one while steps are driven
        return (yield from volume.leading_run(channel, prompt, channel.now() + seconds, self._prestage, away))


def _namespaces(volume: ServedVolume) -> set[int]:
    """Those that the volume's values lie in, by their indexes."""
    settings = volume.settings
    return {each.namespace for each in settings.extents} | {each.namespace for each in settings.shares}


def _nothing(prompt: Sequence[bytes]) -> LeadingRun:
    """Of a volume that the tenant has not: another one's, or nobody's."""
    run = LeadingRun()
    run.hole = MissCause.NEVER_STORED if prompt else None
    return run
