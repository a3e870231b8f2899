"""Puts and gets in batches while a data key rotates, a tenant is erased, or limits hold, in virtual time.

Workers of one agent or of two store, read and delete the same keys. A value may be a miss, and never a wrong
one. What was acknowledged is there, where one agent has the pool and no enclosure fails. At the end nobody
holds anything.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent.inline.secrets import SecretKey
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.directory import is_under
from agent.pool.maintenance.rekey import ResealCounts, reseal_set
from agent.pool.read.batch import read_together
from agent.pool.read.get import SlotReader
from agent.pool.volume.bandwidth import BURST_SECONDS, Bandwidth
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.key_transition import MAP_AGE_SECONDS, QUIET_SECONDS, SETTLE_SECONDS, KeyTransition
from agent.pool.volume.quota import Limits, Measured, Quota
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Keys, TenantShare, Volume
from agent.pool.write.batch import UNTRIED, write_together
from agent.pool.write.put import SlotWriter
from agent.sim.faulty_flash import SimChannel
from agent.sim.seeded_scheduler import Sleep, Task
from tests.support.pool.memory_pool import fixed_secret, key_of
from tests.unit.pool.test_agents_racing import Race, Steps

WRITE_SECONDS = 5.0
TIMING = Timing(read_deadline=1.0, write_deadline=WRITE_SECONDS)
BATCH = 12
EARLIER = fixed_secret()
LATER = SecretKey(EARLIER.reveal()[:32] + b"\x07" * 32)
"""The same places, and another data key."""


class Batches(Race):
    """Workers whose every operation is one of many keys."""

    def __init__(self, seed: object, *, agents: int = 1, keys: int = 40, **settings: Any) -> None:
        super().__init__(seed, agents=agents, timing=TIMING, **{"value_bytes": 8192, **settings})
        self.keys = keys
        self.ends = self.scheduler.now + 5.0
        self.deletes_begun: dict[int, int] = {}
        self.stored_count = self.served_count = self.untried = self.deleted_count = 0
        self.ack_is_good: Callable[[Volume, bytes], bool] = lambda volume, key: True
        self.may_serve: Callable[[float], bool] = lambda began: True
        self.longest = 0.0

    def start(self, workers: int, *, pause: float = 0.05, deletes: bool = True) -> None:
        for number in range(workers):
            volume = self.volumes[number % len(self.volumes)]
            name = f"w{number}"
            channel = SimChannel(self.scheduler, self.namespaces, name)
            self.channels.append(channel)
            self.scheduler.spawn(name, self._go_on(name, volume, channel, pause, deletes=deletes), name)

    def _go_on(self, name: str, volume: Volume, channel: SimChannel, pause: float, *, deletes: bool) -> Steps:
        rng = random.Random(f"{name} {self.rng.random()}")
        while channel.now() < self.ends:
            yield Sleep(channel.now() + rng.expovariate(1 / pause))
            numbers = [rng.randrange(self.keys) for _ in range(rng.randint(2, BATCH))]
            what = rng.choices(["put", "get", "delete"], [5, 5, 1 if deletes else 0])[0]
            began = channel.now()
            if what == "put":
                yield from self.put_many(volume, channel, numbers, rng)
            elif what == "get":
                yield from self.get_many(volume, channel, numbers)
            else:
                yield from self.delete_many(volume, channel, numbers[: rng.choice([1, BATCH])])
            self.longest = max(self.longest, channel.now() - began)
            assert not channel.unsettled(), "a command is under way in the worker's buffers"

    def put_many(self, volume: Volume, channel: SimChannel, numbers: list[int], rng: random.Random) -> Steps:
        values = [rng.randbytes(rng.choice([1, 100, 5000, 8192])) for _ in numbers]
        for number, value in zip(numbers, values, strict=True):
            self.stored.setdefault(key_of(number), set()).add(value)
        deletes = [self.deletes_begun.get(number, 0) for number in numbers]
        keys, views = [key_of(number) for number in numbers], [memoryview(value) for value in values]
        became = yield from write_together(volume, channel, keys, views, WRITE_SECONDS)
        for number, value, before, one in zip(numbers, values, deletes, became, strict=True):
            is_stored = one is True
            if one is UNTRIED:  # as a client does, by a put of its own
                self.untried += 1
                is_stored = yield from self.put_one(volume, channel, number, value)
            if is_stored:
                self.stored_count += 1
                assert self.ack_is_good(volume, key_of(number))
                if before == self.deletes_begun.get(number, 0):
                    self.acknowledged[key_of(number)] = value

    def put_one(self, volume: Volume, channel: SimChannel, number: int, value: bytes) -> Steps:
        writing = SlotWriter(volume, key_of(number), length=len(value))
        try:
            yield from writing.write(channel, 0, memoryview(value), channel.now() + WRITE_SECONDS)
        except PutRefused:
            return False
        finally:
            writing.drop()
        return writing.stored

    def get_many(self, volume: Volume, channel: SimChannel, numbers: list[int]) -> Steps:
        began = channel.now()
        targets = [memoryview(bytearray(8192)) for _ in numbers]
        keys = [key_of(number) for number in numbers]
        became = yield from read_together(volume, channel, keys, targets, TIMING.read_deadline)
        for number, target, one in zip(numbers, targets, became, strict=True):
            length = one
            if one is None:
                reading = SlotReader(volume, key_of(number))
                length = yield from reading.read(channel, 0, target, channel.now() + TIMING.read_deadline)
            if isinstance(length, MissCause) or not length:
                continue
            self.served_count += 1
            if bytes(target[:length]) not in self.stored.get(key_of(number), ()):
                self.wrong.append(f"key {number}: {length} bytes that nobody stored")
            if not self.may_serve(began):
                self.wrong.append(f"key {number} was served")

    def delete_many(self, volume: Volume, channel: SimChannel, numbers: list[int]) -> Steps:
        for number in numbers:
            self.deletes_begun[number] = self.deletes_begun.get(number, 0) + 1
            self.acknowledged.pop(key_of(number), None)
        keys = [key_of(number) for number in numbers]
        became = yield from serve(volume).delete_many(channel, keys, WRITE_SECONDS)
        self.deleted_count += became.count(True)
        for number in numbers:
            self.acknowledged.pop(key_of(number), None)
            self.deletes_begun[number] += 1

    def kill_one(self, at: float) -> None:
        """A worker's call breaks off, as by an interrupt."""

        def kill() -> None:
            self.scheduler.kill("w0")

        self.scheduler.call_at(at, kill)

    def hang_one(self, at: float, seconds: float) -> None:
        namespace = self.rng.choice(self.namespaces)
        self.scheduler.call_at(at, namespace.hang)
        self.scheduler.call_at(at + seconds, lambda: namespace.wake(self.scheduler))

    def end(self) -> None:
        self.scheduler.run()
        self.gets = self.tally().gets_hit + self.tally().gets_missed  # one may have broken off
        self.run()
        for volume in self.volumes:
            assert not len(volume.key_locks)
            assert not len(volume.puts_in_pieces)

    def read_back(self, volume: Volume) -> dict[bytes, bytes]:
        """What a volume serves of the keys that were stored."""
        channel, found = SimChannel(self.scheduler, self.namespaces, "reader"), {}
        self.channels.append(channel)
        for key in self.stored:
            reading, into = SlotReader(volume, key), memoryview(bytearray(8192))
            count = self.scheduler.finish(reading.read(channel, 0, into, channel.now() + 5.0))
            if reading.cause is None:
                found[key] = bytes(into[:count])
        return found


