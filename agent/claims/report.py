"""The whole answer of `g35 claims`: computed once, for tables, JSON and plots."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent.claims.equations import whole_gpu
from agent.claims.hit_curve import CurvePoint, curve_of
from agent.claims.published import Published, published_figures
from agent.claims.scenario import Choice, Scenario, figures_used, most_hits, scenario_of
from agent.claims.trace import Trace
from agent.claims.verdicts import (
    CONTEXTS,
    STATED_HIT_SHARES,
    STATED_PREFILL_SHARES,
    CapacityRow,
    Claim,
    ModelRow,
    SensitivityRow,
    capacities,
    of_all_models,
    of_capacity,
    of_endurance,
    of_hits,
    of_whole_gpus,
    over_g4,
    over_recompute,
    power_over_g4,
    power_over_recompute,
    sensitivity,
)
from agent.figures.tables import Rate, Tables
from agent.inline.secrets import SecretKey

DEFAULT_CONTEXT = 131_072
DEFAULT_HIT_SHARE = 0.9
WAYS = ("nothing", "recompute", "g4", "g35")
TIERS = ("computed again", "G4, load first", "G4, prestaged", "G3.5, load first", "G3.5, prestaged")
TTFT_CONTEXTS = tuple(int(4096 * 2 ** (step / 10.5)) for step in range(64))
"""Tokens, where there is no trace: 4,096 to 262,144, evenly over the logarithm."""
TTFT_REQUESTS_MAX = 4096
_PLACEMENT = SecretKey(bytes(range(32)))
"""Of the curve alone: where blocks lie must be the same in every run."""


@dataclass(frozen=True, slots=True)
class FromTrace:
    """What a trace says: its curve, and how much of it the pod and its servers would find."""

    trace: Trace
    curve: list[CurvePoint]
    unbounded: float
    busy_gpus: float
    """GPUs that the prompts of the trace keep busy, all computed."""
    block_tb: float
    used_again: float
    prefill_share: float | None
    """Of GPU time, all computed; None where no decode rate of the model on the GPU was published."""

    def tb_a_gpu(self, blocks: float) -> float:
        return blocks * self.block_tb / self.busy_gpus

    def at(self, tb_a_gpu: float, cache: str) -> float:
        """The hit ratio at a capacity, on a line between two points of the curve over the logarithm."""
        blocks = tb_a_gpu * self.busy_gpus / self.block_tb
        if blocks < self.curve[0].blocks:
            return float(getattr(self.curve[0], cache)) * blocks / self.curve[0].blocks
        for one, next_one in zip(self.curve, self.curve[1:], strict=False):
            if blocks < next_one.blocks:
                part = math.log(blocks / one.blocks) / math.log(next_one.blocks / one.blocks)
                low, high = getattr(one, cache), getattr(next_one, cache)
                return float(low + part * (high - low))
        return float(getattr(self.curve[-1], cache))


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that is said, as records."""

    choice: Choice
    scenario: Scenario
    inputs: list[tuple[str, float, str, str]]
    contexts: list[Scenario]
    hits: list[Scenario]
    claims: list[Claim]
    models: list[ModelRow]
    capacities: list[CapacityRow]
    sensitivity: list[SensitivityRow]
    published: list[Published]
    ttft_s: dict[str, list[float]]
    """By tier, one for each request, in order of size."""
    found: FromTrace | None
    limit: str
    hit_share_asked: float | None
    """By the user. The hit share is larger where the servers of a trace find more in their own memory."""


