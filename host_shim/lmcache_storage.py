"""LMCache: a storage plug-in of its in-process mode. Imported by LMCache alone, which has to be installed.

    storage_plugins: ["g35"]
    extra_config:
      storage_plugin.g35.module_path: host_shim.lmcache_storage
      storage_plugin.g35.class_name: G35StorageBackend
      g35.mount: /mnt/g35
      g35.volume: kv

Everything runs on threads of our own; `contains` and `get_blocking` wait for them, LOOKUP_SECONDS and
LOAD_SECONDS at most. A later answer counts as a miss, and while it is still due every question is a miss at
once: an agent that hangs costs an engine one wait. Chunks are loaded into memory of LMCache's CPU back-end,
which has it back when the transfer has ended. A key of one layer (`use_layerwise`) is never stored: nothing
says what shape it has.

Written for lmcache 0.5.6 (lmcache/v1/storage_backend/abstract_backend.py).
"""

import asyncio
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from host_shim.block_watch import BlockWatch
from host_shim.connector_jobs import JobRunner
from host_shim.connector_options import PublisherOptions
from host_shim.kv_events import ZmqPublisher
from host_shim.named_values import NamedValues, name_of
from host_shim.prefix_records import leading_hits

_log = logging.getLogger(__name__)

T = TypeVar("T")
OPTION_PREFIX = "g35."
LOOKUP_SECONDS = 2.0
"""What a question of LMCache's scheduler may take; a pool that works answers in a millisecond."""
LOAD_SECONDS = 30.0


class _ChunkLayout:
    """What a whole chunk consists of: a tensor for each group of like layers, one behind another."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata
        self.shapes, self.dtypes = metadata.get_shapes(), metadata.get_dtypes()
        # These two are what RemoteConnector.reshape_partial_chunk reads of its `self`.
        self.full_chunk_size_bytes = sum(self._sizes(self.shapes))
        self.single_token_size = self.full_chunk_size_bytes // metadata.chunk_size

    def of_length(self, room: Any, length: int | None) -> Any:
        """Memory of a whole chunk as the chunk that is in it: the last of a request may have fewer tokens.

        None, and the memory is given back, where that is no chunk of this engine's.
        """
        if length is not None:
            try:
                if len(self.shapes) == 1:
                    return RemoteConnector.reshape_partial_chunk(self, room, length)
                return self._of_groups(room, length)
            except ValueError:
                pass  # no whole number of tokens: not what this engine stores
        room.ref_count_down()
        return None

    def _of_groups(self, room: Any, length: int) -> Any:
        """reshape_partial_chunk for several groups, which LMCache's own does not know (lmcache 0.5.6)."""
        if length != self.full_chunk_size_bytes:
            shapes = self._metadata.get_shapes(length // self.single_token_size)
            sizes = self._sizes(shapes)
            if not length or sum(sizes) != length:
                raise ValueError(f"{length} bytes are no whole number of tokens")
            room.meta.shape, room.meta.shapes = shapes[0], shapes
            room.group_prefix_sum = [0, *itertools.accumulate(sizes)]
        return room

    def _sizes(self, shapes: Sequence[Any]) -> list[int]:
        return [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, self.dtypes, strict=True)]


