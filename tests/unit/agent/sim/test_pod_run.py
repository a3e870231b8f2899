"""Pods in virtual time with rates: the same seed gives the same digest, and every rate matters."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from agent.errors import UserError
from agent.figures.tables import load
from agent.pool.counters import Tally
from agent.sim.experiment import ROWS, Experiment, play
from agent.sim.links import SharedLink
from agent.sim.pod_plan import FAULTS, PodPlan, block_values, changed, plan_of
from agent.sim.pod_run import BooksDoNotBalance, PodRun, RowResult
from agent.sim.pool_store import PoolStore
from agent.sim.workload import KINDS, Request, demand_of

BLOCK_TOKENS = 512
SMALL = PodPlan(
    gpus=8, enclosures=3, drives=2, workers=4, g1_bytes=0, g2_bytes=0, gate=False, read_deadline=5.0,
    bytes_per_token=16_384, drive_tail=0.0, drive_bytes=20_000_000_000,
)  # fmt: skip
"""Two hosts without caches of their own, so that each block comes from the pool."""


def _asked_twice(prompts: int = 20, blocks: int = 12, pause: float = 0.2) -> Iterator[Request]:
    """Each prompt is asked, and asked again when all is stored."""
    for number in range(2 * prompts):
        first = number % prompts * blocks
        at = number * pause + (5.0 if number >= prompts else 0.0)
        yield Request(
            number, at, blocks * BLOCK_TOKENS, 10, tuple(range(first, first + blocks)), BLOCK_TOKENS
        )


def _run(
    plan: PodPlan, requests: Iterator[Request] | None = None, row: str = "g35", seed: int = 35
) -> RowResult:
    asked = _asked_twice() if requests is None else requests
    return PodRun(row, plan, seed, BLOCK_TOKENS, asked).run()


def _not_had(found: RowResult) -> int:
    """Block references that no tier had."""
    return found.blocks - found.blocks_in_gpu - found.blocks_in_host - found.blocks_loaded


def test_what_was_stored_is_found_with_its_real_length() -> None:
    found = _run(SMALL)
    _, value_bytes = block_values(SMALL, BLOCK_TOKENS)
    assert value_bytes == 8 << 20
    assert (found.requests, found.blocks, found.blocks_loaded) == (40, 480, 240)
    assert found.counts["puts"] == found.counts["gets_hit"] == 240
    assert found.counts["gets_missed"] == 0
    assert {cause: count for cause, count in found.misses.items() if count} == {"never_stored": 240}
    # A slot is its header and its value.
    assert found.link_bytes["host_nics_in"] == found.link_bytes["drives_read"] == 240 * (value_bytes + 4096)
    assert found.link_bytes["drives_written"] == 240 * (value_bytes + 4096)


def test_the_same_seed_is_the_same_run() -> None:
    plan = changed(SMALL, faults=FAULTS, fault_every=0.5, read_deadline=0.05)
    digests = {_run(plan).digest for _ in range(2)}
    assert len(digests) == 1
    assert _run(plan, seed=36).digest not in digests


@pytest.mark.parametrize("link", ["drive_read", "enclosure_nic", "host_nic", "gpu_pcie"])
def test_a_link_that_is_ten_times_faster_changes_what_a_get_takes(link: str) -> None:
    """Each of them is the narrowest in turn, and all the others stay as they are."""
    narrow = 0.5e9

    def at(rate: float) -> float:
        plan: Any = changed(SMALL, **{link: rate})
        return _run(plan, _asked_twice(pause=1.0)).ttft_mean

    slow, fast = at(narrow), at(10 * narrow)
    assert fast < 0.8 * slow


def test_gpus_and_disks_and_shared_storage_that_are_faster_change_it_too() -> None:
    def twice(row: str, **changes: float) -> RowResult:
        return _run(changed(SMALL, **changes), _asked_twice(pause=1.0), row)

    assert (
        twice("recompute", prefill_rate=10_000.0).ttft_mean
        > 5 * twice("recompute", prefill_rate=1e5).ttft_mean
    )
    assert twice("g4", g4_rate=0.2e9).ttft_mean > 1.5 * twice("g4", g4_rate=2e9).ttft_mean
    assert twice("g3", g3_rate=0.2e9).ttft_mean > 1.5 * twice("g3", g3_rate=2e9).ttft_mean


def test_a_pool_that_is_too_small_evicts_and_says_so() -> None:
    plan = changed(SMALL, enclosures=1, drives=2, drive_bytes=600 << 20)
    found = _run(plan)
    assert found.counts["evictions"] > 0
    assert found.blocks_loaded < 240
    assert found.counts["lookups_absent"] > 240
    assert found.misses["never_stored"] >= 240
    assert found.misses["evicted"] > 0
    assert sum(found.misses.values()) == _not_had(found)


def test_what_lies_behind_a_hole_is_a_miss_of_its_own() -> None:
    """The first four of twelve blocks, then all but the second: none of those behind it can be used."""
    asked = [
        Request(number, 2.0 * number, len(blocks) * BLOCK_TOKENS, 10, tuple(blocks), BLOCK_TOKENS)
        for number, blocks in enumerate(([0, 1, 2, 3], [0, 99, 2, 3]))
    ]
    found = _run(SMALL, iter(asked))
    assert found.blocks_loaded == 1
    assert {cause: count for cause, count in found.misses.items() if count} == {
        "never_stored": 5, "behind_a_hole": 2,
    }  # fmt: skip


def test_a_deadline_that_no_get_can_keep_is_a_miss_that_is_late() -> None:
    found = _run(changed(SMALL, drive_read=0.05e9, read_deadline=0.05))
    # Gets, and lookups before them.
    assert found.misses["late"] >= found.counts["gets_missed"] > 0
    assert sum(found.misses.values()) == _not_had(found)


def test_a_host_has_the_memory_that_g35_claims_counts_too() -> None:
    tables = load()
    plan = plan_of(tables, "rack", "deepseek-v3", "fp8", "gb200")
    assert plan.g2_bytes == tables.gpus["gb200"].dram_gb.value * 1e9 * plan.gpus_per_host
    assert plan_of(tables, "rack", "deepseek-v3", "fp8", "gb200", g2_bytes=5).g2_bytes == 5


def test_drives_are_written_as_often_a_day_as_the_run_says() -> None:
    found = _run(SMALL)
    days = found.virtual_seconds / 86_400
    written = found.link_bytes["drives_written"]
    assert found.drive_writes_a_day == pytest.approx(written / days / (6 * SMALL.drive_bytes))
    assert found.drive_writes_a_day < found.most_written_drive < 6 * found.drive_writes_a_day
    again = _run(changed(SMALL, drive_bytes=2 * SMALL.drive_bytes))
    assert again.drive_writes_a_day == pytest.approx(found.drive_writes_a_day / 2, rel=0.01)


def test_a_run_leaves_no_cycles_to_the_collector() -> None:
    """A hundred thousand requests would leave millions, each with a block of a directory."""
    run = PodRun("g35", SMALL, 35, BLOCK_TOKENS, _asked_twice())
    gc.collect()
    gc.disable()
    try:
        found = run.run()
        assert gc.collect() < found.requests
    finally:
        gc.enable()


def test_agents_share_what_is_immutable() -> None:
    pool = PodRun("g35", SMALL, 35, BLOCK_TOKENS, iter(())).pool
    assert pool is not None
    first, second = (agent.volumes[0] for agent in pool.agents)
    assert first is not second
    assert first.placement is second.placement
    assert first.settings is second.settings
    assert len(first.settings.extents) == 6


def test_another_seed_lays_blocks_elsewhere() -> None:
    runs = [PodRun("g35", SMALL, seed, BLOCK_TOKENS, _asked_twice()) for seed in (1, 2)]
    for run in runs:
        run.run()
    assert len({tuple(drive.bytes_read for drive in run.flash.drives) for run in runs}) == 2


def _played(plan: PodPlan, players: int) -> RowResult:
    return PodRun("g35", plan, 35, BLOCK_TOKENS, _asked_twice(), players=players).run()


def test_players_take_requests_in_turn_and_wait_for_each_block() -> None:
    slow = changed(SMALL, gpus=4, drive_read=1e8, drive_write=1e8)
    one, four = _played(slow, 1), _played(slow, 4)
    assert (
        (one.requests, one.blocks, one.blocks_loaded) == (four.requests, four.blocks, 240) == (40, 480, 240)
    )
    whole = 480 * ((8 << 20) + 4096)
    # One player has one value under way, and four drives' worth are not busier than all six.
    assert one.virtual_seconds == pytest.approx(whole / 1e8, rel=0.02)
    assert whole / 1e8 / 4 < four.virtual_seconds < whole / 1e8 / 2
    assert one.bytes_loaded == one.bytes_stored == 240 * (8 << 20)


def test_a_directory_that_is_believed_is_not_read_again() -> None:
    believed = _played(changed(SMALL, gpus=4, directory_fresh=3600.0), 1)
    assert believed.counts["directory_reads"] < _played(changed(SMALL, gpus=4), 1).counts["directory_reads"]
    assert believed.blocks_loaded == 240


def test_the_gate_computes_again_what_would_come_too_late() -> None:
    slow = changed(SMALL, host_nic=0.3e9, gate=True, prefill_rate=100_000.0)
    found = _run(slow, _asked_twice(prompts=60, pause=0.05))
    assert found.counts["gets_gated"] > 0
    assert found.misses["late"] == found.counts["gets_missed"]


def test_the_gate_judges_a_stripe_by_its_whole_block() -> None:
    """Loading is twice as fast as computing, whether a block is one value or three."""
    for token_bytes in (32_768, 98_304):
        plan = changed(SMALL, bytes_per_token=token_bytes, gate=True, workers=1)
        # Values of 16 MiB, each from a drive of its own.
        load_seconds = (16 << 20) / plan.drive_read
        rate = BLOCK_TOKENS / (2 * load_seconds) / plan.gpus_per_host
        # Two values of a stripe on one drive come too late: with this seed none of those read are.
        found = _run(changed(plan, prefill_rate=rate), _asked_twice(pause=1.0), seed=36)
        assert found.counts["gets_gated"] == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_happens_and_the_books_balance(fault: str) -> None:
    plan = changed(SMALL, faults=(fault,), fault_every=0.4, read_deadline=0.05)
    found = _run(plan)
    assert found.requests == 40
    assert found.counts["agents killed" if fault == "agent" else f"fault {fault}"] > 0
    assert sum(found.misses.values()) == _not_had(found)


def test_a_miss_that_no_agent_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PoolStore.tally

    def one_less(pool: PoolStore) -> Tally:
        tally = whole(pool)
        tally.gets_hit -= 1
        return tally

    monkeypatch.setattr(PoolStore, "tally", one_less)
    with pytest.raises(BooksDoNotBalance, match=r"agents tell of \(239, 0\) .* engines had \(240, 0\)"):
        _run(SMALL)


def test_a_miss_without_a_cause_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolStore, "missed", lambda pool, causes: None)
    with pytest.raises(BooksDoNotBalance, match="engines did not have 240 blocks"):
        _run(SMALL)


def test_a_byte_that_does_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SharedLink.begin
    monkeypatch.setattr(SharedLink, "begin", lambda link, now, size, ended: whole(link, now, size - 1, ended))
    with pytest.raises(BooksDoNotBalance, match="bytes by link"):
        _run(SMALL)


def test_tenants_have_volumes_of_their_own() -> None:
    assert _run(changed(SMALL, tenants=2)).blocks_loaded == 240


def test_a_block_of_several_values_crosses_the_links_whole() -> None:
    plan = changed(SMALL, bytes_per_token=98_304)
    values, value_bytes = block_values(plan, BLOCK_TOKENS)
    assert values == 3
    found = _run(plan)
    assert found.link_bytes["host_nics_in"] == found.link_bytes["enclosures_out"]
    assert found.link_bytes["host_nics_in"] == 240 * values * (value_bytes + 4096)


def test_rows_differ_in_the_store_alone() -> None:
    rows = (
        "g35", "g35-waits", "g35-prestages", "g35-learns", "g35-copies", "g35-hedges", "g35-kv", "g35+g4",
        "recompute", "g3", "g4", "lustre-dpu",
    )  # fmt: skip
    assert set(rows) == set(ROWS)
    plan = changed(SMALL, g4_rate=1e9)
    report = play(Experiment(plan, requests=30, rows=rows))
    by_name = {row.name: row for row in report.rows}
    assert len({(row.requests, row.input_tokens, row.blocks) for row in report.rows}) == 1
    assert by_name["recompute"].blocks_loaded == 0
    assert report.speed_up(by_name["recompute"]) == 1.0
    assert by_name["g35"].hit_ratio > by_name["recompute"].hit_ratio
    # Its bytes go through a DPU that serves, to the one that asked.
    assert by_name["lustre-dpu"].link_bytes["host_nics_in"] > by_name["g4"].link_bytes["host_nics_in"]


@pytest.mark.parametrize(("gpus", "requests"), [(8, 100), (72, 1000), (1152, 300)])
@pytest.mark.parametrize("workload", ["mixed", "documents"])
def test_requests_come_to_the_load_that_is_asked_for(gpus: int, requests: int, workload: str) -> None:
    experiment = Experiment(PodPlan(gpus=gpus), requests=requests, workload=workload)
    made = list(itertools.islice(experiment.source()(), requests))
    assert demand_of(made, requests, experiment.plan).load(experiment.plan) == pytest.approx(0.7, rel=0.01)
    # From the start: half of the requests take about half of the time.
    assert 0.35 < made[requests // 2].at / made[-1].at < 0.65


def test_pauses_between_turns_stay_what_they_are() -> None:
    """The load is a matter of how often sessions begin."""
    made = Experiment(PodPlan(gpus=72), requests=3000, workload="agents", made_block_tokens=16).source()()
    last: dict[int, float] = {}
    pauses = []
    for request in itertools.islice(made, 3000):
        before = next((last[block] for block in reversed(request.blocks) if block in last), None)
        if before is not None:
            pauses.append(request.at - before)
        last[request.blocks[-1]] = request.at
    assert sum(pauses) / len(pauses) == pytest.approx(KINDS["agents"].pause, rel=0.1)


def test_the_report_says_the_load_that_was_reached() -> None:
    report = play(Experiment(SMALL, requests=60, rows=("recompute",)))
    assert report.record()["load_reached"] == pytest.approx(0.7, rel=0.01)
    assert ("load", "0.7 of the GPUs' time, all computed") in report.facts()


def test_a_store_behind_the_pool_has_what_the_pool_evicted() -> None:
    small = changed(SMALL, enclosures=1, drives=2, drive_bytes=600 << 20, g4_rate=10e9)
    found = _run(small)
    assert found.counts["loaded from g4"] > 0
    assert found.blocks_loaded == 240


def test_what_goes_to_and_from_shared_storage_crosses_the_hosts_nic() -> None:
    small = changed(SMALL, enclosures=1, drives=2, drive_bytes=600 << 20, g4_rate=10e9)
    moved = _run(small).link_bytes
    stripe, value_bytes = block_values(small, BLOCK_TOKENS)
    written = 240 * stripe * value_bytes
    assert moved["host_nics_out"] == moved["drives_written"] + written
    assert moved["host_nics_in"] == moved["drives_read"] + moved["g4"] - written
    # Slow shared storage is slow to have it.
    slow = _run(changed(small, g4_rate=0.02e9))
    assert slow.blocks_loaded < 240


def test_a_file_system_in_dpus_crosses_drives_and_twice_the_fabric() -> None:
    plan = changed(SMALL, gpus=72)
    found = _run(plan, row="lustre-dpu")
    assert found.blocks_loaded == 240
    moved = found.link_bytes
    assert moved["drives_read"] == moved["enclosures_out"] == 240 * block_values(plan, BLOCK_TOKENS)[1]
    assert moved["drives_written"] == moved["enclosures_in"] > 0
    slow = _run(changed(plan, drive_read=0.5e9), row="lustre-dpu")
    assert slow.ttft_mean > 1.2 * found.ttft_mean


def test_every_host_serves_the_same_share_of_a_file_system_in_dpus() -> None:
    """Whatever the lengths of prompts are: one in 18 is served by the host that asks."""
    plan = changed(SMALL, gpus=72, drives=32)
    found = _run(plan, _asked_twice(prompts=100, blocks=36, pause=0.05), row="lustre-dpu")
    assert found.fabric_per_byte == pytest.approx(2 - 1 / 18, abs=0.03)
    assert _run(plan).fabric_per_byte == 1.0
    # Each value is stored once, read once to be copied, and stored again; and half of the bytes are loaded.
    assert _run(changed(plan, copies=2, hedges=False)).fabric_per_byte == pytest.approx(2.0, rel=0.001)
    assert _run(plan, row="recompute").fabric_per_byte is None


def test_what_was_refused_is_counted_once() -> None:
    found = _run(changed(SMALL, faults=("stop",), fault_every=0.2))
    assert [name for name in found.counts if "refused" in name] == ["puts_refused"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enclosures": 0}, "1 to 1,024 enclosures, not 0"),
        ({"gpus": 6}, "no whole hosts"),
        ({"drive_read": 0.0}, "--drive-read of 0 carries nothing"),
        ({"prefill_rate": 0.0}, "--prefill-rate of 0"),
        ({"enclosures": 1000, "drives": 1000}, "drives in all"),
        ({"fault_every": 1e-9}, "faults cannot come every"),
        ({"faults": ("stap",)}, "did you mean stop?"),
    ],
)
def test_a_pod_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", "\\(").replace("?", "\\?")):
        changed(PodPlan(), **changes)


def test_a_preset_with_a_typo_is_answered_by_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean superpod"):
        plan_of(load(), "superpd", "deepseek-v3", "fp8", "gb200")


def test_a_pod_has_the_figures_of_the_table_and_of_the_user() -> None:
    plan = plan_of(load(), "superpod", "deepseek-v3", "fp8", "gb200", drives=24, host_nic=None)
    assert (plan.gpus, plan.hosts, plan.enclosures, plan.drives) == (1152, 288, 36, 24)
    assert (plan.bytes_per_token, plan.prefill_rate, plan.decode_rate) == (35_136, 26_156, 13_386)
    assert (plan.drive_read, plan.enclosure_nic, plan.host_nic) == (14e9, 400e9, 100e9)


def test_a_rate_that_nobody_published_has_to_be_given() -> None:
    with pytest.raises(UserError, match="no prefill rate of llama-3"):
        plan_of(load(), "rack", "llama-3.3-70b", "bf16", "gb200")
    plan = plan_of(load(), "rack", "llama-3.3-70b", "bf16", "gb200", prefill_rate=9500.0, decode_rate=3000.0)
    assert plan.bytes_per_token == 327_680


def test_a_drive_without_room_for_a_set_is_refused() -> None:
    with pytest.raises(UserError, match="no room for a set"):
        _run(changed(SMALL, drive_bytes=1 << 20))
