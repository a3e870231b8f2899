"""The alternatives beside the pool, by formula: they hold blocks as a perfect LRU, and carry them over links.

They are kinder to the alternatives than the pool's row is to the pool: no metadata, no lost update, no fault.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from agent.sim.drive_times import RatedFlash, last_of
from agent.sim.engine import BlockLru, Engine
from agent.sim.fabric import mixed
from agent.sim.links import SharedLink
from agent.sim.virtual_time import Signal, VirtualLoop
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]
UNBOUNDED = 1 << 62


class NoStore:
    """Nothing behind the hosts' memory: what is not there is computed again."""

    def find(self, engine: Engine, request: Request, start: int) -> Steps:
        yield from ()
        return 0

    def announce(self, engine: Engine, request: Request, start: int, count: int) -> None: ...

    def fetch(self, engine: Engine, request: Request, start: int, count: int) -> Steps:
        yield from ()
        return 0

    def keep(self, engine: Engine, request: Request, start: int) -> None: ...


class Remembering(NoStore, ABC):
    """A store that knows its blocks by name, and moves a prompt's bytes as one transfer."""

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        self._loop = loop
        self._flash = flash
        self._block_bytes = block_bytes
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.fabric_bytes = 0
        """Bytes that crossed the fabric for them, each time counted."""

    @property
    def bytes_moved(self) -> int:
        return self.bytes_loaded + self.bytes_stored

    @abstractmethod
    def _blocks(self, engine: Engine) -> BlockLru:
        """The blocks that a host finds there."""

    @abstractmethod
    def _carry(
        self, engine: Engine, blocks: Sequence[int], ended: Callable[[], None], *, write: bool
    ) -> None:
        """Move blocks between the store and a host; `ended` when they have been carried."""

    def find(self, engine: Engine, request: Request, start: int) -> Steps:
        yield from ()
        blocks, found = self._blocks(engine), 0
        for block in request.blocks[start:]:
            if block not in blocks:
                break
            found += 1
        return found

    def fetch(self, engine: Engine, request: Request, start: int, count: int) -> Steps:
        done = Signal()
        blocks = request.blocks[start : start + count]
        self.bytes_loaded += count * self._block_bytes
        self._carry(engine, blocks, lambda: self._loop.fire(done), write=False)
        yield done
        self._blocks(engine).use(blocks)
        return count

    def keep(self, engine: Engine, request: Request, start: int) -> None:
        blocks = self._blocks(engine)
        fresh = [block for block in request.blocks[start:] if block not in blocks]
        if fresh:
            self.bytes_stored += len(fresh) * self._block_bytes
            self._carry(engine, fresh, lambda: blocks.use(fresh), write=True)


class OwnDisks(Remembering):
    """G3: each host's own SSDs, seen by that host alone."""

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        super().__init__(loop, flash, block_bytes)
        self._each = [BlockLru(flash.plan.g3_bytes // block_bytes) for _ in flash.hosts]

    def _blocks(self, engine: Engine) -> BlockLru:
        return self._each[engine.number]

    def _carry(
        self, engine: Engine, blocks: Sequence[int], ended: Callable[[], None], *, write: bool
    ) -> None:
        size = len(blocks) * self._block_bytes
        self._loop.call_at(engine.links.own_disks.begin(self._loop.now, size), ended)


class SharedStorage(Remembering):
    """G4: storage that all hosts share, at one rate and without an end."""

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        super().__init__(loop, flash, block_bytes)
        self._all = BlockLru(UNBOUNDED)

    def _blocks(self, engine: Engine) -> BlockLru:
        return self._all

    def _carry(
        self, engine: Engine, blocks: Sequence[int], ended: Callable[[], None], *, write: bool
    ) -> None:
        size = len(blocks) * self._block_bytes
        self.fabric_bytes += size
        self._flash.carry_g4(engine.links, size, ended, write=write)


class LustreInDpus(SharedStorage):
    """A shared file system whose servers run in the hosts' DPUs, over the pool's enclosures.

    A byte goes from a drive over its enclosure's NIC to the DPU that serves the drive, and from there to the
    DPU that asked: twice over the fabric, but for the one in `hosts` whose server is its own. Blocks are
    striped over drives as the pool's are.
    """

    def _carry(
        self, engine: Engine, blocks: Sequence[int], ended: Callable[[], None], *, write: bool
    ) -> None:
        flash, hosts, plan = self._flash, self._flash.hosts, self._flash.plan
        piece, now, last = self._block_bytes // flash.stripe, self._loop.now, self._loop.now
        by_enclosure: Counter[int] = Counter()
        by_server: Counter[int] = Counter()
        by_pair: Counter[tuple[int, int]] = Counter()
        for block in blocks:
            for number in range(flash.stripe):
                drive = flash.drives[mixed(block, number) % len(flash.drives)]
                last = max(last, drive.begin(plan, now, piece, write=write))
                server = mixed(drive.number, 0) % len(hosts)
                by_enclosure[drive.enclosure] += piece
                by_server[server] += piece
                by_pair[drive.enclosure, server] += piece
        legs = [
            ((flash.enclosures_in if write else flash.enclosures_out)[enclosure], size)
            for enclosure, size in by_enclosure.items()
        ]
        for number, size in by_server.items():
            serving, asker = hosts[number], engine.links
            legs.append((serving.nic_out if write else serving.nic_in, size))
            self.fabric_bytes += size
            if serving is not asker:
                legs.append((serving.nic_in if write else serving.nic_out, size))
                legs.append((asker.nic_out if write else asker.nic_in, size))
                self.fabric_bytes += size
        last += self._cross(legs, by_pair, by_server, engine.number, write=write)
        leg = last_of(len(legs) + 1, ended)
        for link, size in legs:
            flash.carry(link, size, leg)
        self._loop.call_at(last, leg)

    def _cross(
        self,
        legs: list[tuple[SharedLink, int]],
        by_pair: Counter[tuple[int, int]],
        by_server: Counter[int],
        asker: int,
        *,
        write: bool,
    ) -> float:
        """Add the links between leaves to `legs`; seconds that the slowest way takes beside them."""
        fabric, late = self._flash.fabric, 0.0
        if fabric is None:
            return late
        ways = [
            fabric.way_of(fabric.leaf_of_host(server), enclosure, server, size, write=write)
            for (enclosure, server), size in by_pair.items()
        ]
        for server, size in by_server.items():
            source, target = (asker, server) if write else (server, asker)
            ends = fabric.leaf_of_host(source), fabric.leaf_of_host(target)
            ways.append(fabric.way(*ends, size, server))
        for way in ways:
            legs += [(link, way.size) for link in way.links]
            late = max(late, way.latency)
        return late
