"""What a thread does after its lookups decides what its next lookup brings along."""

from __future__ import annotations

import pytest

from tests.support.fs.memory_shared import CHUNK, MAKER, Files, SharedPool

DATA = bytes(range(256)) * (4 * CHUNK // 256)


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool()


def reads(pool: SharedPool) -> int:
    return sum(namespace.reads for namespace in pool.namespaces[:2])


def test_a_thread_that_opens_what_it_looks_up_holds_it_with_the_lookup(pool: SharedPool) -> None:
    files = pool.agent()
    files.put("f", DATA)
    files.release(files.open("f"))
    before = reads(pool)
    ino = files.lookup("f").attributes.ino
    assert reads(pool) > before, "directories of its chunks"
    before = reads(pool)
    assert held(files) == 4
    file = files.open_node(ino)
    assert reads(pool) == before
    assert files.pread(file, 0, len(DATA)) == DATA
    files.release(file)
    assert held(files) == 0


def test_a_thread_that_only_asks_pays_for_nothing_else(pool: SharedPool) -> None:
    files = pool.agent()
    files.put("f", DATA)
    files.release(files.open("f"))
    for _ in range(2):
        files.lookup("f")
    before = reads(pool)
    files.lookup("f")
    assert reads(pool) == before


def test_what_nobody_comes_for_is_let_go(pool: SharedPool) -> None:
    files = pool.agent()
    files.put("f", DATA)
    files.release(files.open("f"))
    files.lookup("f")
    assert held(files) == 4
    files.channel.clock += 2
    assert files.stat("another") is None
    assert held(files) == 0


def test_a_name_that_was_replaced_elsewhere_is_not_held_for_its_old_content(pool: SharedPool) -> None:
    files, others = pool.agent(), pool.agent()
    files.put("f", DATA)
    files.release(files.open("f"))
    others.put("f", DATA[::-1])
    files.lookup("f")
    assert held(files) == 0
    assert files.get("f") == DATA[::-1]


def test_the_directories_of_the_next_chunk_are_read_beside_the_one_that_is_stored(pool: SharedPool) -> None:
    files = pool.agent()
    file = files.create("f")
    files.pwrite(file, 0, DATA[:CHUNK], MAKER)
    trips = files.channel.round_trips
    before = reads(pool)
    files.pwrite(file, CHUNK, DATA[CHUNK : 2 * CHUNK], MAKER)
    assert reads(pool) > before
    assert files.channel.round_trips >= trips
    files.close(file)


def held(files: Files) -> int:
    return len(files.chunks.holds)


def test_what_the_kernel_forgets_is_not_held_for_it(pool: SharedPool) -> None:
    """It looks a name up twice where the file that it knew was written meanwhile, and forgets one answer."""
    files = pool.agent()
    files.put("f", DATA)
    files.release(files.open("f"))
    ino = files.lookup("f").attributes.ino
    assert held(files) > 0
    files.face.forget(ino, 2)
    assert held(files) == 0