class G35StorageBackend(StoragePluginInterface):  # type: ignore[misc]
    """See the module. `extra_config` holds the keys of `PublisherOptions`, each after `g35.`."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if metadata is None or local_cpu_backend is None:
            raise ValueError("g35's storage plug-in loads into LMCache's CPU back-end: set local_cpu: true")
        extra = config.extra_config or {}
        self._options = PublisherOptions.from_dict(
            {
                key.removeprefix(OPTION_PREFIX): each
                for key, each in extra.items()
                if key.startswith(OPTION_PREFIX)
            }
        )
        self._metadata = metadata
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        chunk_bytes = self._layout().full_chunk_size_bytes
        options = self._options
        self._values = NamedValues.opened(options, chunk_bytes)
        publisher = partial(
            ZmqPublisher, options.events, options.events_topic, block_size=metadata.chunk_size
        )
        self.watch = BlockWatch(self._values, _names, _event_hash, publisher if options.events else None)
        allocates_by = inspect.signature(local_cpu_backend.allocate).parameters
        # By default it waits until somebody gives memory back, which we may be holding meanwhile.
        self._at_once = {"busy_loop": False} if "busy_loop" in allocates_by else {}
        self._askers = JobRunner("g35-lmcache-ask", self._options.threads)
        self._readers = JobRunner("g35-lmcache-load", self._options.threads)
        self._writers = JobRunner("g35-lmcache-store", self._options.threads)
        self._lock = threading.Lock()
        self._storing: set[Any] = set()
        self._overdue: set[Future[Any]] = set()

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many chunks from the first on are there, in one round trip; those are prestaged."""
        return self._within(LOOKUP_SECONDS, self._askers, lambda: self._leading(keys), 0)

    def _leading(self, keys: list[Any]) -> int:
        found = self._values.lookup_leading(_names(keys), prestage=self._options.prestage)
        self.watch.looked_up(keys, found)
        return leading_hits(found)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await self._awaited(lambda: self._leading(keys), 0)

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._storing

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Store chunks, later. Storing is best effort: what fails is missing, and no error to the engine."""
        with self._lock:
            chosen = [
                (key, each)
                for key, each in zip(keys, objs, strict=True)
                if key not in self._storing and not hasattr(key, "layer_id")
            ]
            self._storing.update(key for key, _ in chosen)
        if not chosen:
            return
        for _, each in chosen:
            each.ref_count_up()

        def store() -> list[bool]:
            names = _names([key for key, _ in chosen])
            stored = self._values.store(names, [[each.byte_array] for _, each in chosen])
            self.watch.stored([key for key, _ in chosen], stored)
            return stored

        def end(stored: list[bool]) -> None:
            for _, each in chosen:
                each.ref_count_down()
            with self._lock:
                self._storing.difference_update(key for key, _ in chosen)
            for (key, _), well in zip(chosen, stored, strict=True):
                if well and on_complete_callback is not None:
                    _call(on_complete_callback, key)

        self._writers.ask(store, end, [False] * len(chosen))

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Chunks by their keys, None for each that is a miss or for which LMCache has no memory."""
        nothing = [None] * len(keys)
        return self._within(LOAD_SECONDS, self._readers, lambda: self._loaded(keys), nothing, _give_back)

    def _loaded(self, keys: list[Any]) -> list[Any]:
        rooms: list[Any] = []
        layout = self._layout()
        for _ in keys:
            room = self.local_cpu_backend.allocate(
                layout.shapes, layout.dtypes, self._format, **self._at_once
            )
            if room is None:
                break
            rooms.append(room)
        chunks: list[Any] = [None] * len(keys)
        names = _names(keys[: len(rooms)])
        began = time.monotonic()
        found = self._values.load(names, [[each.byte_array] for each in rooms], exact=False)
        if rooms:
            done = [length is not None for length in found]
            took = time.monotonic() - began
            self.watch.loaded(keys[: len(rooms)], done, layout.full_chunk_size_bytes, took)
        for at, (room, length) in enumerate(zip(rooms, found, strict=True)):
            chunks[at] = layout.of_length(room, length)
        return chunks

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """The chunks from the first on, up to the first miss."""

        def load() -> list[Any]:
            chunks = self._loaded(keys)
            end = chunks.index(None) if None in chunks else len(chunks)
            _give_back(chunks[end:])
            return chunks[:end]

        return await self._awaited(load, [], _give_back)

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[Any]:
        return self._started(
            self._readers, lambda: self._loaded([key])[0], None, lambda chunk: _give_back([chunk])
        )

    def pin(self, key: Any) -> bool:
        """Nothing is pinned: a chunk that is evicted before it is loaded is a miss."""
        return True

    def unpin(self, key: Any) -> bool:
        return True

    def touch_cache(self) -> None:
        """Nothing: a read counts as a use in the pool."""

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        return self._within(LOOKUP_SECONDS, self._askers, lambda: sum(self._values.forget(_names(keys))), 0)

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """See `BlockWatch.close`."""
        self.watch.close(self._askers, self._readers, self._writers)

    def _layout(self) -> _ChunkLayout:
        """That of now: LMCache groups a model's layers when it has seen their memory, after our start."""
        return _ChunkLayout(self._metadata)

    async def _awaited(
        self, work: Callable[[], T], failed: T, unwanted: Callable[[T], None] | None = None
    ) -> T:
        future = self._started(self._readers, work, failed, unwanted)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if unwanted is not None:  # for a result that was there before the cancellation; see `_started`
                future.add_done_callback(lambda ended: ended.cancelled() or unwanted(ended.result()))
            raise

    def _within(
        self,
        seconds: float,
        runner: JobRunner,
        work: Callable[[], T],
        failed: T,
        unwanted: Callable[[T], None] | None = None,
    ) -> T:
        """What `work` gives, or `failed` where that takes longer, or another such answer is still due."""
        with self._lock:
            if self._overdue:
                return failed
        future = self._started(runner, work, failed, unwanted)
        try:
            return future.result(seconds)
        except TimeoutError:
            with self._lock:
                self._overdue.add(future)
            if future.cancel():
                return failed
            with self._lock:
                self._overdue.discard(future)
            return future.result()  # it came just now

    def _started(
        self, runner: JobRunner, work: Callable[[], T], failed: T, unwanted: Callable[[T], None] | None = None
    ) -> Future[T]:
        """`work` as a future, `failed` where it raises or never runs; `unwanted` has what nobody takes."""
        future: Future[T] = Future()

        def end(result: T) -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
                return
            with self._lock:
                self._overdue.discard(future)
            if unwanted is not None:
                unwanted(result)

        runner.ask(lambda: failed if future.cancelled() else work(), end, failed, urgent=True)
        return future


def _give_back(chunks: Sequence[Any]) -> None:
    for each in chunks:
        if each is not None:
            each.ref_count_down()


def _names(keys: Sequence[Any]) -> list[bytes]:
    """The whole key as LMCache writes it: model, world size, worker, hash, type and tags."""
    return [name_of("lmcache", key.to_string()) for key in keys]


def _event_hash(key: Any) -> Hashable | None:
    """A chunk's hash as LMCache has it: a number, or bytes."""
    found: Hashable | None = getattr(key, "chunk_hash", None)
    return found


def _call(callback: Callable[[Any], None], key: Any) -> None:
    try:
        callback(key)
    except Exception:
        _log.exception("LMCache's callback for a stored chunk failed")
