"""The alternatives beside the pool, by formula: they hold blocks as a perfect LRU, and carry them over links.

They are kinder to the alternatives than the pool's row is to the pool: no metadata, no lost update, no fault.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

from agent.sim.engine import BlockLru, Engine
from agent.sim.rated_flash import RatedFlash
from agent.sim.virtual_loop import Signal, VirtualLoop
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]
UNBOUNDED = 1 << 62


class NoStore:
    """Nothing behind the hosts' memory: what is not there is computed again."""

    name = "recompute"

    def find(self, engine: Engine, request: Request, start: int) -> Steps:
        yield from ()
        return 0

    def fetch(self, engine: Engine, request: Request, start: int, count: int) -> Steps:
        yield from ()
        return 0

    def keep(self, engine: Engine, request: Request, start: int) -> None: ...


class _Remembering(NoStore, ABC):
    """A store that knows its blocks by name, and moves a prompt's bytes as one transfer."""

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        self._loop = loop
        self._flash = flash
        self._block_bytes = block_bytes
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.fabric_bytes = 0
        """Bytes that crossed a host's NIC for them, each time counted."""

    @abstractmethod
    def _blocks(self, engine: Engine) -> BlockLru:
        """The blocks that a host finds there."""

    @abstractmethod
    def _carry(self, engine: Engine, size: int, ended: Callable[[], None], *, write: bool) -> None:
        """Move bytes between the store and a host; `ended` when they have been carried."""

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
        size = count * self._block_bytes
        self.bytes_loaded += size
        self._carry(engine, size, lambda: self._loop.fire(done), write=False)
        yield done
        self._blocks(engine).use(request.blocks[start : start + count])
        return count

    def keep(self, engine: Engine, request: Request, start: int) -> None:
        blocks = self._blocks(engine)
        fresh = [block for block in request.blocks[start:] if block not in blocks]
        if fresh:
            size = len(fresh) * self._block_bytes
            self.bytes_stored += size
            self._carry(engine, size, lambda: blocks.use(fresh), write=True)


class OwnDisks(_Remembering):
    """G3: each host's own SSDs, seen by that host alone."""

    name = "g3"

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        super().__init__(loop, flash, block_bytes)
        self._each = [BlockLru(flash.plan.g3_bytes // block_bytes) for _ in flash.hosts]

    def _blocks(self, engine: Engine) -> BlockLru:
        return self._each[engine.number]

    def _carry(self, engine: Engine, size: int, ended: Callable[[], None], *, write: bool) -> None:
        self._loop.call_at(engine.links.own_disks.begin(self._loop.now, size), ended)


class SharedStorage(_Remembering):
    """G4: storage that all hosts share, at one rate and without an end."""

    name = "g4"

    def __init__(self, loop: VirtualLoop, flash: RatedFlash, block_bytes: int) -> None:
        super().__init__(loop, flash, block_bytes)
        self._all = BlockLru(UNBOUNDED)

    def _blocks(self, engine: Engine) -> BlockLru:
        return self._all

    def _carry(self, engine: Engine, size: int, ended: Callable[[], None], *, write: bool) -> None:
        left = [2]

        def leg() -> None:
            left[0] -= 1
            if not left[0]:
                ended()

        self.fabric_bytes += size
        self._flash.carry(self._flash.g4, size, leg)
        self._flash.carry(engine.links.nic_out if write else engine.links.nic_in, size, leg)


class LustreInDpus(SharedStorage):
    """A shared file system whose servers run in the hosts' DPUs, over the pool's enclosures.

    A byte goes from an enclosure to the DPU that serves it, and from there to the DPU that asked: twice over
    the fabric, but for the one in `hosts` whose server is its own.
    """

    name = "lustre-dpu"

    def _carry(self, engine: Engine, size: int, ended: Callable[[], None], *, write: bool) -> None:
        flash, hosts = self._flash, self._flash.hosts
        server = hosts[(engine.number * 7919 + size // 4096) % len(hosts)]
        enclosure = (engine.number * 104_729 + size // 4096) % flash.plan.enclosures
        side = (flash.enclosures_in if write else flash.enclosures_out)[enclosure]
        crossed = [side, server.nic_out if write else server.nic_in]
        self.fabric_bytes += size
        if server is not engine.links:
            crossed += [server.nic_in if write else server.nic_out]
            crossed += [engine.links.nic_out if write else engine.links.nic_in]
            self.fabric_bytes += size
        left = [len(crossed)]

        def leg() -> None:
            left[0] -= 1
            if not left[0]:
                ended()

        for link in crossed:
            flash.carry(link, size, leg)
