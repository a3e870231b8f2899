"""How this agent serves the pool's volumes: what waits in memory, and their policies. All faces share one
object.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from agent.config.configuration import Configuration, PolicySection
from agent.errors import ConfigError
from agent.pool.access import ServedVolume, serve
from agent.pool.prestage.prefetcher import Prefetcher
from agent.pool.prestage.readahead import Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.volume.volume import PoolVolume, in_sets
from agent.pool.write.admission import SEEN_MAX, SecondUse
from agent.pool.write.write_back import Storing, WriteBack
from agent.remote.channel import WorkerChannel
from agent.service.queue_plan import QueuePlan
from host_shim.control_wire import Outcome

log = logging.getLogger(__name__)


class VolumePolicies:
    """Prestaging and policies. `take_channel` gives a channel that drives steps, by queue id."""

    def __init__(
        self,
        configuration: Configuration,
        volumes: Sequence[PoolVolume],
        take_channel: Callable[[int], WorkerChannel],
        queues: QueuePlan,
    ) -> None:
        """Raises ConfigError."""
        prestage, policies = configuration.prestage, configuration.policies
        came = threading.Event()
        self.served: Sequence[ServedVolume] = _served(policies, volumes, came)
        backs = [each.back for each in self.served if each.back is not None]
        self._storing = Storing(backs, came) if backs else None
        self._storing_thread = threading.Thread(target=self._store, name="write-back", daemon=True)
        self._storing_queue = queues.write_back
        self._take_channel = take_channel
        self.prestage = PrestageCache(prestage.memory, waits_open=prestage.waits == "open")

        def channel_of(number: int) -> tuple[WorkerChannel, WorkerChannel]:
            made = take_channel(queues.prestage[number])
            return made, made

        self.prefetcher = Prefetcher(self.prestage, channel_of, guess_rate=prestage.learn_rate)
        self.readahead = Readahead(
            self.prefetcher.guess, depth=prestage.depth, active=prestage.learn and prestage.memory > 0
        )

    def gates(self) -> dict[str, dict[str, float | None]]:
        """The figures of the recompute gates, by volume."""
        return {each.settings.name: each.gate.figures() for each in self.served if each.gate is not None}

    def start_prestage(self, volume: ServedVolume, key: bytes, milliseconds: int = 0) -> Outcome:
        """Set out to bring a key into memory; not begun after `milliseconds`, where they are given."""
        if volume.in_sets is None:
            return Outcome.REFUSED
        until = time.monotonic() + milliseconds / 1e3 if milliseconds else None
        started = self.prefetcher.request(volume.in_sets, key, until)
        if started is None:
            return Outcome.HIT
        return Outcome.STARTED if started else Outcome.REFUSED

    def start(self) -> None:
        self.prefetcher.start()
        if self._storing is not None:
            self._storing_thread.start()

    def stop(self) -> None:
        """End the threads, once what was acknowledged is stored or was given up (write_back.py)."""
        self.prefetcher.stop()
        if self._storing is not None:
            self._storing.stop()
            self._storing_thread.join()

    def _store(self) -> None:
        if self._storing is not None and self._storing_queue is not None:
            channel = self._take_channel(self._storing_queue)
            self._storing.work(channel, channel)


def _served(
    policies: Sequence[PolicySection], volumes: Sequence[PoolVolume], came: threading.Event
) -> list[ServedVolume]:
    """Every volume with what its policy says. Raises ConfigError."""
    wanted = {each.volume: each for each in policies}
    names = {each.settings.name for each in volumes}
    caches = {each.settings.name: each for each in in_sets(volumes) if each.settings.kind in ("kv", "shared")}
    for name in wanted:
        if name not in names:
            log.warning("policies names volume %s, which this pool does not serve", name)
        elif name not in caches:
            raise ConfigError(
                f"policies names {name}, and there are none for volumes of files or of names, or on KV "
                "namespaces",
                "take that table out",
            )
        elif wanted[name].write == "second-use" and caches[name].settings.kind == "shared":
            raise ConfigError(
                f"policies names {name}, a shared volume, which would lose files by second-use: their chunks "
                "are stored once",
                "leave out `write` there",
            )
    # The memory for keys that were seen is shared.
    seen_max = SEEN_MAX // max(1, sum(each.write == "second-use" for each in policies))
    made = []
    for volume in volumes:
        policy = wanted.get(volume.settings.name)
        if policy is None:
            made.append(serve(volume))
            continue
        rate, weight, cache = policy.prefill_tokens_per_s, policy.bytes_per_token, caches[policy.volume]
        made.append(
            serve(
                cache,
                RecomputeGate(rate, weight) if rate else None,
                SecondUse(seen_max) if policy.write == "second-use" else None,
                WriteBack(cache, policy.write_back_memory, came) if policy.write == "back" else None,
            )
        )
    return made
