"""What a file of /shared costs to open and to put: round trips, where every read and write takes a second."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

from agent.fs.interface import FsError, SetAttributes
from agent.fs.shared.discards import Discards
from agent.fs.shared.face import FOLDER_SECONDS, SharedFace
from agent.fs.shared.nodes import SHARED_ROOT
from agent.fs.shared.unnamed import NAMED_WITH_DATA
from agent.fs.shared.volume import SharedVolume
from agent.pool.access import serve
from agent.pool.steps import Outcome, is_steps
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.fs.memory_shared import CALLER, CHUNK, MAKER, settings_of
from tests.support.pool.memory_pool import fixed_secret

T = TypeVar("T")
SLOW = Timing(read_deadline=1000.0, write_deadline=1000.0)
CHUNKS = 16
DATA = bytes(range(256)) * (CHUNKS * CHUNK // 256)


class TimedPool:
    """A shared volume on two namespaces, and agents that have read nothing of it yet."""

    def __init__(
        self,
        directory_fresh: float = 0.0,
        trip: float = 1.0,
        name_sets: Sequence[int] = (4, 4),
        chunk_bytes: int = CHUNK,
    ) -> None:
        """`trip`: seconds of each read and write."""
        self.chunk_bytes = chunk_bytes
        self.name_sets = name_sets
        self.scheduler = StepScheduler("shared costs")
        self.namespaces = [SimNamespace(1 << 40, latency=(trip, trip)) for _ in range(4)]
        self.channel = SimChannel(self.scheduler, self.namespaces)
        self.timing = Timing(SLOW.read_deadline, SLOW.write_deadline, directory_fresh)

    def agent(self) -> TimedFiles:
        return TimedFiles(self)

    def reads(self) -> int:
        return sum(namespace.reads for namespace in self.namespaces)

    def writes(self) -> int:
        return sum(namespace.writes for namespace in self.namespaces)


class TimedFiles:
    """One agent's face, whose calls say how many round trips and reads they took."""

    def __init__(self, pool: TimedPool) -> None:
        self.pool, cache = pool, DirectoryCache(64 << 20)
        chunks = settings_of("v", "shared", pool.chunk_bytes, 0, (16, 16))
        names = settings_of("v.names", "shared-names", 16_384, 2, pool.name_sets)
        self.chunks = Volume(chunks, fixed_secret(1), cache, pool.timing)
        volume = SharedVolume(
            "v", serve(self.chunks), serve(Volume(names, fixed_secret(2), cache, pool.timing)),
            self.chunks.usage,
        )  # fmt: skip
        self.volume = volume
        self.face = SharedFace([volume], lambda: pool.channel, Discards())
        self.root = self.face._volume_inodes[b"v"]
        self.cost = (0.0, 0)
        """Round trips and reads of the call before."""

    def call(self, outcome: Outcome[T]) -> T:
        scheduler, reads = self.pool.scheduler, self.pool.reads()
        began = scheduler.now
        found: T = scheduler.finish(outcome) if is_steps(outcome) else outcome  # type: ignore[arg-type, assignment]
        self.cost = round(scheduler.now - began, 3), self.pool.reads() - reads
        return found

    def put(self, name: bytes, data: bytes) -> None:
        entry, opened = self.call(self.face.create(CALLER, self.root, name, 0o644, os.O_WRONLY | os.O_CREAT))
        file = entry.attributes.ino, opened.handle
        for at in range(0, len(data), CHUNK):
            self.call(self.face.write(*file, at, memoryview(data[at : at + CHUNK]), MAKER))
        self.call(self.face.flush(*file, MAKER))
        self.call(self.face.release(*file))

    def lookup(self, name: bytes) -> int:
        return self.call(self.face.lookup(CALLER, self.root, name)).attributes.ino

    def open(self, ino: int) -> int:
        return self.call(self.face.open(CALLER, ino, os.O_RDONLY)).handle

    def read(self, ino: int, handle: int, at: int = 0) -> bytes:
        into = bytearray(CHUNK)
        assert self.call(self.face.read(ino, handle, at, memoryview(into))) == CHUNK
        return bytes(into)


def one_read(files: TimedFiles) -> bool:
    """One of a chunk; all of it may come before the read is over."""
    trips, reads = files.cost
    return reads == 1 and trips <= 1.0


@pytest.fixture
def timed() -> TimedPool:
    return TimedPool()


def test_the_open_of_sixteen_chunks_costs_no_more_round_trips_than_its_first_read(timed: TimedPool) -> None:
    timed.agent().put(b"f", DATA)
    files = timed.agent()
    ino = files.lookup(b"f")
    assert files.cost == (2.0, 3), "both directories of the name, then the manifest"
    handle = files.open(ino)
    trips, reads = files.cost
    assert trips == 1.0, "all chunks at once"
    assert reads <= 2 * CHUNKS
    assert files.read(ino, handle) == DATA[:CHUNK]
    assert one_read(files)
    files.call(files.face.release(ino, handle))

    ino = files.lookup(b"f")
    assert files.cost[0] == 1.0, "manifest and chunks at once: its thread opens what it looks up"
    assert files.cost[1] <= 3 + CHUNKS, "of each chunk the directory that names it"
    handle = files.open(ino)
    assert files.cost == (0.0, 0)
    assert files.read(ino, handle) == DATA[:CHUNK]
    assert one_read(files)


