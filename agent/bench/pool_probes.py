"""/kv through the mount, by host_shim, as an engine would use it.

Each of four threads names its next few keys in one request (`get_many`, `put_many`) and moves them one after
the other, so four values are in flight; a `batch` of 1 is one key a call. Only these calls are timed. All
values are compared once before, and after every round the last ones of each thread. The agent's own counters
must agree at the end (`PoolSite.complaints`).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent.bench.contents import STEPS, Contents, pages
from agent.bench.rounds import (
    LATENCIES_MIN,
    Sample,
    Timed,
    TogetherFor,
    Turn,
    in_bursts,
    median_time,
    rate,
    together,
    together_clocked,
)
from agent.bench.sites import IN_FLIGHT, PoolShape, Sites
from agent.errors import G35Error
from host_shim.block_key import key_of
from host_shim.pool import Volume

GET_BYTES = 64 << 20
"""Values that are read over and over: more than a core's own caches hold, and at least 16 of them."""
PUT_BYTES = 128 << 20
"""Values that are stored before they are deleted again, which is not timed."""
PUTS_MAX = 1024
BATCH = 8
"""Keys that a thread names at a time."""


def shape_for(value_bytes: int, door: str = "fuse", transport: str = "tcp") -> PoolShape:
    """A pool in which what the probes store is a third at most: nothing is evicted, nothing is crowded."""
    room = value_bytes + 4096
    sets = max(3, -(-3 * (values_got(value_bytes) + puts_at_a_time(value_bytes)) // 64))
    return PoolShape(value_bytes, (16 << 20) + sets * (64 * room + 4096), door=door, transport=transport)


def values_got(value_bytes: int) -> int:
    return max(16, min(STEPS, GET_BYTES // value_bytes))


def puts_at_a_time(value_bytes: int) -> int:
    return min(PUTS_MAX, PUT_BYTES // value_bytes)


class KvSite(Protocol):
    """A pool as the probes use it, and what they have done with it."""

    bytes_got: int
    bytes_put: int
    misses: int

    @property
    def volume(self) -> Volume: ...


@dataclass
class PoolProbe:
    """Work on a pool of its shape. `registered`: with values in buffers of `Pool.memory`."""

    sites: Sites
    shape: PoolShape
    batch: int = BATCH
    in_flight: int = IN_FLIGHT
    registered: bool = False
    value_bytes: int = 0
    """Of the values, where that is less than the shape's slots take."""

    def __post_init__(self) -> None:
        self.value_bytes = self.value_bytes or self.shape.value_bytes

    def prefix(self, verb: str) -> str:
        """Of the keys: values of several lengths may lie in one pool."""
        return verb if self.value_bytes == self.shape.value_bytes else f"{verb} {self.value_bytes}"


@dataclass
class GetProbe(PoolProbe):
    """Gets, each thread with values of its own. `median_only`: the median of their times, not a rate."""

    median_only: bool = False

    def prepare(self) -> None:
        self.site = self.sites.pool(self.shape)
        contents = Contents(self.value_bytes)
        prefix = self.prefix("get")
        store(self.site, contents, prefix, values_got(self.value_bytes))
        new_buffer = self.site.memory if self.registered else pages
        self._gets = Gets(self.site, contents, self.batch, new_buffer, self.in_flight, prefix)

    def round(self, seconds: float) -> Sample:
        timed = self._gets.timed(seconds, LATENCIES_MIN if self.median_only else 0)
        self._gets.compare_last()
        return median_time(timed) if self.median_only else rate(timed)


class Gets:
    """Threads that get the values `get 0`, `get 1`, ... of a site, over and over."""

    def __init__(
        self,
        site: KvSite,
        contents: Contents,
        batch: int = BATCH,
        new_buffer: Callable[[int], memoryview] = pages,
        in_flight: int = IN_FLIGHT,
        prefix: str = "get",
    ) -> None:
        count = values_got(contents.value_bytes)
        self._site = site
        self._together = together_clocked if batch == 1 else together
        self._readers = [
            _Reader(site, contents, list(range(first, count, in_flight)), batch, new_buffer, prefix)
            for first in range(in_flight)
        ]

    def timed(self, seconds: float, least: int = 0, how: TogetherFor | None = None) -> Timed:
        timed = (how or self._together)(self._readers, seconds, least)
        self._site.bytes_got += timed.bytes
        return timed

    def compare_last(self) -> None:
        for reader in self._readers:
            reader.compare_last()


class _Reader:
    """One thread's turns. A miss moves no bytes, and is counted."""

    def __init__(
        self,
        site: KvSite,
        contents: Contents,
        numbers: list[int],
        batch: int,
        new_buffer: Callable[[int], memoryview] = pages,
        prefix: str = "get",
    ) -> None:
        self._site, self._contents = site, contents
        self._get_many, self._get_into = site.volume.get_many, site.volume.get_into
        size, count = contents.value_bytes, min(batch, len(numbers))
        whole = new_buffer(size * count)
        self._buffers = [whole[at : at + size] for at in range(0, size * count, size)]
        keys = [(number, key_of(f"{prefix} {number}")) for number in numbers]
        self._round_about = itertools.cycle(keys)
        self._last: list[int] = []

    def __call__(self) -> int:
        if len(self._buffers) == 1:
            number, key = next(self._round_about)
            self._last = [number]
            return self._moved(0, self._get_into(key, self._buffers[0]))
        numbered = list(itertools.islice(self._round_about, len(self._buffers)))
        self._last = [number for number, _ in numbered]
        lengths = self._get_many([key for _, key in numbered], self._buffers)
        return sum(self._moved(at, length) for at, length in enumerate(lengths))

    def _moved(self, at: int, length: int | None) -> int:
        """The bytes of one value; none for a miss, which is counted."""
        if length is None:
            self._last[at] = -1
            self._site.misses += 1
            return 0
        if length != self._contents.value_bytes:
            raise G35Error(f"a get brought {length} of {self._contents.value_bytes} bytes")
        return length

    def compare_last(self) -> None:
        for number, buffer in zip(self._last, self._buffers, strict=False):
            if number >= 0 and buffer != self._contents.value(number):
                raise G35Error(f"wrong bytes in value {number}")


@dataclass
class PutProbe(PoolProbe):
    """Puts."""

    def prepare(self) -> None:
        site, size = self.sites.pool(self.shape), self.value_bytes
        contents = Contents(size, site.memory if self.registered else None)
        self._puts = Puts(
            site, contents, pages(size), self.prefix("put"), batch=self.batch, in_flight=self.in_flight
        )

    def round(self, seconds: float) -> Sample:
        return rate(self._puts.timed(seconds))


@dataclass
class Puts:
    """Puts of keys that are not there; they are deleted when room runs short. `buffer` holds one value."""

    site: KvSite
    contents: Contents
    buffer: memoryview
    prefix: str = "put"
    batch: int = BATCH
    in_flight: int = IN_FLIGHT

    def __post_init__(self) -> None:
        self._together = together_clocked if self.batch == 1 else together
        self._numbers = itertools.count()

    def timed(self, seconds: float) -> Timed:
        return in_bursts(self._burst, seconds)

    def _burst(self, seconds: float) -> Timed:
        value_bytes = self.contents.value_bytes
        count = puts_at_a_time(value_bytes)
        fresh = [next(self._numbers) for _ in range(count)]
        plans = [
            [(self._key(number), self.contents.value(number)) for number in fresh[first :: self.in_flight]]
            for first in range(self.in_flight)
        ]
        timed = self._together([_writer(self.site, plan, self.batch) for plan in plans], seconds)
        self.site.bytes_put += timed.bytes
        keys = [self._key(number) for number in fresh]
        there = sum(self.site.volume.exists(keys))
        if there * value_bytes != timed.bytes:
            raise G35Error(f"{timed.bytes} bytes were stored, {there} values are there")
        self._read_one_back(fresh[0])
        self.site.volume.delete(keys)
        return timed

    def _key(self, number: int) -> bytes:
        return key_of(f"{self.prefix} {number}")

    def _read_one_back(self, number: int) -> None:
        got = self.site.volume.get_into(self._key(number), self.buffer)
        if got != len(self.buffer) or self.buffer != self.contents.value(number):
            raise G35Error(f"value {number} did not come back as it was stored")
        self.site.bytes_got += got


def _writer(site: KvSite, plan: list[tuple[bytes, memoryview]], batch: int) -> Turn:
    put_many = site.volume.put_many
    left = iter(plan)

    def turn() -> int | None:
        steps = list(itertools.islice(left, batch))
        if not steps:
            return None
        values = [value for _, value in steps]
        if not all(put_many([key for key, _ in steps], values)):
            raise G35Error("the agent refused a put into a volume that is a third full at most")
        return sum(map(len, values))

    return turn


def store(site: KvSite, contents: Contents, prefix: str, count: int) -> None:
    """Store values 0 to `count` - 1 where they are not there yet, and compare each byte of them."""
    volume = site.volume
    keys = [key_of(f"{prefix} {number}") for number in range(count)]
    buffer = pages(contents.value_bytes)
    for number, there in enumerate(volume.exists(keys)):
        if there:
            continue
        if not volume.put(keys[number], contents.value(number)):
            raise G35Error("the agent refused a put into an empty volume")
        site.bytes_put += contents.value_bytes
    compare_all(site, contents, prefix, count, buffer)


def compare_all(site: KvSite, contents: Contents, prefix: str, count: int, buffer: memoryview) -> None:
    """Get values 0 to `count` - 1, one by one, and compare each byte of them."""
    for number in range(count):
        got = site.volume.get_into(key_of(f"{prefix} {number}"), buffer)
        if got != len(buffer) or buffer != contents.value(number):
            raise G35Error(f"value {number} did not come back as it was stored")
        site.bytes_got += got
