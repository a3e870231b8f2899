"""Every table that bounds itself, filled beyond its bound: it holds no more, and costs what is said."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from agent.fs.files.block_rows import SealedBlock
from agent.fs.files.face import FilesFace
from agent.fs.files.fsync_tracking import BLOCKS_MAX, Unsynced
from agent.fs.files.open_files import OpenFile
from agent.fs.files.options import FilesOptions
from agent.fs.files.pool_store import OPEN_BLOCKS_MAX, PoolBlockStore
from agent.fs.files.staging import StagingMemory
from agent.fs.files.suspect_blocks import Suspects
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Caller, FsError
from agent.host_os.per_user_bounds import CATALOGUE, Bounds
from agent.inline.cipher_suites import Place
from agent.pool.access import serve
from agent.pool.format.directory import Entry
from agent.pool.format.spill_mark import SpillMark
from agent.pool.prestage.prefetcher import Prefetcher
from agent.pool.prestage.readahead import CHAIN_MAX, Readahead
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import settle
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.media_errors import SlotAt
from agent.pool.volume.replication_backlog import DOUBTFUL_MAX, OWED_MAX, NamedCopy
from agent.pool.volume.spill_copies import FoundMark
from agent.pool.write.admission import SecondUse
from agent.pool.write.write_back import WriteBack
from agent.remote.fence import Fence
from agent.service.watched_memory import watch_memory
from agent.spill.read_up import Below, PlaceHealth
from tests.support.pool.inline_runner import InlineRunner
from tests.support.pool.memory_blocks import MemoryBlockStore
from tests.support.pool.memory_pool import MemoryPool, PoolAgent
from tests.support.pool.spill_pool import MemoryTarget
from tests.support.sim.kv_flash import kv_volume

RUN = InlineRunner()
SMALLER = 1 << 14
"""Of tables that take a bound, and whose own would take long."""


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Walk(NamedTuple):
    """A table: how one more comes in, how many are in it, and how many may."""

    add: Callable[[int], object]
    held: Callable[[], int]
    most: int


def agent() -> PoolAgent:
    return MemoryPool((64, 64), value_bytes=4096).agent()


def of(table: str, add: Callable[[int], object], volume: Any) -> Walk:
    return Walk(add, lambda: volume.table_sizes()[table], CATALOGUE[table].most)


def kept_units() -> Walk:
    volume = agent().volume
    return of("kept-units", lambda at: volume.unit_cache.keep(at, 0, volume.unit_buffers.borrow()), volume)


def spare_units() -> Walk:
    volume = agent().volume
    borrowed = [volume.unit_buffers.borrow() for _ in range(100)]
    return of("spare-units", lambda at: volume.unit_buffers.give_back(borrowed[at]), volume)


def proven_headers() -> Walk:
    volume = agent().volume
    place = Place(bytes(16), 1)

    def add(at: int) -> None:
        for _ in range(2):
            proven = cast(Any, [0] * 300)
            volume.codec.proven_headers.keep(name(at) * 2, bytes(4096), place, proven)

    return of("proven-headers", add, volume)


def unsettled_keys() -> Walk:
    volume = agent().volume
    return of("unsettled-keys", lambda at: volume.in_doubt_writes.note(name(at), 0.0), volume)


def kv_keys() -> Walk:
    volume = kv_volume((1 << 24,))
    tables = (volume.uses, volume.evicted, volume.disproven)
    return of("kv-keys", lambda at: tables[at % 3].note(name(at), 1 << 50), volume)


def damaged_slots() -> Walk:
    volume = agent().volume
    return of(
        "damaged-slots",
        lambda at: volume.media_errors.refused_a_write(cast(Any, SlotAt(0, at, 0)), 1),
        volume,
    )


def owed_copies() -> Walk:
    volume = agent().volume

    def add(at: int) -> None:
        if at >= DOUBTFUL_MAX:
            volume.replication_backlog.note(name(at))
        else:  # beyond that nobody makes one (replication.py)
            volume.replication_backlog.doubt(NamedCopy(0, at, 0, name(at), at), 0.0)

    return of("owed-copies", add, volume)


def spill_copies() -> Walk:
    copies = agent().volume.spill_copies
    copies.wanted = True

    def add(at: int) -> None:
        victim = Entry(name(at), at + 1, at, 4096)
        copies.note((0, at), at % 64, victim, SpillMark(at, 1, 1))
        copies.mark_for((1, at), at % 64, victim)

    return Walk(add, lambda: len(copies), CATALOGUE["spill-copies"].most)


def spill_uses() -> Walk:
    below = Below(agent().volume, "00" * 16, MemoryTarget(), PlaceHealth(1, 1, 1.0))

    def add(at: int) -> None:
        for _ in range(1 + (at % 7 == 0)):
            below.served(
                name(at), name(at), memoryview(b""), FoundMark(Place(bytes(16), at), (1, at), 0, bytes(8))
            )

    return Walk(add, lambda: len(below), CATALOGUE["spill-uses"].most)


def removed_marks() -> Walk:
    volume = agent().volume

    def add(at: int) -> None:
        for number in range(1 + 31 * (at % 64 == 0)):
            marks = [(at << 8 | number << 4 | each).to_bytes(8, "big") for each in range(4)]
            volume.removed_marks.note(name(at), marks, at / 1e6, generations=[at + number])

    return of("removed-marks", add, volume)


def held_keys() -> Walk:
    holds = agent().volume.holds
    return Walk(lambda at: holds.take([name(at)], 0), lambda: len(holds), CATALOGUE["held-keys"].most)


def second_use_keys() -> Walk:
    table = SecondUse(SMALLER)
    return Walk(lambda at: table.was_seen(name(at)), lambda: len(table), SMALLER)


def learned_keys() -> Walk:
    table, volume = Readahead(lambda _volume, _key: None, entries_max=SMALLER), agent().volume

    def add(at: int) -> None:
        if at % CHAIN_MAX == 0:
            table.chain(volume, [name(at + each) for each in range(CHAIN_MAX)])

    return Walk(add, lambda: len(table), SMALLER)


def prestage_keys() -> Walk:
    never = Prefetcher(PrestageCache(1 << 20), cast(Any, None), threads=1)
    volume = agent().volume

    def add(at: int) -> None:
        never.request(volume, name(2 * at))
        never.guess(volume, name(2 * at + 1))

    return Walk(add, lambda: len(never), CATALOGUE["prestage-keys"].most)


def fenced_places() -> Walk:
    fence = Fence()
    return Walk(
        lambda at: fence.put_up(bytes(16), at << 20, 1 << 20, 1e9, 0.0),
        lambda: len(fence),
        CATALOGUE["fenced-places"].most,
    )


def file_blocks() -> Walk:
    pool = agent()
    store = PoolBlockStore([pool.volume], lambda: pool.channel)

    def add(at: int) -> None:
        store._unsynced.add(name(at), Unsynced(at, at, 4096, (0, 1)))
        store._reading(pool.volume, name(at))

    return Walk(add, lambda: store.remembered, OPEN_BLOCKS_MAX + BLOCKS_MAX)


def suspect_blocks() -> Walk:
    nothing = cast(Any, None)
    table = Suspects(nothing, nothing, nothing, nothing, nothing, lambda: 0.0)
    file = cast(OpenFile, type("File", (), {"lost": False, "ino": 7}))
    return Walk(
        lambda at: table.note(file, at, SealedBlock(1, 4096, 4096)),
        lambda: len(table),
        CATALOGUE["suspect-blocks"].most,
    )


WALKS = {
    "kept-units": kept_units, "spare-units": spare_units, "proven-headers": proven_headers,
    "unsettled-keys": unsettled_keys, "kv-keys": kv_keys, "damaged-slots": damaged_slots,
    "owed-copies": owed_copies, "spill-copies": spill_copies, "spill-uses": spill_uses,
    "removed-marks": removed_marks,
    "held-keys": held_keys, "second-use-keys": second_use_keys,
    "learned-keys": learned_keys,
    "prestage-keys": prestage_keys, "fenced-places": fenced_places, "file-blocks": file_blocks,
    "suspect-blocks": suspect_blocks,
}  # fmt: skip


@pytest.mark.expects_log("blocks of files were written that no flush has proven")
@pytest.mark.parametrize("table", WALKS)
def test_a_table_holds_no_more_than_it_may_and_costs_what_is_said(table: str) -> None:
    walk = WALKS[table]()
    limit = CATALOGUE[table]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    most = 0
    for at in range(walk.most + (walk.most >> 4) + 2):
        walk.add(at)
        if at % 64 == 0:
            most = max(most, walk.held())
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert walk.most // 2 <= max(most, walk.held()) <= walk.most <= limit.most
    assert grown <= walk.most * limit.bytes_each


def test_what_waits_to_be_staged_ends_at_its_bound() -> None:
    memory = StagingMemory(1 << 20, 1 << 16, [1 << 16])
    while memory.take(1 << 16) is not None:
        pass
    assert memory.lent == memory.limit
    assert memory.take(1 << 16, overdraw=True) is not None
    assert memory.take(1 << 16, overdraw=True) is None


def test_kernels_hold_no_more_nodes_of_files_than_there_may_be(tmp_path: Path) -> None:
    bounds, root = Bounds(), FACE_FILES << FACE_SHIFT | 1
    options = FilesOptions(files_max=20, staging_bytes=4096)
    face = FilesFace(tmp_path / "files.sqlite", MemoryBlockStore((512,)), options, bounds=bounds)
    made = 0
    with contextlib.suppress(FsError):
        for made in range(21):
            settle(face.create(Caller(0), root, b"%d" % made, 0o644, os.O_RDWR), RUN)
    assert made == 19, "the root folder is one"
    rows = {row["name"]: row for row in bounds.snapshot()}
    assert rows["fs-nodes"]["limit"] == 20
    assert 15 < rows["fs-nodes"]["held"] <= 20
    assert rows["staging-bytes"]["limit"] >= 4096
    face.close()


def test_the_agent_shows_them_all_and_what_they_hold() -> None:
    pool, bounds = agent(), Bounds()
    back = WriteBack(pool.volume, 1 << 20)
    assert back.set_aside(500)
    pool.volume.in_doubt_writes.note(name(1), 0.0)
    kv = kv_volume((1 << 24,))
    kv.uses.note(name(1), 1)
    pool.volume.holds.take([name(1), name(2)], "guest")
    cache = PrestageCache(1 << 20)
    policies = SimpleNamespace(
        served=[serve(pool.volume, admission=SecondUse(), back=back), serve(kv)],
        prestage=cache,
        prefetcher=Prefetcher(cache, cast(Any, None)),
        readahead=Readahead(lambda _volume, _key: None),
    )
    watch_memory(
        bounds,
        cast(Any, policies),
        DirectoryCache(0),
        RegisteredMemory(0),
        1 << 20,
        Fence(),
    )
    rows = {row["name"]: row for row in bounds.snapshot()}
    elsewhere = {"suspect-blocks", "file-blocks"}
    assert set(WALKS) - elsewhere <= set(rows)
    assert rows["unsettled-keys"]["held"] == rows["kv-keys"]["held"] == 1
    assert rows["unsettled-keys"]["limit"] == 2 * CATALOGUE["unsettled-keys"].most
    assert rows["owed-copies"]["limit"] == OWED_MAX + DOUBTFUL_MAX, "of the volume that has such"
    assert (rows["held-keys"]["held"], rows["held-keys"]["holders"]) == (2, 1)
    assert (rows["write-back-bytes"]["held"], rows["write-back-bytes"]["limit"]) == (500, 1 << 20)