def test_the_folder_of_a_volume_is_asked_for_once_a_second(timed: TimedPool) -> None:
    """The kernel asks for it twice with each file that is made in it."""
    files = timed.agent()
    files.call(files.face.lookup(CALLER, SHARED_ROOT, b"v"))
    assert files.cost == (1.0, 2)
    timed.scheduler.now += FOLDER_SECONDS / 4
    found = files.call(files.face.getattr(CALLER, files.root, None))
    assert files.cost == (0.0, 0)
    assert found.valid_seconds == pytest.approx(FOLDER_SECONDS * 3 / 4), "the kernel may ask no later"
    timed.scheduler.now += FOLDER_SECONDS
    found = files.call(files.face.getattr(CALLER, files.root, None))
    assert files.cost == (1.0, 2)
    assert found.valid_seconds == FOLDER_SECONDS
    files.call(files.face.setattr(CALLER, files.root, SetAttributes(mode=0o1777), None))
    found = files.call(files.face.getattr(CALLER, files.root, None))
    assert found.mode & 0o7777 == 0o1777, "its own change is seen at once"
    assert files.cost == (0.0, 0)


def test_a_file_of_sixteen_chunks_is_put_with_one_write_of_each_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one of all places: of sixteen chunks that lie as they like, each may have a directory of its own."""
    monkeypatch.setattr(os, "urandom", random.Random(35).randbytes)  # a file's identity places its chunks
    timed = TimedPool(directory_fresh=1000.0, trip=0.001)
    files = timed.agent()
    files.put(b"f", DATA)
    with pytest.raises(FsError):
        files.lookup(b"g")
    entry, opened = files.call(files.face.create(CALLER, files.root, b"g", 0o644, os.O_WRONLY | os.O_CREAT))
    file = entry.attributes.ino, opened.handle
    began, writes = timed.scheduler.now, timed.writes()
    for number in range(CHUNKS):
        data = DATA[number * CHUNK : (number + 1) * CHUNK]
        files.call(files.face.write(*file, number * CHUNK, memoryview(data), MAKER))
    assert timed.writes() - writes == CHUNKS + NAMED_WITH_DATA, "the slots, and the first directories"
    assert round(timed.scheduler.now - began, 3) <= (CHUNKS + 1) / 1000, "one each, and the first directories"
    files.call(files.face.flush(*file, MAKER))
    assert files.cost == (0.002, 0), "the directories of the name were read before"
    named = timed.writes() - writes - CHUNKS - NAMED_WITH_DATA - 2
    assert NAMED_WITH_DATA + named < CHUNKS


def test_a_single_agent_asks_for_no_directory_that_it_knows() -> None:
    """Neither those of its next chunk nor those of its name: each question costs processor time."""
    pool = TimedPool(directory_fresh=1000.0, trip=0.001)
    files = pool.agent()
    for name in (b"a", b"b", b"c", b"d"):
        _put_trips(files, name, CHUNKS)
    lookups, reads = pool.channel.tally("v").lookups, pool.reads()
    for name in (b"e", b"f"):
        _put_trips(files, name, CHUNKS)
    assert pool.channel.tally("v").lookups - lookups < CHUNKS
    assert pool.reads() - reads < CHUNKS


def _put_trips(files: TimedFiles, name: bytes, chunks: int) -> list[tuple[float, int]]:
    """Put a file by one call for each chunk: round trips and reads of each call, and of the close."""
    with pytest.raises(FsError):
        files.lookup(name)
    entry, opened = files.call(files.face.create(CALLER, files.root, name, 0o644, os.O_WRONLY | os.O_CREAT))
    file, costs = (entry.attributes.ino, opened.handle), []
    for number in range(chunks):
        data = memoryview(DATA[number * CHUNK : (number + 1) * CHUNK])
        files.call(files.face.write(*file, number * CHUNK, data, MAKER))
        costs.append(files.cost)
    files.call(files.face.flush(*file, MAKER))
    costs.append(files.cost)
    files.call(files.face.release(*file))
    return costs


@pytest.mark.parametrize("chunks", range(1, NAMED_WITH_DATA + 1))
def test_the_close_of_a_short_file_costs_a_single_agent_one_round_trip(chunks: int) -> None:
    """As a value of /kv does: its slot and its directory. All else was done beside the data."""
    files = TimedPool(directory_fresh=1000.0).agent()
    for name in (b"a", b"b"):  # From then on a program that looks a name up creates it.
        _put_trips(files, name, 1)
    costs = _put_trips(files, b"d", chunks)
    assert [trips for trips, _ in costs] == [1.0] * (chunks + 1)
    assert costs[-1] == (1.0, 0)
    assert files.lookup(b"d")


@pytest.mark.parametrize("units", [2, 4, 16])
def test_a_file_of_one_long_chunk_costs_the_round_trips_of_a_value_of_kv(units: int) -> None:
    """The last unit goes out with header and directory: a trip for each unit, and one for the close."""
    pool = TimedPool(directory_fresh=1000.0, chunk_bytes=units * CHUNK)
    files = pool.agent()
    for name in (b"a", b"b"):
        _put_trips(files, name, units)
    writes = pool.writes()
    costs = _put_trips(files, b"c", units)
    assert [trips for trips, _ in costs] == [1.0] * (units + 1)
    assert pool.writes() - writes == units + 2 + 2, "its header and directory; the name's slot and directory"


@pytest.mark.parametrize("trip", [0.001, 1.0])
def test_the_close_of_a_short_file_waits_for_no_chunk_where_other_agents_write(trip: float) -> None:
    """The directories of its name are read with the close, however slow the enclosures are."""
    files = TimedPool(trip=trip).agent()
    for name in (b"a", b"b"):
        _put_trips(files, name, 1)
    costs = _put_trips(files, b"c", NAMED_WITH_DATA)
    assert costs[-1] == (2 * trip, 2)


def test_files_with_names_in_one_directory_have_their_chunks_named_at_the_same_time() -> None:
    """The names' directories are taken for the manifest alone, so four closes need five round trips; six
    where chunks of two files have a directory in common, as chance has it."""
    files = TimedPool(directory_fresh=1000.0, trip=0.001, name_sets=(1, 1)).agent()
    for name in (b"a", b"b", b"c", b"d"):  # From then on a file is expected, and all directories are known.
        _put_trips(files, name, CHUNKS)
    opened = []
    for name in (b"e", b"f", b"g", b"h"):
        with pytest.raises(FsError):
            files.lookup(name)
        entry, made = files.call(files.face.create(CALLER, files.root, name, 0o644, os.O_WRONLY | os.O_CREAT))
        opened.append((entry.attributes.ino, made.handle))
        for at in range(0, len(DATA), CHUNK):
            files.call(files.face.write(*opened[-1], at, memoryview(DATA[at : at + CHUNK]), MAKER))
    scheduler = files.pool.scheduler
    began = scheduler.now
    for file in opened:
        closing = files.face.flush(*file, MAKER)
        assert is_steps(closing)
        scheduler.spawn("a close", closing)
    scheduler.run()
    assert round(scheduler.now - began, 3) <= 0.006
    assert all(files.lookup(name) for name in (b"e", b"f", b"g", b"h"))


def test_chunks_that_come_slowly_are_named_with_their_data() -> None:
    # With enclosures that take longer than 20 ms a directory is read once more before it is written.
    trip = 0.001
    files = TimedPool(trip=trip).agent()
    for name in (b"a", b"b"):
        _put_trips(files, name, 1)
    costs = _put_trips(files, b"c", 8)
    assert max(seconds for seconds, _ in costs) <= 2 * trip


def test_a_single_agent_opens_a_file_by_directories_that_it_has_just_read() -> None:
    timed = TimedPool(directory_fresh=1000.0)
    files = timed.agent()
    files.put(b"f", DATA)
    ino = files.lookup(b"f")
    assert files.cost == (1.0, 1), "the manifest"
    handle = files.open(ino)
    assert files.cost == (0.0, 0)
    assert files.read(ino, handle) == DATA[:CHUNK]
    assert one_read(files)


def full(files: TimedFiles) -> None:
    """Have the volume be one that has evicted."""
    slots, _ = files.volume.usage()
    files.face._volumes[files.root] = dataclasses.replace(files.volume, usage=lambda: (slots, slots))


def test_a_single_agent_asks_for_no_chunk_of_a_file_that_it_only_looks_at() -> None:
    files = TimedPool(directory_fresh=1000.0).agent()
    files.put(b"f", DATA)
    full(files)
    for _ in range(3):
        files.lookup(b"f")
        assert files.cost == (1.0, 1), "the manifest"


def test_of_several_agents_each_asks_for_the_chunks_of_a_file_in_a_full_volume(timed: TimedPool) -> None:
    """Beside the name, where it knows the file; else after it, and then the open finds the chunks held."""
    timed.agent().put(b"f", DATA)
    files = timed.agent()
    full(files)
    ino = files.lookup(b"f")
    assert files.cost[0] == 3.0, "both directories of the name, the manifest, all chunks at once"
    handle = files.open(ino)
    assert files.cost == (0.0, 0)
    files.call(files.face.release(ino, handle))
    for _ in range(3):
        files.lookup(b"f")
        trips, reads = files.cost
        assert trips == 1.0
        assert reads <= 3 + 2 * CHUNKS


@pytest.mark.parametrize("directory_fresh", [0.0, 1000.0])
def test_a_close_asks_for_no_chunk_that_it_holds(directory_fresh: float) -> None:
    files = TimedPool(directory_fresh=directory_fresh, trip=0.001).agent()
    full(files)
    for name in (b"a", b"b", b"c"):
        costs = _put_trips(files, name, CHUNKS)
    assert costs[-1][0] <= 0.003, "directories of the last chunks, and of the name; the manifest"
    assert not files.chunks.holds.held
