"""One run of a pod: requests arrive at engines before one store, and what is counted.

The run ends when the last request is served and nothing is under way. Then the books are closed: bytes that
left drives and enclosures arrived at hosts, and the causes add up to the misses.
"""

import contextlib
import gc
import hashlib
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

from agent.pool.maintenance.rebalance import Rebalancer
from agent.sim.drive_times import RatedFlash
from agent.sim.engine import Engines, Served, Store
from agent.sim.other_stores import LustreInDpus, NoStore, OwnDisks, Remembering, SharedStorage
from agent.sim.players import Players
from agent.sim.pod_joining import changed
from agent.sim.pod_plan import PodPlan, block_values
from agent.sim.pool_store import HostAgent, PoolStore
from agent.sim.virtual_time import Sleep, VirtualLoop
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]
FAULT_SECONDS: Final = (1.0, 3.0)
MOVE_BYTES_PER_S: Final = 2 << 30
SAY_EVERY: Final = 1000
DAY_SECONDS: Final = 86_400
COLLECT_EVERY: Final = 100_000
"""Objects that are made between two looks for cycles."""


class BooksDoNotBalance(AssertionError):
    """Bytes or misses were lost on the way: a fault of the simulation or of the agent."""


@dataclass(slots=True)
class RowResult:
    """What one row of a run came to. Times in seconds, sizes in bytes."""

    name: str
    digest: str
    requests: int
    input_tokens: int
    cached_tokens: int
    blocks: int
    blocks_in_gpu: int
    blocks_in_host: int
    blocks_loaded: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    busy_seconds: float
    stalled_seconds: float
    virtual_seconds: float
    tokens_per_gpu_second: float
    link_bytes: dict[str, int]
    misses: dict[str, int]
    counts: dict[str, int]
    events: int
    bytes_stored: int = 0
    """Of the values that the pool has taken, with those that were there already."""
    bytes_loaded: int = 0
    """Of the store's blocks that were loaded for prompts."""
    drive_writes_a_day: float = 0.0
    """Of the capacity of all drives, at the pace of the run: values and their headers, no directories."""
    most_written_drive: float = 0.0
    """The same of the drive that was written most."""
    fabric_per_byte: float | None = None
    """How often a byte that was loaded or stored crossed the fabric; None where none was."""

    @property
    def hit_ratio(self) -> float:
        """Of block references, whichever tier had the block."""
        found = self.blocks_in_gpu + self.blocks_in_host + self.blocks_loaded
        return found / self.blocks if self.blocks else 0.0

    @property
    def stalled_share(self) -> float:
        """Of the time that the GPUs were taken, how much they waited for bytes."""
        return self.stalled_seconds / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def loaded_ratio(self) -> float:
        """Of the block references that the hosts' own memory did not have."""
        asked = self.blocks - self.blocks_in_gpu - self.blocks_in_host
        return self.blocks_loaded / asked if asked else 0.0


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for cycles seldom: a run leaves next to none, and a look walks all directories that are kept."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class PodRun:
    """One row. Build it, `run` it."""

    def __init__(
        self, row: str, plan: PodPlan, seed: int, block_tokens: int, requests: Iterator[Request],
        say: Callable[[int], None] | None = None, players: int = 0,
    ) -> None:  # fmt: skip
        """`say` hears how many requests were served, now and then. `players`: so many play the requests as
        `g35 replay` does, without engines; the row is the pool then."""
        self.plan = plan
        self.row = row
        self.loop = VirtualLoop()
        stripe, value_bytes = block_values(plan, block_tokens)
        self.block_bytes = stripe * value_bytes
        self.flash = RatedFlash(self.loop, plan, seed, stripe)
        self._seed = seed
        self._requests = requests
        self._say = say
        self._players = players
        self._dice = random.Random(f"pod run {seed}")
        self._sick: dict[int, float] = {}
        self.pool: PoolStore | None = None
        self._others: Remembering | None = None
        store: Store = self._store(row, value_bytes)
        self.engines = Engines(self.loop, plan, self.flash, self.block_bytes, store)
        self._left = 0
        self._all_came = False
        self.over = False
        self._over_at = self.loop.now

    def _store(self, row: str, value_bytes: int) -> Store:
        loop, flash, block = self.loop, self.flash, self.block_bytes
        if row == "g35":
            spare = self.plan.drives if "join" in self.plan.faults and self.plan.enclosures > 1 else 0
            self.pool = PoolStore(loop, flash, value_bytes, block, spare, self._seed)
            return self.pool
        others = {"recompute": NoStore, "g3": OwnDisks, "g4": SharedStorage, "lustre-dpu": LustreInDpus}
        kind: Any = others[row]
        if kind is NoStore:
            return NoStore()
        store: Remembering = kind(loop, flash, block)
        self._others = store
        return store

    # -- the run ------------------------------------------------------------------------------------

    def run(self) -> RowResult:
        """Play all requests. Raises BooksDoNotBalance."""
        began = self.loop.now
        if self._players and self.pool is not None:
            players = Players(self.pool, self._requests, self._served)
            playing = [players.play(number) for number in range(self._players)]
            for each in playing:
                self.loop.spawn(self._played(each))
            self._left = len(playing)
            self._all_came = True
        else:
            self.loop.spawn(self._arrivals())
        if self.pool is not None:
            enclosures = [drive.enclosure for drive in self.flash.drives]
            for agent in self.pool.agents:
                self._start(agent, enclosures)
            if self.plan.faults:
                self.loop.spawn(self._misfortune())
            if "join" in self.plan.faults:
                self.loop.spawn(self._moving())
        if self.flash.fabric is not None and self.plan.noise:
            self.loop.spawn(self.flash.fabric.neighbour(lambda: self.over))
        with collecting_seldom():
            self.loop.run()
        self._close_the_books()
        return self._result(self._over_at - began)

    def _start(self, agent: HostAgent, enclosures: list[int]) -> None:
        if self.pool is not None and self.plan.faults:
            self.loop.spawn(self.pool.look(agent, enclosures), agent)

    def _arrivals(self) -> Steps:
        began = self.loop.now
        for request in self._requests:
            at = began + request.at
            if at > self.loop.now:
                yield Sleep(at)
            self._left += 1
            self.loop.spawn(self._serve(request))
        self._all_came = True
        self._perhaps_over()

    def _serve(self, request: Request) -> Steps:
        yield from self.engines.serve(request)
        self._left -= 1
        self._tell()
        self._perhaps_over()

    def _played(self, player: Steps) -> Steps:
        yield from player
        self._left -= 1
        self._perhaps_over()

    def _served(self, row: Served) -> None:
        self.engines.served.append(row)
        self._tell()

    def _tell(self) -> None:
        served = len(self.engines.served)
        if self._say is not None and not served % SAY_EVERY:
            self._say(served)

    def _perhaps_over(self) -> None:
        if self._all_came and not self._left:
            self.over, self._over_at = True, self.loop.now
            if self.pool is not None:
                self.pool.over = True

    # -- misfortune ---------------------------------------------------------------------------------

    def _misfortune(self) -> Steps:
        pool, dice, plan = self.pool, self._dice, self.plan
        assert pool is not None
        while not self.over:
            yield Sleep(self.loop.now + plan.fault_every * (0.5 + dice.random()))
            fault = plan.faults[int(dice.random() * len(plan.faults))]
            until = self.loop.now + FAULT_SECONDS[int(dice.random() * len(FAULT_SECONDS))]
            enclosure = int(dice.random() * plan.enclosures)
            if fault == "agent":
                self._restarted(pool.kill(int(dice.random() * plan.hosts)))
            elif fault in ("join", "leave"):
                self._change_map(fault)
            elif self._sick.get(enclosure, 0.0) <= self.loop.now:
                self._sick[enclosure] = until
                pool.counts[f"fault {fault}"] += 1
                self._hurt(fault, enclosure, until)

    def _hurt(self, fault: str, enclosure: int, until: float) -> None:
        drives = self.flash.drives_of(enclosure)
        if fault == "lose":
            drives = [drives[int(self._dice.random() * len(drives))]]
            drives[0].lose_all()
        for drive in drives:
            drive.hung = fault == "stop"
            drive.down = fault in ("kill", "lose")
            drive.erring = 0.01 if fault == "err" else 0.0
            drive.link.slower = 20.0 if fault == "slow" else 1.0

        def heal() -> None:
            for drive in drives:
                drive.down, drive.erring, drive.link.slower = False, 0.0, 1.0
            self.flash.wake(drives)

        self.loop.call_at(until, heal)

    def _change_map(self, change: str) -> None:
        pool = self.pool
        assert pool is not None
        members = set(pool.map.members)
        inside = [
            number
            for number in range(self.plan.enclosures)
            if self.flash.drives_of(number)[0].number in members
        ]
        outside = [number for number in range(self.plan.enclosures) if number not in inside]
        candidates = inside if change == "leave" else outside
        if (
            not candidates
            or (change == "leave" and len(inside) < 3)
            or (change == "join" and pool.map.settled)
        ):
            return
        chosen = candidates[int(self._dice.random() * len(candidates))]
        group = {drive.number for drive in self.flash.drives_of(chosen)}
        pool.counts[f"fault {change}"] += 1
        pool.map = changed(pool.map, group)
        for number in range(self.plan.hosts):
            at = self.loop.now + 0.2 * self._dice.random()
            self.loop.call_at(at, self._follow, number)

    def _follow(self, number: int) -> None:
        assert self.pool is not None
        fresh = self.pool.follow(number)
        if fresh is not None:
            self._restarted(fresh)

    def _restarted(self, agent: HostAgent) -> None:
        self._start(agent, [drive.enclosure for drive in self.flash.drives])

    def _moving(self) -> Steps:
        """The upkeep of the first agent: values go to drives that joined."""
        pool = self.pool
        assert pool is not None
        agent, mover = pool.agents[0], None
        while not self.over:
            yield Sleep(self.loop.now + 0.05)
            if mover is None or agent is not pool.agents[0]:
                agent = pool.agents[0]
                mover = Rebalancer(agent.volumes, MOVE_BYTES_PER_S, follow_seconds=0.25, grace_seconds=0.1)
            channel = yield from agent.worker()
            values = mover.moves.values
            yield from mover.turn(channel)
            pool.counts["values moved"] += mover.moves.values - values
            agent.done(channel, self.loop)

    # -- the outcome --------------------------------------------------------------------------------

    def link_bytes(self) -> dict[str, int]:
        """Bytes of values by link; `small`: directories and headers by themselves."""
        flash = self.flash
        return self._fabric_bytes() | {
            "drives_read": sum(drive.bytes_read for drive in flash.drives),
            "drives_written": sum(drive.bytes_written for drive in flash.drives),
            "enclosures_out": sum(link.carried for link in flash.enclosures_out),
            "enclosures_in": sum(link.carried for link in flash.enclosures_in),
            "host_nics_in": sum(host.nic_in.carried for host in flash.hosts),
            "host_nics_out": sum(host.nic_out.carried for host in flash.hosts),
            "gpu_pcie_in": sum(host.to_gpu.carried for host in flash.hosts),
            "own_disks": sum(host.own_disks.began for host in flash.hosts),
            "g4": flash.g4.carried,
            "small": flash.small_bytes,
        }

    def _fabric_bytes(self) -> dict[str, int]:
        fabric = self.flash.fabric
        if fabric is None:
            return {}
        up, down = fabric.carried()
        return {
            "leaves_up": up, "leaves_down": down, "fabric_repeated": fabric.repeated,
            "neighbour": fabric.noise // 2,
        }  # fmt: skip

    def _fabric_counts(self) -> dict[str, int]:
        """What the fabric did. `incast`: transfers at once to one host, the most there were."""
        fabric, hosts = self.flash.fabric, self.flash.hosts
        if fabric is None:
            return {}
        moves = self.flash.moves
        took = moves.seconds / moves.count if moves.count else 0.0
        return dict(sorted(fabric.counts.items())) | {
            "fabric mean us of a value": round(took * 1e6),
            "fabric longest us of a value": round(moves.longest * 1e6),
            "fabric incast": max(host.nic_in.most for host in hosts),
            "fabric unevenness, per cent": round(100 * fabric.unevenness()),
        }

    def _close_the_books(self) -> None:
        moved, pool, store = self.link_bytes(), self.pool, self._others
        pairs = [
            (moved["drives_read"], moved["enclosures_out"]),
            (moved["drives_written"], moved["enclosures_in"]),
        ]
        nics_in, nics_out = moved["host_nics_in"], moved["host_nics_out"]
        if pool is not None:
            pairs += [
                (nics_in, moved["drives_read"] + pool.g4_bytes_read),
                (nics_out, moved["drives_written"] + pool.g4_bytes_written),
                (moved["g4"], pool.g4_bytes_read + pool.g4_bytes_written),
            ]
        elif isinstance(store, LustreInDpus):
            # A byte that crossed the fabric twice is in three of the hosts' links: two of its server's.
            pairs.append((nics_in + nics_out, 2 * store.fabric_bytes - store.bytes_moved))
        elif isinstance(store, SharedStorage):
            pairs += [(nics_in, store.bytes_loaded), (nics_out, store.bytes_stored)]
            pairs.append((moved["g4"], store.bytes_moved))
        if self.flash.fabric is not None and not self.flash.fabric.balanced():
            raise BooksDoNotBalance(f"what went up the leaves did not come down: {moved}")
        if any(one != other for one, other in pairs):
            raise BooksDoNotBalance(f"bytes by link are {moved}")
        if pool is not None:
            tally = pool.tally()
            # What an agent was at when it was killed, it may have counted, and nobody had an answer.
            told, had = (tally.gets_hit, tally.gets_missed), (pool.gets_hit, pool.gets_missed)
            if told != had and not pool.counts["agents killed"]:
                raise BooksDoNotBalance(f"agents tell of {told} hits and misses, and engines had {had}")
        not_had = 0
        for row in self.engines.served:
            missed = row.blocks - row.in_gpu - row.in_host - row.loaded
            if missed < 0:
                raise BooksDoNotBalance(f"request {row.number} found more blocks than it has")
            not_had += missed
        if pool is not None and sum(pool.misses.values()) != not_had:
            raise BooksDoNotBalance(f"engines did not have {not_had} blocks, by their causes {pool.misses}")

    def _fabric_per_byte(self, moved: dict[str, int]) -> float | None:
        """Shared storage behind the pool has a network of its own."""
        pool, store = self.pool, self._others
        if pool is not None:
            crossed = moved["host_nics_in"] + moved["host_nics_out"]
            crossed -= pool.g4_bytes_read + pool.g4_bytes_written
            of_use = (pool.gets_hit + pool.tally().puts) * pool.slot_bytes
            return crossed / of_use if of_use else None
        return store.fabric_bytes / store.bytes_moved if store is not None and store.bytes_moved else None

    def _writes_a_day(self, written: float, seconds: float) -> float:
        """Of the capacity of one drive, from what was written to it in a time."""
        return written * DAY_SECONDS / (seconds * self.plan.drive_bytes) if seconds else 0.0

    def _result(self, seconds: float) -> RowResult:
        served, plan = self.engines.served, self.plan
        counts: dict[str, int] = {}
        misses: dict[str, int] = {}
        if self.pool is not None:
            tally = self.pool.tally()
            misses = dict(self.pool.misses)
            counts = {
                "gets_hit": tally.gets_hit, "gets_missed": tally.gets_missed, "gets_gated": tally.gets_gated,
                "lookups": tally.lookups, "lookups_absent": tally.lookups_absent, "puts": tally.puts,
                "puts_already_there": tally.puts_already_there, "puts_refused": tally.puts_refused,
                "evictions": tally.evictions, "directory_reads": tally.directory_reads,
            } | self.pool.policy_counts(tally) | dict(sorted(self.pool.counts.items()))  # fmt: skip
        counts |= self._fabric_counts()
        moved = self.link_bytes()
        digest = hashlib.blake2b(digest_size=16)
        for row in sorted(served, key=lambda each: each.number):
            facts = row.number, row.engine, round(row.ttft * 1e6), row.cached_tokens, row.in_gpu, row.loaded
            digest.update(repr(facts).encode())
        digest.update(repr((sorted(counts.items()), sorted(misses.items()), sorted(moved.items()))).encode())
        ttfts = sorted(row.ttft for row in served)
        busy = sum(engine.busy_seconds for engine in self.engines.engines) * plan.gpus_per_host
        tokens = sum(row.input_tokens for row in served)
        return RowResult(
            self.row, digest.hexdigest(), len(served), tokens, sum(row.cached_tokens for row in served),
            sum(row.blocks for row in served), sum(row.in_gpu for row in served),
            sum(row.in_host for row in served), sum(row.loaded for row in served),
            sum(ttfts) / len(ttfts) if ttfts else 0.0, _quantile(ttfts, 0.5), _quantile(ttfts, 0.95),
            _quantile(ttfts, 0.99), busy,
            sum(engine.stalled_seconds for engine in self.engines.engines) * plan.gpus_per_host, seconds,
            tokens / busy if busy else 0.0, moved, misses, counts, self.loop.events,
            (counts.get("puts", 0) + counts.get("puts_already_there", 0)) * self.block_bytes,
            sum(row.loaded for row in served) * self.block_bytes,
            self._writes_a_day(moved["drives_written"] / len(self.flash.drives), seconds),
            self._writes_a_day(max(drive.bytes_written for drive in self.flash.drives), seconds),
            self._fabric_per_byte(moved),
        )  # fmt: skip


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