def answer(
    tables: Tables,
    choice: Choice,
    *,
    trace: Trace | None = None,
    context: int | None = None,
    hit_share: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Answer:
    """The answer. `context` and `hit_share`, where not given, are the trace's, or the stated ones."""
    length = context or (trace.mean_context if trace is not None else DEFAULT_CONTEXT)
    scenario = scenario_of(tables, choice, length, 0.0 if hit_share is None else hit_share)
    found = fits = None
    if trace is not None:
        rate = tables.rates.get((choice.model, choice.gpu))
        found = _from_trace(scenario, trace, rate, progress)
        local = found.at(tables.gpus[choice.gpu].dram_gb.value / 1000, "lru")
        fits = found.at(scenario.capacity_tb, "pool")
        share = fits if hit_share is None else hit_share
        most = most_hits(length)
        scenario = replace(scenario, hit_share=min(max(share, local), most), local_share=min(local, most))
    elif hit_share is None:
        scenario = replace(scenario, hit_share=DEFAULT_HIT_SHARE)
    by_trace = found is not None and found.prefill_share is not None
    if found is not None and found.prefill_share is not None:
        scenario = replace(scenario, prefill_share=found.prefill_share)
    contexts = [
        replace(scenario_of(tables, choice, each, scenario.hit_share), local_share=scenario.local_share)
        for each in CONTEXTS
    ]
    shares = sorted({*STATED_HIT_SHARES, scenario.hit_share})
    hits = [replace(scenario, hit_share=share) for share in shares if share >= scenario.local_share]
    models, rows = of_all_models(tables, choice, length), capacities(tables, choice)
    limit = scenario.limit()
    unbounded = found.unbounded if found is not None else None
    if limit == "hits" and unbounded is not None and fits is not None and hit_share is None:
        limit = "capacity" if fits < unbounded - 0.01 else "GPU"
    claims = [
        over_recompute(scenario, contexts, models),
        over_g4(scenario, models),
        of_whole_gpus(scenario, by_trace=by_trace),
        power_over_recompute(scenario),
        power_over_g4(scenario, tables, choice),
        of_capacity(rows, tables.pods[choice.pod]),
        of_hits(
            scenario,
            fits,
            unbounded,
            found is not None and found.tb_a_gpu(found.trace.unique) < scenario.capacity_tb,
        ),
        of_endurance(scenario, found.used_again if found is not None else None),
    ]
    return Answer(
        choice=choice,
        scenario=scenario,
        inputs=[*figures_used(tables, choice), _prefill_share_used(scenario, by_trace)],
        contexts=contexts,
        hits=hits,
        claims=claims,
        models=models,
        capacities=rows,
        sensitivity=sensitivity(scenario),
        published=published_figures(tables),
        ttft_s=ttft_by_tier(scenario, trace, int(tables.pods[choice.pod].gpus_per_host.value)),
        found=found,
        limit=limit,
        hit_share_asked=hit_share,
    )


def _prefill_share_used(scenario: Scenario, by_trace: bool) -> tuple[str, float, str, str]:
    source = "computed: tokens of the trace, prefill and decode rate" if by_trace else "assumed"
    return "prefill's share of GPU time", scenario.prefill_share, source, "2026-11"


def _from_trace(
    scenario: Scenario, trace: Trace, rate: Rate | None, progress: Callable[[float], None]
) -> FromTrace:
    curve, unbounded = curve_of(trace, _PLACEMENT, progress)
    share = None
    if rate is not None and rate.decode_tokens_s is not None:
        prefill_s = sum(trace.inputs) / scenario.tokens_s
        share = prefill_s / (prefill_s + sum(trace.outputs) / rate.decode_tokens_s.value)
    return FromTrace(
        trace=trace,
        curve=curve,
        unbounded=unbounded,
        busy_gpus=sum(trace.inputs) / trace.duration_s / scenario.tokens_s,
        block_tb=scenario.bytes_per_token * trace.block_tokens / 1e12,
        used_again=trace.used_again_share(),
        prefill_share=share,
    )


def ttft_by_tier(scenario: Scenario, trace: Trace | None, gpus: int) -> dict[str, list[float]]:
    """Seconds to the first token, one server (`gpus`) for each request and all other GPUs loading as well.

    Nothing lies in the server itself. Without a trace: `TTFT_CONTEXTS`, each with the hit share.
    """
    if trace is None:
        prompts = [(context, scenario.hit_share) for context in TTFT_CONTEXTS]
    else:
        step = -(-trace.requests // TTFT_REQUESTS_MAX)
        shares = _found_shares(trace)
        prompts = [(trace.inputs[n], shares[n]) for n in range(0, trace.requests, step) if trace.inputs[n]]
    found: dict[str, list[float]] = {tier: [] for tier in TIERS}
    for context, hit_share in prompts:
        here = replace(scenario, context=context, hit_share=hit_share, local_share=0.0)
        whole = context / here.tokens_s / gpus
        times = (
            here.recompute,
            here.g4.serial(hit_share),
            here.g4.overlapped(hit_share),
            here.g35.serial(hit_share),
            here.g35.overlapped(hit_share),
        )
        for tier, time in zip(TIERS, times, strict=True):
            found[tier].append(time * whole)
    return {tier: sorted(times) for tier, times in found.items()}


def _found_shares(trace: Trace) -> "array[float]":
    """Of each request, the share of its tokens that earlier requests had."""
    seen = bytearray(trace.unique)
    shares = array("d")
    for request in range(trace.requests):
        blocks = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        hits = next((depth for depth, block in enumerate(blocks) if not seen[block]), len(blocks))
        for block in blocks:
            seen[block] = 1
        shares.append(trace.tokens_of(request, hits) / max(1, trace.inputs[request]))
    return shares


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def record(said: Answer) -> dict[str, Any]:
    """For `--json`. Bandwidths and watts are for one GPU, shares from 0 to 1, times in seconds."""
    scenario, found = said.scenario, said.found
    return {
        "model": said.choice.model,
        "kv": said.choice.kv,
        "gpu": said.choice.gpu,
        "pod": said.choice.pod,
        "context": scenario.context,
        "hit_share": _round(scenario.hit_share),
        "hit_share_asked": said.hit_share_asked,
        "local_share": _round(scenario.local_share),
        "inputs": [
            {"what": what, "value": _round(value), "source": source, "date": date}
            for what, value, source, date in said.inputs
        ],
        "prefill_tokens_s": _round(scenario.tokens_s),
        "attention_share": _round(scenario.attention_share),
        "break_even_gb_s": _round(scenario.break_even_gb_s),
        "lanes_gb_s": {name: _round(rate) for name, rate in scenario.lanes_gb_s.items()},
        "g4_gb_s": _round(scenario.g4_gb_s),
        "supply": _round(scenario.supply),
        "limit": said.limit,
        "contexts": [_context_row(each) for each in said.contexts],
        "speed_up": [_hit_row(each) for each in said.hits],
        "whole_gpu": [
            {"prefill_share": share, "speed_up": _round(whole_gpu(scenario.speed_up("recompute"), share))}
            for share in STATED_PREFILL_SHARES
        ],
        "energy_j": {
            way: {**_rounded(asdict(scenario.energy(way))), "total": _round(scenario.energy(way).total)}
            for way in WAYS
        },
        "drive_writes_a_day": _round(scenario.writes_a_day),
        "drive_writes_a_day_rated": scenario.drive_writes_a_day,
        "retention_hours": _round(scenario.retention_hours),
        "capacities": [_rounded(asdict(row)) for row in said.capacities],
        "trace": _trace_record(found),
        "models": [_rounded(asdict(row)) for row in said.models],
        "ttft_prompts": _ttft_prompts(said),
        "ttft_s": {
            tier: {f"p{int(100 * share)}": _round(_quantile(times, share)) for share in (0.5, 0.9, 0.99)}
            for tier, times in said.ttft_s.items()
            if times
        },
        "claims": [asdict(claim) for claim in said.claims],
        "sensitivity": [_rounded(asdict(row)) for row in said.sensitivity],
        "published": [asdict(row) for row in said.published],
    }


def _ttft_prompts(said: Answer) -> str:
    if said.found is not None:
        return "the prompts of the trace, each with what earlier ones had"
    mix = f"{TTFT_CONTEXTS[0]:,} to {TTFT_CONTEXTS[-1]:,} tokens"
    return f"prompts of {mix} whatever --context is, with a hit share of {said.scenario.hit_share:.1%}"


def _trace_record(found: FromTrace | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "requests": found.trace.requests,
        "blocks": len(found.trace.blocks),
        "unique_blocks": found.trace.unique,
        "block_tokens": found.trace.block_tokens,
        "is_whole": found.trace.is_whole,
        "broken_lines": found.trace.broken_lines,
        "busy_gpus": _round(found.busy_gpus),
        "used_again_share": _round(found.used_again),
        "prefill_share": None if found.prefill_share is None else _round(found.prefill_share),
        "unbounded_hit_ratio": _round(found.unbounded),
        "hit_curve": [
            {**_rounded(asdict(point)), "tb_a_gpu": _round(found.tb_a_gpu(point.blocks))}
            for point in found.curve
        ],
    }


def _context_row(scenario: Scenario) -> dict[str, Any]:
    best = scenario.with_best_hits()
    return {
        "context": scenario.context,
        "break_even_gb_s": _round(scenario.break_even_gb_s),
        "supply": _round(scenario.supply),
        "best_hit_share": _round(best.hit_share),
        "best_over_recompute": _round(best.speed_up("recompute")),
        "best_over_g4": _round(best.speed_up("g4")),
        "g4_threshold_tb_s": _round(best.g4_threshold_gb_s() * best.gpus / 1000),
    }


def _hit_row(scenario: Scenario) -> dict[str, Any]:
    row: dict[str, Any] = {"hit_share": _round(scenario.hit_share), "limit": scenario.limit()}
    for over in WAYS[:3]:
        row[f"over_{over}"] = _round(scenario.speed_up(over))
        row[f"over_{over}_load_first"] = _round(scenario.speed_up(over, overlapped=False))
    return row


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _round(value) if isinstance(value, float) else value for name, value in values.items()}


def _round(value: float) -> float:
    """Six significant digits: inputs have two or three."""
    return float(f"{value:.6g}")
