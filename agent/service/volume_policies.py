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
from agent.pool.access import AnyVolume
from agent.pool.kv.volume import KvVolume
from agent.pool.prestage.prefetcher import Prestager
from agent.pool.prestage.readahead import Continuer
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.write.admission import SEEN_MAX, SecondUse
from agent.pool.write.write_back import Storing, WriteBack
from agent.remote.channel import WorkerLanes
from host_shim.control_wire import Outcome

log = logging.getLogger(__name__)


def storing_queues(policies: Sequence[PolicySection]) -> int:
    """Queues on every enclosure for writing back: one, where a volume does."""
    return int(any(policy.write == "back" for policy in policies))


class Serving:
    """Prestaging and policies. `take_lanes` gives lanes that drive steps, by queue id."""

    def __init__(
        self,
        configuration: Configuration,
        volumes: Sequence[AnyVolume],
        take_lanes: Callable[[int], WorkerLanes],
        storing_queue: int,
    ) -> None:
        """The prestagers' queue ids are those after the workers', `storing_queue` is for writing back.

        Raises ConfigError.
        """
        prestage, policies = configuration.prestage, configuration.policies
        prestage_queue = configuration.agent.workers + 1
        came = threading.Event()
        second_use = sum(each.write == "second-use" for each in policies)
        backs = [back for each in policies if (back := _apply(each, volumes, came, second_use)) is not None]
        self._storing = Storing(backs, came) if backs else None
        self._storing_thread = threading.Thread(target=self._store, name="write-back", daemon=True)
        self._storing_queue = storing_queue
        self._take_lanes = take_lanes
        self.prestage = PrestageCache(prestage.memory, waits_open=prestage.waits == "open")

        def lanes_of(number: int) -> tuple[WorkerLanes, WorkerLanes]:
            made = take_lanes(prestage_queue + number)
            return made, made

        self.prestager = Prestager(self.prestage, lanes_of, guess_rate=prestage.learn_rate)
        self.continuer = Continuer(
            self.prestager.guess, depth=prestage.depth, active=prestage.learn and prestage.memory > 0
        )

    def start_prestage(self, volume: AnyVolume, key: bytes, milliseconds: int = 0) -> Outcome:
        """Set out to bring a key into memory; not begun after `milliseconds`, where they are given."""
        if isinstance(volume, KvVolume):
            return Outcome.REFUSED
        until = time.monotonic() + milliseconds / 1e3 if milliseconds else None
        started = self.prestager.request(volume, key, until)
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
        lanes = self._take_lanes(self._storing_queue)
        if self._storing is not None:
            self._storing.work(lanes, lanes)


def _apply(
    policy: PolicySection, volumes: Sequence[AnyVolume], came: threading.Event, second_use: int
) -> WriteBack | None:
    """Set a volume up as its policy says; what it writes back, if it does.

    `second_use`: how many volumes share the memory for keys that were seen.
    """
    volume = next((each for each in volumes if each.settings.name == policy.volume), None)
    if volume is None:
        log.warning("policies names volume %s, which this pool does not serve", policy.volume)
        return None
    if isinstance(volume, KvVolume) or volume.settings.kind != "kv":
        raise ConfigError(
            f"policies names {policy.volume}, and there are none for volumes of files or on KV namespaces",
            "take that table out",
        )
    if policy.prefill_tokens_per_s:
        volume.gate = RecomputeGate(policy.prefill_tokens_per_s, policy.bytes_per_token)
    if policy.write == "second-use":
        volume.admission = SecondUse(SEEN_MAX // second_use)
    if policy.write == "back":
        volume.back = WriteBack(volume, policy.write_back_memory, came)
    return volume.back
