"""Who changes a file waits for a namespace that is slow, or that gets have found late."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace as altered
from pathlib import Path

import pytest

from agent.fs.files.face import FilesFace
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import PoolBlockStore
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from tests.support.fs.files_calls import FaceCalls
from tests.support.fs.memory_shared import CHUNK, SharedPool
from tests.support.pool.memory_channel import PATIENCE, MemoryNamespace
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

SLOW = 10 * PATIENCE
Trouble = Callable[[MemoryNamespace], None]


def slow(namespace: MemoryNamespace) -> None:
    namespace.slow = SLOW


def paused(namespace: MemoryNamespace) -> None:
    namespace.paused = True


both = pytest.mark.parametrize("trouble", [slow, paused])


def store(agent: PoolAgent, value: bytes) -> None:
    agent.channel.run(agent.served.replace(agent.channel, key_of(1), value, agent.deadline()))


@both
def test_a_value_is_replaced_where_a_get_would_not_wait(trouble: Trouble) -> None:
    pool = MemoryPool()
    agent = pool.agent()
    store(agent, b"older")
    for namespace in pool.namespaces:
        trouble(namespace)
    store(agent, b"newer")
    found = agent.channel.run(agent.served.newest(agent.channel, key_of(1), agent.deadline()))
    assert found in (MissCause.LATE, MissCause.ENCLOSURE_DOWN), "a get of a cache misses, as ever"
    for namespace in pool.namespaces:
        namespace.slow, namespace.paused = 0.0, False
    assert agent.channel.run(agent.served.newest(agent.channel, key_of(1), agent.deadline())) == b"newer"


@both
@pytest.mark.parametrize("directory_fresh", [0.0, 1.0])
def test_no_call_of_shared_that_changes_something_fails(trouble: Trouble, directory_fresh: float) -> None:
    pool = SharedPool(directory_fresh=directory_fresh)
    files = pool.agent()
    files.put("before", b"x" * CHUNK)
    for namespace in pool.namespaces:
        trouble(namespace)
    files.mkdir("folder")
    files.put("empty", b"")
    files.put("short", b"y" * 100)
    files.put("chunks", b"z" * (3 * CHUNK + 5))
    files.rename("before", "renamed")
    files.unlink("empty")
    for namespace in pool.namespaces:
        namespace.slow, namespace.paused = 0.0, False
    assert files.get("short") == b"y" * 100
    assert files.get("chunks") == b"z" * (3 * CHUNK + 5)
    assert files.get("renamed") == b"x" * CHUNK
    assert files.stat("empty") is None
    assert files.stat("folder") is not None


@both
def test_a_block_of_a_file_is_stored_where_both_its_places_are_slow(trouble: Trouble, tmp_path: Path) -> None:
    pool = MemoryPool((1, 1))
    pool.settings = altered(pool.settings, kind="files")
    agent = pool.agent()
    store = PoolBlockStore([agent.volume], lambda: agent.channel)
    face = FilesFace(
        tmp_path / "files.sqlite", store, FilesOptions(workers=1, cache_seconds=0), clock=agent.channel.now
    )
    calls = FaceCalls(face, agent.channel)
    for namespace in pool.namespaces:
        trouble(namespace)
    file = calls.open("file", os.O_CREAT | os.O_WRONLY)
    calls.pwrite(file, b"v" * 1000, 0)
    calls.fsync(file)
    calls.close(file)
    assert calls.get("file") == b"v" * 1000
    face.close()


def test_a_block_goes_where_nobody_has_to_wait() -> None:
    pool = MemoryPool((1, 1))
    pool.settings = altered(pool.settings, kind="files")
    agent = pool.agent()
    slow(pool.namespaces[0])
    began = agent.channel.now()
    for number in range(8):
        agent.put(key_of(number), b"block")
        assert agent.where(key_of(number))[0] == 1
    assert agent.channel.now() - began <= 8 * PATIENCE + 0.001


@both
def test_a_value_of_a_cache_is_refused_soon(trouble: Trouble) -> None:
    pool = MemoryPool((1, 1))
    agent = pool.agent()
    for namespace in pool.namespaces:
        trouble(namespace)
    began = agent.channel.now()
    with pytest.raises(PutRefused):
        agent.put(key_of(1), b"value")
    assert agent.channel.now() - began <= 2 * PATIENCE
