"""LMCache: the L2 adapter of its multi-process mode. Imported by LMCache alone, which has to be installed.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "host_shim.lmcache_l2",
        "class_name": "G35L2Adapter", "adapter_params": {"mount": "/mnt/g35", "volume": "kv"}}'

LMCache submits tasks, waits at an eventfd for each kind of task and fetches the results. Loads and lookups do
not wait behind stores. A task is answered only when its transfer has ended, however long a mount holds it:
then LMCache gives the memory to others, and a late read would be a wrong block.

A lock of LMCache's is a prestage here: blocks are not kept from eviction. Written for lmcache 0.5.6
(lmcache/v1/distributed/l2_adapters/base.py).
"""

import json
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from host_shim.block_watch import BlockWatch
from host_shim.connector_jobs import JobRunner
from host_shim.connector_options import PublisherOptions
from host_shim.control_wire import NameForm, Outcome
from host_shim.kv_events import ZmqPublisher
from host_shim.named_values import NamedValues, name_of

_log = logging.getLogger(__name__)

RESULTS_MAX = 65536
"""Results nobody has fetched; beyond it the oldest goes, which LMCache sees as a task that never ends."""
SIZES_MAX = 65536
"""Sizes of stored blocks that are remembered for LMCache's own books."""


class _Lane:
    """Tasks of one kind: their eventfd and the results that wait to be fetched. Any thread."""

    def __init__(self) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Any] = OrderedDict()
        self._open = True

    def finish(self, task: int, result: Any) -> None:
        with self._lock:
            if not self._open:
                return
            self._results[task] = result
            if len(self._results) > RESULTS_MAX:
                self._results.popitem(last=False)
            os.eventfd_write(self.event, 1)

    def take(self, task: int) -> Any:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            taken, self._results = dict(self._results), OrderedDict()
            return taken

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.event)


class G35L2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See the module. `adapter_params` are the keys of `PublisherOptions`."""

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._options = options = PublisherOptions.from_dict(adapter_params)
        self._values = NamedValues.opened(options)
        publisher = partial(ZmqPublisher, options.events, options.events_topic) if options.events else None
        self.watch = BlockWatch(self._values, _names, lambda key: bytes(key.chunk_hash), publisher)
        self._told_form = False
        self._readers = JobRunner("g35-lmcache-load", options.threads)
        self._writers = JobRunner("g35-lmcache-store", options.threads)
        self._stores, self._lookups, self._loads = _Lane(), _Lane(), _Lane()
        self._lock = threading.Lock()
        self._last_task = 0
        self._sizes: OrderedDict[Any, int] = OrderedDict()
        self._counts: Counter[str] = Counter()  # approximate: threads count without a lock
        self._closed = False

    def get_store_event_fd(self) -> int:
        return self._stores.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event

    def get_load_event_fd(self) -> int:
        return self._loads.event

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store blocks; first write wins, and one that is there already counts as stored."""

        def store() -> Any:
            stored = self._values.store(_names(keys), [[each.byte_array] for each in objects])
            sizes = [int(each.get_size()) for each in objects]
            self.watch.stored(keys, stored)
            there = [at for at, well in enumerate(stored) if well]
            self._counts["stored"] += len(there)
            self._counts["refused"] += len(keys) - len(there)
            if there:
                self._remember([keys[at] for at in there], [sizes[at] for at in there])
                self._notify_keys_stored([keys[at] for at in there], [sizes[at] for at in there])
            return L2StoreResult(len(there) == len(keys), sum(sizes[at] for at in there))

        return self._start(self._writers, self._stores, store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Which blocks are there, in one round trip; those are prestaged, unless the options say not to."""

        def look_up() -> Any:
            self._tell_form(keys)
            found = self._values.lookup(_names(keys), prestage=self._options.prestage)
            self.watch.looked_up(keys, found)
            return _bitmap([one is Outcome.HIT for one in found])

        return self._start(self._readers, self._lookups, look_up, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing: what was prestaged leaves the agent's memory by itself."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load blocks into the memory of `objects`; a block whose length is not the object's is a miss."""

        def load() -> Any:
            rooms = [each.byte_array for each in objects]
            began = time.monotonic()
            found = self._values.load(_names(keys), [[room] for room in rooms])
            whole = [length == len(room) for length, room in zip(found, rooms, strict=True)]
            if keys:
                self.watch.loaded(keys, whole, len(rooms[0]), time.monotonic() - began)
            self._counts["loaded"] += sum(whole)
            self._counts["missed"] += len(whole) - sum(whole)
            loaded = [key for key, well in zip(keys, whole, strict=True) if well]
            if loaded:
                self._notify_keys_accessed(loaded)
            return _bitmap(whole)

        return self._start(self._readers, self._loads, load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Forget blocks, later; while there is no agent they stay, until the pool needs their slots."""

        def forget() -> None:
            gone = [key for key, well in zip(keys, self._values.forget(_names(keys)), strict=True) if well]
            if gone:
                self.watch.deleted(gone)
                with self._lock:
                    sizes = [self._sizes.pop(key, 0) for key in gone]
                self._notify_keys_deleted(gone, sizes)

        self._writers.submit(forget)

    def report_status(self) -> dict[str, Any]:
        """Counters, and whether the last task met an agent; waits for nothing."""
        return {
            "is_healthy": self._values.agent_seen and not self._closed,
            "type": type(self).__name__,
            "mount": self._options.mount,
            "volume": self._options.volume,
            **{what: self._counts[what] for what in ("stored", "refused", "loaded", "missed")},
            **self.watch.status(),
        }

    def close(self) -> None:
        """See `BlockWatch.close`."""
        if not self._closed:
            self._closed = True
            self.watch.close(self._readers, self._writers)
            for lane in (self._stores, self._lookups, self._loads):
                lane.close()

    def _start(self, runner: JobRunner, lane: _Lane, work: Callable[[], Any], failed: Any) -> int:
        with self._lock:
            self._last_task += 1
            task = self._last_task
        runner.ask(work, partial(lane.finish, task), failed)
        return task

    def _tell_form(self, keys: Sequence[Any]) -> None:
        if keys and not self._told_form:
            self._told_form = True
            _log.info("names of chunks, for queries: %s", json.dumps(name_form(keys[0]).describe()))

    def _remember(self, keys: Sequence[Any], sizes: Sequence[int]) -> None:
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                self._sizes[key] = size
            while len(self._sizes) > SIZES_MAX:
                self._sizes.popitem(last=False)


def name_form(key: Any) -> NameForm:
    """How a router makes names of the hashes of chunks that are like this one (docs/query.md)."""
    beside = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    return NameForm(name_of("lmcache l2"), name_of(*beside))


def _names(keys: Sequence[Any]) -> list[bytes]:
    return [name_form(key).name(key.chunk_hash) for key in keys]


def _bitmap(bits: Sequence[bool]) -> Any:
    found = Bitmap(len(bits))
    for at, well in enumerate(bits):
        if well:
            found.set(at)
    return found