# -- a data key is replaced -----------------------------------------------------------------------------


class Rotating(Batches):
    """The verb that rotates the key, and the agents that follow it."""

    def __init__(self, seed: object, **more: Any) -> None:
        super().__init__(seed, **more)
        self.ends = self.scheduler.now + 60.0
        self.is_dropped = False
        self.resealed = ResealCounts()
        self.ack_is_good = self._is_under_a_key_that_stays
        self.scheduler.spawn("verb", self._verb())

    def _is_under_a_key_that_stays(self, volume: Volume, key: bytes) -> bool:
        """Of what this agent remembers of the key's entry, where it still does."""
        if not self.is_dropped:
            return True
        pseudonym = volume.placement.pseudonym(key)
        sets = volume.borrow_sets(pseudonym)
        volume.give_back_sets(sets)
        return all(is_under(found.entry, 1) for found in volume.find(sets, pseudonym))

    def _verb(self) -> Steps:
        yield Sleep(self.scheduler.now + self.rng.uniform(0.5, 1.5))
        for number, volume in enumerate(self.volumes):
            self.scheduler.spawn(f"upkeep {number}", self._follow(number, volume))
        yield Sleep(self.scheduler.now + QUIET_SECONDS)
        clean = 0
        while clean < 2:
            clean = clean + 1 if not self._left() else 0
            yield Sleep(self.scheduler.now + (QUIET_SECONDS if clean == 1 else 0.3))
        self.is_dropped = True
        for volume in self.volumes:
            volume.change(keys=Keys(volume.codec_of(LATER, 1)))
        self.ends = self.scheduler.now + 1.0

    def _left(self) -> int:
        entries = [entry for directory in self.directories() for _, entry in directory if entry.length]
        return sum(not is_under(entry, 1) for entry in entries)

    def _follow(self, number: int, volume: Volume) -> Steps:
        channel = SimChannel(self.scheduler, self.namespaces, f"upkeep {number}")
        yield Sleep(channel.now() + self.rng.uniform(0.0, MAP_AGE_SECONDS))
        older = volume.codec_of(EARLIER, 0)
        newer = volume.codec_of(LATER, 1, (older,))
        transition = KeyTransition(newer, channel.now() + SETTLE_SECONDS)
        volume.change(keys=Keys(volume.codec_of(EARLIER, 0, (newer,)), transition))
        # Late, as upkeep may be; each put looks at the time by itself.
        yield Sleep(transition.seals_at + self.rng.uniform(0.0, 0.5))
        volume.change(keys=Keys(newer, transition))
        while not self.is_dropped:
            for place in volume.settings.set_places(volume.settings.extents):
                yield from reseal_set(volume, channel, place, self.resealed)
            yield Sleep(channel.now() + 0.2)


