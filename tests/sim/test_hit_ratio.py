"""Eviction in two sets of 64 by age and hits, against a fully associative LRU of the same bytes.

The real volume on memory, played with values of one byte; the real trace where it is there, and a small
one made here that has its traits: conversations that come back and grow, and a few prefixes for all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import pytest

from agent.pool.volume.settings import Timing
from agent.replay.lru import LruBaseline
from tests.support.pool.memory_pool import MemoryPool, PoolAgent
from tests.support.pool.spill_pool import MemoryTarget, SpillingAgent

Request = tuple[float, list[int]]


def requests_of(trace: Path, count: int) -> list[Request]:
    with trace.open() as file:
        lines = [json.loads(line) for line in islice(file, count)]
    return [(line["timestamp"] / 1000, line["hash_ids"]) for line in lines]


def made_trace(seed: int, count: int) -> list[Request]:
    """Most conversations are one request; some go on for long. All begin with one of three prefixes."""
    rng = random.Random(f"trace {seed}")
    lasting: list[list[int]] = []
    block = 100
    requests: list[Request] = []
    for number in range(count):
        if lasting and rng.random() < 0.35:
            blocks = lasting[-1 - int(rng.expovariate(1 / 25)) % len(lasting)]
        else:
            blocks = [rng.randrange(3)]
            if rng.random() < 0.25:
                lasting.append(blocks)
        grown = rng.randint(1, 20)
        blocks += range(block, block + grown)
        block += grown
        requests.append((number * 0.3, list(blocks)))
    return requests


class SparseTarget(MemoryTarget):
    """Objects without the zeros at the end of each 4 KiB, which are most of values of a byte."""

    def put(self, name: str, data: memoryview) -> None:
        blocks = [bytes(data[at : at + 4096]).rstrip(b"\0") for at in range(0, len(data), 4096)]
        self.sparse[name] = blocks

    def __init__(self) -> None:
        super().__init__()
        self.sparse: dict[str, list[bytes]] = {}

    def fetch(self, name: str, offset: int, size: int) -> Future[bytes]:
        blocks = self.sparse[name][offset // 4096 : -(-(offset + size) // 4096)]
        future: Future[bytes] = Future()
        future.set_result(b"".join(block.ljust(4096, b"\0") for block in blocks)[:size])
        return future


class Player:
    """Plays requests through a volume as an engine would: the prefix that is there, then what is not."""

    def __init__(self, agent: PoolAgent, spilling: SpillingAgent | None = None) -> None:
        self.agent = agent
        self.spilling = spilling
        self.blocks = self.hits = 0

    def play(self, at: float, hash_ids: Sequence[int]) -> None:
        channel = self.agent.channel
        channel.clock = max(channel.clock, 1000 + at)
        self.blocks += len(hash_ids)
        prefix = True
        for hash_id in hash_ids:
            key = hash_id.to_bytes(16, "little")
            if prefix:
                prefix = self.agent.get(key, 1) == b"k"
                self.hits += prefix
            if not prefix:
                self.agent.put(key, b"k")
        if self.spilling is not None:
            self.spilling.spill()

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.blocks


def play(requests: Sequence[Request], namespaces: int) -> tuple[float, float]:
    """Hit ratio of block references: of the volume, and of the LRU; room for a quarter of the blocks."""
    unique = len({hash_id for _, hash_ids in requests for hash_id in hash_ids})
    sets = max(1, unique // 4 // 64 // namespaces)
    pool = MemoryPool((sets,) * namespaces, value_bytes=4096, suite="plain+crc64")
    agent = pool.agent(timing=Timing(directory_fresh=1e9), cache_bytes=1 << 30)
    ours, lru = Player(agent), LruBaseline(sets * namespaces * 64)
    for at, hash_ids in requests:
        ours.play(at, hash_ids)
        lru.play(hash_ids)
    print(
        f"{len(requests)} requests, {ours.blocks} blocks, {unique} unique, {pool.settings.slots} slots: "
        f"ours {ours.hit_ratio:.2%}, LRU {lru.hit_ratio:.2%}"
    )
    assert agent.tally.gets_hit == ours.hits
    return ours.hit_ratio, lru.hit_ratio


def play_with_g4(requests: Sequence[Request], namespaces: int, *, all_values: bool) -> float:
    """As `play`, with a place in G4 below: what came from there is a hit."""
    unique = len({hash_id for _, hash_ids in requests for hash_id in hash_ids})
    sets = max(1, unique // 4 // 64 // namespaces)
    pool = MemoryPool((sets,) * namespaces, value_bytes=4096, suite="plain+crc64")
    agent = pool.agent(timing=Timing(directory_fresh=1e9), cache_bytes=1 << 30)
    player = Player(agent, SpillingAgent(agent, SparseTarget(), all_values=all_values))
    for at, hash_ids in requests:
        player.play(at, hash_ids)
    tally = agent.tally
    print(f"with G4: {player.hit_ratio:.2%}, of them {tally.gets_from_g4} from there; {tally.misses}")
    assert tally.gets_hit == player.hits
    return player.hit_ratio


@pytest.mark.parametrize("count", [300, pytest.param(600, marks=pytest.mark.nightly)])
def test_the_real_trace_with_g4_below(real_trace: Path, count: int) -> None:
    """Both ways to choose what goes down find more than flash alone; `all` in time most of what there is."""
    requests = requests_of(real_trace, count)
    alone, _ = play(requests, 4)
    used = play_with_g4(requests, 4, all_values=False)
    every = play_with_g4(requests, 4, all_values=True)
    seen: set[int] = set()
    repeated = references = 0
    for _, hash_ids in requests:
        repeated += sum(hash_id in seen for hash_id in hash_ids)
        references += len(hash_ids)
        seen.update(hash_ids)
    assert alone <= used < every <= repeated / references
    if count >= 600:  # until then little has come back
        assert every - alone > (repeated / references - alone) / 2


@pytest.mark.nightly  # Made traces are played each time.
def test_the_real_trace(real_trace: Path) -> None:
    ours, lru = play(requests_of(real_trace, 3000), namespaces=4)
    assert ours >= lru
    assert lru > 0.2, "the trace is not the one it was"


@pytest.mark.parametrize("namespaces", [1, 3])
def test_a_made_trace(namespaces: int, seed: int) -> None:
    """Made by recency alone, which is an LRU's home ground: here ours comes near it, either way."""
    ours, lru = play(made_trace(seed, 700), namespaces)
    assert ours >= lru - 0.03
    assert lru > 0.1
