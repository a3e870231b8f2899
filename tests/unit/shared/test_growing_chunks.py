"""Chunks longer than a write: their pieces are on flash as they come, and the file is whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from typing import TypeVar, cast

import pytest

from agent.fs.after_reply import AfterReply
from agent.fs.close_cause import Closing
from agent.fs.interface import FsError
from agent.fs.shared.discards import Discards
from agent.fs.shared.face import SharedFace
from agent.fs.shared.growing_chunk import GROWING_MAX, GROWS_SECONDS
from agent.fs.shared.unnamed import UNNAMED_SECONDS
from agent.fs.shared.volume import SharedVolume
from agent.pool.access import serve
from agent.pool.steps import Outcome, Steps, is_steps, settle
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.puts_in_pieces import IDLE_SECONDS
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.fs.memory_shared import (
    CALLER,
    CHUNK,
    MAKER,
    OTHER,
    Files,
    SharedPool,
    refused,
    settings_of,
)
from tests.support.pool.memory_pool import fixed_secret

T = TypeVar("T")
UNIT, UNITS = CHUNK, 4
LONG = UNITS * UNIT
DATA = random.Random(1819).randbytes(40 * UNIT)


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool(chunk_bytes=LONG, directory_fresh=1.0)


def unit(number: int, count: int = 1) -> bytes:
    return DATA[number * UNIT : (number + count) * UNIT]


def pwrite(files: Files, file: tuple[int, int], numbers: list[int], shift: int = 0) -> None:
    for number in numbers:
        files.pwrite(file, number * UNIT, unit(number + shift))


def nothing_is_held(files: Files) -> None:
    files.collect()
    assert (files.face._staged.held, files.reserved(), files.chunks.puts_in_pieces.bytes_held) == (0, 0, 0)


@pytest.mark.parametrize("length", [UNIT, LONG - UNIT, LONG, 2 * LONG, 2 * LONG + UNIT, 9 * UNIT + 777])
def test_pieces_that_come_in_order_take_no_memory(files: Files, others: Files, length: int) -> None:
    file = files.create("f")
    for at in range(0, length, UNIT):
        files.pwrite(file, at, DATA[at : min(at + UNIT, length)])
        assert files.face._staged.held == 0
    files.close(file)
    assert files.get("f") == others.get("f") == DATA[:length]
    manifest = files.manifest("f")
    assert manifest is not None
    assert not manifest.runs
    assert files.taken() == -(-length // LONG)
    nothing_is_held(files)


@pytest.mark.parametrize("seed", range(12))
def test_whole_units_may_come_in_any_order(files: Files, others: Files, seed: int) -> None:
    order = list(range(2 * UNITS + 1))
    random.Random(seed).shuffle(order)
    file = files.create("f")
    pwrite(files, file, order)
    assert files.face._staged.held == 0
    files.close(file)
    assert others.get("f") == DATA[: len(order) * UNIT]
    nothing_is_held(files)


def test_a_unit_that_is_written_again_goes_to_another_slot(files: Files, others: Files) -> None:
    """The key of a slot seals each unit once."""
    file = files.create("f", flags=os.O_RDWR)
    pwrite(files, file, [0, 1])
    pwrite(files, file, [0], shift=20)
    assert files.face._staged.held == LONG, "it is put together in memory"
    pwrite(files, file, [2, 3])
    files.close(file)
    assert others.get("f") == unit(20) + unit(1, 3)
    manifest = files.manifest("f")
    assert manifest is not None
    assert manifest.runs, "under another origin"
    files.collect()
    assert files.taken() == 1
    nothing_is_held(files)


@pytest.mark.parametrize("at", [0, 5, UNIT, 2 * UNIT - 3, 3 * UNIT, LONG - 9])
def test_a_few_bytes_are_written_into_a_chunk_that_grows(files: Files, at: int) -> None:
    file = files.create("f", flags=os.O_RDWR)
    pwrite(files, file, [0, 1])
    files.pwrite(file, at, b"in part")
    wanted = bytearray(unit(0, 2).ljust(at + 7, b"\0"))
    wanted[at : at + 7] = b"in part"
    assert files.pread(file, 0, LONG) == wanted
    files.close(file)
    assert files.get("f") == wanted
    nothing_is_held(files)


def test_units_that_nobody_wrote_are_zeros(files: Files, others: Files) -> None:
    file = files.create("f")
    pwrite(files, file, [2, 5])
    files.close(file)
    assert others.get("f") == bytes(2 * UNIT) + unit(2) + bytes(2 * UNIT) + unit(5)
    nothing_is_held(files)


@pytest.mark.parametrize("older", [100, UNIT + 100, 3 * UNIT, LONG - 1, LONG])
def test_units_that_nobody_wrote_stay_as_an_earlier_content_has_them(
    files: Files, others: Files, older: int
) -> None:
    files.put("f", DATA[:older])
    file = others.open("f", os.O_RDWR)
    pwrite(others, file, [1], shift=20)
    others.close(file)
    wanted = bytearray(DATA[:older].ljust(2 * UNIT, b"\0"))
    wanted[UNIT : 2 * UNIT] = unit(21)
    assert files.get("f") == wanted
    others.collect()
    assert files.taken() == 1
    nothing_is_held(others)


def test_an_earlier_chunk_that_is_written_over_whole_is_not_read(files: Files) -> None:
    files.put("f", DATA[:LONG])
    file = files.open("f", os.O_RDWR)
    before = files.channel.tally("v").bytes_read
    pwrite(files, file, [0, 1, 2, 3], shift=20)
    files.close(file)
    assert files.channel.tally("v").bytes_read == before
    assert files.get("f") == unit(20, 4)


@pytest.mark.parametrize("size", [0, 7, UNIT, UNIT + 7, 2 * UNIT, 5 * UNIT, LONG + 3])
@pytest.mark.parametrize("sent", [2, 6])
def test_a_file_is_cut_or_lengthened_amid_a_chunk(files: Files, others: Files, size: int, sent: int) -> None:
    file = files.create("f")
    pwrite(files, file, list(range(sent)))
    files.ftruncate(file, size)
    files.close(file)
    assert others.get("f") == DATA[: min(size, sent * UNIT)].ljust(size, b"\0")
    nothing_is_held(files)


def test_the_writer_reads_what_it_has_sent(files: Files) -> None:
    file = files.create("f", flags=os.O_RDWR)
    pwrite(files, file, [0, 1])
    assert files.pread(file, UNIT - 5, 10) == DATA[UNIT - 5 : UNIT + 5]
    pwrite(files, file, [2, 3])
    files.close(file)
    assert files.get("f") == DATA[:LONG]
    nothing_is_held(files)


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("tail", [0, 100])
def test_a_program_that_stops_amid_a_chunk_has_its_file_when_it_goes_on(is_full: bool, tail: int) -> None:
    files = SharedPool((1,), (4,), chunk_bytes=LONG, directory_fresh=1.0).agent()
    file, sent = files.create("f"), 2 * UNIT + tail
    pwrite(files, file, [0, 1])
    if tail:
        files.pwrite(file, 2 * UNIT, DATA[2 * UNIT : sent])
    files.name()
    assert (files.taken(), files.reserved()) == (0, 1), "it may go on at once"
    files.channel.clock += UNNAMED_SECONDS if tail else GROWS_SECONDS
    files.name()
    assert (files.taken(), files.reserved(), len(files.face._unnamed)) == (1, 0, 0)
    files.channel.clock += IDLE_SECONDS + 1
    for number in range(62 if is_full else 1):
        files.put(f"g{number}", DATA[:LONG])
    files.pwrite(file, sent, DATA[sent:LONG])
    files.close(file)
    assert files.get("f") == DATA[:LONG]
    nothing_is_held(files)


def test_a_slow_program_keeps_its_chunk(files: Files) -> None:
    file = files.create("f")
    for number in range(UNITS):
        pwrite(files, file, [number])
        files.channel.clock += GROWS_SECONDS / 2
        files.name()
        assert files.face._staged.held == 0
    files.close(file)
    assert files.get("f") == DATA[:LONG]
    files.channel.clock += GROWS_SECONDS  # nobody has opened what was looked up
    files.name()
    assert len(files.face._unnamed) == 0


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("fault", ["broken", "down", "hung"])
def test_an_enclosure_that_goes_amid_a_chunk_leaves_no_file(
    pool: SharedPool, files: Files, fault: str, numbers: list[int]
) -> None:
    file = files.create("f")
    pwrite(files, file, [0])
    for namespace in pool.namespaces[:2]:
        setattr(namespace, fault, True)
    refused(errno.EIO, files.pwrite, file, UNIT, unit(1))
    for namespace in pool.namespaces[:2]:
        setattr(namespace, fault, False)
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None
    nothing_is_held(files)
    files.channel.clock += 60.0
    files.put("f", DATA[: 3 * LONG])
    assert pool.agent().get("f") == DATA[: 3 * LONG]


def test_an_enclosure_that_goes_before_the_last_piece_leaves_no_file(pool: SharedPool, files: Files) -> None:
    file = files.create("f")
    pwrite(files, file, [0, 1, 2])
    for namespace in pool.namespaces[:2]:
        namespace.broken = True
    refused(errno.EIO, files.pwrite, file, 3 * UNIT, unit(3))
    for namespace in pool.namespaces[:2]:
        namespace.broken = False
    refused(errno.EIO, files.close, file)
    assert files.stat("f") is None
    nothing_is_held(files)


def test_the_first_piece_goes_elsewhere_where_an_enclosure_does_not_take_it(
    pool: SharedPool, files: Files
) -> None:
    pool.namespaces[0].broken = True
    stored = 0
    for number in range(8):
        file = files.create(f"f{number}")
        try:
            pwrite(files, file, [0])
        except FsError:
            continue
        finally:
            files.channel.clock += 60.0
        pwrite(files, file, [1, 2, 3])
        files.close(file)
        assert files.get(f"f{number}") == DATA[:LONG]
        stored += 1
    assert stored >= 4


@pytest.mark.parametrize("numbers", [[0], [1, 2], [0, 1, 2, 3, 4]])
def test_a_writer_that_dies_amid_a_chunk_leaves_nothing(files: Files, numbers: list[int]) -> None:
    file = files.create("f")
    pwrite(files, file, numbers)
    with contextlib.suppress(FsError):
        files.close(file, how=Closing.DYING)
    assert files.stat("f") is None
    nothing_is_held(files)
    assert files.taken() == 0


def test_a_file_that_loses_its_name_amid_a_chunk_leaves_nothing(files: Files) -> None:
    file = files.create("f")
    pwrite(files, file, [0, 1])
    files.unlink("f")
    pwrite(files, file, [2])
    files.close(file)
    nothing_is_held(files)
    assert files.taken() == 0


def test_chunks_beyond_the_bound_are_put_together_in_memory() -> None:
    files = SharedPool((16, 16), chunk_bytes=2 * UNIT, directory_fresh=1.0).agent()
    file = files.create("f")
    count = GROWING_MAX + 3
    for number in range(count):
        files.pwrite(file, 2 * number * UNIT, unit(2 * number))
    assert files.reserved() == GROWING_MAX
    assert files.face._staged.held == 3 * 2 * UNIT
    for number in range(count):
        files.pwrite(file, (2 * number + 1) * UNIT, unit(2 * number + 1))
    files.close(file)
    assert files.get("f") == DATA[: 2 * count * UNIT]
    nothing_is_held(files)


def test_chunks_that_grow_leave_most_of_a_small_volume_to_others() -> None:
    files = SharedPool((1,), (4,), chunk_bytes=LONG, directory_fresh=1.0).agent()
    opened = [files.create(f"f{number}") for number in range(12)]
    for number in range(UNITS):
        for file in opened:
            pwrite(files, file, [number])
            assert files.reserved() <= 64 // 8 + 1
    for file in opened:
        files.close(file)
    assert [files.get(f"f{number}") for number in range(12)] == [DATA[:LONG]] * 12
    nothing_is_held(files)


def test_processes_that_fill_one_file_together_send_their_pieces(files: Files, others: Files) -> None:
    mine = files.create("f", flags=os.O_RDWR)
    theirs = files.create("f", OTHER, os.O_RDWR)
    for number in range(2 * UNITS):
        files.pwrite((mine, theirs)[number % 2], number * UNIT, unit(number))
    files.close(mine)
    files.close(theirs)
    assert others.get("f") == DATA[: 2 * LONG]
    nothing_is_held(files)


def test_where_others_use_the_pool_chunks_are_put_together_in_memory() -> None:
    """A slot that grows is nobody's for as long as its program pauses, and others would take it."""
    files = SharedPool(chunk_bytes=LONG).agent()
    file = files.create("f")
    pwrite(files, file, [0, 1])
    assert (files.reserved(), files.face._staged.held) == (0, LONG)
    pwrite(files, file, [2, 3])
    files.close(file)
    assert files.get("f") == DATA[:LONG]


