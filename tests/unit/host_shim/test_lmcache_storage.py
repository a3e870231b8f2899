"""LMCache's in-process storage plug-in against modules of LMCache's shape."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from host_shim import named_values
from host_shim.pool import Pool
from tests.support.engines.drained import drained
from tests.support.engines.fake_engines import CacheEngineKey, Memory, connector_with_fake_engine
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

CHUNK_BYTES, TOKENS = 256, 16
KEYS = [CacheEngineKey(f"org/model@1@0@{at:x}@half") for at in range(5)]


class CpuBackend:
    """Memory for loaded chunks: `left` of them."""

    def __init__(self) -> None:
        self.left = 100
        self.given: list[Memory] = []

    def allocate(self, shapes: Any, dtypes: Any, layout: Any, busy_loop: bool = True) -> Memory | None:
        assert not busy_loop, "it would wait for memory that this load may hold itself"
        if not self.left:
            return None
        self.left -= 1
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        self.given.append(Memory(bytearray(size)))
        return self.given[-1]


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def module(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with connector_with_fake_engine("host_shim.lmcache_storage") as module:
        monkeypatch.setattr(named_values, "Pool", functools.partial(Pool, files=agent))
        yield module


class Metadata:
    """Of an engine: `widths`, bytes a token of each group of its layers. LMCache learns the groups late."""

    use_mla, chunk_size = False, TOKENS

    def __init__(self, *widths: int) -> None:
        self.widths = widths

    def get_shapes(self, tokens: int = TOKENS) -> list[Any]:
        return [SimpleNamespace(numel=lambda size=tokens * width // 2: size) for width in self.widths]

    def get_dtypes(self) -> list[Any]:
        return [SimpleNamespace(itemsize=2)] * len(self.widths)


def made(
    module: ModuleType,
    cpu: CpuBackend | None,
    chunk_bytes: int = CHUNK_BYTES,
    metadata: Metadata | None = None,
    **options: Any,
) -> Any:
    extra = {"g35.mount": "/nowhere", "storage_plugin.g35.module_path": "host_shim.lmcache_storage"}
    extra |= {f"g35.{key}": value for key, value in options.items()}
    metadata = metadata or Metadata(chunk_bytes // TOKENS)
    return module.G35StorageBackend("cpu", SimpleNamespace(extra_config=extra), metadata, cpu, None)


class Held:
    """Reads of an agent that answers when it is let."""

    def __init__(self, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.come, self.go, self._real = threading.Event(), threading.Event(), agent.preadv
        monkeypatch.setattr(agent, "preadv", self)

    def __call__(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.come.set()
        assert self.go.wait(20)
        return self._real(descriptor, into, offset)


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def backend(module: ModuleType, cpu: CpuBackend, agent: ScriptedAgent) -> Iterator[Any]:
    backend = made(module, cpu)
    yield backend
    backend.close()
    assert agent.open_files == 0


def put(backend: Any, keys: list[CacheEngineKey], values: list[bytes], **more: Any) -> list[Memory]:
    chunks = [Memory(bytearray(value)) for value in values]
    backend.batched_submit_put_task(keys, chunks, **more)
    wait_until(lambda: not any(map(backend.exists_in_put_tasks, keys)), 10)
    return chunks


def test_chunks_come_back_and_a_short_one_is_shorter(backend: Any, cpu: CpuBackend) -> None:
    completed: list[CacheEngineKey] = []
    chunks = put(
        backend,
        KEYS[:2],
        [b"a" * CHUNK_BYTES, b"b" * (CHUNK_BYTES // 2)],
        on_complete_callback=completed.append,
    )
    assert [chunk.references for chunk in chunks] == [1, 1]
    wait_until(lambda: completed == KEYS[:2], 10)
    first, second, missing = backend.batched_get_blocking(KEYS[:3])
    assert first.length == CHUNK_BYTES
    assert bytes(first.data) == b"a" * CHUNK_BYTES
    assert second.length == CHUNK_BYTES // 2
    assert missing is None
    assert [room.references for room in cpu.given] == [1, 1, 0]  # what is not handed over is given back


def test_chunks_of_groups_that_lmcache_learned_late_come_back(
    module: ModuleType, agent: ScriptedAgent, cpu: CpuBackend
) -> None:
    metadata = Metadata(16)
    backend = made(module, cpu, metadata=metadata)
    metadata.widths = (8, 2, 20)
    whole, half, strange = (bytes(range(size % 250)) * 4 for size in (120, 60, 55))
    put(backend, KEYS[:3], [whole, half, strange])
    first, second, third = backend.batched_get_blocking(KEYS[:3])
    assert bytes(first.data) == whole
    assert bytes(second.data[: len(half)]) == half
    assert second.group_prefix_sum == [0, 8 * 8, 8 * 10, 8 * 30]
    assert [shape.numel() for shape in second.meta.shapes] == [32, 8, 80]
    assert second.meta.shape is second.meta.shapes[0]
    assert third is None  # no whole number of tokens
    assert cpu.given[2].references == 0
    backend.close()
    assert agent.open_files == 0


def test_prefixes_pins_and_removal(backend: Any, agent: ScriptedAgent) -> None:
    put(backend, [KEYS[0], KEYS[1], KEYS[3]], [b"v" * 16] * 3)
    assert backend.batched_contains(KEYS) == 2
    assert len(agent.prestaged) == 2
    assert backend.contains(KEYS[3], pin=True)
    assert backend.pin(KEYS[3])
    assert backend.unpin(KEYS[3])
    backend.touch_cache()
    assert backend.batched_remove(KEYS) == 3
    assert not backend.remove(KEYS[0])
    assert not backend.contains(KEYS[0])


def test_what_is_no_whole_number_of_tokens_is_a_miss(backend: Any, cpu: CpuBackend) -> None:
    put(backend, KEYS[:1], [b"v" * 17])
    assert backend.get_blocking(KEYS[0]) is None
    assert cpu.given[0].references == 0


def test_without_memory_a_chunk_is_a_miss(backend: Any, cpu: CpuBackend) -> None:
    put(backend, KEYS[:3], [b"v" * 16] * 3)
    cpu.left = 1
    found = backend.batched_get_blocking(KEYS[:3])
    assert [chunk is None for chunk in found] == [False, True, True]


def test_a_key_of_one_layer_is_not_stored(backend: Any, agent: ScriptedAgent) -> None:
    class LayerKey(CacheEngineKey):
        layer_id = 3

    backend.batched_submit_put_task([LayerKey("layer 3")], [Memory(bytearray(16))])
    assert agent.values == {}


def test_what_the_loop_awaits_does_not_hold_it(
    module: ModuleType, cpu: CpuBackend, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of the loop is 1 ms at most while the agent takes its time: the median, on a busy machine."""
    backend = made(module, cpu)
    put(backend, KEYS[:2], [b"v" * 16] * 2)
    go = threading.Event()
    inner = agent.preadv

    def held(descriptor: int, into: memoryview, offset: int) -> int:
        assert go.wait(30)
        return inner(descriptor, into, offset)

    monkeypatch.setattr(agent, "preadv", held)

    async def engine() -> tuple[int, list[Any], list[float]]:
        asked = asyncio.create_task(backend.batched_async_contains("lookup", KEYS))
        loading = asyncio.create_task(backend.batched_get_non_blocking("lookup", KEYS))
        storing = backend.async_batched_submit_put_task(KEYS[3:], [Memory(bytearray(16)) for _ in KEYS[3:]])
        turns = []
        await storing
        for _ in range(200):
            before = time.perf_counter()
            await asyncio.sleep(0)
            turns.append(time.perf_counter() - before)
        assert not asked.done()
        assert not loading.done()
        go.set()
        return await asked, await loading, turns

    found, chunks, turns = asyncio.run(engine())
    assert found >= 2
    assert len(chunks) >= 2
    assert sorted(turns)[len(turns) // 2] < 0.001
    backend.close()


def test_non_blocking_gets_end_at_the_first_miss(backend: Any, cpu: CpuBackend) -> None:
    put(backend, [KEYS[0], KEYS[2]], [b"v" * 16] * 2)
    chunks = asyncio.run(backend.batched_get_non_blocking("lookup", KEYS[:3]))
    assert len(chunks) == 1
    assert [room.references for room in cpu.given] == [1, 0, 0]
    future = backend.get_non_blocking(KEYS[2])
    wait([future], timeout=10)
    assert future.result().length == 16


def test_a_dead_agent_is_misses_and_lost_stores_until_it_is_back(
    backend: Any, agent: ScriptedAgent, cpu: CpuBackend
) -> None:
    put(backend, KEYS[:1], [b"v" * 16])
    agent.kill()
    (chunk,) = put(backend, KEYS[1:2], [b"w" * 16])
    assert chunk.references == 1
    assert backend.get_blocking(KEYS[0]) is None
    assert not backend.contains(KEYS[0])
    assert asyncio.run(backend.batched_async_contains("lookup", KEYS)) == 0
    agent.restart()
    wait_until(lambda: backend.contains(KEYS[0]), 10)
    assert backend.batched_contains(KEYS) == 1


def test_after_close_everything_is_a_miss(
    module: ModuleType, cpu: CpuBackend, expects_log: Callable[..., None]
) -> None:
    expects_log("refuses blocks: the pool is closed")
    backend = made(module, cpu)
    backend.close()
    chunk = Memory(bytearray(16))
    backend.batched_submit_put_task(KEYS[:1], [chunk])
    assert chunk.references == 1
    assert backend.get_blocking(KEYS[0]) is None
    assert asyncio.run(backend.batched_async_contains("lookup", KEYS)) == 0


def test_a_callback_that_raises_does_not_stop_the_others(
    backend: Any, expects_log: Callable[..., None]
) -> None:
    expects_log("LMCache's callback for a stored chunk failed")
    called: list[CacheEngineKey] = []

    def callback(key: CacheEngineKey) -> None:
        called.append(key)
        raise RuntimeError("of the engine")

    put(backend, KEYS[:2], [b"v" * 16] * 2, on_complete_callback=callback)
    wait_until(lambda: called == KEYS[:2], 10)


def test_wrong_settings_are_said_at_the_start(
    module: ModuleType, cpu: CpuBackend, agent: ScriptedAgent
) -> None:
    with pytest.raises(ValueError, match="do not fit into the slots"):
        made(module, cpu, chunk_bytes=1 << 20)
    with pytest.raises(ValueError, match="unknown options tenant"):
        made(module, cpu, tenant="t")
    with pytest.raises(ValueError, match="local_cpu: true"):
        made(module, None)
    assert agent.open_files == 0


def test_an_agent_that_hangs_costs_one_wait_and_the_memory_comes_back(
    module: ModuleType, backend: Any, agent: ScriptedAgent, cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, KEYS[:2], [b"v" * 16] * 2)
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.01)
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.01)
    held, real = Held(agent, monkeypatch), backend._started

    def started(*given: Any) -> Any:
        """Its time begins when the read has, which may be late on a busy machine."""
        future = real(*given)
        assert held.come.wait(10)
        return future

    with monkeypatch.context() as patched:
        patched.setattr(backend, "_started", started)
        assert backend.batched_get_blocking(KEYS[:2]) == [None, None]
    assert [room.references for room in cpu.given] == [1, 1], "a read may still land there"
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 20)
    assert not backend.contains(KEYS[0])
    assert backend.batched_remove(KEYS) == 0
    held.go.set()
    wait_until(lambda: [room.references for room in cpu.given] == [0, 0], 10)
    wait_until(lambda: backend.contains(KEYS[0]), 10)
    held.go.clear()
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.01)
    assert not backend.contains(KEYS[0])
    held.go.set()
    monkeypatch.setattr(module, "LOAD_SECONDS", 20)
    wait_until(lambda: backend.get_blocking(KEYS[0]) is not None, 10)


