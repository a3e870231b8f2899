"""Figures that others published, beside what these equations make of the same inputs.

A row says what was published and where, and what comes out here. No row is a prediction: each divides
published inputs by each other, or meets the figure with an input that was not published. So the most that a
row can be is consistent. What cannot be played again, because its inputs are not public, is a row as well,
with the reason.
"""

from dataclasses import dataclass

from agent.claims.equations import break_even_gb_s
from agent.claims.scenario import TERA, Choice, scenario_of
from agent.figures.prefill import PrefillCost
from agent.figures.tables import Tables


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure. `consistent` None: it cannot be judged."""

    what: str
    published: str
    here: str
    consistent: bool | None

    @property
    def judgement(self) -> str:
        """In a word, for people."""
        return (
            "not judged" if self.consistent is None else "consistent" if self.consistent else "inconsistent"
        )


def _near(here: float, published: float, tolerance: float) -> bool:
    return abs(here - published) <= tolerance * published


def published_figures(tables: Tables) -> list[Published]:
    """All rows, by the figures of the table."""
    return [
        _deepseek_production(),
        _weka(tables),
        _mlperf_drive(),
        _hits_of_a_talk(tables),
        _goodput_of_a_talk(tables),
        _vllm_load(),
        _dynamo_disk(tables),
        _sglang_file(tables),
        _mooncake_ssd(tables),
        Published(
            "Mooncake paper, table 1: hit ratios of its trace by capacity",
            "0.30 / 0.40 / 0.48 / 0.50 / 0.51 / 0.51",
            "not reproducible: the released trace gives others 0.341 to 0.553 (Mooncake issue 4020, open)",
            None,
        ),
        Published(
            "Mooncake paper, section 5.3: throughput of its cluster",
            "up to 75 % more requests",
            "not reproducible: its set-up is not public (Mooncake issue 452)",
            None,
        ),
    ]


def _deepseek_production() -> Published:
    """Computed tokens over the share that is not found are the tokens that went in."""
    here = 32.2 / (1 - 0.563)
    return Published(
        "DeepSeek in production, 8 H800: tokens in, by 32.2K computed and 56.3 % found",
        "73.7K tokens/s",
        f"{here:.1f}K tokens/s",
        _near(here, 73.7, 0.001),
    )


def _weka(tables: Tables) -> Published:
    """First token at 128K tokens, 300 GB/s for a server of eight; the model was not named."""
    scenario = scenario_of(tables, Choice("llama-3.3-70b", "bf16", "h100", "one"), 131_072, 1.0)
    computed = scenario.context / (scenario.tokens_s * 8)
    loaded = scenario.context * scenario.bytes_per_token / 300e9
    here = computed / loaded
    return Published(
        "WEKA: first token at 128K tokens from 300 GB/s a server; taken as Llama-70B bf16 on 8 H100",
        "41x",
        f"{here:.0f}x, at the assumed utilisation",
        _near(here, 41, 0.15),
    )


def _mlperf_drive() -> Published:
    """One drive in MLPerf Storage v3.0, KV cache. Its specification: 7.0 GB/s of reads, 3.3 of writes."""
    reads, writes = 7.0 / 1.0737, 3.3 / 1.0737
    return Published(
        "MLPerf Storage v3.0, KV cache, one Solidigm P5336: reads and writes",
        "7.86 and 1.79 GiB/s",
        f"at most {reads:.2f} and {writes:.2f} GiB/s by its specification (61 TB); reads above it are not of "
        "the drive alone, and what limits the writes is not known",
        None,
    )


def _hits_of_a_talk(tables: Tables) -> Published:
    """200 new tokens on 100,000: a property of the workload, not of a store."""
    here = 1 - 200 / 100_000
    size = tables.models["llama-3.1-405b"].bytes_per_token("bf16") * 100_000 / 1e9
    return Published(
        "DOCA Memos talk: 99.8 % found, 50 GB of cache for 100K tokens",
        "99.8 %, 50 GB",
        f"{here:.1%} by 200 new tokens a turn; {size:.1f} GB as Llama-405B bf16",
        _near(here, 0.998, 0.001) and _near(size, 50, 0.05),
    )


def needed_gb_s(gigabytes: float, busy_s: float, stall_share: float, hidden_share: float) -> float:
    """The bandwidth at which a request waits for `stall_share` of its time, by how much load is hidden."""
    return gigabytes * (1 - hidden_share) / (busy_s * stall_share / (1 - stall_share))


def _goodput_of_a_talk(tables: Tables) -> Published:
    """96 % goodput is a wait of 4 %: a region of bandwidth, overlap and busy time, not a point."""
    size = tables.models["llama-3.1-405b"].bytes_per_token("bf16") * 100_000 / 1e9
    busy = 10.0
    region = ", ".join(
        f"{needed_gb_s(size, busy, 0.04, hidden):.0f} GB/s with {hidden:.0%} hidden"
        for hidden in (0.0, 0.5, 0.9)
    )
    return Published(
        "DOCA Memos talk: 96 % goodput on the same requests",
        "96 %",
        f"a region, not a point: a request that is busy for {busy:.0f} s waits 4 % at {region}",
        None,
    )


def _vllm_load() -> Published:
    size = 98_304 * 131_072 / 1e9
    slow, fast = size / 2.1, size / 1.8
    return Published(
        "vLLM pull request 53126: 131,072 tokens of 98,304 bytes in 1.8 to 2.1 s",
        "12.9 GB, 6.1 to 7.2 GB/s",
        f"{size:.1f} GB, {slow:.1f} to {fast:.1f} GB/s",
        _near(size, 12.9, 0.005) and _near(slow, 6.1, 0.01) and _near(fast, 7.2, 0.01),
    )


def _dynamo_disk(tables: Tables) -> Published:
    """Llama-3.1-8B on one H100: 20,000 tokens computed in 0.9 s, and read from disk in 40 s."""
    bytes_per_token = tables.models["llama-3.1-8b"].bytes_per_token("bf16")
    given = bytes_per_token * 20_000 / 40 / 1e9
    needed = break_even_gb_s(bytes_per_token, 20_000 / 0.9)
    return Published(
        "Dynamo issue 6101: a prefix from disk, Llama-8B on H100",
        "loses: 40 s instead of 0.9 s",
        f"{_verdict(given, needed)}: {given:.3f} GB/s of the {needed:.2f} GB/s that it breaks even at",
        given < needed,
    )


def _sglang_file(tables: Tables) -> Published:
    """DeepSeek-V4-Flash, four GPUs of prefill: 76.8 M tokens from files in 6,911 s, computed in 4,032 s."""
    bytes_per_token, tokens = tables.models["deepseek-v4-flash"].bytes_per_token("fp8"), 76.8e6
    given = bytes_per_token * tokens / 6910.8 / 4 / 1e9
    needed = break_even_gb_s(bytes_per_token, tokens / 4032.3 / 4)
    return Published(
        "SGLang issue 36179: a prefix from files, DeepSeek-V4-Flash on 4 H200",
        "loses: 6,911 s instead of 4,032 s",
        f"{_verdict(given, needed)}: {given * 1000:.1f} MB/s a GPU of the {needed * 1000:.1f} MB/s or more "
        "that it breaks even at",
        given < needed,
    )


def _verdict(given: float, needed: float) -> str:
    return "loses" if given < needed else "wins"


def _mooncake_ssd(tables: Tables) -> Published:
    """Qwen3-8B on one A100, four requests at a time, 4,096 new tokens a turn, in turn 7.

    What was computed in 16 s with 36 % found gives the rate. With all earlier turns found, what is left of
    7.4 s is loading, at no more than the 27 GB/s of the drives.
    """
    turn, new = 7, 4096
    context = turn * new
    found = (turn - 1) / turn
    model = tables.models["qwen3-8b"]
    assert model.parameters is not None
    layers = sum(count for count, _ in model.layers)
    cost = PrefillCost(2 * model.parameters.active * 1e9, 2 * model.attention_width * layers)
    whole = cost.flops(context)

    def left(share: float) -> float:
        return 1 - cost.flops(int(context * share)) / whole

    computing = 16 * left(found) / left(0.36)
    size = 4 * context * found * model.bytes_per_token("bf16") / 1e9
    needed = size / (7.4 - computing)
    peak_share = 4 * whole * left(0.36) / 16 / (312 * TERA)
    return Published(
        "Mooncake SSD offload, Qwen3-8B on A100, turn 7: found, and first token",
        "over 84 % instead of 36 %; 7.4 s instead of 16 s",
        f"{found:.1%}; {computing:.1f} s if all loads are hidden, 7.4 s with {needed:.1f} of the 27 GB/s of "
        f"its drives ({peak_share:.0%} of the GPU's peak)",
        _near(found, 0.84, 0.03) and computing <= 7.4 and needed <= 27 and peak_share < 1,
    )
