"""/fs while an enclosure is away: what is written goes to the others, and what is removed is freed there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore
from agent.fs.files.space_reclaim import RETRY_SECONDS
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.volume.volume import Layout
from agent.pool.write.delete_and_pin import delete, delete_block
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

BLOCK = 16384


class Shelves:
    """/fs over a volume that lies on four namespaces, of which two go away together."""

    def __init__(self, folder: Path) -> None:
        self.pool = MemoryPool((1, 1, 1, 1))
        self.pool.settings = replace(self.pool.settings, kind="files")
        self.agent: PoolAgent = self.pool.agent()
        store = PoolBlockStore([self.agent.volume], lambda: self.agent.channel)
        options = FilesOptions(staging_bytes=4 * BLOCK, workers=4, cache_seconds=0)
        self.face = FilesFace(folder / "files.sqlite", store, options, clock=self.agent.channel.now)
        self.calls = FaceCalls(self.face, self.agent.channel)

    def take_away(self, *, away: bool) -> None:
        for namespace in self.pool.namespaces[2:]:
            namespace.down = away

    def write(self, name: str) -> None:
        """A synced file of one block."""
        file = self.calls.open(name, os.O_CREAT | os.O_WRONLY)
        self.calls.pwrite(file, name.encode() * 1000, 0)
        self.calls.fsync(file)
        self.calls.close(file)

    def collect(self) -> None:
        self.agent.channel.clock += RETRY_SECONDS
        while self.calls.do(self.face.collect):
            pass

    @property
    def stored(self) -> list[int]:
        """Of each namespace: blocks that its directories name."""
        counts = [0] * len(self.pool.namespaces)
        for namespace, _, directory in self.pool.directories():
            counts[namespace] += directory.taken
        return counts


@pytest.fixture
def shelves(tmp_path: Path) -> Iterator[Shelves]:
    made = Shelves(tmp_path)
    yield made
    made.face.close()


def test_removed_files_give_their_room_back_where_the_enclosure_is_there(shelves: Shelves) -> None:
    for number in range(60):
        shelves.write(f"f{number}")
    before = shelves.stored
    assert min(before) > 5
    shelves.take_away(away=True)
    for number in range(60):
        shelves.calls.unlink(f"f{number}")
    shelves.collect()
    assert shelves.stored == [0, 0, *before[2:]]
    assert shelves.face.gauges().doomed_blocks == sum(before[2:]), "the rest is kept for later"
    # Four times what the two namespaces have room for.
    for number in range(8 * SLOTS_PER_SET):
        shelves.write(f"n{number}")
        shelves.calls.unlink(f"n{number}")
    shelves.collect()
    assert shelves.stored == [0, 0, *before[2:]]
    shelves.take_away(away=False)
    shelves.collect()
    assert shelves.stored == [0, 0, 0, 0]
    assert shelves.face.gauges().doomed_blocks == 0


def test_every_file_is_written_while_half_of_the_pool_is_away(shelves: Shelves) -> None:
    shelves.take_away(away=True)
    for number in range(60):
        shelves.write(f"f{number}")
    assert shelves.face.counters.seals_failed == 0
    assert shelves.face.gauges().doomed_blocks == 0
    assert sum(shelves.stored) == 60
    assert all(shelves.calls.get(f"f{number}") == f"f{number}".encode() * 1000 for number in range(60))


def test_a_value_is_deleted_everywhere_or_nowhere_and_a_block_where_it_is_reached() -> None:
    """An enclosure that is away may hold an older value of a key, but nothing else of a block."""
    pool = MemoryPool()
    agent = pool.agent()
    keys = [key_of(number) for number in range(40)]
    for key in keys:
        agent.put(key, b"value")
    here = [key for key in keys if agent.where(key)[0] == 0]
    assert 5 < len(here) < 35
    pool.namespaces[1].down = True
    for key in here:
        with pytest.raises(PutRefused):
            agent.delete(key)
        assert agent.get(key) == b"value"
        assert agent.channel.run(delete_block(agent.volume, agent.channel, key, agent.deadline()))
    for key in set(keys) - set(here):
        with pytest.raises(PutRefused):
            agent.channel.run(delete_block(agent.volume, agent.channel, key, agent.deadline()))
    assert sum(directory.taken for _, _, directory in pool.directories()) == len(keys) - len(here)
    pool.namespaces[1].down = False
    other = pool.agent()
    for key in here:
        assert not other.channel.run(delete(other.volume, other.channel, key, other.deadline()))
    for key in set(keys) - set(here):
        assert other.get(key) == b"value"


def test_a_block_is_removed_while_the_other_enclosure_hangs() -> None:
    pool = MemoryPool()
    agent = pool.agent()
    agent.put(key_of(1), b"value")
    pool.namespaces[1 - agent.where(key_of(1))[0]].hung = True
    deadline = agent.deadline()
    assert agent.channel.run(delete_block(agent.volume, agent.channel, key_of(1), deadline))
    assert agent.channel.now() < deadline
    assert all(directory.taken == 0 for _, _, directory in pool.directories())


def test_what_may_have_been_moved_is_looked_for_again() -> None:
    pool = MemoryPool()
    agent = pool.agent()
    agent.put(key_of(1), b"value")
    pool.namespaces[1 - agent.where(key_of(1))[0]].down = True
    volume = agent.volume
    volume.change(layout=Layout(volume.settings, volume.placement, volume.placement))
    with pytest.raises(PutRefused):
        agent.channel.run(delete_block(agent.volume, agent.channel, key_of(1), agent.deadline()))
    assert all(directory.taken == 0 for _, _, directory in pool.directories()), "a copy may be elsewhere"
