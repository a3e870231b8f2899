"""Events and records of the connectors of SGLang and LMCache, with modules of their shape."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from host_shim import named_values
from host_shim.control_wire import Outcome, decode_name_form_untrusted, key_of_long_name
from host_shim.pool import Pool
from tests.support.engines.fake_engines import (
    HiCacheStorageConfig,
    ObjectKey,
    connector_with_fake_engine,
)
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until
from tests.unit.host_shim.test_lmcache_l2 import KEYS as CHUNKS
from tests.unit.host_shim.test_lmcache_l2 import load, look_up, store
from tests.unit.host_shim.test_sglang_hicache import PAGE_TOKENS, HostPool

KEYS = [f"{at:016x}{at:048x}" for at in range(6)]


class Form:
    """A structure of SGLang's events, which knows its fields."""

    __struct_fields__: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        assert set(fields) <= set(self.__struct_fields__)
        self.fields = fields


class BlockStored(Form):
    __struct_fields__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")


class BlockRemoved(Form):
    __struct_fields__ = ("block_hashes",)  # of a version that names no medium there


class KVEventBatch(Form):
    __struct_fields__ = ("ts", "events")


class Published:
    """In the place of a publisher's socket."""

    def __init__(self, *_words: object, **_options: object) -> None:
        self.batches: list[Any] = []
        self.skipped = 0
        self.closed = False
        published.append(self)

    def publish(self, batch: Any) -> None:
        self.batches.append(batch)

    def skip(self, count: int) -> None:
        self.skipped += count

    def shutdown(self) -> None:
        self.closed = True

    close = shutdown


published: list[Published] = []


@pytest.fixture(autouse=True)
def _nothing_published() -> None:
    published.clear()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ScriptedAgent:
    made = ScriptedAgent()
    monkeypatch.setattr(named_values, "Pool", functools.partial(Pool, files=made))
    return made


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with connector_with_fake_engine("host_shim.sglang_hicache") as module:
        events = SimpleNamespace(
            BlockStored=BlockStored,
            BlockRemoved=BlockRemoved,
            KVEventBatch=KVEventBatch,
            ZmqEventPublisher=Published,
        )
        monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.kv_events", events)
        yield module


def hicache(module: ModuleType, rank: int = 0) -> Any:
    options = {"mount": "/nowhere", "events": "tcp://*:5558", "prestage": False}
    made = module.G35HiCache(HiCacheStorageConfig({"g35": options}, tp_rank=rank, tp_size=2))
    made.register_mem_pool_host(HostPool())
    return made


def pages(*numbers: int) -> list[int]:
    return [page * PAGE_TOKENS + at for page in numbers for at in range(PAGE_TOKENS)]


def told() -> list[tuple[str, list[int]]]:
    return [
        (type(event).__name__, event.fields["block_hashes"])
        for batch in published[0].batches
        for event in batch.fields["events"]
    ]


def test_sglangs_publisher_hears_of_pages_stored_and_found_gone(
    sglang: ModuleType, agent: ScriptedAgent
) -> None:
    backend = hicache(sglang)
    assert backend.batch_set_v1(KEYS[:3], pages(0, 1, 2)) == [True] * 3
    wait_until(told, 10, "the event")
    agent.values.clear()
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_get_v1(KEYS[2:3], pages(2)) == [False]
    wait_until(lambda: sum(len(keys) for _, keys in told()) == 6, 10, "the others")
    assert told()[0] == ("BlockStored", [0, 1, 2])
    assert [key for form, keys in told()[1:] for key in keys if form == "BlockRemoved"] == [0, 1, 2]
    backend.close()
    assert published[0].closed


@pytest.mark.parametrize(
    ("key", "number"),
    [("00" * 32, 0), ("7f" + "ff" * 31, (1 << 63) - 1), ("80" + "00" * 31, -(1 << 63)), ("no hash", None)],
)
def test_a_page_has_sglangs_own_number_in_events(sglang: ModuleType, key: str, number: int | None) -> None:
    assert sglang.event_hash(key) == number


