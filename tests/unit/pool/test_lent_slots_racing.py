"""Processes that borrow slots, racing at every yield with the lender's own puts, deletes and gets.

As in test_agents_racing.py a seed is one interleaving. A borrower may end at any step. What it had sent then
lands whole, in part or not at all, at once or as late as an enclosure may carry it out. What must hold: what
is served is what somebody stored under that key, and nothing is lost that was acknowledged.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from agent.inline.cipher_suites import PROOF_BYTES, Place
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.late_answers import miss_cause_of
from agent.pool.steps import Wait
from agent.pool.volume.directory_cache import CachedSet, DirectoryCache
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.lent_slots import LentSlots
from agent.pool.write.slot_messages import Fate, LentSlot, Value
from agent.remote.fence import LOST_SECONDS
from agent.sim.faulty_flash import BLOCK, SimChannel
from agent.sim.seeded_scheduler import Sleep
from tests.support.pool.lending import NoFence
from tests.support.pool.memory_pool import fixed_secret, key_of
from tests.unit.pool.test_agents_racing import TIMING, Race

Steps = Generator[Any, bool, Any]
STEPS_TO_DIE_AT = ("asked", "lent", "sent", "written", "")


class Borrowing(Race):
    """Workers of the lender, and of borrowers whose values it names."""

    def __init__(self, seed: object, **settings: Any) -> None:
        super().__init__(seed, agents=1, value_bytes=16384, **settings)
        # It knows the same keys, and no directory.
        self.other = Volume(self.settings, fixed_secret(), DirectoryCache(1 << 20), TIMING)
        self.deaths: dict[str, int] = {}
        self.borrowed = 0
        self.deletes: dict[bytes, int] = {}
        """Of each key those that have ended. A put under way meanwhile may come before one or after it."""

    def borrower(self, name: str, turns: int, keys: int, deadly: float) -> None:
        lender = SimChannel(self.scheduler, self.namespaces, f"{name} lender")
        self.channels.append(lender)
        self.scheduler.spawn(name, self._borrow(name, lender, turns, keys, deadly))

    def _borrow(self, name: str, lender: SimChannel, turns: int, keys: int, deadly: float) -> Steps:
        for turn in range(turns):
            yield Sleep(lender.now() + self.rng.random() * 0.002)
            channel = SimChannel(self.scheduler, self.namespaces, f"{name} {turn}")
            dies_at = self.rng.choice(STEPS_TO_DIE_AT[:-1]) if self.rng.random() < deadly else ""
            numbers = [self.rng.randrange(keys) for _ in range(self.rng.randrange(1, 6))]
            yield from self._call(name, lender, channel, numbers, dies_at)

    def _call(
        self, name: str, lender: SimChannel, channel: SimChannel, numbers: list[int], dies_at: str
    ) -> Steps:
        deletes = dict(self.deletes)
        volume = self.volumes[0]
        values = [random.Random(f"{name} {n} {self.rng.random()}").randbytes(9000) for n in numbers]
        for number, value in zip(numbers, values, strict=True):
            self.stored.setdefault(key_of(number), set()).add(value)
        self.under_way.update(values)
        wanted = [Value(key_of(n), len(value)) for n, value in zip(numbers, values, strict=True)]
        slots = LentSlots(volume, lender, wanted, 20.0, 0, NoFence())
        try:
            places = yield from slots.lend()
            if dies_at in ("asked", "lent"):
                yield from self._die(dies_at)
                return
            sealed = {
                number: (place, self._sealed(wanted[number].key, values[number], place))
                for number, place in enumerate(places)
                if isinstance(place, LentSlot)
            }
            if dies_at == "sent":
                for place, data in sealed.values():
                    self._lands_late(place, data)
                yield from self._die(dies_at)
                return
            under_way = {
                number: channel.write(self._namespace(place), place.offset, [data])
                for number, (place, data) in sealed.items()
            }
            fates: list[tuple[int, Fate]] = []
            for number, pending in under_way.items():
                arrived = yield Wait(pending, channel.now() + 20)
                cause = miss_cause_of(channel, pending, arrived)
                fates.append((number, Fate.WRITTEN if cause is None else Fate.UNKNOWN))
            if dies_at == "written":
                yield from self._die(dies_at)
                return
            became = (yield from slots.name(fates)) if fates else []
            for (number, _), one in zip(fates, became, strict=True):
                if one is True:
                    self.borrowed += 1
                    key = wanted[number].key
                    if self.deletes.get(key) == deletes.get(key):
                        self.acknowledged[key] = values[number]
        finally:
            slots.close()
            self.under_way.difference_update(values)

    def _sealed(self, key: bytes, value: bytes, slot: LentSlot) -> memoryview:
        codec = self.other.codec.of_key(slot.fingerprint)
        assert codec is not None
        room = memoryview(bytearray(HEADER_BYTES + codec.padded(len(value)) + PROOF_BYTES))
        sealer = codec.seal(key, slot.generation, Place(slot.nguid, slot.number))
        sealer.seal(0, memoryview(value), room[HEADER_BYTES:])
        sealer.header_into(room, len(value), slot.expiry, 0)
        return room[:-PROOF_BYTES]

    def _namespace(self, slot: LentSlot) -> int:
        return next(each.namespace for each in self.settings.extents if each.nguid == slot.nguid)

    def _lands_late(self, slot: LentSlot, data: memoryview) -> None:
        """The enclosure has it, whole or in part, and carries it out before the controller ends."""
        blocks = [at for at in range(0, len(data), BLOCK) if self.rng.random() < 0.8]
        target = self.namespaces[self._namespace(slot)]

        def land() -> None:
            for at in blocks:
                target.store(slot.offset + at, [data[at : at + BLOCK]])

        after = self.rng.choice([0.0, 0.004, 0.1, LOST_SECONDS]) * self.rng.random()
        self.scheduler.call_at(self.scheduler.now + after, land)

    def _die(self, step: str) -> Steps:
        """Its connections end now, and the lender hears of it later."""
        self.deaths[step] = self.deaths.get(step, 0) + 1
        yield Sleep(self.scheduler.now + self.rng.random() * 0.003)

    def put(self, name: str, volume: Volume, channel: SimChannel, number: int) -> Steps:
        key = key_of(number)
        deletes = self.deletes.get(key)
        before = self.acknowledged.get(key)
        stored = yield from super().put(name, volume, channel, number)
        if stored and self.deletes.get(key) != deletes and self.acknowledged.get(key) != before:
            self.acknowledged.pop(key, None)
        return stored

    def deleter(self, name: str, turns: int, keys: int) -> None:
        channel = SimChannel(self.scheduler, self.namespaces, name)
        self.channels.append(channel)

        def work() -> Steps:
            for _ in range(turns):
                yield Sleep(channel.now() + self.rng.random() * 0.002)
                key = key_of(self.rng.randrange(keys))
                try:
                    yield from delete(self.volumes[0], channel, key, channel.now() + 20)
                except PutRefused:
                    continue
                self.deletes[key] = self.deletes.get(key, 0) + 1
                self.acknowledged.pop(key, None)

        self.scheduler.spawn(name, work())


def lost(race: Borrowing) -> list[str]:
    """What was acknowledged and is not served, by this process or one that starts afresh."""
    found = []
    fresh = Volume(race.settings, fixed_secret(), DirectoryCache(1 << 20), TIMING)
    for volume in (race.volumes[0], fresh):
        channel = SimChannel(race.scheduler, race.namespaces, "judge")
        race.channels.append(channel)
        for number in range(60):
            served = race.scheduler.finish(race.get(volume, channel, number))
            expected = race.acknowledged.get(key_of(number))
            if expected is not None and isinstance(served, MissCause):
                found.append(f"{number}: {served.name}")
    return found


def settle(race: Borrowing) -> None:
    """Until all that was sent has landed."""

    def wait() -> Steps:
        yield Sleep(race.scheduler.now + 2 * LOST_SECONDS)

    race.scheduler.finish(wait())


@pytest.mark.parametrize("deadly", [0.0, 0.5])
def test_borrowers_and_workers_serve_nothing_wrong_and_lose_nothing(deadly: float, seed: int) -> None:
    borrowed, deaths = 0, dict[str, int]()
    for run in range(20):
        race = Borrowing((seed, run, deadly), sets=(1, 1))
        for number in range(4):
            race.borrower(f"b{number}", turns=6, keys=30, deadly=deadly)
        for number in range(2):
            work = [(race.rng.choice(["put", "get", "get"]), race.rng.randrange(30)) for _ in range(20)]
            race.worker(f"w{number}", race.volumes[0], work)
        race.deleter("d", turns=25, keys=30)
        race.run()
        settle(race)
        assert not lost(race), f"seed {seed} run {run}"
        race.run()
        borrowed += race.borrowed
        for step, count in race.deaths.items():
            deaths[step] = deaths.get(step, 0) + count
    assert borrowed > 100
    if deadly:
        assert min(deaths[step] for step in STEPS_TO_DIE_AT[:-1]) > 5, deaths


@pytest.mark.interpreted
def test_without_time_to_cool_down_a_late_write_is_seen_to_do_harm(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation finds what it looks for: a slot that is given away while its write may land."""
    monkeypatch.setattr(CachedSet, "cool_down", lambda self, slot, now: None)
    for run in range(40):
        race = Borrowing((seed, "no cooling", run), sets=(1,))
        for number in range(6):
            race.borrower(f"b{number}", turns=8, keys=60, deadly=0.6)
        race.deleter("d", turns=60, keys=60)
        race.run()
        settle(race)
        if lost(race):
            return
    raise AssertionError("no late write did harm; the test does not test")
