"""Prestaging in one agent of a simulated pod: its own queue, cache and table of guesses, in virtual time.

What an agent runs in threads (agent/pool/prestage/prefetcher.py), tasks of the virtual loop run here.
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from agent.config.configuration import PrestageSection
from agent.pool.prestage.prefetcher import stage
from agent.pool.prestage.readahead import Readahead
from agent.pool.prestage.staging_queue import Item, StagingQueue
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.volume.volume import Volume
from agent.sim.drive_times import RatedChannel, unreserved
from agent.sim.pod_plan import ANNOUNCED, LEARNED, PodPlan
from agent.sim.virtual_time import Signal, VirtualLoop

Steps = Generator[Any, bool, Any]


class Stager:
    """One agent's. `channels`: one for each of its tasks. A block of a stripe weighs as much as one value."""

    def __init__(
        self, loop: VirtualLoop, plan: PodPlan, stripe: int, channels: Sequence[RatedChannel]
    ) -> None:
        usual = PrestageSection.model_validate({})
        self._loop = loop
        self._channels = channels
        self._is_asked = plan.prestage == ANNOUNCED
        self.cache = PrestageCache(plan.prestage_bytes // stripe, clock=lambda: loop.now)
        self._queue = StagingQueue(self.cache, usual.learn_rate, loop.now)
        self._readahead = Readahead(self._guess, depth=usual.depth, active=plan.prestage == LEARNED)
        self._idle: deque[Signal] = deque()

    def start(self, owner: object) -> None:
        """Begin to read what is asked for, until the agent is killed."""
        for channel in self._channels:
            self._loop.spawn(self._work(channel), owner)

    def announce(self, volume: Volume, keys: Sequence[bytes]) -> None:
        """An engine will ask for these, as soon as it has time."""
        if self._is_asked:
            for key in keys:
                self._ask(Item(volume, volume.placement.pseudonym(key), key))

    def named(self, volume: Volume, keys: Sequence[bytes]) -> None:
        """An engine looked for these keys, in this order."""
        self._readahead.chain(volume, keys)

    def reads(self, volume: Volume, key: bytes) -> None:
        """An engine has begun to read a key."""
        self._readahead.reads(volume, key)

    def _guess(self, volume: Volume, pseudonym: bytes) -> None:
        self._ask(Item(volume, pseudonym, None))

    def _ask(self, item: Item) -> None:
        self._queue.ask(item)
        if self._idle:
            self._loop.fire(self._idle.popleft())

    def _work(self, channel: RatedChannel) -> Steps:
        while True:
            self.cache.sweep()
            item = self._queue.next(self._loop.now)
            if item is None:
                turn = Signal()
                self._idle.append(turn)
                yield turn
                continue
            yield from stage(item.volume, self.cache, channel, item.pseudonym, item.key, unreserved)
            self._queue.forget(item)
