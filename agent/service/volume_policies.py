"""How this agent serves the pool's volumes, beyond moving bytes: what waits in memory, and policies.

One object is made from the configuration and shared by all faces; it has the threads that work ahead of gets
and behind puts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from agent.config.configuration import Configuration
from agent.config.policy_sections import PolicySection
from agent.errors import ConfigError
from agent.pool.access import AnyVolume, ServedVolume
from agent.pool.kv.volume import KvVolume
from agent.pool.prestage.prefetcher import Prefetcher
from agent.pool.prestage.readahead import Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.write.admission import SEEN_MAX, SecondUse
from agent.pool.write.write_back import Storing, WriteBack
from agent.remote.channel import WorkerLanes
from agent.service.queue_plan import QueuePlan
from host_shim.control_wire import Outcome

log = logging.getLogger(__name__)


class VolumePolicies:
    """Prestaging and policies. `take_lanes` gives lanes that drive steps, by queue id."""

    def __init__(
        self,
        configuration: Configuration,
        volumes: Sequence[AnyVolume],
        take_lanes: Callable[[int], WorkerLanes],
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
        self._take_lanes = take_lanes
        self.prestage = PrestageCache(prestage.memory, waits_open=prestage.waits == "open")

        def lanes_of(number: int) -> tuple[WorkerLanes, WorkerLanes]:
            made = take_lanes(queues.prestage[number])
            return made, made

        self.prestager = Prefetcher(self.prestage, lanes_of, guess_rate=prestage.learn_rate)
        self.continuer = Readahead(
            self.prestager.guess, depth=prestage.depth, active=prestage.learn and prestage.memory > 0
        )

    def start_prestage(self, volume: ServedVolume, key: bytes, milliseconds: int = 0) -> Outcome:
        """Set out to bring a key into memory; not begun after `milliseconds`, where they are given."""
        if isinstance(volume.volume, KvVolume):
            return Outcome.REFUSED
        until = time.monotonic() + milliseconds / 1e3 if milliseconds else None
        started = self.prestager.request(volume.volume, key, until)
        if started is None:
            return Outcome.HIT
        return Outcome.STARTED if started else Outcome.REFUSED

    def start(self) -> None:
        self.prestager.start()
        if self._storing is not None:
            self._storing_thread.start()

    def stop(self) -> None:
        """End the threads, once what was acknowledged is stored or was given up (write_back.py)."""
        self.prestager.stop()
        if self._storing is not None:
            self._storing.stop()
            self._storing_thread.join()

    def _store(self) -> None:
        if self._storing is not None and self._storing_queue is not None:
            lanes = self._take_lanes(self._storing_queue)
            self._storing.work(lanes, lanes)


def _served(
    policies: Sequence[PolicySection], volumes: Sequence[AnyVolume], came: threading.Event
) -> list[ServedVolume]:
    """Every volume with what its policy says. Raises ConfigError."""
    by_name = {each.settings.name: each for each in volumes}
    wanted = {each.volume: each for each in policies}
    for name in wanted:
        volume = by_name.get(name)
        if volume is None:
            log.warning("policies names volume %s, which this pool does not serve", name)
        elif isinstance(volume, KvVolume) or volume.settings.kind != "kv":
            raise ConfigError(
                f"policies names {name}, and there are none for volumes of files or on KV namespaces",
                "take that table out",
            )
    second_use = sum(each.write == "second-use" for each in policies)
    made = []
    for name, volume in by_name.items():
        policy = wanted.get(name)
        if policy is None or isinstance(volume, KvVolume):
            made.append(ServedVolume(volume))
            continue
        rate, weight = policy.prefill_tokens_per_s, policy.bytes_per_token
        made.append(
            ServedVolume(
                volume,
                RecomputeGate(rate, weight) if rate else None,
                # The memory for keys that were seen is shared.
                SecondUse(SEEN_MAX // second_use) if policy.write == "second-use" else None,
                WriteBack(volume, policy.write_back_memory, came) if policy.write == "back" else None,
            )
        )
    return made