def test_another_hosts_content_is_not_replaced_by_one_that_was_filled() -> None:
    """Units between the pieces are nobody's, so the content takes the place of nothing but its own."""
    pool = SharedPool(chunk_bytes=LONG)
    files, others = pool.agent(), pool.agent()
    file = files.create("f")
    pwrite(files, file, [0, 2])
    others.put("f", b"another's")
    refused(errno.ESTALE, files.close, file)
    assert others.get("f") == b"another's"
    whole = files.create("g")
    pwrite(files, whole, [1, 0])
    others.put("g", b"another's")
    files.close(whole)
    assert others.get("g") == unit(0, 2), "one that was written whole replaces any"


def test_pieces_are_stored_before_the_answer() -> None:
    """The next one is of the same chunk, and would wait for it on a worker of its own."""
    after = AfterReply(8)
    files, worker = SharedPool(chunk_bytes=LONG, directory_fresh=1.0).agent(after_reply=after), after.join()
    file = files.create("f")
    view = memoryview(unit(0))
    assert settle(files.face.write(*file, 0, view, MAKER), files.channel) == UNIT
    assert not worker.due
    files.pwrite(file, UNIT, unit(1, 3))
    files.close(file)
    assert files.get("f") == DATA[:LONG]
    worker.leave()


def call(scheduler: StepScheduler, outcome: Outcome[T]) -> T:
    return scheduler.finish(outcome) if is_steps(outcome) else cast("T", outcome)


