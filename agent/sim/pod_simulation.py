"""A pod in virtual time from one seed: agents on DPUs, enclosures full of drives, and what goes wrong.

tests/support/sim/pool_simulation.py tests one small volume in depth, this the whole. Two tenants' volumes lie
on all drives, and agents judge the drives (agent/remote). Enclosures stop, slow down, err or are killed.
Drives are lost or bring other bytes, and join and leave while agents have an old map. Agents are killed.

These invariants (DESIGN, "What must hold, always") are checked with every operation, write and step:

* what is served is a value that somebody began to store under this key of this tenant;
* a write stays inside the pool, and nothing in it is in clear; while nothing has failed and the volume is
  less than half full, nothing is evicted;
* every get is a hit or a miss with one cause, and the books of every worker say so;
* caches and tables keep to their bounds;
* a get ends by its deadline, a put soon after it;
* with one agent that writes (killed and restarted as often as the seed says): a value that was acknowledged
  is served to every agent that goes by the same places, unless its drives met a fault that loses data. An
  enclosure that was slow, or erred, has lost nothing;
* an agent puts nothing new on a drive that it suspects while the key's other set has room.

Two of several writers can lose an update of a directory: `lost_between_agents` counts these lost hits.
"""

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

from agent.pool.counters import Tally, total
from agent.pool.errors import PutRefused
from agent.pool.format.directory import SLOTS_PER_SET
from agent.pool.read.get import SlotReader
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import SlotWriter
from agent.remote.circuit_breaker import Health
from agent.remote.outlier_detection import LOOK_SECONDS, OutlierDetection, Verdict
from agent.sim.faulty_flash import SimChannel
from agent.sim.medium import fixed_secret, key_of
from agent.sim.pod_agent import PodAgent, Stored
from agent.sim.pod_flash import MARK, VALUE_BYTES, Flash, PodMap, Wrong
from agent.sim.pod_joining import changed, forget_what_left, moving
from agent.sim.pod_shapes import ENCLOSURE_FAULTS, FAULTS, Shape, small_shape
from agent.sim.seeded_scheduler import Sleep, StepScheduler, Task

Steps = Generator[Any, bool, Any]
READ_DEADLINE, WRITE_DEADLINE = 0.05, 0.5
KEYS_MAX = 4096
KEYS = [key_of(number) for number in range(KEYS_MAX)]


class Noticed(NamedTuple):
    """How long an agent took to suspect the drives of an enclosure, in virtual seconds."""

    fault: str
    agent: int
    seconds: float


class Moved(NamedTuple):
    """What a change of the map means for the values that were stored: bytes no longer where it looks."""

    change: str
    share_of_drives: float
    bytes_moved: int
    bytes_stored: int


