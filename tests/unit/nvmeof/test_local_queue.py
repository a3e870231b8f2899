"""A queue to a medium of this machine: answers as a controller's, and buffers that are left alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from nvmeof.controller.storage import Scratch, StorageError
from nvmeof.errors import ConnectionLost, QueueFull
from nvmeof.host import commands
from nvmeof.host.command import Command
from nvmeof.transport import connect_io_queue
from nvmeof.transport.local_queue import IO_THREADS, LocalMedia, LocalQueue
from nvmeof.wire.sqe import IoOpcode
from nvmeof.wire.status import Status
from tests.support.nvme.heap_storage import HeapStorage
from tests.support.waiting import wait_until

FAR = 30.0


class SlowStorage(HeapStorage):
    """Reads and writes wait until they may go on."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.go_on = threading.Event()
        self.begun = 0

    def read(self, offset: int, length: int, scratch: Scratch) -> memoryview:
        self.begun += 1
        assert self.go_on.wait(FAR)
        return super().read(offset, length, scratch)

    def write(self, offset: int, data: memoryview, *, placed: bool) -> None:
        self.begun += 1
        assert self.go_on.wait(FAR)
        super().write(offset, data, placed=placed)


@pytest.fixture
def slow() -> SlowStorage:
    return SlowStorage()


@pytest.fixture
def media(slow: SlowStorage) -> Iterator[LocalMedia]:
    found = LocalMedia({1: HeapStorage(direct=False), 2: slow}, "io-test")
    yield found
    slow.go_on.set()
    found.close()


@pytest.fixture
def queue(media: LocalMedia) -> LocalQueue:
    return media.connect(16)


def done(queue: LocalQueue, command: Command) -> int | None:
    queue.submit(command)
    assert queue.wait(command, time.monotonic() + FAR)
    return command.status


def test_a_session_says_what_a_queue_needs(media: LocalMedia) -> None:
    info = media.info("nqn.2014-08.org.nvmexpress:one", "nqn.2014-08.org.nvmexpress:host", bytes(16))
    queue = connect_io_queue(info, 7, 64)
    assert isinstance(queue, LocalQueue)
    assert (queue.depth, queue.max_transfer, queue.alive) == (64, 2 << 20, True)


def test_the_end_of_a_medium_tells_those_whose_turn_never_came(
    queue: LocalQueue, media: LocalMedia, slow: SlowStorage
) -> None:
    under_way = [commands.write(2, 8 * at, 1, [bytes(4096)]) for at in range(IO_THREADS)]
    waiting = commands.write(2, 0, 1, [b"x" * 4096])
    for each in (*under_way, waiting):
        queue.submit(each)
    wait_until(lambda: slow.begun == IO_THREADS, FAR, "all threads to be busy")
    queue.abandon(under_way[0])
    media.close()
    assert queue.wait(waiting, time.monotonic() + FAR)
    assert waiting.status == Status.NAMESPACE_NOT_READY
    # What a thread has begun counts as unanswered until it ends.
    assert (under_way[0].answered_late, queue.in_flight) == (False, IO_THREADS)


def test_what_is_written_is_read(queue: LocalQueue) -> None:
    parts = [b"a" * 4096, memoryview(b"b" * 8192), bytearray(b"c" * 4096)]
    assert done(queue, commands.write(1, 3, 4, parts)) == 0
    into = memoryview(bytearray(16384))
    reading = commands.read(1, 3, 4, into)
    assert done(queue, reading) == 0
    assert bytes(into) == b"a" * 4096 + b"b" * 8192 + b"c" * 4096
    assert reading.received == 16384
    assert done(queue, commands.flush(1)) == 0
    assert queue.in_flight == 0


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (commands.read(9, 0, 1, memoryview(bytearray(4096))), Status.INVALID_NAMESPACE),
        (commands.read(1, 64, 1, memoryview(bytearray(4096))), Status.LBA_OUT_OF_RANGE),
        (commands.read(1, 63, 2, memoryview(bytearray(8192))), Status.LBA_OUT_OF_RANGE),
        (commands.read(1, 1 << 40, 1, memoryview(bytearray(4096))), Status.LBA_OUT_OF_RANGE),
        (commands.read(1, 0, 2, memoryview(bytearray(4096))), Status.DATA_SGL_LENGTH_INVALID),
        (commands.write(1, 0, 1, [bytes(8192)]), Status.DATA_SGL_LENGTH_INVALID),
        (Command("compare", IoOpcode.COMPARE, 1), Status.INVALID_OPCODE),
    ],
)
def test_blocks_are_checked_as_a_controller_checks_them(
    queue: LocalQueue, command: Command, status: Status
) -> None:
    assert done(queue, command) == status


def test_more_than_a_command_may_move_is_refused() -> None:
    media = LocalMedia({1: HeapStorage(blocks=1024)}, "io-test")
    into = memoryview(bytearray((2 << 20) + 4096))
    assert done(media.connect(4), commands.read(1, 0, 513, into)) == Status.INVALID_FIELD
    media.close()


def test_a_medium_that_fails_gives_its_status(queue: LocalQueue, slow: SlowStorage) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError(Status.WRITE_FAULT, "bad cells")

    slow.write = fail  # type: ignore[method-assign]
    assert done(queue, commands.write(2, 0, 1, [bytes(4096)])) == Status.WRITE_FAULT