@pytest.mark.parametrize("late", [False, True], ids=["before it is there", "after it is there"])
def test_a_load_that_is_cancelled_gives_its_memory_back(
    backend: Any, agent: ScriptedAgent, cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    put(backend, KEYS[:2], [b"v" * 16] * 2)
    held = Held(agent, monkeypatch)

    async def engine() -> None:
        loading = asyncio.create_task(backend.batched_get_non_blocking("lookup", KEYS[:2]))
        await asyncio.sleep(0)
        assert held.come.wait(10)
        if late:  # the loop learns of the result only after the cancellation
            held.go.set()
            assert drained(backend._readers, 10)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        held.go.set()

    asyncio.run(engine())
    wait_until(lambda: [room.references for room in cpu.given] == [0, 0], 10)


def test_closing_answers_what_waits_and_gives_its_memory_back(
    module: ModuleType, cpu: CpuBackend, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(module, cpu, threads=1)
    put(backend, KEYS[:1], [b"v" * 16])
    held, real = Held(agent, monkeypatch), agent.pwrite

    def held_write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        assert held.go.wait(20)
        return real(descriptor, data, offset)

    loads = [backend.get_non_blocking(KEYS[0]) for _ in range(3)]
    assert held.come.wait(10)
    monkeypatch.setattr(agent, "pwrite", held_write)
    chunks = [Memory(bytearray(16)) for _ in KEYS[1:]]
    for key, chunk in zip(KEYS[1:], chunks, strict=True):
        backend.batched_submit_put_task([key], [chunk])
    wait_until(lambda: len(backend._writers._rest) == len(chunks) - 1, 10)

    def let_go() -> None:
        wait_until(loads[-1].done, 10, "what waits to be answered")
        held.go.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    backend.close()
    letting_go.join(10)
    assert [load.result(10) is None for load in loads] == [False, True, True]
    assert [chunk.references for chunk in chunks] == [1] * len(chunks)
    assert not backend._storing
    assert agent.open_files == 0
