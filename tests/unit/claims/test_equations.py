"""The equations of the claims, against figures that were computed by hand and against each other."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.claims import equations as of
from agent.claims.scenario import Choice, Scenario, scenario_of
from agent.claims.verdicts import CHANGES, sensitivity
from agent.figures.prefill import PrefillCost
from agent.figures.tables import KvPrecision, load

TABLES = load()
shares = st.floats(0, 1)
supplies = st.floats(0.01, 1000)


@pytest.mark.parametrize(
    ("model", "kv", "gpu", "expected"),
    [
        ("llama-3.3-70b", "bf16", "h100", ((1.41, 8.9), (0.83, 15.1))),
        ("llama-3.3-70b", "bf16", "gb200", ((3.11, 4.0), (1.83, 6.8))),
        ("llama-3.1-405b", "fp8", "gb200", ((0.48, 26), (0.33, 37))),
        ("gpt-oss-120b", "bf16", "gb200", ((4.29, 2.9), (2.18, 5.7))),
        ("llama-3.1-8b", "bf16", "gb200", ((9.33, 1.3), (4.55, 2.7))),
    ],
)
def test_break_even_and_supply_by_an_independent_sketch(
    model: str, kv: KvPrecision, gpu: str, expected: tuple[tuple[float, float], ...]
) -> None:
    """At 32,768 and 131,072 tokens, with the GPU's assumed utilisation."""
    for context, (break_even, supply) in zip((32_768, 131_072), expected, strict=True):
        found = scenario_of(TABLES, Choice(model, kv, gpu, "superpod"), context, 0.9)
        assert found.break_even_gb_s == pytest.approx(break_even, abs=0.006 + 0.005 * break_even)
        assert found.supply == pytest.approx(supply, rel=0.05)
        assert (found.gb_s, found.lane) == (12.5, "network")


def test_a_published_rate_calibrates_the_gpu_for_its_model() -> None:
    rate = TABLES.rates["deepseek-v3", "gb200"]
    found = scenario_of(TABLES, Choice("deepseek-v3", "fp8", "gb200", "superpod"), rate.context, 0.9)
    assert found.tokens_s == pytest.approx(rate.tokens_s.value)


@given(shares, supplies)
def test_without_attention_the_times_are_the_textbooks(hit_share: float, supply: float) -> None:
    tier = of.Tier(supply)
    best = supply / (1 + supply)
    expected = max(1 - min(hit_share, best), min(hit_share, best) / supply)
    assert tier.overlapped(hit_share) == pytest.approx(expected, abs=1e-9)
    assert tier.overlapped(1.0) == pytest.approx(1 / (1 + supply))
    assert tier.serial(hit_share) == pytest.approx(min(1.0, 1 - hit_share + hit_share / supply), abs=1e-12)


@given(shares, supplies, shares, st.floats(0, 0.9))
def test_prestaging_is_worth_at_most_two_and_never_costs(
    hit_share: float, supply: float, attention: float, local: float
) -> None:
    tier = of.Tier(supply, attention, local)
    overlapped, serial = tier.overlapped(hit_share), tier.serial(hit_share)
    assert overlapped <= serial + 1e-9
    assert serial <= 2 * overlapped + 1e-9
    assert overlapped <= of.work_of(local, attention) + 1e-9


@given(supplies, shares)
def test_more_supply_is_never_slower(supply: float, hit_share: float) -> None:
    assert of.Tier(2 * supply, 0.5).overlapped(hit_share) <= of.Tier(supply, 0.5).overlapped(hit_share) + 1e-9


@given(st.floats(4.1, 500), st.floats(0.1, 10))
def test_the_threshold_of_g4_is_the_one_of_the_closed_form(supply: float, break_even: float) -> None:
    time = 5 * of.Tier(supply).overlapped(1.0)
    expected = max(0.0, (1 + supply) / 5 - 1)
    assert of.supply_for(time, 0.0) == pytest.approx(expected, abs=1e-6)


def test_the_work_that_is_left_is_what_the_operations_say() -> None:
    cost = PrefillCost(100.0, 3.0)
    context, found = 1000, 600
    rest = 100.0 * (context - found) + 3.0 * (context**2 - found**2) / 2
    assert of.work_of(0.6, cost.attention_share(context)) == pytest.approx(rest / cost.flops(context))
    assert of.hit_share_for(of.work_of(0.6, 0.3), 0.3) == pytest.approx(0.6)


