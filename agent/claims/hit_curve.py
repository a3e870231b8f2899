"""Hit ratio by capacity: what the pool, a FIFO, an LRU and a clairvoyant cache find of a trace.

All four play by the rule of engines: of a prompt counts the leading run of blocks that are there, and
afterwards what was missing is stored. Ratios are of tokens, over the second half of the requests; the first
half fills the cache. LRU and the clairvoyant one never keep a block without those before it.

The pool is its own code without flash: `Placement` says which two sets a block may lie in, `Directory` names
what is there and counts uses, `best_choice` chooses slot and victim.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from agent.claims.trace import Trace, next_requests
from agent.inline.secrets import SecretKey
from agent.pool.format.directory import DIRECTORY_BYTES, KEY_BYTES, SLOTS_PER_SET, Directory, Entry
from agent.pool.format.eviction_choice import Choice
from agent.pool.format.mark_block import MARK_BLOCK_BYTES
from agent.pool.format.spill_mark import SpillMark, is_mark
from agent.pool.steps import IoChannel
from agent.pool.volume.directory_cache import CachedSet
from agent.pool.volume.placement import Placement
from agent.pool.volume.settings import VolumeExtent
from agent.pool.write.slot_allocation import best_choice, ghost_of

CAPACITIES = tuple(1 << power for power in range(12, 21, 2))
"""Blocks: 4,096 to 1,048,576. The pool's directories take 80 bytes of memory for each."""
NAMESPACES = 4
_EPOCH_S = 1_800_000_000.0
_STEP_S = 1e-6
"""No two writes of an agent fall into one microsecond."""


class Cache(Protocol):
    """A cache that plays requests one after the other."""

    def play(self, request: int, blocks: Sequence[int]) -> int:
        """How many leading blocks were there; what was missing is stored."""


class Fifo:
    """The oldest block goes, whatever it is used for."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[int, None] = OrderedDict()

    def play(self, request: int, blocks: Sequence[int]) -> int:
        kept = self._kept
        hits = _leading(kept, blocks)
        for block in blocks:
            if block not in kept:
                if len(kept) >= self._capacity:
                    kept.popitem(last=False)
                kept[block] = None
        return hits


class PrefixLru:
    """The block goes that was used longest ago, and of one prompt the last.

    A prompt's blocks are noted from its end to its beginning. So a block is noted after all that follow it,
    and the oldest one has none behind it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._last_use: OrderedDict[int, int] = OrderedDict()

    def play(self, request: int, blocks: Sequence[int]) -> int:
        kept = self._last_use
        hits = _leading(kept, blocks)
        for block in blocks[:hits]:
            kept[block] = request
            kept.move_to_end(block)
        end = hits
        while end < len(blocks):
            if len(kept) >= self._capacity:
                oldest = next(iter(kept))
                if kept[oldest] == request:
                    break
                del kept[oldest]
            kept[blocks[end]] = request
            end += 1
        for block in reversed(blocks[:end]):
            kept.move_to_end(block)
        return hits


class Clairvoyant:
    """The block goes whose next use is farthest away (Belady 1966); one whose use is farther is not stored.

    A block is used whenever one behind it is. So the farthest one has none behind it, once the deeper goes
    first of two that are used again together.
    """

    def __init__(self, capacity: int, trace: Trace, upcoming: "array[int]") -> None:
        self._capacity = capacity
        self._trace = trace
        self._upcoming = upcoming
        self._kept: dict[int, tuple[int, int]] = {}
        self._farthest: list[tuple[int, int, int]] = []

    def play(self, request: int, blocks: Sequence[int]) -> int:
        kept, start = self._kept, self._trace.starts[request]
        hits = _leading(kept, blocks)
        for depth, block in enumerate(blocks):
            upcoming = self._upcoming[start + depth]
            if depth >= hits and len(kept) >= self._capacity and not self._make_room(upcoming):
                break
            kept[block] = (-upcoming, -depth)
            heapq.heappush(self._farthest, (-upcoming, -depth, block))
        return hits

    def _make_room(self, upcoming: int) -> bool:
        while True:
            use, depth, block = self._farthest[0]
            if self._kept.get(block) != (use, depth):
                heapq.heappop(self._farthest)
                continue
            if -use <= upcoming:
                return False
            heapq.heappop(self._farthest)
            del self._kept[block]
            return True


