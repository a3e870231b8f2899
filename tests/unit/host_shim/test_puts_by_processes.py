"""host_shim before an agent whose readers take puts: they do, and the first takes what they do not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from agent.fs.control.registered_memory import RegisteredMemory
from agent.pool.access import serve
from agent.pool.write.slot_messages import Kind
from host_shim import agent_processes
from host_shim.pool import Pool, ValueTooLong
from host_shim.session_files import Refusal
from tests.support.engines.counted_door import Counted
from tests.support.engines.scripted_agent import PlainFiles
from tests.support.pool.lending import Lending, content
from tests.support.pool.memory_pool import key_of

READER = 100_000


class Both(PlainFiles):
    """The first process and a reader; `dies`: the errno of each request to the reader from now on."""

    def __init__(self, lending: Lending, memory: RegisteredMemory) -> None:
        lending.reader.served = serve(lending.reader.volume, slots=lending)
        self.first, self.reader = Counted(lending.first, memory), Counted(lending.reader, memory)
        self.reader.face._may_read = lambda volume: True
        transfers = self.reader.face._transfers
        assert transfers is not None
        transfers.borrows_slots = True
        self.dies = 0

    def _of(self, descriptor: int) -> tuple[Any, int]:
        if descriptor >= READER:
            if self.dies:
                raise Refusal(self.dies, os.strerror(self.dies))
            return self.reader, descriptor - READER
        return self.first, descriptor

    def processes(self, folder: str) -> list[str]:
        return ["process-1"]

    def open(self, path: str) -> int:
        is_reader = "process-1" in path
        if is_reader and self.dies:
            raise Refusal(self.dies, os.strerror(self.dies))
        return READER * is_reader + (self.reader if is_reader else self.first).open(path)

    def close(self, descriptor: int) -> None:
        door, own = (self.reader, descriptor - READER) if descriptor >= READER else (self.first, descriptor)
        door.close(own)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        door, own = self._of(descriptor)
        return cast(int, door.pwrite(own, data, offset))

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        door, own = self._of(descriptor)
        return cast(int, door.preadv(own, into, offset))

    def fgetxattr(self, descriptor: int, name: bytes, into: memoryview) -> int:
        door, own = self._of(descriptor)
        return cast(int, door.fgetxattr(own, name, into))

    def ioctl(self, descriptor: int, command: int, data: bytearray) -> None:
        door, own = self._of(descriptor)
        door.ioctl(own, command, data)


@pytest.fixture
def lending() -> Lending:
    return Lending((2, 2))


@pytest.fixture
def both(lending: Lending) -> Iterator[Both]:
    memory = RegisteredMemory(1 << 30)
    yield Both(lending, memory)
    memory.close()


@pytest.fixture
def pool(both: Both) -> Iterator[Pool]:
    with Pool("/mnt", files=both, parallel=1) as made:
        volume = made.volume("v")
        assert volume.put(key_of(1000), b"the first one is asked first")  # from here on there are others
        both.first.asked.clear()
        yield made


def put(pool: Pool, numbers: range) -> list[bool]:
    return pool.volume("v").put_many([key_of(n) for n in numbers], [content(n) for n in numbers])


def served(lending: Lending, numbers: range) -> bool:
    return all(lending.first.get(key_of(n)) == content(n) for n in numbers)


def test_a_batch_goes_to_the_reader_alone(pool: Pool, both: Both, lending: Lending) -> None:
    assert put(pool, range(40)) == [True] * 40
    assert both.reader.asked["STORE_MANY"] == 1
    assert not both.first.asked
    assert served(lending, range(40))
    lending.nothing_is_held()


def test_a_value_of_registered_memory_goes_to_the_reader(pool: Pool, both: Both, lending: Lending) -> None:
    registered = pool.memory(len(content(7)))
    registered[:] = content(7)
    assert pool.volume("v").put(key_of(7), registered)
    assert both.reader.asked["STORE"] == 1
    assert not both.first.asked.get("STORE")
    assert pool.volume("v").put(key_of(8), content(8)), "other memory goes to the first"
    assert served(lending, range(7, 9))


@pytest.mark.parametrize("code", [errno.EREMOTE])
def test_where_the_reader_dies_or_refuses_the_first_is_asked(
    code: int, pool: Pool, both: Both, lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(pool, range(4)) == [True] * 4
    both.dies = code
    for turn in range(1, 4):
        assert put(pool, range(turn * 4, turn * 4 + 4)) == [True] * 4
    assert both.first.asked["STORE_MANY"] == 3
    both.dies = 0
    monkeypatch.setattr(agent_processes, "ASIDE_SECONDS", 0.0)
    pool._processes._aside.clear()
    before = both.reader.asked["STORE_MANY"]
    assert put(pool, range(20, 24)) == [True] * 4
    assert both.reader.asked["STORE_MANY"] == before + 1
    assert served(lending, range(16))


def test_a_reader_that_refuses_puts_serves_gets(pool: Pool, both: Both, lending: Lending) -> None:
    lending.lends = False
    assert put(pool, range(4)) == [True] * 4
    assert both.first.asked["STORE_MANY"] == 1
    put(pool, range(4, 8))
    assert lending.asked == [Kind.ASK], "it is left alone with puts for a second"
    assert not pool._processes._is_aside(pool._processes._all[1], "v")


def test_where_a_reader_takes_batches_alone_single_values_go_to_the_first(
    pool: Pool, both: Both, lending: Lending
) -> None:
    """It has too few processors for them (`lends_single_slots`), and is asked once a second at the most."""
    lending.values_least = 2
    registered = pool.memory(len(content(7)))
    registered[:] = content(7)
    assert put(pool, range(4)) == [True] * 4
    for number in range(10, 13):
        assert pool.volume("v").put(key_of(number), registered)
    assert both.first.asked["STORE"] == 3
    assert not lending.asked.count(Kind.ASK) > 1, "for the batch"
    assert both.reader.asked["STORE"] >= 1
    assert pool._processes.begin_put("v", 1) is pool._processes._first
    assert pool._processes.begin_put("v", 2) is not pool._processes._first, "batches are still taken"
    assert put(pool, range(20, 24)) == [True] * 4
    assert both.reader.asked["STORE_MANY"] == 2
    assert all(lending.first.get(key_of(number)) == content(7) for number in range(10, 13))
    lending.nothing_is_held()


def test_the_second_value_of_a_key_is_not_stored(pool: Pool, both: Both, lending: Lending) -> None:
    keys = [key_of(1), key_of(2), key_of(1)]
    assert pool.volume("v").put_many(keys, [content(1), content(2), b"second"]) == [True] * 3
    assert served(lending, range(1, 3))
    lending.nothing_is_held()


def test_a_value_that_is_refused_is_not_put_again(pool: Pool, both: Both, lending: Lending) -> None:
    for namespace in lending.pool.namespaces:
        namespace.broken = True
    assert put(pool, range(4)) == [False] * 4
    assert not both.first.asked.get("STORE_MANY")


def test_a_value_that_found_no_way_is_put_by_the_first(pool: Pool, both: Both, lending: Lending) -> None:
    """It may have one. Here it has none either."""
    for namespace in lending.pool.namespaces:
        namespace.down = True
    assert put(pool, range(4)) == [False] * 4
    assert both.first.asked["STORE_MANY"] == 1


def test_a_value_too_long_for_the_volume(both: Both) -> None:
    with Pool("/mnt", files=both) as pool:
        pool.volume("v").put(key_of(1), b"there")
        registered = pool.memory(1 << 18)
        with pytest.raises(ValueTooLong):
            pool.volume("v").put(key_of(2), registered)


def test_the_only_value_that_is_left_to_the_first_is_too_long(
    pool: Pool, lending: Lending, expects_log: Callable[..., None]
) -> None:
    expects_log("longer than the slots of volume 'v'")
    values = [content(1), bytes(1 << 18), content(3)]
    assert pool.volume("v").put_many([key_of(n) for n in (1, 2, 3)], values) == [True, False, True]
    assert lending.first.get(key_of(1)) == content(1)
    assert lending.first.get(key_of(3)) == content(3)
    lending.nothing_is_held()


def test_puts_go_to_whom_has_the_fewest(pool: Pool) -> None:
    assert put(pool, range(2)) == [True] * 2
    processes = pool._processes
    first, (reader,) = processes._first, processes._all[1:]
    another = processes._make("/mnt/another")
    processes._all = (first, reader, another)
    taken = [processes.begin_put("v", 2) for _ in range(4)]
    assert sorted(map(id, taken)) == sorted(2 * [id(reader), id(another)])
    processes.end_put(another)
    processes.end_put(another)
    assert [processes.begin_put("v", 2) for _ in range(2)] == [another, another]
    processes.set_aside(reader, agent_processes.BATCHES + "v")
    for _ in range(2):
        processes.end_put(reader)
    assert processes.begin_put("v", 2) is another, "the one with fewer is left alone"


def test_one_that_is_set_aside_leaves_its_puts_to_the_others(pool: Pool) -> None:
    """It has none under way, so it was the one with the fewest: nearly all puts were left to the first."""
    assert put(pool, range(2)) == [True] * 2
    processes = pool._processes
    first, (reader,) = processes._first, processes._all[1:]
    another = processes._make("/mnt/another")
    processes._all = (first, reader, another)
    processes._aside[id(reader), agent_processes.BATCHES + "v"] = float("inf")
    assert [processes.begin_put("v", 2) for _ in range(4)] == [another] * 4
    processes._aside[id(another), agent_processes.BATCHES + "v"] = float("inf")
    assert processes.begin_put("v", 2) is first