@pytest.mark.expects_log("io-test")
def test_a_bug_costs_one_command(queue: LocalQueue, slow: SlowStorage) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    slow.read = break_down  # type: ignore[assignment,method-assign]
    assert done(queue, commands.read(2, 0, 1, memoryview(bytearray(4096)))) == Status.INTERNAL_ERROR
    assert done(queue, commands.read(1, 0, 1, memoryview(bytearray(4096)))) == 0


def test_a_medium_that_hangs_costs_the_deadline_and_touches_nothing_later(
    queue: LocalQueue, slow: SlowStorage
) -> None:
    into = memoryview(bytearray(b"mine" * 1024))
    reading = commands.read(2, 0, 1, into)
    queue.submit(reading)
    began = time.monotonic()
    assert not queue.wait(reading, began + 0.02)
    queue.abandon(reading)
    assert (queue.oldest_abandoned(), queue.abandoned) == (reading.submitted_at, 1)
    assert not reading.answered_late
    slow.go_on.set()
    wait_until(lambda: reading.answered_late, 10, "the thread to end the command")
    assert bytes(into) == b"mine" * 1024
    assert (queue.oldest_abandoned(), queue.in_flight, reading.done) == (None, 0, False)
    assert queue.abandoned == 0


def test_a_thread_that_is_bound_to_a_processor_binds_no_thread_of_the_medium() -> None:
    """Linux has a new thread run where the one may that started it (agent/host_os/one_processor.py)."""
    allowed, became = os.sched_getaffinity(0), list[int | None]()
    media = LocalMedia({1: HeapStorage(direct=False)}, "io-unbound")
    queue = media.connect(16)

    def read() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        became.append(done(queue, commands.read(1, 0, 1, memoryview(bytearray(4096)))))

    bound = threading.Thread(target=read)
    bound.start()
    bound.join()
    assert became == [0]
    numbers = [each.native_id for each in threading.enumerate() if each.name.startswith("io-unbound")]
    assert [os.sched_getaffinity(number) for number in numbers if number is not None] == [allowed]
    media.close()


def test_a_write_that_is_given_up_in_time_is_never_carried_out(queue: LocalQueue, slow: SlowStorage) -> None:
    blockers = [commands.write(2, number, 1, [b"x" * 4096]) for number in range(IO_THREADS)]
    for each in blockers:
        queue.submit(each)
    wait_until(lambda: slow.begun == IO_THREADS, 10, "all threads to be busy")
    late = commands.write(2, 40, 1, [b"y" * 4096])
    queue.submit(late)
    queue.abandon(late)
    assert late.answered_late
    slow.go_on.set()
    for each in blockers:
        assert queue.wait(each, time.monotonic() + FAR)
    assert not any(slow.memory[40 * 4096 : 41 * 4096])


def test_a_write_that_is_under_way_counts_until_it_has_ended(
    media: LocalMedia, queue: LocalQueue, slow: SlowStorage
) -> None:
    """Also after the end of its queue: its place stays fenced (agent/remote/fence.py)."""
    payload = bytearray(b"x" * 4096)
    given_up = commands.write(2, 0, 1, [payload])
    queue.submit(given_up)
    wait_until(lambda: slow.begun == 1, 10, "a thread to begin")
    queue.abandon(given_up)
    payload[:] = b"z" * 4096
    queue.close()
    assert not given_up.answered_late
    assert not given_up.orphaned
    slow.go_on.set()
    wait_until(lambda: given_up.answered_late, 10, "the write to end")
    assert slow.memory[:4096] == b"x" * 4096


def test_a_queue_takes_as_many_as_it_is_deep(media: LocalMedia, slow: SlowStorage) -> None:
    queue = media.connect(2)
    held = [commands.read(2, 0, 1, memoryview(bytearray(4096))) for _ in range(2)]
    for each in held:
        queue.submit(each)
    with pytest.raises(QueueFull):
        queue.submit(commands.read(1, 0, 1, memoryview(bytearray(4096))))
    slow.go_on.set()
    assert all(queue.wait(each, time.monotonic() + FAR) for each in held)


def test_the_end_of_a_queue_ends_its_commands(
    media: LocalMedia, queue: LocalQueue, slow: SlowStorage
) -> None:
    reading = commands.read(2, 0, 1, memoryview(bytearray(4096)))
    queue.submit(reading)
    queue.close()
    assert (reading.lost, queue.alive) == (True, False)
    with pytest.raises(ConnectionLost):
        queue.submit(commands.flush(1))
    queue.close()
    slow.go_on.set()


def test_after_the_end_of_the_media_nothing_is_taken(media: LocalMedia, queue: LocalQueue) -> None:
    media.close()
    command = commands.flush(1)
    with pytest.raises(ConnectionLost):
        queue.submit(command)
    assert (command.cid, queue.in_flight) == (-1, 0)


def test_threads_come_as_they_are_needed(media: LocalMedia, queue: LocalQueue) -> None:
    for _ in range(20):
        assert done(queue, commands.flush(1)) == 0
    assert sum(each.name.startswith("io-test") for each in threading.enumerate()) <= 2