def test_what_a_batch_acknowledged_outlives_the_rotation_of_its_key(seed: int) -> None:
    """One agent whose enclosures are well: the end of the earlier key takes nothing with it."""
    for run in range(2):
        race = Rotating((seed, "rotation", run), keys=60)
        race.start(3, pause=0.1)
        race.kill_one(race.scheduler.now + race.rng.uniform(1.0, 8.0))
        race.end()
        assert race.is_dropped
        assert race.resealed.resealed > 0, "nothing lay under the earlier key; the test does not test"
        assert race.stored_count > 50
        assert race.served_count > 50
        assert not race.tally().evictions
        fresh = Volume(race.settings, LATER, DirectoryCache(1 << 20), TIMING)
        fresh.change(keys=Keys(fresh.codec_of(LATER, 1)))
        assert race.acknowledged.items() <= race.read_back(fresh).items(), f"seed {seed} run {run}"


@pytest.mark.parametrize("agents", [1, 2])
def test_a_batch_that_hangs_across_the_end_of_its_key_acknowledges_nothing_under_it(
    agents: int, seed: int
) -> None:
    for run in range(3):
        race = Rotating((seed, "hangs", run, agents), agents=agents)
        race.start(4, pause=0.3)
        for _ in range(4):
            race.hang_one(race.scheduler.now + race.rng.uniform(0.5, 25.0), race.rng.uniform(0.2, 6.0))
        race.end()
        assert race.is_dropped
        assert not race._left()


