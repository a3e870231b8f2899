"""Rows that have more of the agent's own code: prestaging, hedged reads of two copies, KV namespaces; and the
rate of GPUs by context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent.errors import UserError
from agent.figures.tables import load
from agent.sim.experiment import Experiment, play
from agent.sim.pod_plan import PodPlan, changed, plan_of
from agent.sim.pod_run import PodRun, RowResult
from agent.sim.workload import Request

BLOCK_TOKENS = 512
BLOCKS = 12
SMALL = PodPlan(
    gpus=8, enclosures=3, drives=2, workers=4, g1_bytes=0, g2_bytes=0, read_deadline=5.0,
    bytes_per_token=16_384, drive_tail=0.0, drive_bytes=20_000_000_000,
)  # fmt: skip
"""Two hosts without caches of their own, so that each block comes from the pool."""


def _asked_twice(prompts: int = 20, pause: float = 0.05) -> Iterator[Request]:
    for number in range(2 * prompts):
        first = number % prompts * BLOCKS
        at = number * pause + (5.0 if number >= prompts else 0.0)
        blocks = tuple(range(first, first + BLOCKS))
        yield Request(number, at, BLOCKS * BLOCK_TOKENS, 10, blocks, BLOCK_TOKENS)


def _row(row: str, plan: PodPlan, requests: Iterator[Request] | None = None) -> RowResult:
    asked = _asked_twice() if requests is None else requests
    return PodRun("g35", Experiment(plan, rows=(row,)).plan_of(row), 35, BLOCK_TOKENS, asked).run()


def test_what_is_announced_has_come_when_the_gpus_are_free() -> None:
    """GPUs are busy for seconds, so prestaging has its time: they wait as little as with loads at arrival."""
    busy = changed(SMALL, drive_read=2e9, prefill_rate=1500.0, decode_rate=20.0)
    waits, prestages, ideal = (_row(row, busy) for row in ("g35-waits", "g35-prestages", "g35"))
    assert prestages.blocks_loaded == waits.blocks_loaded > 0
    assert prestages.counts["prestaged_useful_bytes"] == prestages.counts["prestaged_bytes"] > 0
    assert prestages.stalled_seconds < 0.1 * waits.stalled_seconds
    assert prestages.stalled_seconds == pytest.approx(ideal.stalled_seconds, rel=0.05)
    assert prestages.ttft_mean < waits.ttft_mean


def test_what_does_not_fit_the_agents_memory_is_read_as_without() -> None:
    busy = changed(SMALL, drive_read=2e9, prefill_rate=1500.0, decode_rate=20.0, prestage_bytes=9 << 20)
    found = _row("g35-prestages", busy)
    assert found.blocks_loaded == _row("g35-waits", busy).blocks_loaded
    assert found.counts["prestaged_wasted_bytes"] > 0


def test_guesses_help_an_engine_that_reads_block_by_block() -> None:
    slow = changed(SMALL, drive_read=1e9, workers=1)
    waits, learns = (_row(row, slow, _asked_twice(pause=0.01)) for row in ("g35-waits", "g35-learns"))
    assert learns.counts["prestaged_useful_bytes"] > 0
    assert learns.stalled_seconds < 0.9 * waits.stalled_seconds


def test_two_copies_are_made_and_the_other_is_asked_where_the_first_is_slow() -> None:
    tail = changed(SMALL, drive_tail=0.1, enclosures=4, drives=4)
    copies, hedges = (_row(row, tail, _asked_twice(prompts=60)) for row in ("g35-copies", "g35-hedges"))
    written = _row("g35", tail, _asked_twice(prompts=60)).link_bytes["drives_written"]
    assert copies.counts["copies_made"] == 60 * BLOCKS
    # A few are made twice: two agents wrote one directory at once, and the later image won.
    assert copies.link_bytes["drives_written"] == pytest.approx(2 * written, rel=0.01)
    assert copies.counts["hedged_reads"] == 0 < hedges.counts["hedge_wins"] <= hedges.counts["hedged_reads"]
    # In the long run a share of all gets.
    assert hedges.counts["hedged_reads"] <= 8 + 0.05 * hedges.counts["gets_hit"]
    assert hedges.ttft_mean < copies.ttft_mean


def test_kv_namespaces_find_the_same_and_read_no_directories() -> None:
    slots, on_kv = _row("g35", SMALL), _row("g35-kv", SMALL)
    assert on_kv.blocks_loaded == slots.blocks_loaded == 20 * BLOCKS
    assert on_kv.counts["directory_reads"] == 0 < slots.counts["directory_reads"]
    assert on_kv.link_bytes["small"] < slots.link_bytes["small"]
    assert on_kv.link_bytes["drives_written"] == slots.link_bytes["drives_written"]


def test_full_kv_namespaces_evict_and_say_so() -> None:
    small = changed(SMALL, enclosures=1, drives=2, drive_bytes=600 << 20)
    found = _row("g35-kv", small)
    assert found.counts["evictions"] > 0
    assert 0 < found.blocks_loaded < 20 * BLOCKS


FAULTS = ("stop", "slow", "err", "kill", "lose", "agent")
WITH_FAULTS = ("g35-prestages", "g35-hedges", "g35-kv")
EACH_TIME = {(row, fault) for at, fault in enumerate(FAULTS) for row in [WITH_FAULTS[at % 3]]}
"""Each fault meets one row, and each row two faults; the nightly run has them all."""


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        pytest.param(row, fault, marks=[] if (row, fault) in EACH_TIME else pytest.mark.nightly)
        for row in WITH_FAULTS
        for fault in FAULTS
    ],
)
def test_each_fault_is_survived_and_the_books_balance(row: str, fault: str) -> None:
    plan = changed(SMALL, faults=(fault,), fault_every=0.4, read_deadline=0.05)
    found = _row(row, plan)
    assert found.requests == 40
    had = found.blocks_in_gpu + found.blocks_in_host + found.blocks_loaded
    assert sum(found.misses.values()) == found.blocks - had
    assert found.digest == _row(row, plan).digest


def test_a_volume_on_kv_namespaces_shares_with_nobody() -> None:
    for changes in ({"tenants": 2}, {"faults": ("join",)}):
        plan: Any = changed(SMALL, **changes)
        with pytest.raises(UserError, match="to itself"):
            Experiment(plan, rows=("g35-kv",))


def test_a_long_prompt_is_computed_slower_and_its_end_slowest() -> None:
    plan = plan_of(load(), "one", "llama-3.3-70b", "bf16", "h100", prefill_rate=5000.0, decode_rate=900.0)
    assert plan.prefill_seconds(2000) == pytest.approx(2000 / 5000)
    assert plan.prefill_seconds(128_000) > 1.5 * 128_000 / 5000
    # Parts add up, and the second half attends to the first.
    first, second = plan.prefill_seconds(64_000), plan.prefill_seconds(128_000, 64_000)
    assert first + second == pytest.approx(plan.prefill_seconds(128_000))
    assert second > 1.3 * first
    # As where it was measured: at another length the same figure stands for a faster GPU.
    longer = changed(plan, prefill_tokens=32_000)
    assert longer.prefill_seconds(32_000) == pytest.approx(32_000 / 5000)
    assert longer.prefill_seconds(2000) < plan.prefill_seconds(2000)
    assert changed(plan, prefill_tokens=2000, prefill_rate=2500.0).prefill_seconds(2000) == pytest.approx(0.8)


def _speed_up(gpu_rate: float, blocks: int) -> float:
    """Of the pool over computing again, where a prompt of so many blocks is asked again with one more."""
    plan = plan_of(
        load(), "one", "llama-3.3-70b", "bf16", "h100", gpus=8, enclosures=1, drives=16, g1_bytes=0,
        g2_bytes=0, prefill_rate=gpu_rate, decode_rate=1e6, read_deadline=60.0, drive_bytes=4_000_000_000_000,
        drive_read=7e8, gpus_per_host=8,
    )  # fmt: skip

    def asked() -> Iterator[Request]:
        for number, more in enumerate((0, 1)):
            names = tuple(range(blocks + more))
            yield Request(number, 500.0 * number, len(names) * BLOCK_TOKENS, 1, names, BLOCK_TOKENS)

    took = {}
    for row in ("g35", "recompute"):
        run = PodRun(row, plan, 35, BLOCK_TOKENS, asked())
        run.run()
        took[row] = run.engines.served[1].ttft
    return took["recompute"] / took["g35"]


def test_faster_gpus_make_it_harder_and_longer_contexts_easier() -> None:
    """What docs/claims.md says by formula, by the pool's own code."""
    base, faster = _speed_up(3000.0, 16), _speed_up(12_000.0, 16)
    longer = _speed_up(3000.0, 128)
    assert faster < 0.7 * base
    assert longer > 1.2 * base


def test_what_is_printed_says_how_the_rate_falls() -> None:
    plan = plan_of(load(), "one", "deepseek-v3", "fp8", "gb200")
    report = play(Experiment(plan, requests=4, rows=("recompute",)))
    assert "in prompts of 2,000" in dict(report.facts())["a GPU, tokens/s"]
    assert not [note for note in report.notes() if "constant rate" in note]
    flat = play(Experiment(changed(SMALL, g4_rate=None), requests=4, rows=("recompute",)))
    assert [note for note in flat.notes() if "constant rate" in note]
