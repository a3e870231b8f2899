"""Deletes in a full volume whose slots other processes borrow: what is gone is served by no process.

A slot is reserved, and its victim forgotten here, before flash hears of it. A process that reads flash goes
by the victim's entry until then, and all do again where the put fails.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.set_versions import SetVersions, shared_versions
from agent.pool.volume.volume import Volume
from agent.pool.write.batch import UNTRIED
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.set_transaction import SetTransaction
from agent.pool.write.slot_messages import Kind
from agent.remote.fence import GIVEN_UP_SECONDS
from agent.sim.faulty_flash import SimChannel
from agent.sim.seeded_scheduler import Sleep
from tests.support.pool.lending import Died, Lending, content
from tests.support.pool.memory_pool import fixed_secret, key_of
from tests.unit.pool.test_agents_racing import TIMING
from tests.unit.pool.test_lent_slots_racing import Borrowing

Steps = Generator[Any, bool, Any]
MANY = range(64)
KEYS = 160
"""A few more than there are slots."""


class Deleting(Borrowing):
    """A lender that deletes, and a reader of the same agent that serves gets."""

    def __init__(self, seed: object, **settings: Any) -> None:
        super().__init__(seed, **settings)
        descriptor = shared_versions()
        first, second = SetVersions(descriptor, is_writer=True), SetVersions(descriptor, is_writer=False)
        os.close(descriptor)
        self.volumes[0].cache = DirectoryCache(1 << 20, first)
        self.reader = Volume(self.settings, fixed_secret(), DirectoryCache(1 << 20, second), TIMING)
        self.gone: dict[bytes, set[bytes]] = {}
        """Values that no get may have which begins now: they were deleted, and are put no more."""
        self.deleted_victims = 0

    def get(self, volume: Volume, channel: SimChannel, number: int) -> Steps:
        gone = set(self.gone.get(key_of(number), ()))
        served = yield from super().get(volume, channel, number)
        if served in gone:
            self.wrong.append(f"key {number}: it was deleted")
        return served

    def _die(self, step: str) -> Steps:
        """As late as there are deletes meanwhile."""
        yield from super()._die(step)
        yield Sleep(self.scheduler.now + self.rng.random() * 0.02)

    def victims(self, keys: int) -> list[int]:
        """Keys that flash names, and the lender does no more."""
        here = {
            entry.pseudonym
            for cached in self.volumes[0].cache.snapshot()
            for _, entry in cached.directory or ()
        }
        there = {entry.pseudonym for directory in self.directories() for _, entry in directory}
        pseudonym = self.volumes[0].placement.pseudonym
        return [number for number in range(keys) if pseudonym(key_of(number)) in there - here]

    def deleter(self, name: str, turns: int, keys: int) -> None:
        channel = SimChannel(self.scheduler, self.namespaces, name)
        self.channels.append(channel)

        def work() -> Steps:
            for _ in range(turns):
                yield Sleep(channel.now() + self.rng.random() * 0.002)
                victims = self.victims(keys)
                number = self.rng.choice(victims or range(keys))
                key = key_of(number)
                before = self.stored.get(key, set()) - self.under_way
                try:
                    yield from delete(self.volumes[0], channel, key, channel.now() + 20)
                except PutRefused:
                    continue
                self.gone.setdefault(key, set()).update(before)
                self.deleted_victims += bool(victims)
                yield from self.get(self.reader, channel, number)

        self.scheduler.spawn(name, work())


@pytest.mark.parametrize("deadly", [0.0, 0.5])
def test_no_process_serves_what_was_deleted(deadly: float, seed: int) -> None:
    deleted = borrowed = 0
    for run in range(4):
        race = Deleting((seed, "deletes", run, deadly), sets=(1, 1))
        for number in range(3):
            race.worker(f"f{number}", race.volumes[0], [("put", n) for n in range(number, KEYS, 3)])
        race.run()
        for number in range(4):
            race.borrower(f"b{number}", turns=15, keys=KEYS, deadly=deadly)
        work = [(race.rng.choice(["put", "get"]), race.rng.randrange(KEYS)) for _ in range(40)]
        race.worker("w", race.volumes[0], work)
        race.worker("r", race.reader, [("get", race.rng.randrange(KEYS)) for _ in range(80)])
        for number in range(3):
            race.deleter(f"d{number}", turns=60, keys=KEYS)
        race.run()
        judge = SimChannel(race.scheduler, race.namespaces, "judge")
        race.channels.append(judge)
        fresh = Volume(race.settings, fixed_secret(), DirectoryCache(1 << 20), TIMING)
        for volume in (race.volumes[0], race.reader, fresh):
            for number in range(KEYS):
                race.scheduler.finish(race.get(volume, judge, number))
        race.run()
        deleted, borrowed = deleted + race.deleted_victims, borrowed + race.borrowed
    assert deleted > 50, "hardly anything was evicted meanwhile; the test does not test"
    assert borrowed > 50


@pytest.mark.parametrize("ends", ["stored", "refused", "died"])
def test_a_value_whose_slot_is_lent_is_deleted_for_everybody(ends: str) -> None:
    """It is out of the lender's memory before flash says so, and the other process reads flash."""
    lending = Lending((1,))
    for number in MANY:
        assert lending.first.put(key_of(number), content(number)).stored
        assert lending.reader.get(key_of(number)) == content(number)
    exchange, victims = lending.exchange, list[int]()

    def then_delete(message: bytes) -> bytes:
        answer = exchange(message)
        if Kind(message[0]) is Kind.ASK:
            [cached] = lending.first.cache.snapshot()
            assert cached.directory is not None
            for number in MANY:
                if cached.directory.find(lending.first.volume.placement.pseudonym(key_of(number))) is None:
                    victims.append(number)
                    assert lending.reader.get(key_of(number)) == content(number), "nothing has said so yet"
                    lending.first.delete(key_of(number))
                    assert not isinstance(lending.pool.agent().get(key_of(number)), bytes)
            if ends == "died":
                raise Died
            if ends == "refused":
                lending.reader.channel.clock += 6
        return answer

    lending.exchange = then_delete  # type: ignore[method-assign]
    if ends == "died":
        with pytest.raises(Died):
            lending.put([100])
        lending.close()
    else:
        assert lending.put([100]) == [True if ends == "stored" else UNTRIED]
    lending.nothing_is_held()
    [victim] = victims
    for _ in range(2):
        for agent in (lending.first, lending.pool.agent()):
            assert not isinstance(agent.get(key_of(victim)), bytes)
        lending.first.channel.clock += GIVEN_UP_SECONDS
        lending.first.age_directories()
    served = [n for n in MANY if lending.pool.agent().get(key_of(n)) == content(n)]
    assert len(served) == 63, "no other value went"


def test_a_slot_that_was_lent_since_it_was_looked_at_is_not_erased() -> None:
    """A move, or a delete, has found a value there that makes way for another one now."""
    lending = Lending((1,))
    first = lending.first
    for number in MANY:
        assert first.put(key_of(number), content(number)).stored
    [cached] = first.cache.snapshot()
    assert cached.directory is not None
    named = {slot: entry.pseudonym for slot, entry in cached.directory}

    def erase(slot: int) -> Steps[MissCause | None]:
        with SetTransaction(first.volume, first.channel, cached) as change:
            assert (yield from change.begin(first.deadline())) is None
            return (yield from change.erase(cached, [slot], named[slot]).end(first.deadline()))

    def before(kind: Kind) -> None:
        if kind is Kind.WRITTEN:
            [slot] = cached.reserved
            assert first.channel.run(erase(slot)) is None

    lending.before = before
    assert lending.put([100]) == [True]
    for agent in (first, lending.pool.agent()):
        assert agent.get(key_of(100)) == content(100)
    lending.nothing_is_held()
