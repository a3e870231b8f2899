"""The pool behind the engines: the agent's own code, an agent on each host, over simulated flash.

What a get, a put and a lookup do is agent/pool's; who is suspect is agent/remote's. Here is what drives them:
the workers of each agent, its looks at its drives, its kills and what it learns of the pool map.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from agent.pool.access import ServedVolume, serve
from agent.pool.counters import MissCause, Tally, total
from agent.pool.errors import PutRefused
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.kv.volume import KvVolume
from agent.pool.maintenance.replication import work_off
from agent.pool.prestage.prefetcher import THREADS
from agent.pool.read.recompute_gate import RecomputeGate
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import KvShare, Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.volume import Layout, Volume
from agent.remote.circuit_breaker import Health
from agent.remote.outlier_detection import LOOK_SECONDS, OutlierDetection
from agent.sim.drive_times import RatedChannel, RatedFlash, unreserved
from agent.sim.engine import BlockLru, Engine
from agent.sim.kv_times import RatedKvChannel
from agent.sim.medium import EXTENT_AT, fixed_secret, nguid_of
from agent.sim.other_stores import UNBOUNDED
from agent.sim.pod_flash import PodMap
from agent.sim.pod_plan import TENANTS_MAX, PodPlan, sets_of_a_drive
from agent.sim.staging import Stager
from agent.sim.stand_in_cipher import StandInSuite
from agent.sim.virtual_time import Signal, Sleep, VirtualLoop
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]
UNIT_BYTES: Final = 1 << 20
VALUE_BYTES_LEAST: Final = 64 << 10
BEHIND_A_HOLE: Final = "behind_a_hole"
"""A block is there and an earlier one of its prompt is not; agents have no such cause, and g35 replay has."""
ROOM: Final = 1 << 16
"""Behind a value, in a worker's buffers."""


class HostAgent:
    """The agent of one host: what it remembers, and its workers. All of it is gone when it is killed."""

    def __init__(self, store: "PoolStore", number: int, pod_map: PodMap) -> None:
        plan, flash = store.plan, store.flash
        self.number = number
        self.map = pod_map
        self.health = [Health() for _ in flash.drives]
        # Nobody looks where nothing goes wrong (PodRun), and a superpod has 300,000 of its records.
        self.outliers = OutlierDetection(self.health if plan.faults else [])
        cache = DirectoryCache(plan.directory_cache)
        timing = Timing(plan.read_deadline, plan.write_deadline, plan.directory_fresh)
        self.volumes: list[Volume] = []
        """None, where they lie on KV namespaces."""
        self.served: list[ServedVolume] = []
        for tenant in range(plan.tenants):
            secret = fixed_secret(store.secrets + tenant)
            if plan.on_kv:
                on_kv = KvVolume(store.kv_settings(), secret, timing)
                on_kv.codec.suite = StandInSuite()
                self.served.append(serve(on_kv))
                continue
            volume = Volume(store.few_extents(pod_map, tenant), secret, cache, timing)
            volume.change(layout=store.layout(pod_map, tenant, volume))
            volume.codec.suite = StandInSuite()
            if not plan.hedges:
                volume.hedge = None
            tokens = plan.prefill_rate * plan.gpus_per_host
            # A get of one value of a stripe takes as long as the whole block, and spares all of its tokens.
            token_bytes = max(1, round(plan.bytes_per_token / flash.stripe))
            gate = RecomputeGate(tokens, token_bytes) if plan.gate else None
            self.volumes.append(volume)
            self.served.append(serve(volume, gate))
        links, kind = flash.hosts[number], RatedKvChannel if plan.on_kv else RatedChannel
        stagers, copiers = THREADS if plan.prestage else 0, int(plan.copies > 1)
        made = [
            kind(
                flash,
                links,
                self.health,
                HEADER_BYTES + store.value_bytes + ROOM,
                number * plan.workers + worker,
            )
            for worker in range(plan.workers + stagers + copiers)
        ]
        self.channels, others = made[: plan.workers], made[plan.workers :]
        self.other_channels = others
        self.stager: Stager | None = None
        if stagers:
            self.stager = Stager(store.loop, plan, flash.stripe, others[:stagers])
            self.stager.start(self)
        self.owes = Signal()
        """Fires when a put has left a second copy to be made."""
        if copiers:
            store.loop.spawn(self._copy(others[-1], store.loop), self)
        self.free = deque(self.channels)
        self.waiting: deque[Signal] = deque()

    def worker(self) -> Steps:
        """A channel of a worker that is free."""
        while not self.free:
            turn = Signal()
            self.waiting.append(turn)
            yield turn
        return self.free.popleft()

    def _copy(self, channel: RatedChannel, loop: VirtualLoop) -> Steps:
        """What an agent's upkeep does for volumes of two copies."""
        while True:
            if not (yield from work_off(self.volumes, channel)):
                self.owes = Signal()
                yield self.owes

    def done(self, channel: RatedChannel, loop: VirtualLoop) -> None:
        self.free.append(channel)
        if self.waiting:
            loop.fire(self.waiting.popleft())


