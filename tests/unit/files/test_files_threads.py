"""Many threads on one face: no deadlock, no torn block, no byte more memory than agreed.

Threads are let in at every step of the store by a short wait there, which is where a worker waits for
the fabric. A run that hangs ends by the test's time-out with all stacks.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep

import pytest

from agent.fs.files import space_reclaim
from tests.support.fs.files_calls import FaceCalls
from tests.support.pool.inline_runner import InlineRunner
from tests.unit.files.conftest import BLOCK, World

WORKERS = 8


def slow_fabric(step: str) -> None:
    """Other threads run now; longer than a switch interval, as a round trip is."""
    sleep(random.random() * 0.0005)


@pytest.fixture
def busy(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Room for two blocks only, deletions at once, and a fabric that takes its time."""
    monkeypatch.setattr(space_reclaim, "BACKLOG_BLOCKS", 1)
    world.options = dataclasses.replace(world.options, staging_bytes=2 * BLOCK, workers=WORKERS)
    world.restart()
    world.store.before = slow_fabric
    return world


def together(*jobs: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result(timeout=100)


@contextmanager
def refused_only_by(*codes: int) -> Iterator[None]:
    """The call inside succeeds, or is refused for one of these reasons."""
    try:
        yield
    except OSError as refusal:
        if refusal.errno not in codes:
            raise


def calls_of(world: World) -> FaceCalls:
    """A worker's, which seals after its answers where that may be."""
    return FaceCalls(world.face, InlineRunner(), world.face.after_reply.join())


def peak_watch(world: World, stop: threading.Event, peaks: list[int]) -> None:
    while not stop.is_set():
        peaks.append(world.face.gauges().staging_bytes)
        sleep(0.001)


def test_each_with_a_file_of_its_own(busy: World) -> None:
    stop, peaks = threading.Event(), [0]

    def work(number: int) -> None:
        dice = random.Random(number)
        calls = calls_of(busy)
        model = bytearray()
        file = calls.open(f"file{number}", os.O_CREAT | os.O_RDWR)
        for turn in range(60):
            offset = dice.randrange(3 * BLOCK)
            data = bytes([number * 16 + turn % 16]) * dice.randrange(1, 2 * BLOCK)
            if turn % 20 == 19:
                calls.ftruncate(file, offset)
                del model[offset:]
                model.extend(bytes(offset - len(model)))
                continue
            assert calls.pwrite(file, data, offset) == len(data)
            model.extend(bytes(max(0, offset - len(model))))
            model[offset : offset + len(data)] = data
            assert calls.pread(file, 6 * BLOCK, 0) == model
            if turn % 10 == 5:
                calls.fsync(file)
        calls.close(file)
        assert calls.get(f"file{number}") == model

    watch = threading.Thread(target=peak_watch, args=(busy, stop, peaks))
    watch.start()
    try:
        together(*[lambda number=number: work(number) for number in range(WORKERS)])
    finally:
        stop.set()
        watch.join()
    assert max(peaks) <= 2 * BLOCK + WORKERS * BLOCK
    assert busy.face.gauges().staging_bytes == 0
    busy.store.before = lambda step: None
    for name in busy.calls.listdir(""):
        busy.calls.unlink(name)
    busy.collect()
    assert busy.store.blocks == {}


def test_readers_of_a_block_that_is_overwritten_see_one_write_or_another(busy: World) -> None:
    """The version that a reader found may be deleted before it fetches it; that is no loss."""
    busy.calls.put("file", b"\0" * 2 * BLOCK)
    ends = threading.Event()

    def write() -> None:
        calls = calls_of(busy)
        file = calls.open("file", os.O_WRONLY)
        for turn in range(150):
            calls.pwrite(file, bytes([turn]) * BLOCK, turn % 2 * BLOCK)
        calls.close(file)
        ends.set()

    def read() -> None:
        calls = calls_of(busy)
        file = calls.open("file", os.O_RDONLY)
        while not ends.is_set():
            for at in (0, BLOCK):
                assert len(set(calls.pread(file, BLOCK, at))) == 1
        calls.close(file)

    together(write, read, read, read)


def test_two_writers_in_one_block(busy: World) -> None:
    def work(number: int) -> None:
        calls = calls_of(busy)
        file = calls.open("file", os.O_CREAT | os.O_RDWR)
        for turn in range(80):
            at = (turn * 2 + number) * 100
            calls.pwrite(file, bytes([65 + number]) * 100, at)
            assert calls.pread(file, 100, at) == bytes([65 + number]) * 100
            if turn % 16 == number:
                calls.fsync(file)
        calls.close(file)

    busy.calls.put("file", b"")
    together(lambda: work(0), lambda: work(1))
    assert busy.calls.get("file") == (b"A" * 100 + b"B" * 100) * 80


def test_names_come_and_go_under_each_other(busy: World) -> None:
    """Every call succeeds or fails for a reason that another thread gave it; nothing is left over."""
    busy.calls.mkdir("d")

    def work(number: int) -> None:
        dice = random.Random(number)
        calls = calls_of(busy)
        names: Sequence[str] = ["a", "b", "d/a", "d/b", "c"]
        for _ in range(120):
            name, other = dice.choice(names), dice.choice(names)
            # ESTALE: looked up here, then removed by another thread.
            with refused_only_by(errno.ENOENT, errno.EEXIST, errno.ESTALE):
                dice.choice(
                    [
                        lambda name=name: calls.put(name, name.encode() * dice.randrange(1, 4000)),
                        lambda name=name: calls.unlink(name),
                        lambda name=name, other=other: calls.rename(name, other, dice.choice([0, 0, 2])),
                        lambda name=name, other=other: calls.link(name, other),
                        lambda name=name: calls.get(name),
                        lambda name=name: calls.truncate(name, dice.randrange(9000)),
                        lambda: calls.tree(),
                    ]
                )()

    together(*[lambda number=number: work(number) for number in range(WORKERS)])
    busy.store.before = lambda step: None
    for name in ("a", "b", "c", "d/a", "d/b"):
        if name.rpartition("/")[2] in busy.calls.listdir(name.rpartition("/")[0]):
            busy.calls.unlink(name)
    busy.calls.rmdir("d")
    busy.collect()
    assert busy.store.blocks == {}
    gauges = busy.face.gauges()
    assert (gauges.inodes, gauges.open_files, gauges.staging_bytes) == (1, 0, 0)


def test_writers_into_a_store_that_is_nearly_full_all_end(busy: World) -> None:
    busy.store.slots = {512: 4, 2048: 4, BLOCK: 10}
    refusals: list[int] = []

    def work(number: int) -> None:
        calls = calls_of(busy)
        for turn in range(30):
            try:
                calls.put(f"file{number}", bytes([turn]) * (turn % 4 * BLOCK + 700))
            except OSError as refusal:
                refusals.append(refusal.errno or 0)
                calls.truncate(f"file{number}", 0)

    together(*[lambda number=number: work(number) for number in range(4)])
    assert set(refusals) <= {errno.ENOSPC}
    busy.store.before = lambda step: None
    for name in busy.calls.listdir(""):
        busy.calls.unlink(name)
    busy.collect()
    assert busy.store.blocks == {}


def test_eviction_and_opening_do_not_meet(busy: World) -> None:
    """A file is evicted or opened, never both: whoever opens it reads all of it."""
    busy.restart(on_full="evict")
    busy.store.slots = {512: 0, 2048: 0, BLOCK: 12}

    def write(number: int) -> None:
        calls = calls_of(busy)
        for turn in range(40):
            with refused_only_by(errno.ENOSPC):
                calls.put(f"file{number}-{turn}", bytes([turn]) * 2 * BLOCK)

    def read() -> None:
        calls = calls_of(busy)
        for _ in range(60):
            for name in calls.listdir(""):
                with refused_only_by(errno.ENOENT, errno.ESTALE):
                    assert len(set(calls.get(name))) <= 1

    together(lambda: write(0), lambda: write(1), read, read)
    assert busy.face.counters.files_evicted > 0
    assert busy.face.counters.files_lost == 0
