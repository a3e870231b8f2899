"""Random calls on one file of `/shared`, by two agents in turn, against the same calls on bytes in memory."""

from __future__ import annotations

import os
import random

import pytest

from agent.fs.shared.growing_chunk import GROWS_SECONDS
from agent.fs.shared.unnamed import UNNAMED_SECONDS
from tests.support.fs.memory_shared import CHUNK, Files, SharedPool

SIZE_MAX = 6 * CHUNK
STEPS = 60
PIECES = [CHUNK // 2, CHUNK, 2 * CHUNK, 1 << 20]
"""What one call of the kernel writes. The units of all volumes have CHUNK bytes."""


def written(model: bytearray, offset: int, data: bytes) -> None:
    if offset > len(model):
        model.extend(bytes(offset - len(model)))
    model[offset : offset + len(data)] = data


def resized(model: bytearray, size: int) -> None:
    del model[size:]
    model.extend(bytes(size - len(model)))


def some_range(rng: random.Random) -> tuple[int, int]:
    """Offset and length: of whole chunks, of pieces across their ends, of single bytes."""
    kind = rng.random()
    if kind < 0.4:
        first = rng.randrange(SIZE_MAX // CHUNK)
        count = rng.randrange(1, SIZE_MAX // CHUNK - first + 1)
        return first * CHUNK, count * CHUNK
    offset = rng.randrange(SIZE_MAX)
    longest = 9000 if kind < 0.7 else 2 * CHUNK
    return offset, rng.randrange(1, min(longest, SIZE_MAX - offset) + 1)


class OneFile:
    """The file, what it must hold, and the agent that has it open."""

    def __init__(self, agents: list[Files], rng: random.Random) -> None:
        self.agents, self.rng = agents, rng
        self.published: bytes = b""
        self.model = bytearray()
        self.path = "f"
        self.agent = agents[0]
        self.file = self.agent.create(self.path, flags=os.O_RDWR)
        self.is_dirty = True

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.45:
            offset, size = some_range(self.rng)
            data, piece = self.rng.randbytes(size), self.rng.choice(PIECES)
            parts = list(range(0, size, piece))
            if self.rng.random() < 0.3:
                self.rng.shuffle(parts)
            for at in parts:
                self.agent.pwrite(self.file, offset + at, data[at : at + piece])
            written(self.model, offset, data)
            self.is_dirty = True
        elif what < 0.6:
            size = self.rng.choice([0, 1, CHUNK, self.rng.randrange(SIZE_MAX)])
            self.agent.ftruncate(self.file, size)
            resized(self.model, size)
            self.is_dirty = True
        elif what < 0.85:
            offset, size = some_range(self.rng)
            assert self.agent.pread(self.file, offset, size) == self.model[offset : offset + size]
        elif what < 0.95:
            self.close()
            self.agent = self.rng.choice(self.agents)
            self.file = self.agent.open(self.path, os.O_RDWR)
        else:
            self.rename()
        if self.rng.random() < 0.1:
            self.agent.channel.clock += self.rng.choice([UNNAMED_SECONDS, GROWS_SECONDS])
            self.agent.name()
        for agent in self.agents:
            agent.collect()

    def close(self) -> None:
        self.agent.close(self.file)
        self.published = bytes(self.model)
        for agent in self.agents:
            assert agent.get(self.path) == self.published

    def rename(self) -> None:
        new = self.rng.choice(["f", "g", "h"])
        self.close()
        self.rng.choice(self.agents).rename(self.path, new)
        self.path = new
        self.agent = self.rng.choice(self.agents)
        self.file = self.agent.open(new, os.O_RDWR)


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 2 * CHUNK, 2 * CHUNK + 8192, 4 * CHUNK, 16 * CHUNK])
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("agents", [1, 2])
def test_random_calls_do_what_they_do_to_bytes(agents: int, number: int, chunk_bytes: int, seed: int) -> None:
    """Of one agent long chunks grow on flash, of two they do not."""
    pool = SharedPool((4, 4), chunk_bytes=chunk_bytes, directory_fresh=2.0 - agents)
    rng = random.Random(f"{seed} {number} {chunk_bytes}")
    one = OneFile([pool.agent() for _ in range(agents)], rng)
    for _ in range(STEPS):
        one.step()
    one.close()
    one.agents[0].unlink(one.path)
    for agent in one.agents:
        agent.collect()
        assert agent.face._staged.held == agent.reserved() == 0
    assert one.agents[0].taken() == 0, "no chunk is left over"