def _of_a_volume(value_bytes: int) -> int:
    """The largest value of a volume for such values."""
    return max(value_bytes, VALUE_BYTES_LEAST)


def _bare_volume(
    plan: PodPlan, volume_bytes: int, name: str, volume_id: bytes, extents: tuple[VolumeExtent, ...]
) -> VolumeSettings:
    unit = min(UNIT_BYTES, 1 << max(16, (volume_bytes - 1).bit_length()))
    return VolumeSettings(
        name,
        bytes(15) + volume_id[:1],
        volume_id,
        "kv",
        volume_bytes,
        unit,
        "plain+crc64",
        0,
        extents,
        copies=plan.copies,
    )


def sets_for(plan: PodPlan, values: int, value_bytes: int) -> int:
    """Sets of one tenant's volume on each drive, for blocks of so many values. Raises UserError where a drive
    has no room for one."""
    bare = _bare_volume(plan, _of_a_volume(value_bytes), "sets", bytes(16), ())
    return sets_of_a_drive(plan, values, bare.set_bytes)


class PoolStore:
    """The row `g35`."""

    def __init__(
        self,
        loop: VirtualLoop,
        flash: RatedFlash,
        value_bytes: int,
        block_bytes: int,
        spare: int = 0,
        seed: int = 0,
    ) -> None:
        """`value_bytes`: of a value; a block is `flash.stripe` of them. `spare`: drives that are not in the
        pool yet. `seed`: of the volumes' secrets, so that blocks lie elsewhere with another one."""
        self.secrets = seed * TENANTS_MAX
        self.loop = loop
        self.flash = flash
        self.plan: PodPlan = flash.plan
        self.value_bytes = value_bytes
        self._block_bytes = block_bytes
        self.slot_bytes = flash.stripe * (HEADER_BYTES + value_bytes)
        """Of a block, with headers: what crosses the links for a get or a put."""
        self._volume_bytes = _of_a_volume(value_bytes)
        self._settings: dict[tuple[int, int], VolumeSettings] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._kv_settings: VolumeSettings | None = None
        for drive in flash.drives:
            drive.key_room = self.plan.drive_bytes // flash.stripe
        sets = sets_for(self.plan, flash.stripe, value_bytes)
        self.map = PodMap(1, tuple(range(len(flash.drives) - spare)), (sets,) * self.plan.tenants)
        self._value = unreserved(self._volume_bytes)
        self._into = unreserved(self._volume_bytes)
        self._gone: list[dict[str, Tally]] = []
        """The tallies of agents that were killed."""
        self.agents = [HostAgent(self, number, self.map) for number in range(self.plan.hosts)]
        self.behind = BlockLru(UNBOUNDED)
        """What G4 has, where there is one."""
        self.gets_hit = 0
        self.gets_missed = 0
        """What engines had of gets, beside what agents count."""
        self.misses = dict.fromkeys((*(cause.name.lower() for cause in MissCause), BEHIND_A_HOLE), 0)
        """Why engines did not have blocks, each block reference once: by its lookup, or by its get."""
        self.g4_bytes_read = 0
        self.g4_bytes_written = 0
        self.counts: Counter[str] = Counter()
        self.over = False

    def _bare(self, name: str, volume_id: bytes, extents: tuple[VolumeExtent, ...]) -> VolumeSettings:
        return _bare_volume(self.plan, self._volume_bytes, name, volume_id, extents)

    def kv_settings(self) -> VolumeSettings:
        """The volume on KV namespaces. It has all drives to itself, so there is one tenant."""
        if self._kv_settings is None:
            shares = tuple(
                KvShare(drive.number, nguid_of(drive.number), drive.key_room) for drive in self.flash.drives
            )
            self._kv_settings = replace(self._bare("kv0", bytes([1] * 16), ()), shares=shares)
        return self._kv_settings

    def settings(self, pod_map: PodMap, tenant: int) -> VolumeSettings:
        """A tenant's volume as agents with a map see it."""
        found = self._settings.get((pod_map.version, tenant))
        if found is None:
            bare = self._bare(f"kv{tenant}", bytes([tenant + 1] * 16), ())
            offset = EXTENT_AT + sum(pod_map.sets[:tenant]) * bare.set_bytes
            extents = tuple(
                VolumeExtent(number, nguid_of(number), offset, pod_map.sets[tenant])
                for number in pod_map.members
            )
            found = replace(bare, extents=extents, settled_extents=pod_map.settled)
            self._settings[pod_map.version, tenant] = found
        return found

    def few_extents(self, pod_map: PodMap, tenant: int) -> VolumeSettings:
        """The same with one extent: for a volume that has its layout next."""
        whole = self.settings(pod_map, tenant)
        return replace(whole, extents=whole.extents[:1], settled_extents=0)

    def layout(self, pod_map: PodMap, tenant: int, volume: Volume) -> Layout:
        """A tenant's layout by a map. It is immutable, so all agents have the same one."""
        place = (pod_map.version, tenant)
        found = self._layouts.get(place)
        if found is None:
            found = self._layouts[place] = volume.layout(self.settings(pod_map, tenant))
        return found

    def tally(self) -> Tally:
        """The sum over all workers, of agents that were killed too."""
        now = [channel.tallies for agent in self.agents for channel in agent.channels + agent.other_channels]
        return total(tally for tallies in self._gone + now for tally in tallies.values())

    def policy_counts(self, tally: Tally) -> dict[str, int]:
        """Of prestaging and of second copies, where there are any."""
        counts: dict[str, int] = {}
        if self.plan.prestage:
            each = [
                agent.stager.cache.counts(volume.settings.volume_id)
                for agent in self.agents
                if agent.stager is not None
                for volume in agent.volumes
            ]
            counts |= {
                "prestaged_bytes": tally.prestaged_bytes,
                "prestaged_useful_bytes": sum(count.useful_bytes for count in each),
                "prestaged_wasted_bytes": sum(count.wasted_bytes for count in each),
                "prestaged_late": sum(count.late for count in each),
            }
        if self.plan.copies > 1:
            counts |= {
                "copies_made": tally.copies_made, "hedged_reads": tally.hedged_reads,
                "hedge_wins": tally.hedge_wins,
            }  # fmt: skip
        return counts

    # -- what engines ask -------------------------------------------------------------------------

    def tenant(self, request: Request) -> int:
        return request.blocks[0] % self.plan.tenants if request.blocks else 0

    def lookup(self, host: int, request: Request, start: int = 0) -> Steps:
        """Why each block from `start` on cannot be had: a MissCause, or None where it can."""
        agent = self.agents[host]
        keys = [key_of(block) for block in request.blocks[start:]]
        if agent.stager is not None:
            named = [key_of(block) for block in request.blocks]
            agent.stager.named(agent.volumes[self.tenant(request)], named)
        channel = yield from agent.worker()
        deadline = self.loop.now + self.plan.read_deadline
        causes = yield from agent.served[self.tenant(request)].lookup(channel, keys, deadline)
        agent.done(channel, self.loop)
        return causes

    def get(self, host: int, tenant: int, block: int) -> Steps:
        """Read a value; the cause of the miss, or None."""
        agent = self.agents[host]
        channel = yield from agent.worker()
        stager = agent.stager
        if stager is None:
            reader = agent.served[tenant].reader(key_of(block))
        else:
            stager.reads(agent.volumes[tenant], key_of(block))
            reader = agent.served[tenant].reader(key_of(block), stager.cache)
        yield from reader.read(
            channel, 0, self._into[: self.value_bytes], self.loop.now + self.plan.read_deadline
        )
        reader.close()
        agent.done(channel, self.loop)
        if reader.cause is None:
            self.gets_hit += 1
        else:
            self.gets_missed += 1
        return reader.cause

    def find(self, engine: Engine, request: Request, start: int) -> Steps:
        causes = yield from self.lookup(engine.number, request, start)
        found = 0
        for block, cause in zip(request.blocks[start:], causes, strict=True):
            if cause is not None and not (self.plan.g4_rate and block in self.behind):
                break
            found += 1
        self.missed(causes[found:])
        return found

    def missed(self, causes: Sequence[MissCause | None]) -> None:
        """The blocks of a prompt from the first one on that did not come; None where one was there."""
        for cause in causes:
            self.misses[BEHIND_A_HOLE if cause is None else cause.name.lower()] += 1

    def announce(self, engine: Engine, request: Request, start: int, count: int) -> None:
        agent = self.agents[engine.number]
        if agent.stager is not None:
            keys = [key_of(block) for block in request.blocks[start : start + count]]
            agent.stager.announce(agent.volumes[self.tenant(request)], keys)

    def fetch(self, engine: Engine, request: Request, start: int, count: int) -> Steps:
        if not count:
            return 0
        state = _Fetch(request.blocks[start : start + count])
        state.left = min(self.plan.workers, count)
        for _ in range(state.left):
            self.loop.spawn(self._fetch_some(engine, state, self.tenant(request)))
        yield state.done
        self.missed([state.causes.get(at) for at in range(state.hole, count)])
        return state.hole

    def _fetch_some(self, engine: Engine, state: "_Fetch", tenant: int) -> Steps:
        while state.next < min(len(state.blocks), state.hole):
            at = state.next
            state.next += 1
            cause = yield from self.get(engine.number, tenant, state.blocks[at])
            if cause is not None and not (yield from self._from_behind(engine, state.blocks[at])):
                state.causes[at] = cause
                state.hole = min(state.hole, at)
        state.left -= 1
        if not state.left:
            self.loop.fire(state.done)

    def _from_behind(self, engine: Engine, block: int) -> Steps:
        """Load a block that the pool missed from G4, where there is one that has it."""
        if not self.plan.g4_rate or block not in self.behind:
            return False
        came, links = Signal(), self.flash.hosts[engine.number]
        self.counts["loaded from g4"] += 1
        self.g4_bytes_read += self._block_bytes
        self.flash.carry_g4(links, self._block_bytes, lambda: self.loop.fire(came), write=False)
        yield came
        return True

    def keep(self, engine: Engine, request: Request, start: int) -> None:
        agent = self.agents[engine.number]
        if self.plan.g4_rate:
            fresh = [block for block in request.blocks[start:] if block not in self.behind]
            if fresh:
                size = len(fresh) * self._block_bytes
                self.g4_bytes_written += size
                self.flash.carry_g4(engine.links, size, lambda: self.behind.use(fresh), write=True)
        for block in request.blocks[start:]:
            self.loop.spawn(self.put(agent, self.tenant(request), block), agent)

    def put(self, agent: HostAgent, tenant: int, block: int) -> Steps:
        """Store a value, or have it refused."""
        channel = yield from agent.worker()
        writer = agent.served[tenant].writer(key_of(block), length=self.value_bytes)
        deadline = self.loop.now + self.plan.write_deadline
        # What is refused, the agent's own tally counts.
        with suppress(PutRefused):
            yield from writer.write(channel, 0, self._value[: self.value_bytes], deadline)
        agent.done(channel, self.loop)
        if self.plan.copies > 1:
            self.loop.fire(agent.owes)

    # -- what agents do by themselves ---------------------------------------------------------------

    def look(self, agent: HostAgent, enclosures: list[int]) -> Steps:
        """The supervisor's part: judge the drives beside each other. An agent that asked nothing has nothing
        to judge."""
        yield Sleep(self.loop.now + LOOK_SECONDS * (agent.number % 64 + 1) / 64)
        while not self.over:
            for change in agent.outliers.look(self.loop.now, enclosures):
                self.counts[f"drives {change.verdict.value}"] += 1
            yield Sleep(self.loop.now + LOOK_SECONDS)

    def kill(self, number: int) -> HostAgent:
        """kill -9, and a start with nothing remembered and the map that is in force."""
        agent = self.agents[number]
        self.counts["agents killed"] += 1
        self.loop.kill(agent)
        for channel in agent.channels + agent.other_channels:
            channel.crash()
            self._gone.append(channel.tallies)
        # Gets that wait for a worker of it find that it is gone.
        agent.free.extend(channel for channel in agent.channels if channel not in agent.free)
        while agent.waiting:
            self.loop.fire(agent.waiting.popleft())
        fresh = self.agents[number] = HostAgent(self, number, self.map)
        return fresh

    def follow(self, number: int) -> HostAgent | None:
        """Learn of the map: as it serves, or by a restart where drives left. The new agent, in that case."""
        agent, now = self.agents[number], self.map
        if agent.map is now:
            return None
        if now.members[: len(agent.map.members)] != agent.map.members:
            return self.kill(number)
        agent.map = now
        for tenant, volume in enumerate(agent.volumes):
            volume.change(layout=self.layout(now, tenant, volume))
        return None


class _Fetch:
    """The blocks of one prompt that are being loaded by several workers."""

    __slots__ = ("blocks", "causes", "done", "hole", "left", "next")

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.causes: dict[int, MissCause] = {}
        """Of the gets that found nothing."""
        self.done = Signal()
        self.hole = len(blocks)
        self.next = 0
        self.left = 0


def key_of(block: int) -> bytes:
    """The key of a block, by its number in the trace."""
    return hashlib.blake2b(block.to_bytes(16, "little"), digest_size=16).digest()