@pytest.mark.parametrize("number", range(6))
def test_workers_that_write_one_file_at_once_fill_it(number: int, seed: int) -> None:
    """Each has a channel of its own, and the pieces of all of them cross in time."""
    dice = random.Random(f"{seed} {number}")
    scheduler, count = StepScheduler(f"{seed} {number}"), 4 * UNITS + 2
    namespaces = [SimNamespace(1 << 40, latency=(0.001, 0.02)) for _ in range(4)]
    channels = [SimChannel(scheduler, namespaces) for _ in range(5)]
    current = [channels[0]]
    cache = DirectoryCache(64 << 20)
    chunks = Volume(settings_of("v", "shared", LONG, 0, (4, 4)), fixed_secret(1), cache, Timing())
    names = Volume(
        settings_of("v.names", "shared-names", 16_384, 2, (4, 4)), fixed_secret(2), cache, Timing()
    )
    volume = SharedVolume("v", serve(chunks), serve(names), chunks.usage)
    face = SharedFace([volume], lambda: current[0], Discards(), judge=lambda *_: Closing.MEANT)
    root = face._volume_inodes[b"v"]
    entry, opened = call(scheduler, face.create(CALLER, root, b"f", 0o644, os.O_RDWR | os.O_CREAT))
    file = entry.attributes.ino, opened.handle
    wanted = bytearray(DATA[: count * UNIT])
    places = [(at, UNIT if dice.random() < 0.8 else 5000) for at in range(0, len(wanted), UNIT)]
    dice.shuffle(places)

    def worker(mine: list[tuple[int, int]], channel: SimChannel) -> Steps[None]:
        for at, piece in mine:
            for begin in range(at, at + UNIT, piece):
                data = memoryview(bytes(wanted[begin : min(begin + piece, at + UNIT)]))
                current[0] = channel
                yield from face.write(*file, begin, data, MAKER)
            if dice.random() < 0.2:
                into = memoryview(bytearray(UNIT))
                current[0] = channel
                read = yield from face.read(*file, at, into)
                assert read == UNIT
                assert into == wanted[at : at + UNIT]

    for each in range(4):
        scheduler.spawn(f"worker {each}", worker(places[each::4], channels[each]))
    scheduler.run()
    current[0] = channels[4]
    call(scheduler, face.flush(*file, MAKER))
    call(scheduler, face.release(*file))
    assert not any(each.reserved for each in cache.snapshot())
    ino = call(scheduler, face.lookup(CALLER, root, b"f")).attributes.ino
    handle = call(scheduler, face.open(CALLER, ino, os.O_RDONLY)).handle
    into = memoryview(bytearray(len(wanted) + 1))
    assert call(scheduler, face.read(ino, handle, 0, into)) == len(wanted)
    assert into[:-1] == wanted


@pytest.mark.parametrize("piece", [3 << 19, (1 << 20) - 32, 1 << 20])
def test_a_chunk_that_is_longer_than_a_channels_buffers_is_stored_and_read_in_pieces(piece: int) -> None:
    files = SharedPool(chunk_bytes=4 << 20, directory_fresh=1.0).agent()
    data = random.Random(piece).randbytes(5 << 20)
    files.put("f", data, piece)
    assert files.manifest("f") is not None
    file = files.open("f", os.O_RDWR)
    files.pwrite(file, 5, b"in part")
    wanted = data[:5] + b"in part" + data[12:]
    assert b"".join(files.pread(file, at, 1 << 20) for at in range(0, len(data), 1 << 20)) == wanted
    files.close(file)
    file = files.open("f")
    assert b"".join(files.pread(file, at, 1 << 20) for at in range(0, len(data), 1 << 20)) == wanted
    files.release(file)
    nothing_is_held(files)
