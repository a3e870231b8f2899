"""An enclosure that goes down, hangs or fails at any step of any operation.

Every operation is run once to count its waits, and then once for each wait and each fault, the fault
beginning just before that wait. Bounded time, no exception but the promised one, nothing wrong served,
nothing left locked, and all well again when the enclosure is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import pytest

from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete, pin
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel, SimNamespace
from agent.sim.seeded_scheduler import StepScheduler
from tests.support.pool.memory_pool import fixed_secret, key_of, volume_settings

Steps = Generator[Any, bool, Any]
TIMING = Timing(read_deadline=0.05, write_deadline=1.0)
CAPACITY = 3 * 65536
VALUE = random.Random(5).randbytes(150_000)
OTHER = random.Random(6).randbytes(150_000)
FAULTS = ("down", "hung", "broken")
SECONDS = {"get cold": 0.05, "get warm": 0.05, "get in ranges": 0.15, "lookup": 0.05}
"""How long each may take at most; what is not named takes a writer's deadline, one for each call of it."""


class Bench:
    def __init__(self) -> None:
        self.scheduler = StepScheduler("faults")
        self.namespaces = [SimNamespace(1 << 40) for _ in range(2)]
        self.channel = SimChannel(self.scheduler, self.namespaces)
        self.settings = volume_settings((1, 1), value_bytes=CAPACITY)
        self.volume = self.open()
        self.scheduler.finish(self.put(VALUE))
        self.namespace = self._holder()

    def open(self) -> Volume:
        return Volume(self.settings, fixed_secret(), DirectoryCache(1 << 20), TIMING)

    def _holder(self) -> int:
        pseudonym = self.volume.placement.pseudonym(key_of(1))
        sets = self.volume.borrow_sets(pseudonym)
        self.volume.give_back_sets(sets)
        return self.volume.find(sets, pseudonym)[0].cached.namespace

    def deadline(self, seconds: float = 1.0) -> float:
        return self.channel.now() + seconds

    def put(self, value: bytes, number: int = 1, pieces: int = 1) -> Steps:
        writing = SlotWriter(self.volume, key_of(number), length=len(value) if pieces == 1 else None)
        step = -(-len(value) // pieces)
        for at in range(0, len(value), step):
            piece = memoryview(value)[at : at + step]
            yield from writing.write(self.channel, at, piece, self.deadline())
        yield from writing.finish(self.channel, self.deadline())
        return writing.stored

    def get(self, volume: Volume, pieces: int = 1) -> Steps:
        reading = SlotReader(volume, key_of(1))
        into = bytearray(len(VALUE))
        step = -(-len(VALUE) // pieces)
        for at in range(0, len(VALUE), step):
            view = memoryview(into)[at : at + step]
            count = yield from reading.read(self.channel, at, view, self.deadline(TIMING.read_deadline))
            if reading.cause is not None:
                return reading.cause
            assert count == len(view)
        return bytes(into)


def _operations(bench: Bench) -> dict[str, Callable[[], Steps]]:
    return {
        "get cold": lambda: bench.get(bench.open()),
        "get warm": lambda: bench.get(bench.volume),
        "get in ranges": lambda: bench.get(bench.volume, pieces=3),
        "lookup": lambda: bench.open().lookup(bench.channel, [key_of(1), key_of(2)], bench.deadline(0.05)),
        "put whole": lambda: bench.put(OTHER, 2),
        "put in pieces": lambda: bench.put(OTHER, 2, pieces=4),
        "delete": lambda: delete(bench.volume, bench.channel, key_of(1), bench.deadline()),
        "delete many": lambda: _first_of_many(bench),
        "pin": lambda: pin(bench.open(), bench.channel, key_of(1), 1 << 31, bench.deadline()),
    }


NAMES = (
    "get cold",
    "get warm",
    "get in ranges",
    "lookup",
    "put whole",
    "put in pieces",
    "delete",
    "delete many",
    "pin",
)


def _first_of_many(bench: Bench) -> Steps:
    keys = [key_of(1), key_of(2), key_of(3)]
    became = yield from serve(bench.volume).delete_many(bench.channel, keys, 1.0)
    if isinstance(became[0], PutRefused):
        raise became[0]
    return became[0]


def with_fault(steps: Steps, at_wait: int, begin: Callable[[], None]) -> Steps:
    """The same steps, with `begin` called before they are resumed after wait number `at_wait`."""
    answer: bool | None = None
    waits = 0
    while True:
        if waits == at_wait:
            begin()
        try:
            wanted = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        waits += 1
        if waits == at_wait:
            begin()
        answer = yield wanted


def waits_of(name: str) -> int:
    bench = Bench()
    steps = _operations(bench)[name]()
    count = 0

    def counting() -> Steps:
        nonlocal count
        answer: bool | None = None
        while True:
            try:
                wanted = steps.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            count += 1
            answer = yield wanted

    bench.scheduler.finish(counting())
    return count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_step(name: str, fault: str) -> None:
    cases = 0
    for who in (0, 1):
        for at_wait in range(waits_of(name) + 1):
            bench = Bench()
            steps = _operations(bench)[name]()
            sick = bench.namespaces[who]
            began = bench.scheduler.now

            def begin(sick: SimNamespace = sick) -> None:
                setattr(sick, fault, True)

            result: Any = None
            try:
                result = bench.scheduler.finish(with_fault(steps, at_wait, begin))
            except PutRefused as refused:
                result = refused
            took = bench.scheduler.now - began
            calls = 5 if "pieces" in name or "many" in name else 1
            assert took <= SECONDS.get(name, calls * 1.0) + 1e-6, f"{name}, {fault} at {at_wait}: {took} s"
            _check_result(name, result)
            assert not bench.channel.unsettled(), f"{name}, {fault} at {at_wait}: left under way"
            for cached in bench.volume.cache.snapshot():
                assert not cached.users
                assert not cached.reserved
                assert not cached.writer.locked()
            _heals(bench, sick, name, result)
            cases += 1
    assert cases >= 4


def _check_result(name: str, result: Any) -> None:
    if name.startswith("get"):
        assert isinstance(result, MissCause) or result == VALUE
    elif name.startswith(("put", "delete")):
        assert isinstance(result, PutRefused) or result is True
    elif name == "pin":
        assert result in (True, None)


def _heals(bench: Bench, sick: SimNamespace, name: str, result: Any) -> None:
    """The enclosure is back: what was acknowledged is there, and everything can be done again."""
    sick.down = sick.broken = False
    sick.wake(bench.scheduler)
    bench.scheduler.now += 100
    for volume in (bench.volume, bench.open()):
        if not name.startswith("delete"):
            assert bench.scheduler.finish(bench.get(volume)) == VALUE
        elif result is True:
            assert isinstance(bench.scheduler.finish(bench.get(volume)), MissCause)
    if name.startswith("put"):
        if isinstance(result, PutRefused):
            bench.scheduler.finish(bench.put(OTHER, 2))
        reading = SlotReader(bench.open(), key_of(2))
        into = bytearray(CAPACITY)
        steps = reading.read(bench.channel, 0, memoryview(into), bench.deadline())
        count = bench.scheduler.finish(steps)
        if reading.cause is not None:
            # Refused, yet named: one get finds that out, and then the key can be stored.
            assert isinstance(result, PutRefused)
        else:
            assert bytes(into[:count]) == OTHER


def test_one_hung_enclosure_does_not_slow_the_others_keys() -> None:
    """Reads whose candidates are both elsewhere never wait for it."""
    scheduler = StepScheduler("others")
    namespaces = [SimNamespace(1 << 40) for _ in range(4)]
    channel = SimChannel(scheduler, namespaces)
    volume = Volume(
        volume_settings((1,) * 4, value_bytes=8192), fixed_secret(), DirectoryCache(1 << 20), TIMING
    )
    numbers = list(range(60))

    def putting() -> Steps:
        for number in numbers:
            writing = SlotWriter(volume, key_of(number), length=4000)
            yield from writing.write(channel, 0, memoryview(bytes(4000)), channel.now() + 1)

    scheduler.finish(putting())
    namespaces[2].hang()
    slow = healthy = 0
    for number in numbers:
        began = scheduler.now
        reading = SlotReader(volume, key_of(number))
        into = memoryview(bytearray(4000))
        count = scheduler.finish(reading.read(channel, 0, into, channel.now() + TIMING.read_deadline))
        candidates = volume.placement.candidates(volume.placement.pseudonym(key_of(number)))
        if all(candidate.namespace != 2 for candidate in candidates):
            healthy += 1
            assert count == 4000
            assert scheduler.now - began < 0.01
        elif reading.cause is MissCause.LATE:
            slow += 1
    assert healthy >= 15
    assert slow >= 5


def test_a_hung_enclosure_leaves_a_put_time_for_the_other() -> None:
    bench = Bench()
    bench.namespaces[1 - bench.namespace].hang()
    volume, bench.volume = bench.volume, bench.open()
    assert bench.scheduler.finish(bench.put(OTHER, 2)) is True
    bench.volume = volume