@pytest.mark.parametrize("context", [5, 7, 11, 40])
def test_sparse_attention_costs_what_its_pairs_do(context: int) -> None:
    """Token by token: each attends to those before it, and to half of itself, up to seven."""
    cost = PrefillCost(100.0, 3.0, 7, 11.0)
    one_by_one = sum(100.0 + 3.0 * (token + 0.5) + 11.0 * min(token + 0.5, 7) for token in range(context))
    assert cost.flops(context) == pytest.approx(one_by_one)


def test_sparse_attention_of_a_model_by_hand() -> None:
    """DeepSeek-V3.2: 64 indexer heads of 128 for every pair, 128 heads of 576 + 512 for 2,048 of them."""
    looked_at = 2 * 64 * 128 * 61 * 131_072 / 2
    chosen = 2 * 128 * (576 + 512) * 61 * 2048 * (1 - 1024 / 131_072)
    found = scenario_of(TABLES, Choice("deepseek-v3.2", "fp8", "gb200", "superpod"), 131_072, 0.9)
    assert found.tokens_s == pytest.approx(0.35 * 5e15 / (2 * 37e9 + looked_at + chosen))


def test_a_whole_gpu_gains_by_its_share_of_prefill() -> None:
    assert of.whole_gpu(10, 0.5) == pytest.approx(1 / 0.55)
    assert of.prefill_share_for(4.9, 5) is None
    share = of.prefill_share_for(10, 5)
    assert share is not None
    assert of.whole_gpu(10, share) == pytest.approx(5)


def _scenario(hit_share: float = 0.95) -> Scenario:
    return scenario_of(TABLES, Choice("llama-3.3-70b", "bf16", "gb200", "superpod"), 32_768, hit_share)


@pytest.mark.parametrize("hit_share", [0.2, 0.8, 0.95])
def test_the_parts_of_the_energy_are_all_of_it(hit_share: float) -> None:
    """GPUs and storage draw their watts for the time that a token takes, and nothing else does."""
    here = _scenario(hit_share)
    spent = here.energy("g35")
    watts = here.gpu_watts + here.storage_watts + here.dpu_watts
    assert spent.total == pytest.approx(watts * here.g35.overlapped(hit_share) / here.tokens_s)
    assert min(spent.computing, spent.waiting, spent.storage, spent.dpu) >= 0
    assert here.energy("nothing").total == pytest.approx(here.gpu_watts / here.tokens_s)


def test_drives_by_hand() -> None:
    """1 GB/s into 86.4 TB is once a day, and fills it within 24 hours."""
    assert of.drive_writes_a_day(1.0, 86.4) == pytest.approx(1)
    assert of.retention_hours(86.4, 1.0) == pytest.approx(24)
    here = _scenario(0.5)
    missing = here.bytes_per_token * here.tokens_s * 0.5 / here.g35.overlapped(0.5) / 1e9
    assert here.written_gb_s == pytest.approx(missing)


def test_only_what_is_not_found_is_written() -> None:
    """A hundredth of 131,072 tokens, of 131,072 bytes each, over the time of the prompt.

    Loading stops where it takes as long as computing. What is computed from there on lies on flash already.
    """
    here = scenario_of(TABLES, Choice("llama-3.1-8b", "bf16", "gb200", "superpod"), 131_072, 0.99)
    seconds = here.context * here.g35.overlapped(0.99) / here.tokens_s
    by_hand = 131_072 * 131_072 * 0.01 / seconds / 1e9
    assert here.written_gb_s == pytest.approx(by_hand)
    assert here.writes_a_day == pytest.approx(0.87, abs=0.01)
    short = scenario_of(TABLES, Choice("llama-3.1-8b", "bf16", "gb200", "superpod"), 32_768, 0.8)
    assert short.writes_a_day == pytest.approx(22.7, abs=0.1)
    assert short.retention_hours == pytest.approx(1.06, abs=0.01)


def test_the_last_token_is_always_computed() -> None:
    here = scenario_of(TABLES, Choice("llama-3.1-8b", "bf16", "gb200", "superpod"), 1000, 1.0)
    assert here.hit_share == pytest.approx(0.999)
    assert here.retention_hours > 0


