"""Jobs between an engine's memory and the pool: what is reported, and that memory is left alone after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from host_shim.named_values import NamedValues, key_of_long_name
from host_shim.pool import Buffer, Pool
from host_shim.tier_jobs import TierJobs
from tests.support.engines.drained import drained
from tests.support.engines.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

CHUNK = 4096
CHUNKS = 32


class Gate:
    """A pool on a scripted agent whose answers can be held up, as by a mount that hangs."""

    def __init__(self, values: NamedValues) -> None:
        self._values = values
        self.open = threading.Event()
        self.open.set()
        self.stores: list[int] = []

    def store(self, names: Sequence[bytes], values: Sequence[Sequence[Buffer | bytes]]) -> list[bool]:
        assert self.open.wait(20)
        self.stores.append(len(names))
        return self._values.store(names, values)

    def load(self, names: Sequence[bytes], rooms: Sequence[Sequence[Buffer]]) -> list[int | None]:
        assert self.open.wait(20)
        return self._values.load(names, rooms)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return self._values.exists(names)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self) -> None:
        self.agent = ScriptedAgent()
        self.pool = Pool("/nowhere", files=self.agent, parallel=1)
        self.gate = Gate(NamedValues(self.pool, "kv"))
        self.clock = Clock()
        self.memory = bytearray(CHUNK * CHUNKS)
        self.key_of: Callable[[bytes], bytes] = lambda key: b"layout" + key
        self.jobs = TierJobs(
            self.gate,
            memoryview(self.memory),
            CHUNK,
            lambda key: self.key_of(key),
            threads=2,
            load_deadline=5,
            store_deadline=5,
            clock=self.clock,
        )

    def chunk(self, number: int) -> bytes:
        return bytes(self.memory[number * CHUNK : (number + 1) * CHUNK])

    def fill(self, number: int) -> bytes:
        data = bytes([number + 1]) * CHUNK
        self.memory[number * CHUNK : (number + 1) * CHUNK] = data
        return data


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gate.open.set()
    rig.jobs.close(10)
    rig.pool.close()


def _keys(*numbers: int) -> list[bytes]:
    return [b"hash %d" % number + bytes(4) for number in numbers]


def test_blocks_come_back_into_other_chunks(rig: Rig) -> None:
    data = [rig.fill(number) for number in range(11)]
    rig.jobs.store(1, _keys(*range(11)), range(11))
    rig.jobs.drain()
    (stored,) = rig.jobs.finished()
    assert (stored.job_id, stored.success, stored.is_load) == (1, True, False)
    rig.jobs.load(2, _keys(*range(11)), range(20, 31))
    rig.jobs.drain()
    (loaded,) = rig.jobs.finished()
    assert (loaded.job_id, loaded.success) == (2, True)
    assert [rig.chunk(20 + number) for number in range(11)] == data
    assert rig.jobs.finished() == []
    assert not rig.jobs._jobs


def test_what_is_there_is_not_written_again(rig: Rig) -> None:
    rig.jobs.store(1, _keys(0, 1), [0, 1])
    rig.jobs.drain()
    rig.jobs.store(2, _keys(0, 1, 2), [0, 1, 2])
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished()] == [True, True]
    assert rig.gate.stores == [2, 1]


def test_a_load_with_holes_says_what_it_brought(rig: Rig) -> None:
    data = rig.fill(3)
    rig.jobs.store(1, _keys(3), [3])
    rig.jobs.drain()
    rig.jobs.finished()
    rig.jobs.load(2, _keys(2, 3, 4), [10, 11, 12])
    rig.jobs.drain()
    (loaded,) = rig.jobs.finished()
    assert not loaded.success
    assert loaded.done == tuple(_keys(3))
    assert rig.chunk(11) == data
    assert rig.chunk(10) == rig.chunk(12) == bytes(CHUNK)


def test_a_job_past_its_deadline_fails_and_its_memory_is_left_alone(rig: Rig) -> None:
    rig.fill(0)
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.drain()
    rig.jobs.finished()
    rig.gate.open.clear()
    rig.jobs.load(2, _keys(0), [9])
    rig.jobs.store(3, _keys(1), [1])
    assert rig.jobs.finished() == []
    rig.clock.now += 6
    assert sorted((job.job_id, job.success) for job in rig.jobs.finished()) == [(2, False), (3, False)]
    rig.gate.open.set()
    wait_until(lambda: drained(rig.jobs._runner, 0), 10, "the threads to come back")
    assert rig.chunk(9) == bytes(CHUNK)
    assert rig.jobs.finished() == []


def test_draining_ends_with_the_deadline(rig: Rig) -> None:
    rig.gate.open.clear()
    rig.jobs.load(1, _keys(0), [0])
    rig.clock.now += 5.5
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished()] == [False]


@pytest.mark.expects_log("no g35 pool at /nowhere")
def test_no_agent_is_failed_jobs_and_its_return_is_noticed(rig: Rig) -> None:
    rig.agent.kill()
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.load(2, _keys(0), [0])
    rig.jobs.drain()
    assert not any(job.success for job in rig.jobs.finished())
    rig.agent.restart()

    def stored() -> bool:
        rig.jobs.store(3, _keys(0), [0])
        rig.jobs.drain()
        return all(job.success for job in rig.jobs.finished())

    wait_until(stored, 10, "a store to succeed")


def test_a_store_that_failed_leaves_nothing_to_be_found(rig: Rig) -> None:
    """A failed store that stays visible: seen in other tiers as a hit on a block that was never whole."""
    rig.fill(0)
    real = rig.gate._values.store
    rig.gate._values.store = lambda names, values: real(names, [[b"half"] for _ in names])  # type: ignore
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.drain()
    rig.jobs.load(2, _keys(0), [5])
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished() if job.is_load] == [False]
    assert rig.chunk(5) == bytes(CHUNK)


def test_a_transfer_that_breaks_off_is_not_counted_as_loaded(rig: Rig) -> None:
    rig.fill(0)
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.drain()
    rig.jobs.finished()
    rig.agent.cut_off = 1000
    rig.jobs.load(2, _keys(0), [5])
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished()] == [False]
    assert rig.chunk(5) == bytes(CHUNK)


def test_a_slot_with_another_requests_block_is_a_miss(rig: Rig) -> None:
    rig.fill(0)
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.drain()
    first, other = (key_of_long_name(rig.key_of(key)) for key in _keys(0, 1))
    rig.agent.values["kv", other] = rig.agent.values["kv", first]
    rig.jobs.finished()
    rig.jobs.load(2, _keys(1), [5])
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished()] == [False]
    assert rig.chunk(5) == bytes(CHUNK)


def test_two_names_with_one_key_are_a_miss_for_the_second(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("host_shim.named_values.key_of_long_name", lambda _name: bytes(16))
    rig.fill(0)
    rig.jobs.store(1, _keys(0), [0])
    rig.jobs.drain()
    rig.jobs.finished()
    rig.jobs.load(2, _keys(0), [6])
    rig.jobs.drain()
    rig.jobs.load(3, _keys(1), [5])
    rig.jobs.drain()
    assert {job.job_id: job.success for job in rig.jobs.finished()} == {2: True, 3: False}
    assert rig.chunk(5) == bytes(CHUNK)


@pytest.mark.expects_log("not in the engine's memory")
def test_a_chunk_outside_of_the_memory_fails_its_job(rig: Rig) -> None:
    rig.jobs.store(1, _keys(0), [CHUNKS])
    rig.jobs.drain()
    assert [job.success for job in rig.jobs.finished()] == [False]
