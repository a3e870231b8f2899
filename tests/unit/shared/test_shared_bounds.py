"""What strangers can raise at `/shared`: it ends at its bound, and all comes back."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.fs.interface import Caller, FsError
from agent.fs.shared.chunks import STAGED
from agent.fs.shared.discards import DISCARDS, Discards
from agent.fs.shared.nodes import NODES
from agent.fs.shared.recent_names import FOLDER_NAMES_MAX, NamesSeen
from agent.fs.shared.unnamed import NAMED_WITH_DATA, UNNAMED_MAX
from agent.host_os.per_user_bounds import CATALOGUE, Bounds
from agent.pool.steps import settle
from tests.support.fs.memory_shared import CHUNK, Files, SharedPool

USER, OTHER = Caller(1000, pid=7), Caller(1001, pid=8)


@contextmanager
def shared_open(bounds: Bounds, tmp_path: Path) -> Iterator[Callable[[Caller, int], object]]:
    files = SharedPool().agent(bounds)
    files.put("f", b"content")
    opened: list[tuple[int, int]] = []
    yield lambda caller, _: opened.append(files.open("f", caller=caller))
    for file in opened:
        files.release(file)
    assert bounds.of(CATALOGUE["shared-open"]).held == 0


@contextmanager
def shared_writers(bounds: Bounds, tmp_path: Path) -> Iterator[Callable[[Caller, int], object]]:
    files = SharedPool().agent(bounds)
    opened: list[tuple[int, int]] = []
    yield lambda caller, number: opened.append(files.create(f"f{number}", caller))
    for file in opened:
        files.release(file)
    assert bounds.of(CATALOGUE["shared-writers"]).held == 0


WALKS = {"shared-open": shared_open, "shared-writers": shared_writers}
"""Walked by tests/unit/agent/bounds/test_walked_to_their_bounds.py."""


def with_most(limit: object, most: int) -> tuple[Bounds, Files]:
    bounds = Bounds()
    bounds.of(limit, most)  # type: ignore[arg-type]
    return bounds, SharedPool().agent(bounds)


def test_a_file_with_unnamed_chunks_costs_no_more_memory_than_is_said() -> None:
    """Each of them keeps a directory remembered."""
    chunks, count = NAMED_WITH_DATA + UNNAMED_MAX - 1, 40
    files, data = SharedPool((4096, 4096)).agent(), bytes(chunks * CHUNK)
    for namespace in files.channel.namespaces:
        namespace.store = lambda offset, parts: None  # type: ignore[method-assign]
    files.pwrite(files.create("f"), 0, data)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        files.pwrite(files.create(f"f{number}"), 0, data)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert files.reserved() == (count + 1) * (UNNAMED_MAX - 1)
    assert grown / count < CATALOGUE["shared-writers"].bytes_each


def test_a_file_looked_up_long_ago_gives_its_place_and_a_folder_does_not() -> None:
    bounds, files = with_most(NODES, 16)
    for number in range(40):
        files.put(f"f{number}", b"content")
        files.lookup(f"f{number}", USER)
        assert bounds.of(NODES).held <= 16
    made = [files.lookup(f"f{number}", OTHER).attributes.ino for number in range(4)]
    for ino in made:
        files.face.forget(ino, 1)
    refused = 0
    for number in range(40):
        try:
            settle(files.face.mkdir(USER, files.root, b"d%d" % number, 0o755), files.channel)
        except FsError as failure:
            refused = failure.errno
    assert refused == errno.ENFILE


def test_nodes_that_the_kernel_forgets_leave_nothing() -> None:
    bounds, files = with_most(NODES, 1024)
    files.put("f", bytes(3 * CHUNK))
    ino = files.lookup("f").attributes.ino
    node = files.face._nodes.get(ino)
    files.face.forget(ino, node.lookups)
    for number, node in list(files.face._nodes._nodes.items()):
        files.face.forget(number, node.lookups)
    assert bounds.of(NODES).held == len(files.face._nodes) == 0
    assert not files.face._nodes._found


def test_one_who_fills_many_chunks_in_part_stores_them_early_and_others_go_on() -> None:
    bounds, files = with_most(STAGED, 8 * CHUNK)
    mine = [files.create(f"f{number}", USER) for number in range(3)]
    theirs = files.create("g", OTHER)
    for number in range(12):
        for file in mine:
            files.pwrite(file, number * CHUNK, b"part")
    assert bounds.of(STAGED).held <= 8 * CHUNK
    files.pwrite(theirs, 0, b"part")
    for file in (*mine, theirs):
        files.release(file)
    assert bounds.of(STAGED).held == 0


def test_the_names_of_one_folder_and_of_all_are_bounded() -> None:
    seen = NamesSeen(most=100)
    for number in range(1000):
        seen.note("v", b"d/%d" % number, is_folder=False)
    assert len(seen) == len(seen.within("v", b"d")) == 100
    assert seen.within("v", b"d")[-1] == (b"999", False)
    for number in range(1000):
        seen.forget("v", b"d/%d" % number)
    assert len(seen) == 0
    assert not seen._within
    large = NamesSeen()
    for number in range(FOLDER_NAMES_MAX + 10):
        large.note("v", b"%d" % number, is_folder=False)
    assert len(large) == FOLDER_NAMES_MAX


def test_what_is_given_up_beyond_the_bound_stays_until_it_is_evicted() -> None:
    bounds = Bounds()
    discards, files = Discards(bounds), SharedPool().agent()
    discards.add(files.volume, ((os.urandom(16), number) for number in range(DISCARDS.most + 5)))
    (row,) = (row for row in bounds.snapshot() if row["name"] == DISCARDS.name)
    assert (row["held"], row["refusals"]) == (DISCARDS.most, 5)
