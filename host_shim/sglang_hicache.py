"""SGLang: a `dynamic` storage back-end of HiCache. Imported by SGLang alone, which has to be installed.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "g35", "module_path": "host_shim.sglang_hicache", "class_name": "G35HiCache",
          "interface_v1": 1, "g35": {"mount": "/mnt/g35", "volume": "kv"}}'

With `interface_v1` pages move between the pool and the host memory pool where they lie. One page is one
value, whose pieces are moved by one system call. SGLang calls from its own threads, which may wait.

Written for sglang 0.5.23 (sglang/srt/mem_cache/hicache_storage.py).
"""

import ctypes
import importlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from host_shim.block_watch import BlockWatch
from host_shim.connector_options import HiCacheOptions
from host_shim.control_wire import NameForm, Outcome
from host_shim.kv_events import HWM, Told
from host_shim.named_values import NamedValues, name_of
from host_shim.prefix_records import leading_hits

_log = logging.getLogger(__name__)

_KV = "kv"
"""SGLang's own name of the pool that v1 calls are about."""

MEDIUM = "EXTERNAL"
"""SGLang's word for storage behind the host's memory."""

QUEUE_MAX = 64
"""Messages that wait for the thread of SGLang's publisher; nobody asks it for old ones."""
_Move: TypeAlias = Callable[[Sequence[bytes], Sequence[list[memoryview]]], Sequence[object]]
"""`load` or `store` of `NamedValues`: a length or True for each value that it moved."""