def test_one_rank_tells_of_all(sglang: ModuleType, agent: ScriptedAgent) -> None:
    other = hicache(sglang, rank=1)
    assert published == []
    other.close()


def test_sglang_without_its_publisher_is_said_at_the_start(
    sglang: ModuleType, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.kv_events", None)
    with pytest.raises(ValueError, match="want SGLang's publisher"):
        hicache(sglang)
    assert agent.open_files == 0


def test_a_question_of_sglangs_is_reported(sglang: ModuleType, agent: ScriptedAgent) -> None:
    backend = hicache(sglang)
    backend.batch_set_v1(KEYS[:2], pages(0, 1))
    assert backend.batch_exists(KEYS[:2]) == 2
    assert backend.batch_get_v1(KEYS[:2], pages(0, 1)) == [True, True]
    [report] = wait_until(agent.reports, 10, "the report") or []
    assert (report[:5], report.cause) == ((2, 2, 2, 0, 2), Outcome.HIT)
    assert backend.batch_exists(KEYS[:4]) == 2
    backend.close()
    assert [each[:3] for each in agent.reports()] == [(2, 2, 2), (4, 2, 2)]
    assert agent.reports()[1].cause is Outcome.NEVER_STORED


def test_the_form_of_names_makes_the_keys_that_sglang_stores_under(
    sglang: ModuleType, agent: ScriptedAgent
) -> None:
    backend = hicache(sglang)
    backend.batch_set_v1(KEYS[1:2], pages(0))
    form = decode_name_form_untrusted(backend.name_form().describe())
    assert list(agent.values) == [("kv", key_of_long_name(form.name(bytes.fromhex(KEYS[1]))))]
    backend.close()


@pytest.fixture
def lmcache() -> Iterator[ModuleType]:
    with connector_with_fake_engine("host_shim.lmcache_l2") as module:
        yield module


def test_lmcaches_adapter_publishes_in_vllms_form(
    lmcache: Any, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache, "ZmqPublisher", Published)
    adapter = lmcache.G35L2Adapter({"mount": "/nowhere", "events": "tcp://*:5558"})
    store(adapter, CHUNKS[:2], [b"a" * 10, b"b" * 10])
    ranks = [ObjectKey(CHUNKS[0].chunk_hash, kv_rank=1)]
    store(adapter, ranks, [b"c" * 10])
    wait_until(lambda: published[0].batches, 10, "the event")
    agent.values.clear()
    assert look_up(adapter, CHUNKS[:1]) == [False]
    assert load(adapter, CHUNKS[1:2], [10]) == [None]
    events = lambda: [each for batch in published[0].batches for each in batch]  # noqa: E731
    hashes = [each.chunk_hash for each in CHUNKS]
    wait_until(lambda: sum(len(each.keys) for each in events()) == 4, 10, "what is gone")
    assert [each.removed for each in events() for _ in each.keys] == [False, False, True, True]
    assert [key for each in events() for key in each.keys] == [hashes[0], hashes[1], hashes[0], hashes[1]]
    status = adapter.report_status()
    assert status["events"] == {"told": 4, "lost": 0}
    adapter.close()
    assert published[0].closed
    assert adapter.watch.status()["prefixes"]["requests"] == 1


def test_the_form_of_names_makes_the_keys_that_lmcache_stores_under(
    lmcache: Any, agent: ScriptedAgent
) -> None:
    adapter = lmcache.G35L2Adapter({"mount": "/nowhere"})
    store(adapter, CHUNKS[:1], [b"a" * 10])
    form = decode_name_form_untrusted(lmcache.name_form(CHUNKS[1]).describe())
    assert list(agent.values) == [("kv", key_of_long_name(form.name(CHUNKS[0].chunk_hash)))]
    adapter.close()


@pytest.mark.parametrize("events", [5, "here", ["tcp://*:1"], "tcp://*:99999", "tcp://*:0", "tcp://*"])
def test_an_address_that_makes_no_sense_stops_the_engine_at_its_start(lmcache: Any, events: object) -> None:
    with pytest.raises(ValueError, match='"events"'):
        lmcache.G35L2Adapter({"mount": "/nowhere", "events": events})