class Unbounded:
    """Keeps everything: what a trace has at the most."""

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def play(self, request: int, blocks: Sequence[int]) -> int:
        hits = _leading(self._kept, blocks)
        self._kept.update(blocks)
        return hits


class _Moment:
    """What `best_choice` asks of a channel: the time, and whether a namespace is trusted."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        self.at += _STEP_S
        return _EPOCH_S + self.at

    def is_local(self, namespace: int) -> bool:
        return False

    def trusts(self, namespace: int) -> bool:
        return True


class PoolCache:
    """A volume of the pool in sets of 64 slots over a few namespaces, by its own placement and eviction."""

    def __init__(self, capacity: int, trace: Trace, secret: SecretKey, namespaces: int = NAMESPACES) -> None:
        sets = max(1, capacity // SLOTS_PER_SET // namespaces)
        extents = [VolumeExtent(number, number.to_bytes(16, "big"), 0, sets) for number in range(namespaces)]
        self.placement = Placement(secret, extents)
        self.slots = sets * namespaces * SLOTS_PER_SET
        self._trace = trace
        self._sets: dict[tuple[int, int], CachedSet] = {}
        self._moment = _Moment()
        self._channel = cast("IoChannel", self._moment)

    def play(self, request: int, blocks: Sequence[int]) -> int:
        moment = self._moment
        moment.at = max(moment.at, self._trace.seconds[request])
        hits, leading = 0, True
        keys = b"".join(block.to_bytes(KEY_BYTES, "little") for block in blocks)
        names = self.placement.pseudonyms(keys)
        for at in range(0, len(names), KEY_BYTES):
            name = names[at : at + KEY_BYTES]
            sets = [self._set(*place) for place in self.placement.candidates(name)]
            is_there = self._is_there(name, sets, leading)
            leading = leading and is_there
            hits += leading
            if not is_there:
                self._put(name, sets)
        return hits

    def _is_there(self, name: bytes, sets: Sequence[CachedSet], leading: bool) -> bool:
        """Whether a block is there; it is used where it is `leading`."""
        for cached in sets:
            assert cached.directory is not None
            slot = cached.directory.find(name)
            if slot is not None:
                if leading:
                    cached.directory.touch(slot, int(self._moment.wall() * 1e6))
                return True
        return False

    def _left_by(self, choice: Choice) -> bytes | None:
        return ghost_of(choice)

    def _directory(self) -> Directory:
        return Directory()

    def _set(self, namespace: int, number: int) -> CachedSet:
        cached = self._sets.get((namespace, number))
        if cached is None:
            cached = CachedSet(namespace, number, directory=self._directory())
            self._sets[namespace, number] = cached
        return cached

    def _put(self, name: bytes, sets: Sequence[CachedSet]) -> None:
        best = best_choice(sets, self._channel, name, ())
        if best is None:
            return
        cached, choice = best
        assert cached.directory is not None
        if choice.victim is not None:
            cached.directory.clear(choice.slot, ghost=self._left_by(choice))
        now_us = int(self._moment.wall() * 1e6)
        ghost = cached.directory.ghost(choice.slot)
        cached.directory.install(choice.slot, Entry(name, now_us << 8, now_us, 1, ghost=ghost))


class SpillingPoolCache(PoolCache):
    """As `PoolCache`, with G4 below: its marks, as agent/spill leaves and follows them. Every copy is made in
    time."""

    def __init__(
        self, capacity: int, trace: Trace, secret: SecretKey, *, all_values: bool, mark_blocks: int = 1
    ) -> None:
        """`mark_blocks`: see `VolumeSettings`."""
        super().__init__(capacity, trace, secret)
        self._directory_bytes = DIRECTORY_BYTES + mark_blocks * MARK_BLOCK_BYTES
        self.copied = 0
        """Values that went down."""
        self.from_below = 0
        """Leading blocks that came from there."""
        self._all_values = all_values
        self._below: set[bytes] = set()
        self._came_up: set[bytes] = set()

    def _directory(self) -> Directory:
        return Directory(bytes(self._directory_bytes))

    def _left_by(self, choice: Choice) -> bytes | None:
        victim = choice.victim
        if victim is not None and (self._all_values or victim.hits):
            self.copied += 1
            self._below.add(victim.pseudonym)
            return SpillMark(0, 1, 1).encode(victim.pseudonym)
        return ghost_of(choice) if victim is None or not is_mark(victim.ghost) else None

    def _is_there(self, name: bytes, sets: Sequence[CachedSet], leading: bool) -> bool:
        if super()._is_there(name, sets, leading):
            return True
        if name not in self._below or not any(each.directory and each.directory.marks(name) for each in sets):
            return False
        if leading:
            self.from_below += 1
            if name in self._came_up:
                self._came_up.discard(name)
                self._put(name, sets)
            else:
                self._came_up.add(name)
        return True

    def _put(self, name: bytes, sets: Sequence[CachedSet]) -> None:
        super()._put(name, sets)
        for cached in sets:
            if cached.directory is not None:
                cached.directory.unmark(name)


def share_of_blocks(cache: Cache, trace: Trace) -> float:
    """Share of all block references that the cache finds, from the first request on."""
    found = sum(
        cache.play(request, trace.blocks[trace.starts[request] : trace.starts[request + 1]])
        for request in range(trace.requests)
    )
    return found / max(1, len(trace.blocks))


def _leading(kept: object, blocks: Sequence[int]) -> int:
    hits = 0
    for block in blocks:
        if block not in kept:  # type: ignore[operator]
            break
        hits += 1
    return hits


def hit_ratio(cache: Cache, trace: Trace, progress: Callable[[], None] = lambda: None) -> float:
    """Share of the prompt tokens of the second half of the requests that the cache finds."""
    first, found, asked = trace.requests // 2, 0, 0
    for request in range(trace.requests):
        blocks = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        hits = cache.play(request, blocks)
        if request >= first:
            found += trace.tokens_of(request, hits)
            asked += trace.tokens_of(request, len(blocks))
        progress()
    return found / max(1, asked)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hit ratios of tokens with room for so many blocks."""

    blocks: int
    pool: float
    fifo: float
    lru: float
    clairvoyant: float


def curve_of(
    trace: Trace, secret: SecretKey, progress: Callable[[float], None] = lambda share: None
) -> tuple[list[CurvePoint], float]:
    """The curve, up to the first capacity that holds the whole trace, and the ratio without bound."""
    fitting = [size for size in CAPACITIES if size < trace.unique]
    sizes = [*fitting, *CAPACITIES[len(fitting) : len(fitting) + 1]]
    upcoming = next_requests(trace)
    plays, played = len(sizes) * 4 * trace.requests, 0

    def one_more() -> None:
        nonlocal played
        played += 1
        if played % 256 == 0:
            progress(min(1.0, played / plays))

    points = [
        CurvePoint(
            size,
            pool=hit_ratio(PoolCache(size, trace, secret), trace, one_more),
            fifo=hit_ratio(Fifo(size), trace, one_more),
            lru=hit_ratio(PrefixLru(size), trace, one_more),
            clairvoyant=hit_ratio(Clairvoyant(size, trace, upcoming), trace, one_more),
        )
        for size in sizes
    ]
    return points, hit_ratio(Unbounded(), trace)
