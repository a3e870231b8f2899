"""A pool in memory with a place in G4 below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from agent.pool.counters import MissCause
from agent.pool.read.recompute_gate import RecomputeGate
from agent.spill.copy_down import Spiller
from agent.spill.read_up import Below, PlaceHealth
from agent.spill.room import Room
from agent.spill.target import Gone, Stored, Taken, Target, TargetError
from tests.support.pool import memory_pool
from tests.support.pool.memory_pool import MemoryPool, PoolAgent, key_of

POOL_ID = "00112233445566778899aabbccddeeff"
SLOTS = 64
"""Of a set."""


class MemoryTarget(Target):
    """Objects in a dict. `damage` is applied to each range; `silent` never answers; `refusal` is every
    answer."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.damage: Callable[[bytes], bytes] = lambda data: data
        self.silent = False
        self.refusal: TargetError | None = None
        self.fetched: list[tuple[str, int, int]] = []

    def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def put(self, name: str, data: memoryview) -> None:
        self._check()
        if name in self.objects:
            raise Taken(name)
        self.objects[name] = bytes(data)

    def fetch(self, name: str, offset: int, size: int) -> Future[bytes]:
        self.fetched.append((name, offset, size))
        future: Future[bytes] = Future()
        if self.silent:
            return future
        if self.refusal is not None:
            future.set_exception(self.refusal)
        elif name not in self.objects:
            future.set_exception(Gone(name))
        else:
            future.set_result(self.damage(self.objects[name][offset : offset + size]))
        return future

    def delete(self, name: str) -> None:
        self._check()
        self.objects.pop(name, None)

    def names(self, prefix: str) -> Iterator[Stored]:
        self._check()
        yield from [Stored(name, len(data)) for name, data in self.objects.items() if name.startswith(prefix)]

    def close(self) -> None:
        pass


class SpillingAgent:
    """An agent of a memory pool, and its place in G4; a turn of the spill thread is a call."""

    def __init__(
        self,
        agent: PoolAgent,
        target: Target,
        *,
        all_values: bool = False,
        gate: RecomputeGate | None = None,
        deadline: float = 0.02,
        bundle_bytes: int = 8 << 20,
        room: Room | None = None,
    ) -> None:
        self.agent = agent
        self.health = PlaceHealth(8, 64 << 20, deadline)
        self.below = Below(agent.volume, POOL_ID, target, self.health, gate, agent.channel.now)
        agent.volume.change(below=self.below)
        self.spiller = Spiller(
            agent.volume,
            POOL_ID,
            target,
            room or Room(target, POOL_ID, agent.volume.settings.volume_id, 1 << 40),
            bundle_bytes,
            all_values=all_values,
            below=self.below,
        )

    def spill(self, *, store: bool = True) -> None:
        """Work off all that the evictions so far want."""
        channel = self.agent.channel
        while channel.run(self.spiller.turn(channel)) is not None:
            pass
        if store:
            self.spiller.store(channel.wall())

    def put(self, key: bytes, value: bytes) -> None:
        """As an engine does; time passes, and what is evicted was copied if it is worth it."""
        self.agent.channel.clock += 1.0
        self.agent.put(key, value)
        self.spill()


def causes_once_deleted() -> set[MissCause]:
    """Why a value that was in G4 and was deleted is a miss. A mark stands in the place of its ghost. With
    a block of marks the ghost stays, until another takes its place."""
    return (
        {MissCause.NEVER_STORED, MissCause.EVICTED} if memory_pool.MARK_BLOCKS else {MissCause.NEVER_STORED}
    )


def value_of(number: int) -> bytes:
    return bytes(((number * 7 + at) & 0xFF) for at in range(256)) * 40


def full(target: Target, pool: MemoryPool | None = None, *, all_values: bool = False) -> SpillingAgent:
    """One set, full; the first eight values were read once."""
    spilling = SpillingAgent((pool or MemoryPool((1,))).agent(), target, all_values=all_values)
    for number in range(SLOTS):
        spilling.put(key_of(number), value_of(number))
    for number in range(8):
        assert spilling.agent.get(key_of(number)) == value_of(number)
    return spilling


def evict_all(spilling: SpillingAgent, first: int = 1000, count: int = 4 * SLOTS) -> None:
    for number in range(first, first + count):
        spilling.put(key_of(number), value_of(number))
