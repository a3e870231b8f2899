"""A volume on KV namespaces in virtual time from one seed: agents, workers, namespaces and what goes wrong.

The short form of pool_simulation.py, with the same oracle. It knows every value that anybody began to store
under a key and checks

* always: what is served is, byte for byte, the range of one such value; a get ends in time; the misses'
  causes add up; nothing raises but what is promised; no namespace holds more than its capacity; what is left
  behind holds no lock;
* with one agent: a value that was acknowledged, not deleted and not evicted, whose namespace met no fault, is
  served;
* at the end, when all faults are over: every key can be stored and is then served.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from typing import Any

from agent.pool.counters import Tally, total
from agent.pool.errors import PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.commands import RESERVED_KEY
from agent.pool.kv.get import KvReader
from agent.pool.kv.put import KvWriter, delete_key
from agent.pool.kv.volume import KvVolume, room_of
from agent.pool.volume.settings import Timing
from agent.sim.seeded_scheduler import Sleep, StepScheduler
from tests.support.pool.memory_pool import SUITES, key_of
from tests.support.sim.kv_flash import SimKvChannel, SimKvNamespace, kv_volume
from tests.support.sim.pool_simulation import Wrong

Steps = Generator[Any, bool, Any]
READ_DEADLINE, WRITE_DEADLINE = 0.05, 0.5
SECONDS = 1.5
FAULTS = ("hang", "down", "broken", "lie", "lose")


class KvSimulation:
    """Build it with a seed, `run` it, and look at what it counted."""

    def __init__(self, seed: object) -> None:
        self.rng = rng = random.Random(f"kv simulation {seed}")
        self.scheduler = StepScheduler(seed)
        self.value_bytes = rng.choice([4096, 65536, 131072, 196608])
        slot = room_of(HEADER_BYTES + self.value_bytes)
        members = rng.randint(1, 4)
        self.capacities = [slot * rng.randint(12, 30) for _ in range(members)]
        self.keys = max(4, int(sum(self.capacities) // slot * rng.choice([0.2, 0.6, 1.5])))
        self.suite = rng.choice(SUITES)
        self.faults = {name: rng.random() < 0.5 for name in FAULTS}
        self.namespaces = [SimKvNamespace(size) for size in self.capacities]
        for namespace in self.namespaces:
            namespace.values[RESERVED_KEY] = b"superblock"
        self.agents = [self._boot() for _ in range(rng.choice([1, 1, 2]))]
        self.tallies: list[dict[str, Tally]] = []
        self.stored: dict[int, set[bytes]] = {}
        self.acknowledged: dict[int, bytes] = {}
        self.touched: Counter[int] = Counter()
        """Puts and deletes of a key that began."""
        self.busy: Counter[int] = Counter()
        """Those under way: a get beside one may go either way."""
        self.counts: Counter[str] = Counter()

    def _boot(self) -> KvVolume:
        timing = Timing(READ_DEADLINE, WRITE_DEADLINE)
        return kv_volume(self.capacities, value_bytes=self.value_bytes, suite=self.suite, timing=timing)

    def run(self) -> str:
        """Faults and workers, then the end; the digest of the run."""
        for number, volume in enumerate(self.agents):
            for worker in range(self.rng.randint(1, 3)):
                channel = SimKvChannel(self.scheduler, self.namespaces, f"{number}.{worker}")
                self.tallies.append(channel.tallies)
                name = f"worker {number}.{worker}"
                self.scheduler.spawn(
                    name, self._work(volume, channel, random.Random(f"{name} {self.rng.random()}"))
                )
        self.scheduler.spawn("faults", self._inject(random.Random(f"faults {self.rng.random()}")))
        self.scheduler.run()
        self._heal()
        self._check_books()
        self._check_the_end()
        for name, cause in (("misses", None), *((each.name.lower(), each) for each in self.tally().misses)):
            tally = self.tally()
            self.counts[f"miss {name}"] += tally.gets_missed if cause is None else tally.misses[cause]
        return self.scheduler.digest()

    def tally(self) -> Tally:
        return total(each["v"] for each in self.tallies if "v" in each)

    # -- what goes wrong -----------------------------------------------------------------------------

    def _inject(self, rng: random.Random) -> Steps:
        end = self.scheduler.now + SECONDS
        chosen = [name for name, on in self.faults.items() if on]
        while chosen and self.scheduler.now < end:
            yield Sleep(self.scheduler.now + rng.uniform(0.05, 0.4))
            namespace = rng.choice(self.namespaces)
            namespace.tainted = True
            fault = rng.choice(chosen)
            self.counts[f"fault {fault}"] += 1
            match fault:
                case "hang":
                    namespace.hung = True
                case "down":
                    namespace.down = True
                case "broken":
                    namespace.broken = True
                case "lie":
                    namespace.lying = rng.choice([0.1, 0.5, 1.0])
                case "lose":
                    namespace.losing = 0.3
            yield Sleep(self.scheduler.now + rng.uniform(0.01, 0.3))
            self._heal_one(namespace)

    def _heal_one(self, namespace: SimKvNamespace) -> None:
        namespace.down = namespace.broken = False
        namespace.lying = namespace.losing = 0.0
        namespace.wake(self.scheduler)

    def _heal(self) -> None:
        for namespace in self.namespaces:
            self._heal_one(namespace)
        self.scheduler.now += 1.0

    # -- what the workers do ------------------------------------------------------------------------------

    def _work(self, volume: KvVolume, channel: SimKvChannel, rng: random.Random) -> Steps:
        end = self.scheduler.now + SECONDS
        while self.scheduler.now < end:
            number = rng.randrange(self.keys)
            match rng.randrange(10):
                case 0 | 1 | 2 | 3:
                    yield from self._put(volume, channel, number, rng)
                case 4:
                    yield from self._delete(volume, channel, number)
                case 5:
                    yield from self._exists(volume, channel, rng)
                case _:
                    yield from self._get(volume, channel, number, rng)
            for namespace in self.namespaces:
                if namespace.used > namespace.capacity:
                    raise Wrong(f"{namespace.used} bytes in a namespace of {namespace.capacity}")
            yield Sleep(self.scheduler.now + rng.choice([0.0, 0.001, 0.02]))

    def _put(self, volume: KvVolume, channel: SimKvChannel, number: int, rng: random.Random) -> Steps:
        length = rng.choice([1, 4095, 4096, self.value_bytes // 2, self.value_bytes])
        value = rng.randbytes(min(length, self.value_bytes))
        self.stored.setdefault(number, set()).add(value)
        self.touched[number] += 1
        alone, touched = not self.busy[number], self.touched[number]
        self.busy[number] += 1
        whole = rng.random() < 0.7
        writing = KvWriter(volume, key_of(number), length=len(value) if whole else None)
        deadline = channel.now() + WRITE_DEADLINE
        try:
            if whole:
                yield from writing.write(channel, 0, memoryview(value), deadline)
            else:
                cut = rng.randrange(len(value) + 1)
                for start, part in ((cut, value[cut:]), (0, value[:cut])):
                    yield from writing.write(channel, start, memoryview(part), deadline)
                yield from writing.finish(channel, deadline)
        except PutRefused as refused:
            self.counts["refused" if refused.cause is not None else "no room"] += 1
            return
        finally:
            self.busy[number] -= 1
        if writing.stored:
            self.counts["stored"] += 1
            if alone and self.touched[number] == touched:  # and no delete may have come after it
                self.acknowledged[number] = value
        elif not writing.already_there:
            raise Wrong(f"a put of key {number} ended well and stored nothing")

    def _delete(self, volume: KvVolume, channel: SimKvChannel, number: int) -> Steps:
        self.touched[number] += 1
        self.busy[number] += 1
        self.acknowledged.pop(number, None)
        try:
            yield from delete_key(volume, channel, key_of(number), channel.now() + WRITE_DEADLINE)
        except PutRefused:
            self.counts["delete refused"] += 1
        finally:
            self.busy[number] -= 1
            self.acknowledged.pop(number, None)

    def _exists(self, volume: KvVolume, channel: SimKvChannel, rng: random.Random) -> Steps:
        numbers = [rng.randrange(self.keys) for _ in range(rng.randint(1, 40))]
        found = yield from volume.lookup(
            channel, [key_of(number) for number in numbers], channel.now() + 4 * READ_DEADLINE
        )
        for number, cause in zip(numbers, found, strict=True):
            if cause is None and number not in self.stored:
                raise Wrong(f"key {number} exists and was never stored")

    def _get(self, volume: KvVolume, channel: SimKvChannel, number: int, rng: random.Random) -> Steps:
        began, touched, busy = channel.now(), self.touched[number], self.busy[number]
        expected, evictions = self.acknowledged.get(number), self.tally().evictions
        reading = KvReader(volume, key_of(number))
        into = memoryview(bytearray(rng.choice([self.value_bytes, 4096, 70_000])))
        got = b""
        while True:
            at = channel.now()
            count = yield from reading.read(channel, len(got), into, at + READ_DEADLINE)
            if channel.now() > at + READ_DEADLINE + 1e-9:
                raise Wrong(f"a get took {channel.now() - at} s")
            got += bytes(into[:count])
            if not count:
                break
        reading.close()
        self.counts["gets"] += 1
        if reading.cause is None:
            self.counts["hits"] += 1
            if got not in self.stored.get(number, ()):
                raise Wrong(f"key {number}: a value that nobody stored")
        elif got and not any(each.startswith(got) for each in self.stored.get(number, ())):
            raise Wrong(f"key {number}: the beginning of a value that nobody stored")
        elif (
            expected is not None
            and len(self.agents) == 1
            and not busy
            and self.touched[number] == touched
            and self.tally().evictions == evictions == 0
            and not self.namespaces[volume.namespace_of(reading.pseudonym)].tainted
        ):
            raise Wrong(f"key {number} was acknowledged at {began} and is a miss: {reading.cause.name}")

    # -- the end --------------------------------------------------------------------------------------------

    def _check_books(self) -> None:
        tally = self.tally()
        if tally.gets_hit + tally.gets_missed != self.counts["gets"]:
            raise Wrong(f"{tally.gets_hit} hits and {tally.gets_missed} misses of {self.counts['gets']}")
        if any(len(volume.key_locks) for volume in self.agents):
            raise Wrong("a key's turn was kept")

    def _check_the_end(self) -> None:
        """A new agent finds what must be there, and can store what is not."""
        volume, channel = self._boot(), SimKvChannel(self.scheduler, self.namespaces, "end")
        self.tallies.append(channel.tallies)
        evicted = self.tally().evictions
        for number, expected in self.acknowledged.items():
            served = self.scheduler.finish(self._whole(volume, channel, number))
            pseudonym = volume.placement.pseudonym(key_of(number))
            tainted = self.namespaces[volume.namespace_of(pseudonym)].tainted
            if (
                served is None
                and not tainted
                and not evicted
                and self.touched[number]
                and len(self.agents) == 1
            ):
                raise Wrong(f"key {number}, {len(expected)} bytes, was acknowledged and is gone at the end")
            self.counts["checked at the end"] += 1
        rng = random.Random("end")
        for number in range(min(self.keys, 12)):
            if self.scheduler.finish(self._whole(volume, channel, number)) is None:
                refused, no_room = self.counts["refused"], self.counts["no room"]
                self.scheduler.finish(self._put(volume, channel, number, rng))
                if self.counts["refused"] > refused:
                    raise Wrong(f"key {number} cannot be stored although all is well")
                stored = self.counts["no room"] == no_room
                if stored and self.scheduler.finish(self._whole(volume, channel, number)) is None:
                    raise Wrong(f"key {number} was stored although all is well, and is not served")
        for namespace in self.namespaces:
            if namespace.values.get(RESERVED_KEY) != b"superblock":
                raise Wrong("the superblock went")

    def _whole(self, volume: KvVolume, channel: SimKvChannel, number: int) -> Steps:
        reading = KvReader(volume, key_of(number))
        into = memoryview(bytearray(self.value_bytes))
        count = yield from reading.read(channel, 0, into, channel.now() + READ_DEADLINE)
        if reading.cause is not None:
            return None
        if bytes(into[:count]) not in self.stored.get(number, ()):
            raise Wrong(f"key {number}: a value that nobody stored, at the end")
        return bytes(into[:count])