class G35HiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module. The extra-config's `g35` holds the keys of `HiCacheOptions`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._options = HiCacheOptions.from_dict(extra.get("g35") or {})
        self._values = NamedValues.opened(self._options)
        try:
            self._of_pool = {
                pool: self._values.beside(volume) for pool, volume in self._options.pools.items()
            }
        except BaseException:
            self._values.close()
            raise
        self._sharded, self._replicated = _shards(storage_config)
        self._is_mla = bool(storage_config.is_mla_model)
        self._complained = False
        self.mem_pool_host: Any = None
        self._host_pools: dict[str, Any] = {}
        self._told_form = False
        # Each rank has a part of the same pages: one of them tells of all.
        tells = self._options.events and not (storage_config.tp_rank or storage_config.pp_rank)
        publisher = partial(SglangPublisher, self._options.events, self._options.events_topic)
        self.watch = BlockWatch(
            self._values, partial(self._names, _KV), event_hash, publisher if tells else None
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self._host_pools[_text(host_pool_name)] = host_pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on are there, in one round trip; those are prestaged."""
        found = self._values.lookup_leading(self._names(_KV, keys), prestage=self._options.prestage)
        self.watch.looked_up(keys, found)
        return leading_hits(found)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host memory pool; which of them are there whole."""
        return self._moved(True, _KV, keys, self._pages(self.mem_pool_host, keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages out of the host memory pool; which of them are on flash."""
        return self._moved(False, _KV, keys, self._pages(self.mem_pool_host, keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A page as a tensor: `target_location`, filled. None for a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """`get` of many. Without a tensor for each page nobody knows its shape: all are misses."""
        if not keys or target_locations is None or len(target_locations) != len(keys):
            return [None] * len(keys)
        rooms = [_tensor_memory(each) for each in target_locations]
        whole = self._moved(True, _KV, keys, rooms)
        return [tensor if well else None for tensor, well in zip(target_locations, whole, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages given as tensors; whether all of them are on flash."""
        if values is None or len(values) != len(keys):
            return False
        # A copy that contiguous() made lives no longer than somebody has it, and a view has only its address.
        whole = [None if value is None else value.contiguous() for value in values]
        return all(self._moved(False, _KV, keys, [_tensor_memory(value) for value in whole]))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How long a prefix can be restored when other pools (states, windows) need their pages, too.

        Pools of `block_groups` hold a second form of the prefix under keys of their own: for each the result
        says how many pages its leading complete groups cover, and none makes the prefix shorter.
        """
        transfers = list(pool_transfers or ())
        grouped = [each.hit_policy == PoolHitPolicy.BLOCK_GROUPS for each in transfers]
        asked = [self._names(_KV, keys)]
        for each, in_groups in zip(transfers, grouped, strict=True):
            asked.append(self._names(_text(each.name), (each.keys or ()) if in_groups else keys))
        outcomes = self._looked_up([_KV, *(_text(each.name) for each in transfers)], asked)
        self.watch.looked_up(keys, outcomes[: len(keys)])
        left = iter(outcomes)
        there = [[next(left) is Outcome.HIT for _ in names] for names in asked]
        pages = there[0].index(False) if False in there[0] else len(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for each, in_groups, has in zip(transfers, grouped, there[1:], strict=True):
            if in_groups:
                covered = min(_pages_of_groups(each, has), len(keys))
                if covered:
                    hits[each.name] = covered
                continue
            if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = pages
            elif each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(each.keys or ()))
            else:
                self._complain(f"hit policy {each.hit_policy} of pool {each.name}")
                return PoolTransferResult.empty()
            own = {end for end in range(1, pages + 1) if all(has[max(0, end - window) : end])}
            if own:
                hits[each.name] = max(own)
            restorable &= own
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _looked_up(self, pools: Sequence[str], asked: Sequence[Sequence[bytes]]) -> list[Outcome | None]:
        """Outcomes of the names of several pools, one behind another; a round trip for each volume."""
        places = [self._of_pool.get(pool, self._values) for pool in pools]
        answers = {
            values: iter(
                values.lookup(
                    [name for at, names in zip(places, asked, strict=True) if at is values for name in names]
                )
            )
            for values in dict.fromkeys(places)
        }
        return [next(answers[at]) for at, names in zip(places, asked, strict=True) for _ in names]

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._moved_v2(True, transfers)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._moved_v2(False, transfers)

    def clear(self) -> bool:
        """Not done: the pool does not list what it holds, and other engines' blocks are in it."""
        self._complain("clearing the storage: blocks go when they expire or when their slots are needed;")
        return False

    def close(self) -> None:
        """Wait for calls under way, some seconds at most: they move SGLang's memory."""
        self.watch.close()

    def name_form(self, pool: str = _KV) -> NameForm:
        """How a router makes names of this engine's page hashes (docs/query.md)."""
        return NameForm(name_of("sglang"), name_of(*self._beside_the_hash(pool)), is_text=True)

    def _names(self, pool: str, keys: Sequence[str]) -> list[bytes]:
        """The full identity of pages: what is stored, of which model and shard, in which layout."""
        beside = self._beside_the_hash(pool)
        if pool == _KV and not self._told_form and keys:
            self._told_form = True
            _log.info("names of pages, for queries: %s", json.dumps(self.name_form().describe()))
        return [name_of("sglang", key, *beside) for key in keys]

    def _beside_the_hash(self, pool: str) -> tuple[str | int, ...]:
        host_pool = self._host_pools.get(pool, self.mem_pool_host)
        layout = getattr(host_pool, "layout", "")
        dtype = getattr(host_pool, "dtype", "")
        page = getattr(host_pool, "page_size", "")
        shard = self._replicated if self._is_mla and pool == _KV else self._sharded
        return (pool, layout, str(dtype), page, *shard)

    def _moved(
        self, is_load: bool, pool: str, keys: Sequence[str], memories: Sequence[list[memoryview] | None]
    ) -> list[bool]:
        """Which pages were loaded or stored whole; a page that has no memory is a miss."""
        usable = [(key, memory) for key, memory in zip(keys, memories, strict=True) if memory is not None]
        names = self._names(pool, [key for key, _ in usable])
        values = self._of_pool.get(pool, self._values)
        move: _Move = values.load if is_load else values.store
        began = time.monotonic()
        done = [bool(each) for each in move(names, [memory for _, memory in usable])]
        if pool == _KV and usable:
            moved = [key for key, _ in usable]
            if is_load:
                size = sum(map(len, usable[0][1]))
                self.watch.loaded(moved, done, size, time.monotonic() - began)
            else:
                self.watch.stored(moved, done)
        left = iter(done)
        return [memory is not None and next(left) for memory in memories]

    def _moved_v2(self, is_load: bool, transfers: Sequence[Any]) -> dict[Any, list[bool]]:
        moved = {}
        for each in transfers:
            pool, keys = _text(each.name), each.keys or []
            pages = self._pages(self._host_pools.get(pool), keys, each.host_indices)
            moved[each.name] = self._moved(is_load, pool, keys, pages)
        return moved

    def _pages(self, host_pool: Any, keys: Sequence[str], indices: Any) -> list[list[memoryview] | None]:
        """The memory of each key's page, piece by piece; None where SGLang cannot say where it lies."""
        nowhere: list[list[memoryview] | None] = [None] * len(keys)
        if not keys or host_pool is None or indices is None:
            return nowhere
        try:
            addresses, sizes = host_pool.get_page_buffer_meta(indices)
        except (ValueError, AssertionError, RuntimeError, AttributeError) as unknown:
            self._complain(f"no page buffers of this host pool: {unknown}")
            return nowhere
        pieces = len(addresses) // len(keys)
        if not pieces or pieces * len(keys) != len(addresses) or len(sizes) != len(addresses):
            self._complain(f"{len(addresses)} page buffers for {len(keys)} pages")
            return nowhere
        memories = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [memories[at * pieces : (at + 1) * pieces] for at in range(len(keys))]

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("the g35 back-end of HiCache cannot serve this: %s", what)


class SglangPublisher:
    """SGLang's own publisher and form of events, which routers for SGLang read."""

    def __init__(self, endpoint: str, topic: str) -> None:
        try:
            self._forms: Any = importlib.import_module("sglang.srt.disaggregation.kv_events")
        except ImportError as absent:
            raise ValueError(
                f"g35: events want SGLang's publisher, and {absent.name} cannot be imported: "
                'leave the option "events" out'
            ) from None
        try:
            self._publisher: Any = self._forms.ZmqEventPublisher(
                0, endpoint=endpoint, topic=topic, hwm=HWM, max_queue_size=QUEUE_MAX, buffer_steps=1
            )
        except Exception as refused:
            raise ValueError(f"g35: events cannot be published at {endpoint}: {refused}") from None

    def publish(self, told: Sequence[Told]) -> None:
        events = [self._event(each) for each in told]
        self._publisher.publish(self._forms.KVEventBatch(ts=time.time(), events=events))

    def _event(self, told: Told) -> Any:
        if told.removed:
            return _made(self._forms.BlockRemoved, block_hashes=told.keys, medium=MEDIUM)
        return _made(
            self._forms.BlockStored,
            block_hashes=told.keys,
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=MEDIUM,
        )

    def skip(self, count: int) -> None:
        """Leave numbers out, where SGLang's publisher counts as it did when this was written."""
        numbers: Any = getattr(self._publisher, "_seq_gen", None)
        for _ in range(0 if numbers is None else count):
            next(numbers)

    def close(self) -> None:
        self._publisher.shutdown()


def _made(form: Any, **fields: Any) -> Any:
    """An event of SGLang's, with those of the fields that its version has."""
    known = getattr(form, "__struct_fields__", fields)
    return form(**{name: value for name, value in fields.items() if name in known})


def event_hash(key: str) -> int | None:
    """A page's hash as SGLang's events have it: the first 64 bits, signed. None for what is no hash."""
    try:
        first = int(key[:16], 16)
    except ValueError:
        return None
    return first - (1 << 64) if first >= 1 << 63 else first


def _pages_of_groups(transfer: Any, there: Sequence[bool]) -> int:
    """How many pages of the prefix the leading complete groups of a pool of `block_groups` stand for.

    `there`: which of the pool's own keys have a value; `group_pages` of them stand for `block_pages` pages.
    """
    size = transfer.group_pages
    if size < 1 or transfer.block_pages < 1:
        return 0
    run: int = there.index(False) if False in there else len(there)
    pages: int = run // size * transfer.block_pages
    return pages


def _shards(config: Any) -> tuple[tuple[str | int, ...], tuple[str | int, ...]]:
    """What else than its key names a page: of a pool that is split over ranks, and of one that is not.

    The second has no tensor-parallel rank: those ranks hold the same and share their pages (MLA).
    """
    common: tuple[str | int, ...] = (
        config.model_name or "",
        "pp", config.pp_rank, config.pp_size,
        "cp", config.attn_cp_rank, config.attn_cp_size,
    )  # fmt: skip
    if config.dcp_size > 1:
        common += ("dcp", config.dcp_rank, config.dcp_size, config.tp_size, config.logical_page_size or 0)
    return (*common, "tp", config.tp_rank, config.tp_size), common


_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200
"""PyBUF_WRITE of CPython."""


def _memory(address: int, size: int) -> memoryview:
    """The engine's memory at an address; its users must have ended before the engine frees it.

    By CPython's own call, because a ctypes array would need a type for each size of a page.
    """
    view: memoryview = _view_of_memory(address, size, _WRITABLE)
    return view


def _tensor_memory(tensor: Any) -> list[memoryview] | None:
    """A page of one piece; None for no tensor, or one that does not lie in one piece."""
    if tensor is None or not tensor.is_contiguous():
        return None
    size = tensor.numel() * tensor.element_size()
    return [_memory(tensor.data_ptr(), size)] if size else None


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))
