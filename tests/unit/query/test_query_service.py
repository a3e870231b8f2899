"""Answers to a tenant: its own volumes alone, at a bounded rate, with the gate's figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.http.gil_yield import Rests
from agent.pool.access import serve
from agent.pool.read.recompute_gate import RecomputeGate
from agent.query.counters import QueryCounters
from agent.query.query_json import BadQuery
from agent.query.service import AT_ONCE_KEYS, AT_ONCE_PROMPTS, QueryService
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

VALUE = b"v" * 1000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """A service for `one`, who has the volume `v`, and `two`, who has none."""

    def __init__(self, gate: RecomputeGate | None = None, keys_per_s: int = 1_000_000) -> None:
        self.agent: PoolAgent = MemoryPool((8, 8), value_bytes=4096).agent()
        self.clock, self.counters = Clock(), QueryCounters()
        self.rests = Rests(self.clock)
        served = serve(self.agent.volume, gate)
        self.service = QueryService(
            {"one": [served], "two": []},
            None,
            lambda: self.agent.channel,
            lambda member: self.agent.channel.namespaces[member].down,
            self.counters,
            deadline=0.05,
            keys_per_s=keys_per_s,
            rests=self.rests,
            clock=self.clock,
        )

    def ask(self, tenant: str, keys: list[bytes], volume: str = "v") -> dict[str, Any]:
        body = json.dumps({"volume": volume, "prompts": [[key.hex() for key in keys]]}).encode()
        found: dict[str, Any] = json.loads(self.service.answer(tenant, body, self.agent.channel))
        return found


def keys_of(agent: PoolAgent, count: int) -> list[bytes]:
    keys = [key_of(number) for number in range(count)]
    for key in keys:
        agent.put(key, VALUE)
    return keys


def test_another_tenants_volume_is_answered_as_one_that_does_not_exist_by_the_same_steps() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 5)
    assert asked.ask("one", keys)["prompts"][0]["run"] == 5
    reads = [namespace.reads for namespace in asked.agent.channel.namespaces]
    others, nobodys = asked.ask("two", keys), asked.ask("two", keys, "nothing")
    assert others["prompts"] == nobodys["prompts"]
    assert (others["served"], nobodys["served"]) == (False, False)
    assert others["prompts"][0]["hole"] == {"at": 0, "cause": "never_stored"}
    assert [namespace.reads for namespace in asked.agent.channel.namespaces] == reads


def test_an_erased_volume_is_none() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 2)
    asked.agent.volume.change(erased=True)
    assert asked.ask("one", keys)["served"] is False


def test_the_gates_figures_say_how_long_loading_and_computing_take() -> None:
    gate = RecomputeGate(100.0, 1000)
    asked = Asked(gate)
    keys = keys_of(asked.agent, 4)
    told = asked.ask("one", keys)["prompts"][0]
    assert (told["load_ms"], told["compute_ms"]) == (None, 40.0)
    assert gate.begin(2 << 20, 0.0)
    gate.end(2 << 20, 2 << 20, 1.0)
    assert gate.bandwidth == 2 << 20
    told = asked.ask("one", keys)["prompts"][0]
    assert told["load_ms"] == pytest.approx(4000 / (2 << 20) * 1e3, abs=1e-3)


def test_a_tenant_asks_for_so_many_keys_a_second_and_another_is_not_held_up() -> None:
    asked = Asked(keys_per_s=10)
    keys = [key_of(number) for number in range(25)]
    asked.service.admit("one")
    asked.ask("one", keys)
    with pytest.raises(BadQuery) as refused:
        asked.service.admit("one")
    assert (refused.value.status, dict(refused.value.headers)) == (429, {"retry-after": "1"})
    asked.service.admit("two")
    asked.clock.now += 1.6
    asked.service.admit("one")
    assert asked.counters.over_rate == 1


def body_of(*prompts: list[bytes]) -> bytes:
    return json.dumps({"volume": "v", "prompts": [[key.hex() for key in keys] for keys in prompts]}).encode()


def test_what_is_remembered_is_answered_at_once_and_a_hole_is_looked_into_from_where_the_run_is() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 6)
    found = asked.service.answer_at_once("one", body_of(keys, keys[2:]))
    assert isinstance(found, bytes)
    assert [told["run"] for told in json.loads(found)["prompts"]] == [6, 4]
    assert found == asked.service.answer("one", body_of(keys, keys[2:]), asked.agent.channel)
    asked.clock.now += 1
    with_hole = [*keys, key_of(99), *keys]
    begun = asked.service.answer_at_once("one", body_of(with_hole, keys))
    assert not isinstance(begun, bytes | None)
    assert [run.length for run in begun.runs] == [6, 0], "what is behind a hole waits for the thread"
    found = asked.service.finish(begun, asked.agent.channel)
    assert found == asked.service.answer("one", body_of(with_hole, keys), asked.agent.channel)
    assert asked.counters.keys == 2 * 10 + 2 * 19


def test_keys_of_a_query_that_is_begun_at_once_are_charged_once() -> None:
    asked = Asked(keys_per_s=10)
    begun = asked.service.answer_at_once("one", body_of([key_of(number) for number in range(10)]))
    assert not isinstance(begun, bytes | None)
    asked.service.finish(begun, asked.agent.channel)
    asked.service.admit("one")


def test_what_takes_long_is_not_answered_in_the_event_loop() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 2)
    one_text = json.dumps({"volume": "v", "prompts": [b"".join(keys).hex() * 800]}).encode()
    for body in (body_of(keys * (AT_ONCE_KEYS // 2 + 1)), one_text):
        assert asked.service.answer_at_once("one", body) is None
    begun = asked.service.answer_at_once("one", body_of(*[keys] * (AT_ONCE_PROMPTS + 1)))
    assert not isinstance(begun, bytes | None)
    assert not any(run.length for run in begun.runs)
    assert len(json.loads(asked.service.finish(begun, asked.agent.channel))["prompts"]) == AT_ONCE_PROMPTS + 1


def test_while_the_door_owes_a_rest_nothing_is_answered_in_the_event_loop() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 2)
    asked.rests.owed(0.5)
    assert asked.service.answer_at_once("one", body_of(keys)) is None
    asked.clock.now += 1.1
    assert asked.service.answer_at_once("one", body_of(keys)) is not None


def test_answers_are_counted() -> None:
    asked = Asked()
    keys = keys_of(asked.agent, 3)
    asked.ask("one", [*keys, key_of(99)])
    asked.ask("two", keys)
    counted = asked.counters.snapshot()
    assert (counted["prompts"], counted["keys"], counted["keys_on_flash"]) == (2, 7, 3)
    assert counted["holes"] == {"never_stored": 2}
