"""The engines of a simulated pod: GPUs that prefill and decode at a calibrated rate, with caches G1 and G2.

The GPUs of one host are one engine. It computes one prompt at a time, in the order in which prompts became
ready, at the rate that the plan gives for its length. After the first token it spends what decoding the
answer takes of `decode_rate`. With overlap a prompt is ready when what is loaded for it lies in the host's
memory; without, loading begins when its turn comes, and the GPUs wait.
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Protocol

from agent.sim.drive_times import HostLinks, RatedFlash
from agent.sim.links import SharedLink
from agent.sim.pod_plan import PodPlan
from agent.sim.virtual_time import Signal, Sleep, VirtualLoop
from agent.sim.workload import Request

Steps = Generator[Any, bool, Any]
_BACKLOG: Final = attrgetter("backlog")


class BlockLru:
    """Which blocks a cache holds; the least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def use(self, blocks: Iterable[int]) -> None:
        """They are used, and kept from now on if they were not."""
        for block in blocks:
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()


@dataclass(slots=True, eq=False)
class Engine:
    """One host's GPUs, its caches and its queue."""

    number: int
    links: HostLinks
    g1: BlockLru
    g2: BlockLru
    backlog: int = 0
    """Tokens of prompts that were sent here and have not been computed."""
    busy: bool = False
    queue: deque[Signal] = field(default_factory=deque)
    busy_seconds: float = 0.0
    stalled_seconds: float = 0.0
    """Of `busy_seconds`: the GPUs wait for bytes."""

    def local(self, blocks: Sequence[int]) -> tuple[int, int]:
        """How many leading blocks are here, and how many of them in the GPUs' memory."""
        here = in_gpu = 0
        for block in blocks:
            if block in self.g1:
                in_gpu += 1
            elif block not in self.g2:
                break
            here += 1
        return here, in_gpu


class Store(Protocol):
    """What stands behind the engines' own memory in one row of the run."""

    def find(self, engine: Engine, request: Request, start: int) -> Steps:
        """How many blocks of a prompt, from `start` on and without a hole, can be loaded."""

    def announce(self, engine: Engine, request: Request, start: int, count: int) -> None:
        """They were found, and will be fetched when the GPUs are free."""

    def fetch(self, engine: Engine, request: Request, start: int, count: int) -> Steps:
        """Load them into the host's memory; how many came before the first miss."""

    def keep(self, engine: Engine, request: Request, start: int) -> None:
        """The blocks from `start` on were computed: store them, beside what goes on."""


@dataclass(slots=True)
class Served:
    """What became of one request. `ttft`: seconds; blocks by the tier that had them."""

    number: int
    engine: int
    ttft: float
    input_tokens: int
    cached_tokens: int
    blocks: int
    in_gpu: int
    in_host: int
    loaded: int


class Engines:
    """All engines of a pod before one store."""

    def __init__(
        self, loop: VirtualLoop, plan: PodPlan, flash: RatedFlash, block_bytes: int, store: Store
    ) -> None:
        self._loop = loop
        self._plan = plan
        self._flash = flash
        self._block_bytes = block_bytes
        self._store = store
        g1, g2 = plan.g1_bytes * plan.gpus_per_host // block_bytes, plan.g2_bytes // block_bytes
        self.engines = [
            Engine(number, links, BlockLru(g1), BlockLru(g2)) for number, links in enumerate(flash.hosts)
        ]
        self._served_last: dict[int, int] = {}
        """The engine that had a block last, so that a session comes back to it."""
        self.served: list[Served] = []

    def route(self, request: Request) -> Engine:
        """The engine that served the longest beginning of it, unless another one has much less to do."""
        for block in reversed(request.blocks):
            number = self._served_last.get(block)
            if number is not None:
                last = self.engines[number]
                # Nobody has less than nothing to do, so most are decided without a look at all engines.
                if last.backlog <= request.input_tokens:
                    return last
                least = self._least()
                return last if last.backlog <= least.backlog + request.input_tokens else least
        return self._least()

    def _least(self) -> Engine:
        """The first one of those that have the least to do."""
        return min(self.engines, key=_BACKLOG)

    def serve(self, request: Request) -> Steps:
        """One request, from its arrival to the end of its decoding."""
        loop, plan, store = self._loop, self._plan, self._store
        arrived = loop.now
        engine = self.route(request)
        engine.backlog += request.input_tokens
        here, in_gpu = engine.local(request.blocks)
        wanted = loaded = 0
        if here < len(request.blocks):
            wanted = yield from store.find(engine, request, here)
        if wanted and plan.overlap:
            loaded = yield from store.fetch(engine, request, here, wanted)
        elif wanted:
            store.announce(engine, request, here, wanted)
        yield from self._turn(engine)
        began = loop.now
        if wanted and not plan.overlap:
            loaded = yield from store.fetch(engine, request, here, wanted)
        from_host = here - in_gpu + loaded
        if from_host:
            yield from self._carried(engine.links.to_gpu, from_host * self._block_bytes)
        stalled = loop.now - began
        cached = min(request.tokens_of(here + loaded), request.input_tokens - 1)
        computing = plan.prefill_seconds(request.input_tokens, cached)
        yield Sleep(loop.now + computing / plan.gpus_per_host)
        ttft = loop.now - arrived
        engine.backlog -= request.input_tokens
        engine.g1.use(request.blocks)
        engine.g2.use(request.blocks)
        self._served_last.update(dict.fromkeys(request.blocks, engine.number))
        store.keep(engine, request, here + loaded)
        self.served.append(
            Served(
                request.number, engine.number, ttft, request.input_tokens, cached, len(request.blocks),
                in_gpu, here - in_gpu, loaded,
            )
        )  # fmt: skip
        yield Sleep(loop.now + request.output_tokens / (plan.decode_rate * plan.gpus_per_host))
        engine.busy_seconds += loop.now - began
        engine.stalled_seconds += stalled
        if engine.queue:
            loop.fire(engine.queue.popleft())
        else:
            engine.busy = False

    def _turn(self, engine: Engine) -> Steps:
        if engine.busy:
            turn = Signal()
            engine.queue.append(turn)
            yield turn
        engine.busy = True

    def _carried(self, link: SharedLink, size: int) -> Steps:
        done = Signal()
        self._flash.carry(link, size, lambda: self._loop.fire(done))
        yield done