class PodSimulation:
    """Build it with a seed and a shape, `run` it, and look at what it counted."""

    def __init__(self, seed: object, shape: Shape | None = None) -> None:
        self.seed = seed
        self.shape = shape = small_shape(seed) if shape is None else shape
        self.rng = random.Random(f"pod simulation {seed}")
        self.scheduler = StepScheduler(seed)
        self.scheduler.after_step = self._after_step
        self.flash = Flash(self.scheduler, shape.enclosures, shape.drives_each, shape.strays)
        self._enclosures = [drive.enclosure for drive in self.flash.drives]
        drives = len(self.flash.drives)
        # Some drives are not in the pool yet, so that they can join.
        spare = 0
        if drives > 2 and "join" in shape.faults:
            spare = shape.drives_each if shape.whole else 1
        self.map = PodMap(1, tuple(range(drives - spare)), shape.sets)
        self.flash.give_room(self.map)
        self.stored: dict[tuple[int, int], set[bytes]] = {}
        self.acknowledged: dict[tuple[int, int], Stored] = {}
        self.touched: Counter[tuple[int, int]] = Counter()
        """Deletes of a key that began or ended, for a put that they cross."""
        self.counts: Counter[str] = Counter()
        self.tallies: list[dict[str, Tally]] = []
        self.noticed: list[Noticed] = []
        self.moved: list[Moved] = []
        self.verdicts: list[tuple[float, int, int, Verdict]] = []
        """When, which agent, which drive, what."""
        self.sick: dict[int, tuple[str, float, float]] = {}
        """Enclosures with a fault: which, since when, until when."""
        self.lost_between_agents = 0
        self.over = False
        self.agents = [self._boot(number, 1) for number in range(shape.agents)]

    # -- agents --------------------------------------------------------------------------------------

    def _boot(self, number: int, lives: int) -> PodAgent:
        cache = DirectoryCache(1 << 20)
        timing = Timing(READ_DEADLINE, WRITE_DEADLINE)
        volumes = [
            Volume(self.map.settings(volume), fixed_secret(volume), cache, timing)
            for volume in range(len(self.map.sets))
        ]
        health = [Health() for _ in self.flash.drives]
        return PodAgent(number, lives, self.map, volumes, health, OutlierDetection(health))

    def _start(self, agent: PodAgent) -> None:
        shape = self.shape
        rate = shape.busy_rate if agent.number < shape.busy else shape.rate
        agent.workers = 2 if agent.number < shape.busy else 1
        for number in range(agent.workers):
            name = f"a{agent.number}.{agent.lives}.w{number}"
            channel = SimChannel(self.scheduler, self.flash.drives, name, agent.health)
            agent.channels.append(channel)
            self.tallies.append(channel.tallies)
            self.scheduler.spawn(name, self._work(agent, channel, name, rate / agent.workers), agent.number)
        if agent.number == 0 and self.shape.moves:
            self.scheduler.spawn(f"move {agent.lives}", moving(self, agent), agent.number)
        self.scheduler.spawn(f"look {agent.number}.{agent.lives}", self._look(agent), agent.number)

    def _look(self, agent: PodAgent) -> Steps:
        """The supervisor's part: judge the drives beside each other."""
        yield Sleep(self.scheduler.now + self.scheduler.random.random() * LOOK_SECONDS)
        while not self.over:
            for change in agent.outliers.look(self.scheduler.now, self._enclosures):
                self.counts[f"verdict {change.verdict.value}"] += 1
                self.verdicts.append((self.scheduler.now, agent.number, change.member, change.verdict))
                if change.verdict is Verdict.SUSPECT:
                    self._suspected(agent, self.flash.drives[change.member].enclosure)
            yield Sleep(self.scheduler.now + LOOK_SECONDS)

    def _suspected(self, agent: PodAgent, enclosure: int) -> None:
        fault, since, until = self.sick.get(enclosure, ("", 0.0, 0.0))
        if until <= self.scheduler.now:
            # A look remembers for a while: what it sees then is mostly the fault that has just ended.
            self.counts["suspected while well"] += until < self.scheduler.now - 1.5
        elif agent.suspected_at.get(enclosure, 0.0) < since:
            agent.suspected_at[enclosure] = self.scheduler.now
            self.noticed.append(Noticed(fault, agent.number, self.scheduler.now - since))

    def kill_agent(self, agent: PodAgent) -> None:
        """kill -9; back after a while with nothing remembered, and with the map that is then in force."""
        if not agent.alive or self.over:
            return
        self.counts["agents killed"] += 1
        agent.alive = False
        self.scheduler.kill(agent.number)
        for channel in agent.channels:
            channel.crash()

        def restart() -> None:
            if not self.over:
                fresh = self.agents[agent.number] = self._boot(agent.number, agent.lives + 1)
                self._start(fresh)

        self.scheduler.call_at(self.scheduler.now + self.rng.uniform(0.001, 0.1), restart)

    # -- work, with the oracle looking on --------------------------------------------------------------

    def _work(self, agent: PodAgent, channel: SimChannel, name: str, rate: float) -> Steps:
        """As an engine does: get a block, store it where it is missing; a few deletes and lookups."""
        rng = random.Random(f"{self.seed} {name}")
        gets = [0] * len(agent.volumes)
        while not self.over:
            yield Sleep(channel.now() + rng.expovariate(rate))
            number = int(self.shape.keys * rng.random() ** 2)
            volume = rng.randrange(len(agent.volumes))
            what = rng.random()
            if what < 0.95:
                gets[volume] += 1
                missed = (yield from self._get(agent, channel, volume, number)) is None
                if missed and agent.number < self.shape.writers:
                    yield from self._put(agent, channel, volume, number, rng)
            elif what < 0.98:
                keys = [KEYS[rng.randrange(self.shape.keys)] for _ in range(8)]
                yield from agent.volumes[volume].lookup(channel, keys, channel.now() + READ_DEADLINE)
            elif agent.number < self.shape.writers:
                yield from self._delete(agent, channel, volume, number)
            tally = channel.tally(agent.volumes[volume].settings.name)
            if tally.gets_hit + tally.gets_missed != gets[volume]:
                raise Wrong(f"{tally.gets_hit} hits and {tally.gets_missed} misses of {gets[volume]} gets")
            if channel.unsettled():
                raise Wrong("an operation ended with a read or write still under way in the worker's buffers")

    def _places(self, volume: Volume, number: int) -> frozenset[tuple[int, int]]:
        """(namespace, offset) of the sets that a key may lie in."""
        candidates = volume.placement.candidates(volume.placement.pseudonym(KEYS[number]))
        return frozenset((each.namespace, volume.set_offset(each)) for each in candidates)

    def all_places(self, volume: Volume, number: int) -> frozenset[tuple[int, int]]:
        """The same, with those of before a join, where it may still lie."""
        candidates = volume.places(volume.placement.pseudonym(KEYS[number]))
        return frozenset((each.namespace, volume.set_offset(each)) for each in candidates)

    def _get(self, agent: PodAgent, channel: SimChannel, volume: int, number: int) -> Steps:
        key = (volume, number)
        expected, began = self.acknowledged.get(key), channel.now()
        reading = SlotReader(agent.volumes[volume], KEYS[number])
        into = memoryview(bytearray(VALUE_BYTES))
        count = yield from reading.read(channel, 0, into, began + READ_DEADLINE)
        if channel.now() > began + READ_DEADLINE + 1e-9:
            raise Wrong(f"a read took {channel.now() - began:.3f} s")
        self.counts["gets"] += 1
        if reading.cause is None:
            self.counts["hits"] += 1
            value = bytes(into[:count])
            if value not in self.stored.get(key, ()) or reading.length != count:
                raise Wrong(f"key {key}: {count} bytes that nobody stored")
            return value
        self.counts[f"miss {reading.cause.name.lower()}"] += 1
        if self._must_be_there(agent, key, expected, began):
            if self.shape.writers == 1:
                raise Wrong(f"key {key} was acknowledged and is {reading.cause.name} to agent {agent.number}")
            self.lost_between_agents += 1
        return None

    def _must_be_there(
        self, agent: PodAgent, key: tuple[int, int], expected: Stored | None, began: float
    ) -> bool:
        if expected is None or self.acknowledged.get(key) is not expected:
            return False
        places = self.all_places(agent.volumes[key[0]], key[1])
        if not expected.places <= places or self.tally().evictions:
            return False
        drives = [self.flash.drives[namespace] for namespace, _ in places]
        sick = (each.tainted or each.sick_until > began or each.strayed_at >= began for each in drives)
        return not any(sick)

    def _put(
        self, agent: PodAgent, channel: SimChannel, volume: int, number: int, rng: random.Random
    ) -> Steps:
        key, opened = (volume, number), agent.volumes[volume]
        value = MARK + rng.randbytes(rng.choice([1, 100, VALUE_BYTES - len(MARK)]))
        self.stored.setdefault(key, set()).add(value)
        touched, began = self.touched[key], channel.now()
        doubted = {
            namespace for namespace, _ in self._places(opened, number) if not channel.trusts(namespace)
        }
        writing = SlotWriter(opened, KEYS[number], length=len(value))
        try:
            yield from writing.write(channel, 0, memoryview(value), began + WRITE_DEADLINE)
        except PutRefused:
            self.counts["refused"] += 1
        if channel.now() > began + WRITE_DEADLINE + 1e-9:
            raise Wrong(f"a put took {channel.now() - began:.3f} s")
        if not writing.stored:
            return
        self.counts["stored"] += 1
        self.counts["bytes stored"] += len(value)
        if touched == self.touched[key]:
            self.acknowledged[key] = Stored(value, self._places(opened, number))
        else:
            self.acknowledged.pop(key, None)
        if doubted:
            self._check_place(opened, channel, number, doubted)

    def _check_place(self, volume: Volume, channel: SimChannel, number: int, doubted: set[int]) -> None:
        """A suspect got a new value only where the other set could not take it, or is suspect as well."""
        pseudonym = volume.placement.pseudonym(KEYS[number])
        sets = volume.borrow_sets(pseudonym)
        try:
            found = volume.find(sets, pseudonym)
            if not found or found[0].cached.namespace not in doubted or len(sets) < 2:
                return
            other = next(cached for cached in sets if cached is not found[0].cached)
            crowded = other.directory is None or other.directory.taken + len(other.cooldown_until) > 48
            if other.namespace in doubted or other.fault is not None or crowded:
                self.counts["stored at a suspect, for want of a better place"] += 1
            elif not channel.trusts(found[0].cached.namespace):
                raise Wrong(f"a new value on drive {found[0].cached.namespace}, which is a suspect")
        finally:
            volume.give_back_sets(sets)

    def _delete(self, agent: PodAgent, channel: SimChannel, volume: int, number: int) -> Steps:
        key = (volume, number)
        self.acknowledged.pop(key, None)
        self.touched[key] += 1
        try:
            yield from delete(agent.volumes[volume], channel, KEYS[number], channel.now() + WRITE_DEADLINE)
        except PutRefused:
            self.counts["delete refused"] += 1
        self.acknowledged.pop(key, None)
        self.touched[key] += 1

    def _after_step(self, task: Task) -> None:
        """Bounds of the agent that has just done something."""
        if not isinstance(task.owner, int):
            return
        agent = self.agents[task.owner]
        cache = agent.volumes[0].cache
        if len(cache) > cache.capacity + 32 * agent.workers:
            raise Wrong(f"{len(cache)} directories remembered, {cache.capacity} is the bound")
        if any(len(volume.key_locks) > agent.workers for volume in agent.volumes):
            raise Wrong("more turns than workers")

    # -- faults ----------------------------------------------------------------------------------------

    def _inject(self) -> Steps:
        rng, shape = self.rng, self.shape
        # One enclosure is left alone, so that what must be there has somewhere to be.
        spared = rng.randrange(shape.enclosures)
        pause = 1 / shape.fault_every
        yield Sleep(self.scheduler.now + rng.expovariate(pause))
        while not self.over:
            name = rng.choice(shape.faults)
            enclosure = rng.randrange(shape.enclosures)
            until = self.scheduler.now + rng.choice(shape.fault_lasts)
            if name == "agent":
                self.kill_agent(rng.choice(self.agents))
            elif name in ("join", "leave"):
                self.change_map(name, rng)
            elif enclosure != spared:
                self.hurt(name, enclosure, until)
            yield Sleep(self.scheduler.now + rng.expovariate(pause))

    def hurt(self, name: str, enclosure: int, until: float) -> None:
        """An enclosure falls ill, or one of its drives dies; one that is ill already is left alone."""
        now = self.scheduler.now
        if self.sick.get(enclosure, ("", 0.0, 0.0))[2] > now:
            return
        self.counts[f"fault {name}"] += 1
        if name == "lose":
            self.flash.lose(self.rng.choice(self.flash.drives_of(enclosure)), until)
            return
        self.sick[enclosure] = (name, now, until)
        match name:
            case "stop":
                self.flash.stop(enclosure, until)
            case "kill":
                self.flash.kill(enclosure, until)
            case "slow":
                self.flash.slow(enclosure, until, self.rng.choice([10.0, 30.0]))
            case "err":
                self.flash.err(enclosure, until, 0.01)

    def change_map(self, change: str, rng: random.Random) -> None:
        """Drives join the pool or leave it; the agents follow, restarted one after another."""
        members = set(self.map.members)
        inside = change == "leave"
        drives = [drive for drive in self.flash.drives if (drive.number in members) == inside]
        if not drives or (inside and len(members) <= 2):
            return
        if self.map.settled and not inside:
            self.counts["joins that had to wait"] += 1
            return
        chosen = rng.choice(drives)
        group = {chosen.number}
        if self.shape.whole:
            group = {drive.number for drive in drives if drive.enclosure == chosen.enclosure}
        self.counts[f"fault {change}"] += 1
        before, self.map = self.map, changed(self.map, group)
        self._measure_move(change, before)
        if inside:
            forget_what_left(self, before, group)
        self.tell()

    def tell(self) -> None:
        """Have the agents learn of the map."""
        rng = self.rng
        for agent in self.agents:
            at = self.scheduler.now + rng.uniform(0.0, 0.2)
            self.scheduler.call_at(at, lambda number=agent.number: self._follow(number))  # type: ignore[misc]

    def _follow(self, number: int) -> None:
        agent = self.agents[number]
        before, now = agent.map, self.map
        if before is now or not agent.alive or self.over:
            return
        if now.members[: len(before.members)] != before.members:
            self.kill_agent(agent)
            return
        agent.map = now
        for volume, opened in enumerate(agent.volumes):
            opened.change(layout=opened.layout(now.settings(volume)))

    def _measure_move(self, change: str, before: PodMap) -> None:
        """How many of the bytes that are stored lie where agents with the new map do not look for them."""
        cache = DirectoryCache(1 << 20)
        settled = replace(self.map, settled=0)
        moved = stored = 0
        for volume in range(len(before.sets)):
            old, new = (
                Volume(each.settings(volume), fixed_secret(volume), cache, Timing())
                for each in (before, settled)
            )
            for (of, number), known in self.acknowledged.items():
                if of != volume or known.places != self._places(old, number):
                    continue
                pseudonym = old.placement.pseudonym(KEYS[number])
                where = {place for place in known.places if self.flash.names(place, pseudonym)}
                stored += len(known.value) if where else 0
                if where and where.isdisjoint(self._places(new, number)):
                    moved += len(known.value)
        share = abs(len(self.map.members) - len(before.members)) / max(
            len(before.members), len(self.map.members)
        )
        self.moved.append(Moved(change, share, moved, stored))

    # -- the run -----------------------------------------------------------------------------------------

    def tally(self) -> Tally:
        return total(tally for tallies in self.tallies for tally in tallies.values())

    def run(self) -> str:
        """The digest of the run. Raises Wrong, or whatever the code under test should not have raised."""
        for agent in self.agents:
            self._start(agent)
        if self.shape.faults:
            self.scheduler.spawn("faults", self._inject())
        if self.shape.joins_at:
            at = self.scheduler.now + self.shape.joins_at
            self.scheduler.call_at(at, lambda: self.change_map("join", self.rng))

        def stop() -> None:
            self.over = True

        self.scheduler.call_at(self.scheduler.now + self.shape.seconds, stop)
        self.scheduler.run()
        failed = any(self.counts[f"fault {name}"] for name in FAULTS) or self.counts["agents killed"]
        slots = SLOTS_PER_SET * min(self.map.sets) * len(self.map.members)
        if not failed and 2 * self.counts["stored"] < slots and self.tally().evictions:
            raise Wrong("something was evicted from a volume that is not half full")
        for agent in self.agents:
            for cached in agent.volumes[0].cache.snapshot() if agent.alive else ():
                if cached.users or cached.reserved or cached.writer.locked():
                    raise Wrong("a set was left in use")
        self._check_the_end()
        self.scheduler.note(sorted(self.counts.items()))
        return self.scheduler.digest()

    def report(self) -> list[str]:
        """Hit ratio, bytes moved by changes of the map, time to notice: for people."""
        lines = [
            f"hit ratio {self.counts['hits'] / max(self.counts['gets'], 1):.1%} of {self.counts['gets']}"
        ]
        lines += [
            f"{each.change} of {each.share_of_drives:.1%} of the drives: {each.bytes_moved} of "
            f"{each.bytes_stored} bytes {'belong elsewhere' if each.change == 'join' else 'are gone'}"
            for each in self.moved
        ]
        lines.append(f"moved by agents: {self.counts['values moved']} values")
        for fault in ENCLOSURE_FAULTS:
            seconds = sorted(each.seconds for each in self.noticed if each.fault == fault)
            if seconds:
                lines.append(f"{fault}: noticed by {len(seconds)}, {seconds[0]:.2f} to {seconds[-1]:.2f} s")
        return lines

    def _check_the_end(self) -> None:
        """When all is well again, a new agent finds what must be there, and can store what is not."""
        self.counts["stray reads"] = sum(drive.stray_reads for drive in self.flash.drives)
        self.flash.heal()
        self.scheduler.now += 1.0
        agent = self._boot(self.shape.agents, 1)
        self.agents.append(agent)
        channel = SimChannel(self.scheduler, self.flash.drives, "end", agent.health)
        self.tallies.append(channel.tallies)
        rng = random.Random(f"{self.seed} end")
        refused = self.counts["refused"]
        for key in sorted(self.acknowledged)[: 40 if self.shape.agents < 8 else 400]:
            self.counts["checked at the end"] += 1
            value = self.scheduler.finish(self._get(agent, channel, *key))
            if value is None:
                self.scheduler.finish(self._put(agent, channel, *key, rng))
                value = self.scheduler.finish(self._get(agent, channel, *key))
            if value is None or self.counts["refused"] > refused:
                raise Wrong(f"key {key} cannot be stored, or is not served, although all is well")
