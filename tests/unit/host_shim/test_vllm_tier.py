"""The translation of vLLM's tier interface, with modules in vLLM's shape in the place of vLLM's own."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from host_shim.control_wire import Outcome, decode_name_form_untrusted, key_of_long_name
from host_shim.pool import Pool
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

CHUNK = 1024
CHUNKS = 16


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class Numbers(list[int]):
    """What the tier uses of a numpy array."""

    def tolist(self) -> list[int]:
        return list(self)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, spec: object, view: memoryview, tier_type: str, detector: object = None) -> None:
        assert view.strides is not None
        self.block_size_bytes = view.strides[0]
        self.tier_type = tier_type


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: object
    removed: bool
    locality: object = None


class FileMapper:
    rank = 0

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    @classmethod
    def from_offloading_spec(cls, *, offloading_spec: Any, **_options: object) -> FileMapper:
        return cls({"model_name": offloading_spec.model})

    def get_run_config(self) -> dict[str, object]:
        return self._fields


def _module(name: str, **content: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def tier_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    locality = enum.Enum("locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"})
    medium = enum.Enum("medium", {"STORAGE": "STORAGE"})
    base = _module(
        "vllm.v1.kv_offload.base",
        Locality=locality,
        LookupResult=LookupResult,
        Medium=medium,
        OffloadingEvent=OffloadingEvent,
        RequestOffloadingContext=SimpleNamespace,
    )
    modules = [
        _module(name) for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering")
    ]
    modules += [
        base,
        _module("vllm.v1.kv_offload.file_mapper", FileMapper=FileMapper),
        _module(
            "vllm.v1.kv_offload.tiering.base",
            JobResult=JobResult,
            SecondaryTierManager=SecondaryTierManager,
        ),
    ]
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, "host_shim.vllm_tier", raising=False)
    yield importlib.import_module("host_shim.vllm_tier")
    sys.modules.pop("host_shim.vllm_tier", None)


class Engine:
    """A scheduler that has one tier, and whose steps the test takes."""

    publishes = True

    def __init__(self, module: Any, agent: ScriptedAgent, model: str = "m", **options: object) -> None:
        self.memory = bytearray(CHUNK * CHUNKS)
        module.Pool = lambda mount, **given: Pool(mount, files=agent, **given)
        self.tier = module.G35Tier(
            offloading_spec=SimpleNamespace(
                model=model,
                blocks_per_chunk=1,
                kv_events_config=SimpleNamespace(enable_kv_cache_events=self.publishes),
            ),
            primary_kv_view=memoryview(self.memory).cast("B", (CHUNKS, CHUNK)),
            tier_type="G35Tier",
            mount="/nowhere",
            **options,
        )
        self._jobs = 0

    def run(self, submit: Any, keys: Sequence[bytes], chunks: Sequence[int], request: str = "") -> JobResult:
        self._jobs += 1
        context = SimpleNamespace(req_id=request) if request else None
        submit(SimpleNamespace(job_id=self._jobs, keys=keys, chunk_ids=Numbers(chunks), req_context=context))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert isinstance(result, JobResult)
        return result

    def lookup(self, key: bytes, request: str) -> LookupResult:
        """What a request is told in the end, steps of the scheduler between."""
        context = SimpleNamespace(req_id=request)

        def told() -> LookupResult | None:
            found = self.tier.lookup(key, context)
            self.tier.on_schedule_end(None)
            assert isinstance(found, LookupResult)
            return None if found is LookupResult.RETRY else found

        found = wait_until(told, 10, "a verdict")
        assert found is not None
        return found


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def engine(tier_module: Any, agent: ScriptedAgent) -> Iterator[Engine]:
    made = Engine(tier_module, agent)
    yield made
    made.tier.shutdown()
    assert agent.open_files == 0


def test_store_lookup_load(engine: Engine) -> None:
    engine.memory[:CHUNK] = b"x" * CHUNK
    stored = engine.run(engine.tier.submit_store, [b"a"], [0])
    assert (stored.success, stored.transfer_bytes) == (True, CHUNK)
    assert engine.lookup(b"a", "r") is LookupResult.HIT
    assert engine.lookup(b"b", "r") is LookupResult.MISS
    loaded = engine.run(engine.tier.submit_load, [b"a"], [7])
    assert loaded.success
    assert loaded.successful_keys is None
    assert engine.memory[7 * CHUNK : 8 * CHUNK] == b"x" * CHUNK


def test_the_first_question_is_answered_later(engine: Engine) -> None:
    assert engine.tier.lookup(b"a", SimpleNamespace(req_id="r")) is LookupResult.RETRY
    engine.tier.on_request_finished(SimpleNamespace(req_id="r"))


def test_a_load_that_fails_in_part(engine: Engine, agent: ScriptedAgent) -> None:
    engine.run(engine.tier.submit_store, [b"a", b"b"], [0, 1])
    assert engine.lookup(b"b", "r") is LookupResult.HIT
    (lost,) = (
        key for volume, key in list(agent.values) if agent.values[volume, key][16:48] == _proof(engine, b"b")
    )
    del agent.values["kv", lost]
    result = engine.run(engine.tier.submit_load, [b"a", b"b"], [4, 5])
    assert not result.success
    assert result.successful_keys == (b"a",)
    assert engine.lookup(b"b", "r") is LookupResult.MISS, "or the scheduler would try it for ever"


def _proof(engine: Engine, key: bytes) -> bytes:
    from host_shim.named_values import label_of

    return label_of(engine.tier._name(key), CHUNK)[16:48]


def test_found_blocks_are_prestaged(engine: Engine, agent: ScriptedAgent) -> None:
    engine.run(engine.tier.submit_store, [b"a"], [0])
    assert engine.lookup(b"a", "r") is LookupResult.HIT
    assert len(agent.prestaged) == 1


def test_another_model_has_blocks_of_its_own(engine: Engine, tier_module: Any, agent: ScriptedAgent) -> None:
    engine.run(engine.tier.submit_store, [b"a"], [0])
    for options in ({"model": "other"}, {"namespace": "tenant"}):
        other = Engine(tier_module, agent, **options)  # type: ignore[arg-type]
        assert other.lookup(b"a", "r") is LookupResult.MISS
        other.tier.shutdown()
    same = Engine(tier_module, agent)
    assert same.lookup(b"a", "r") is LookupResult.HIT
    same.tier.shutdown()


@pytest.mark.expects_log("will store nothing")
def test_slots_that_are_too_small_are_said_and_are_misses(tier_module: Any) -> None:
    agent = ScriptedAgent(slot_bytes=CHUNK)
    engine = Engine(tier_module, agent)
    assert engine.lookup(b"a", "r") is LookupResult.MISS
    engine.tier.shutdown()


@pytest.mark.expects_log("no g35 pool at /nowhere")
def test_no_agent_is_misses_and_failed_jobs(engine: Engine, agent: ScriptedAgent) -> None:
    agent.kill()
    assert engine.lookup(b"a", "r") is LookupResult.MISS
    assert not engine.run(engine.tier.submit_store, [b"a"], [0]).success
    assert not engine.run(engine.tier.submit_load, [b"a"], [0]).success


@pytest.mark.parametrize(
    "option",
    [
        {"lookup_deadline": -1},
        {"load_deadline": "5"},
        {"store_deadline": None},
        {"ttl": float("inf")},
        {"threads": "4"},
        {"volume": ""},
        {"prestage": "false"},
        {"namespace": 5},
        {"enable_kv_events": "yes"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_make_no_sense_stop_the_engine_at_its_start(
    tier_module: Any, agent: ScriptedAgent, option: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f'"{next(iter(option))}"'):
        Engine(tier_module, agent, **option)


def events_of(engine: Engine) -> list[tuple[bool, list[bytes]]]:
    found = list(engine.tier.take_events())
    assert all(isinstance(each, OffloadingEvent) for each in found)
    assert {each.medium.name for each in found} <= {"STORAGE"}
    assert {each.locality.name for each in found} <= {"REMOTE"}
    return [(each.removed, each.keys) for each in found]


def test_vllm_gets_events_of_what_was_stored_and_found_gone(tier_module: Any, agent: ScriptedAgent) -> None:
    engine = Engine(tier_module, agent, enable_kv_events=True)
    engine.run(engine.tier.submit_store, [b"a", b"b", b"c"], [0, 1, 2])
    assert events_of(engine) == [(False, [b"a", b"b", b"c"])]
    engine.run(engine.tier.submit_store, [b"a"], [0])
    assert events_of(engine) == []
    agent.values.clear()
    assert engine.lookup(b"a", "r") is LookupResult.MISS
    assert engine.lookup(b"never", "r") is LookupResult.MISS
    engine.run(engine.tier.submit_load, [b"b"], [3])
    assert events_of(engine) == [(True, [b"a", b"b"])]
    assert engine.tier.events_lost == 0
    engine.tier.shutdown()


def test_a_block_that_is_late_is_not_told_of_as_gone(tier_module: Any, agent: ScriptedAgent) -> None:
    engine = Engine(tier_module, agent, enable_kv_events=True)
    engine.run(engine.tier.submit_store, [b"a"], [0])
    events_of(engine)
    ((_, key),) = agent.values
    agent.values.clear()
    agent.causes[key] = Outcome.LATE
    assert engine.lookup(b"a", "r") is LookupResult.MISS
    assert not engine.run(engine.tier.submit_load, [b"a"], [3]).success
    assert events_of(engine) == []
    engine.tier.shutdown()


def test_without_the_option_there_are_no_events(engine: Engine) -> None:
    engine.run(engine.tier.submit_store, [b"a"], [0])
    assert events_of(engine) == []


@pytest.mark.expects_log("vLLM publishes no events")
def test_events_that_vllm_does_not_publish_are_not_kept(
    tier_module: Any, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "publishes", False)
    engine = Engine(tier_module, agent, enable_kv_events=True)
    engine.run(engine.tier.submit_store, [b"a"], [0])
    assert events_of(engine) == []
    engine.tier.shutdown()


def test_a_request_that_ends_gives_one_record_with_its_last_job(engine: Engine, agent: ScriptedAgent) -> None:
    agent.gate = {"bytes_per_s": 1e9, "recomputed_bytes_per_s": 1.0}
    engine.run(engine.tier.submit_store, [b"a", b"b"], [0, 1])
    for key, found in ((b"a", LookupResult.HIT), (b"b", LookupResult.HIT), (b"c", LookupResult.MISS)):
        assert engine.lookup(key, "r") is found
    engine.run(engine.tier.submit_load, [b"a", b"b"], [4, 5], "r")
    engine.tier.submit_store(
        SimpleNamespace(
            job_id=99, keys=[b"c"], chunk_ids=Numbers([2]), req_context=SimpleNamespace(req_id="r")
        )
    )
    engine.tier.on_request_finished(SimpleNamespace(req_id="r"))
    engine.tier.drain_jobs()
    assert agent.reports() == []
    assert len(list(engine.tier.get_finished_jobs())) == 1
    [report] = wait_until(agent.reports, 10, "the report") or []
    assert report[:5] == (3, 2, 2, 1, 2)
    assert (report.cause, report.saved_ms) == (Outcome.NEVER_STORED, 2 * CHUNK * 1000 - report.load_ms)
    assert engine.tier._under_way == {}


def test_the_form_of_names_makes_the_keys_that_the_tier_stores_under(
    engine: Engine, agent: ScriptedAgent
) -> None:
    block = bytes(range(32))
    engine.run(engine.tier.submit_store, [block + (1).to_bytes(4, "big")], [0])
    form = decode_name_form_untrusted(engine.tier.name_form(1).describe())
    assert list(agent.values) == [("kv", key_of_long_name(form.name(block)))]