def test_what_limits_changes_with_the_hits() -> None:
    assert _scenario(0.5).limit() == "hits"
    assert _scenario(0.99).limit() == "network"


def test_more_enclosures_leave_the_hosts_alone() -> None:
    """Twice the enclosures: network, drives, room and watts; the host's DPU then limits no later."""
    here = _scenario(0.99)
    there = CHANGES["number of enclosures"](here, 4.0)
    assert (there.gb_s, there.lane) == (25.0, "host DPU")
    assert there.storage_watts == 4 * here.storage_watts
    assert there.capacity_tb == 4 * here.capacity_tb
    assert there.dpu_watts == here.dpu_watts


def test_power_wear_and_decoding_have_their_own_inputs() -> None:
    rows = {(row.input, row.factor): row for row in sensitivity(_scenario(0.95))}
    free, dear = rows["watts of G4", 0.5], rows["watts of G4", 2.0]
    assert free.power_over_g4 < dear.power_over_g4
    assert free.power_over_recompute == dear.power_over_recompute
    assert (
        rows["watts of the host's DPU", 0.5].power_over_g4
        > rows["watts of the host's DPU", 2.0].power_over_g4
    )
    small, large = rows["capacity", 0.5], rows["capacity", 2.0]
    assert small.drive_writes_of_rated == pytest.approx(4 * large.drive_writes_of_rated)
    assert small.retention_hours == pytest.approx(large.retention_hours / 4)
    lasting = "writes a day that the drives last"
    assert rows[lasting, 0.5].drive_writes_of_rated == 4 * rows[lasting, 2.0].drive_writes_of_rated
    share = "prefill's share of GPU time"
    assert rows[share, 0.5].whole_gpus == pytest.approx(
        of.whole_gpu(_scenario(0.95).speed_up("recompute"), 0.25)
    )
    assert rows[share, 2.0].whole_gpus == rows[share, 2.0].over_recompute


def test_bytes_of_g4_pass_the_dpu_of_the_host() -> None:
    choice = Choice("llama-3.3-70b", "bf16", "gb200", "superpod", 100_000.0)
    here = scenario_of(TABLES, choice, 32_768, 0.95)
    assert here.g4_gb_s == pytest.approx(86.8, abs=0.1)
    assert here.g4.supply == pytest.approx(25 / here.break_even_gb_s)


def test_each_input_that_matters_moves_the_answer() -> None:
    """Where the network limits, twice the network is faster; twice the drives is not."""
    rows = {(row.input, row.factor): row for row in sensitivity(_scenario(0.99))}
    assert len(rows) == 2 * len(CHANGES)
    here = _scenario(0.99).speed_up("recompute")
    assert rows["network of the enclosures", 0.5].over_recompute < here
    assert rows["number of enclosures", 2.0].over_recompute > here
    assert rows["reads of the drives", 2.0].over_recompute == here
    assert rows["prefill rate", 2.0].over_recompute < here, "a faster GPU makes it harder"
    assert rows["KV bytes a token", 0.5].over_recompute > here
    assert rows["G4", 0.5].over_g4 > rows["G4", 2.0].over_g4
    assert all(math.isfinite(row.power_over_recompute) for row in rows.values())


def test_faster_gpus_break_even_later_and_longer_contexts_sooner() -> None:
    """For every model whose cost is known: what docs/claims.md says in one sentence."""
    gpus = sorted(TABLES.gpus, key=lambda name: TABLES.gpus[name].fp8_tflops.value)
    able = [name for name, model in TABLES.models.items() if model.parameters is not None]
    assert len(able) > 8
    for model in able:
        by_context = {}
        for context in (8192, 32_768, 131_072):
            flops: dict[str, float] = {}
            for gpu in gpus:
                found = scenario_of(TABLES, Choice(model, "fp8", gpu, "superpod"), context, 0.9)
                flops[gpu] = found.flops_s
                by_context[gpu, context] = found.break_even_gb_s
            ordered = sorted(gpus, key=flops.__getitem__)
            for slower, faster in itertools.pairwise(ordered):
                if flops[slower] < flops[faster]:
                    assert by_context[slower, context] < by_context[faster, context], (model, context)
        for gpu in gpus:
            assert by_context[gpu, 8192] > by_context[gpu, 32_768] > by_context[gpu, 131_072], (model, gpu)
