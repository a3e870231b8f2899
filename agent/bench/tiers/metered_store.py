"""What the host spends on a store: processor time of the calling thread, and the time of look-ups."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.replay.latencies import Latencies
from agent.replay.player import BlockStore
from host_shim.control_wire import Outcome
from host_shim.pool import Fetched

T = TypeVar("T")


class MeteredStore:
    """Passes calls on. For one thread; making and comparing contents is not in the figures."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.seconds = 0.0
        """Processor time of this thread in the calls so far, the kernel's work for them included."""
        self.lookup_latencies = Latencies()

    def lookup(self, keys: Sequence[bytes]) -> list[Outcome | None]:
        began = time.monotonic()
        found = self._metered(lambda: self._store.lookup(keys))
        self.lookup_latencies.add(time.monotonic() - began)
        return found

    def prestage(self, keys: Sequence[bytes]) -> list[bool]:
        return self._metered(lambda: self._store.prestage(keys))

    def fetch(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Fetched]:
        return self._metered(lambda: self._store.fetch(keys, buffers))

    def put(self, key: bytes, data: memoryview) -> bool:
        return self._metered(lambda: self._store.put(key, data))

    def _metered(self, call: Callable[[], T]) -> T:
        before = time.thread_time()
        try:
            return call()
        finally:
            self.seconds += time.thread_time() - before
