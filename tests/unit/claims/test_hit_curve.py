"""Hit ratios by capacity: against kvcache-simulator to the token, and against the volume itself."""

import itertools
import json
from pathlib import Path

import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_ceiling, simulate_policy
from kvcache_sim.trace import parse_trace_file

from agent.claims import trace as traces
from agent.claims.hit_curve import (
    Clairvoyant,
    Fifo,
    PoolCache,
    PrefixLru,
    SpillingPoolCache,
    Unbounded,
    curve_of,
    hit_ratio,
    share_of_blocks,
)
from agent.claims.trace import next_requests, read_trace
from agent.errors import UserError
from agent.inline.secrets import SecretKey
from agent.pool.volume.settings import Timing
from agent.replay.trace_generator import encode_line, made_trace
from tests.support.pool.memory_pool import MemoryPool

SECRET = SecretKey(bytes(range(32)))


def _head(trace: Path, requests: int, to: Path) -> Path:
    with trace.open() as lines:
        to.write_text("".join(line for line, _ in zip(lines, range(requests), strict=False)))
    return to


def _made(to: Path, requests: int) -> Path:
    to.write_text("\n".join(encode_line(request) for request in made_trace(35, requests)) + "\n")
    return to


def test_fifo_lru_and_optimum_are_those_of_the_judge(real_trace: Path, tmp_path: Path) -> None:
    file = _head(real_trace, 1500, tmp_path / "trace.jsonl")
    plan = build_execution_plan(parse_trace_file(file, block_size=512), warmup_fraction=0.5)
    trace = read_trace(file)
    upcoming = next_requests(trace)
    # With 64, a prompt is often longer than what is kept: then the order within it matters, too.
    for capacity in (64, 512, 4096):
        caches = {
            "fifo": Fifo(capacity),
            "lru": PrefixLru(capacity),
            "optimal": Clairvoyant(capacity, trace, upcoming),
        }
        for policy, cache in caches.items():
            assert hit_ratio(cache, trace) == simulate_policy(plan, policy, capacity).hitRate, policy
    assert hit_ratio(Unbounded(), trace) == simulate_ceiling(plan).hitRate


def test_the_pool_of_the_curve_finds_what_the_volume_finds(tmp_path: Path) -> None:
    """The real volume on memory, block for block, with a few hundred evictions."""
    trace = read_trace(_made(tmp_path / "trace.jsonl", 90))
    sets = 1
    pool = MemoryPool((sets,) * 2, value_bytes=4096, suite="plain+crc64")
    agent = pool.agent(timing=Timing(directory_fresh=1e9), cache_bytes=1 << 30)
    ours = PoolCache(128, trace, SECRET, namespaces=2)
    ours.placement = agent.volume.placement
    found = [0, 0]
    for request in range(trace.requests):
        blocks = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        agent.channel.clock = max(agent.channel.clock, 1000 + trace.seconds[request])
        leading = True
        for block in blocks:
            key = block.to_bytes(16, "little")
            leading = leading and agent.get(key, 1) == b"k"
            found[0] += leading
            if not leading:
                agent.put(key, b"k")
        found[1] += ours.play(request, blocks)
    assert agent.tally.evictions > 100
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_the_pool_lies_between_lru_and_optimum_and_the_gap_is_shown(tmp_path: Path) -> None:
    trace = read_trace(_made(tmp_path / "trace.jsonl", 250))
    sizes, _ = curve_of(trace, SECRET)
    assert sizes[-1].pool == sizes[-1].clairvoyant, "room for all of it"
    capacity = 512
    ours = hit_ratio(PoolCache(capacity, trace, SECRET), trace)
    lru = hit_ratio(PrefixLru(capacity), trace)
    best = hit_ratio(Clairvoyant(capacity, trace, next_requests(trace)), trace)
    print(f"pool {ours:.1%}, LRU {lru:.1%}, optimum {best:.1%}")
    assert lru - 0.03 <= ours <= best


@pytest.mark.parametrize(
    ("all_values", "mark_blocks", "ratio", "copied"),
    [
        (False, 0, 0.253, 4300),
        (True, 1, 0.314, 43400),
        # Each of their two switches is played above.
        pytest.param(True, 0, 0.276, 44300, marks=pytest.mark.nightly),
        pytest.param(False, 1, 0.253, 4300, marks=pytest.mark.nightly),
    ],
)
def test_with_g4_below_the_real_trace_finds_what_the_page_says(
    real_trace: Path, tmp_path: Path, all_values: bool, mark_blocks: int, ratio: float, copied: int
) -> None:
    """docs/tiers.md: the first 3,000 requests, room for a quarter of their blocks; LRU has 0.241."""
    file = tmp_path / "first.jsonl"
    with real_trace.open() as lines:
        file.write_text("".join(itertools.islice(lines, 3000)))
    trace = read_trace(file)
    cache = SpillingPoolCache(
        trace.unique // 4, trace, SECRET, all_values=all_values, mark_blocks=mark_blocks
    )
    found = share_of_blocks(cache, trace)
    assert round(found, 3) == ratio
    assert round(cache.copied, -2) == copied


def test_a_trace_of_small_blocks_and_one_of_mixed_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3], "block_size": 16},
        {"timestamp": 10, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 9], "block_size": 16},
        {"timestamp": 20, "input_length": 40, "output_length": 1, "hash_ids": [1], "block_size": 512},
    ]
    file = tmp_path / "small.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(file)
    assert (trace.block_tokens, trace.requests, trace.broken_lines) == (16, 2, 1)
    assert hit_ratio(Unbounded(), trace) == 32 / 40
    assert trace.used_again_share() == 0.5


def test_of_a_long_trace_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _made(tmp_path / "trace.jsonl", 300)
    heard: list[float] = []
    whole = read_trace(file, heard.append)
    assert whole.is_whole
    assert heard == sorted(heard)
    monkeypatch.setattr(traces, "REFERENCES_MAX", 500)
    first = read_trace(file)
    assert not first.is_whole
    assert 500 <= len(first.blocks) < 600
    assert first.blocks == whole.blocks[: len(first.blocks)]


def test_a_packed_trace_is_the_same_and_a_cut_one_is_refused(
    real_trace: Path, repository: Path, tmp_path: Path
) -> None:
    packed = repository / "tests/vectors/conversation_trace.jsonl.xz"
    assert read_trace(packed).blocks == read_trace(real_trace).blocks
    cut = tmp_path / "cut.xz"
    cut.write_bytes(packed.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be unpacked"):
        read_trace(cut)


def test_a_file_that_is_no_trace_is_refused_with_its_first_fault(tmp_path: Path) -> None:
    file = tmp_path / "no.jsonl"
    file.write_text("hello\n")
    with pytest.raises(
        UserError, match="no request with blocks and tokens; the first of 1 broken lines: line 1: no JSON"
    ):
        read_trace(file)
    # Blocks of 16 tokens in a trace that does not say so.
    file.write_text('{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}')
    with pytest.raises(
        UserError, match=r"line 1: 3 blocks of 512 tokens are more than a prompt of 40; .*_size"
    ):
        read_trace(file)
