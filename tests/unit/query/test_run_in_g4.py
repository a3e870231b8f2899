"""Keys that G4 alone has are a tier of their own: by marks, at one look at their directories."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.http.gil_yield import Rests
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.read.leading_run import LeadingRun
from agent.pool.read.recompute_gate import TRUSTED_BYTES, RecomputeGate
from agent.query.counters import QueryCounters
from agent.query.service import QueryService
from tests.support.pool.memory_pool import MemoryPool, key_of
from tests.support.pool.spill_pool import MemoryTarget, SpillingAgent, evict_all, full, value_of

pytestmark = pytest.mark.usefixtures("mark_blocks")

BELOW = [key_of(number) for number in range(8)]
"""What `full` and `evict_all` leave in G4 alone."""
LENGTH = len(value_of(0))


def below() -> SpillingAgent:
    spilling = full(MemoryTarget(), MemoryPool((1,), value_bytes=16 * LENGTH))
    evict_all(spilling)
    return spilling


def run_of(spilling: SpillingAgent, keys: list[bytes], away: frozenset[int] = frozenset()) -> LeadingRun:
    agent = spilling.agent
    joined = b"".join(keys)
    run = agent.served.remembered_run(joined, agent.channel.wall(), agent.prestage, away)
    steps = agent.served.leading_run(agent.channel, joined, agent.deadline(0.05), agent.prestage, away, run)
    return agent.channel.run(steps)


def test_keys_of_g4_count_as_g4_and_those_of_flash_between_them_as_flash() -> None:
    spilling = below()
    agent = spilling.agent
    on_flash = [key for key in map(key_of, range(1000, 1256)) if agent.get(key) == value_of_key(key)][-8:]
    before = len(target_of(spilling).fetched)
    mixed = [key for pair in zip(BELOW, on_flash, strict=True) for key in pair]
    run = run_of(spilling, [*mixed, key_of(9999)])
    assert (run.in_g4, run.on_flash, run.length, run.hole) == (8, 8, 16, MissCause.NEVER_STORED)
    slot = agent.volume.settings.slot_bytes
    assert 8 * LENGTH <= run.g4_bytes <= 8 * (LENGTH + slot // 16)
    assert run.flash_bytes == 8 * LENGTH
    assert len(target_of(spilling).fetched) == before, "a question moves nothing out of G4"


def test_a_run_in_g4_costs_one_look_at_its_directories_however_long_it_is() -> None:
    spilling = below()
    before = sum(each.reads for each in spilling.agent.channel.namespaces)
    assert run_of(spilling, BELOW).in_g4 == 8
    assert sum(each.reads for each in spilling.agent.channel.namespaces) - before <= 1


def test_a_place_that_is_left_alone_serves_nothing() -> None:
    spilling = below()
    for _ in range(2):
        spilling.health.did_not_answer(spilling.agent.channel.now(), failed=True)
    run = run_of(spilling, BELOW)
    assert (run.length, run.hole) == (0, MissCause.EVICTED)


def test_a_mark_in_an_enclosure_that_is_away_is_a_hole() -> None:
    spilling = below()
    run = run_of(spilling, BELOW, frozenset({0}))
    assert (run.length, run.hole) == (0, MissCause.ENCLOSURE_DOWN)


def test_the_load_time_of_g4_is_by_its_own_measure() -> None:
    spilling = below()
    agent = spilling.agent
    gate = RecomputeGate(1e6, 1000)
    g4 = gate.like()
    spilling.below._gate = g4
    counters = QueryCounters()
    service = QueryService(
        {"one": [serve(agent.volume, gate)]}, None, lambda: agent.channel, lambda _: False, counters,
        deadline=0.05, keys_per_s=10**6, rests=Rests(agent.channel.now), clock=agent.channel.now,
    )  # fmt: skip

    def asked() -> dict[str, Any]:
        body = json.dumps({"volume": "v", "prompts": [[key.hex() for key in BELOW]]}).encode()
        found: dict[str, Any] = json.loads(service.answer("one", body, agent.channel))["prompts"][0]
        return found

    measure(gate, 10.0)
    told = asked()
    assert (told["run"], told["g4"], told["flash"], told["load_ms"]) == (8, 8, 0, None)
    measure(g4, 1000.0)
    told = asked()
    assert told["load_ms"] == pytest.approx(told["bytes"] * 1000.0 / TRUSTED_BYTES * 1e3, rel=0.05)
    assert counters.keys_in_g4 == 16


def measure(gate: RecomputeGate, seconds: float) -> None:
    """What the gate trusts came, in so many seconds."""
    gate.begin(TRUSTED_BYTES, 0.0)
    gate.end(TRUSTED_BYTES, TRUSTED_BYTES, seconds)


def value_of_key(key: bytes) -> bytes:
    return next(value_of(number) for number in range(1000, 1256) if key_of(number) == key)


def target_of(spilling: SpillingAgent) -> MemoryTarget:
    target = spilling.below._target
    assert isinstance(target, MemoryTarget)
    return target