# -- a tenant is erased ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_faulty", [False, True])
def test_after_an_erasure_no_batch_stores_or_serves_anything(is_faulty: bool, seed: int) -> None:
    for run in range(3):
        race = Batches((seed, "erased", run, is_faulty))
        race.start(4, pause=0.01)
        erased_at = race.scheduler.now + race.rng.uniform(0.3, 1.0)
        race.ends = erased_at + 0.3
        if is_faulty:
            race.hang_one(erased_at - race.rng.uniform(0.0, 0.2), race.rng.uniform(0.1, 1.0))
        puts: list[int] = []

        def erase(race: Batches = race, puts: list[int] = puts) -> None:
            race.volumes[0].change(erased=True)
            puts.append(race.tally().puts)

        race.scheduler.call_at(erased_at, erase)
        race.may_serve = lambda began, erased_at=erased_at: began <= erased_at  # type: ignore[misc]
        race.kill_one(erased_at + race.rng.uniform(0.0, 0.01))
        race.end()
        assert puts[0] > 10
        assert race.tally().puts == puts[0], f"seed {seed} run {run}: stored under an erased key"
        assert race.served_count > 10
        assert not race.read_back(race.volumes[0])


# -- limits of tenants ----------------------------------------------------------------------------------


def test_batches_keep_a_quota_and_leave_nothing_set_aside(seed: int) -> None:
    for run in range(2):
        race = Batches((seed, "quota", run))
        race.ends = race.scheduler.now + 2.0
        volume = race.volumes[0]
        slots = race.rng.randint(5, 30)
        quota = Quota([Measured(volume.occupancy, volume.settings.slot_bytes)], Limits(slots=slots))
        volume.change(tenant=TenantShare(quota, None, (volume,)))

        def look(task: Task, quota: Quota = quota, slots: int = slots) -> None:
            assert quota._known()[0] <= slots

        race.start(4, pause=0.01)
        race.kill_one(race.scheduler.now + race.rng.uniform(0.5, 1.0))
        if run % 2:
            # What was refused may land all the same, and is found there by a later look.
            race.hang_one(race.scheduler.now + 1.0, race.rng.uniform(0.1, 6.0))
        else:
            race.scheduler.after_step = look
        race.end()
        assert quota._set_aside == [0, 0]
        assert race.stored_count > 30, "at its quota a tenant stores on, by evictions of its own"
        assert quota.counts.evictions > 5


def test_batches_keep_a_bandwidth_and_others_have_their_own(seed: int) -> None:
    race = Batches((seed, "bandwidth"), agents=2)
    limited, free = race.volumes
    rate, seats = race.rng.choice([200_000, 600_000]), threading.BoundedSemaphore(3)
    limited.change(tenant=TenantShare(None, Bandwidth(seats, rate)))
    free.change(tenant=TenantShare(None, Bandwidth(seats)))
    began = race.scheduler.now
    race.ends = began + 3.0
    race.start(6, pause=0.01, deletes=False)
    race.kill_one(began + race.rng.uniform(0.5, 2.0))
    race.end()
    moved = [sum(_moved(channel) for channel in race.channels[at::2]) for at in range(2)]
    assert moved[0] <= rate * (race.ends - began + BURST_SECONDS) + 3 * BATCH * 8192
    assert moved[0] >= rate * (race.ends - began) / 4, "the limit starves nobody"
    assert moved[1] > 2 * moved[0], "who has no limit waits for nobody"
    assert [seats.acquire(blocking=False) for _ in range(4)] == [True] * 3 + [False], "a seat was kept"


def _moved(channel: SimChannel) -> int:
    return sum(tally.bytes_read + tally.bytes_written for tally in channel.tallies.values())
