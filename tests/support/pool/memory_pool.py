"""A small pool in memory: namespaces, volumes and whole operations in one call each.

`MemoryPool` is the flash; `agent()` opens a volume on it with directories of its own, as another agent
on another DPU would. The secret is fixed, so that a failing test fails again in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.inline.secrets import SecretKey
from agent.pool.access import serve
from agent.pool.counters import MissCause, Tally
from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET, Directory
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.prestage.prefetcher import stage
from agent.pool.read.get import SlotReader
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Steps
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import LOCAL_NGUID, Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.volume import Volume
from agent.pool.write.delete_and_pin import delete
from agent.pool.write.put import PUT_FRESH_SECONDS, SlotWriter
from agent.sim.medium import EXTENT_AT as EXTENT_AT
from agent.sim.medium import fixed_secret as fixed_secret
from agent.sim.medium import key_of as key_of
from agent.sim.medium import nguid_of as nguid_of
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace

MARK_BLOCKS = 0
"""Of volumes that do not say; see `mark_blocks` in tests/unit/spill/conftest.py."""
TENANT, VOLUME_ID = bytes(range(1, 17)), bytes(range(17, 33))
SUITES = ("aes-256-gcm", "aes-256-xts+crc64", "plain+crc64")


def volume_settings(
    sets: Sequence[int] = (2, 2),
    *,
    value_bytes: int = 16384,
    unit_bytes: int = 1 << 16,
    suite: str = "aes-256-gcm",
    ttl_seconds: int = 0,
    tenant: bytes = TENANT,
    volume_id: bytes = VOLUME_ID,
    copies: int = 1,
    local: Sequence[int] = (),
    mark_blocks: int | None = None,
) -> VolumeSettings:
    """A volume with `sets[n]` sets on namespace n. `local`: those that are servers' own SSDs, where the first
    copies lie."""
    extents = tuple(
        VolumeExtent(
            number, local_nguid_of(number) if number in local else nguid_of(number), EXTENT_AT, count
        )
        for number, count in enumerate(sets)
        if count
    )
    return VolumeSettings(
        "v",
        tenant,
        volume_id,
        "kv",
        value_bytes,
        unit_bytes,
        suite,
        ttl_seconds,
        extents,
        copies=copies,
        local_first=bool(local),
        mark_blocks=MARK_BLOCKS if mark_blocks is None else mark_blocks,
    )


def local_nguid_of(number: int) -> bytes:
    """As `nguid_of`, of a server's own SSD."""
    return LOCAL_NGUID + nguid_of(number)[len(LOCAL_NGUID) :]


class PoolAgent:
    """One agent's view of a volume, with a single worker; every call drives its steps to the end."""

    def __init__(
        self,
        namespaces: Sequence[MemoryNamespace],
        settings: VolumeSettings,
        *,
        secret: SecretKey | None = None,
        timing: Timing | None = None,
        cache_bytes: int = 64 << 20,
        prestage_bytes: int = 0,
    ) -> None:
        self.channel = MemoryChannel(namespaces)
        self.cache = DirectoryCache(cache_bytes)
        self.prestage = PrestageCache(prestage_bytes) if prestage_bytes else None
        self.volume = Volume(settings, secret or fixed_secret(), self.cache, timing or Timing())
        self.served = serve(self.volume)

    @property
    def tally(self) -> Tally:
        return self.channel.tally("v")

    def deadline(self, seconds: float = 5.0) -> float:
        return self.channel.now() + seconds

    def put(self, key: bytes, value: bytes, *, ttl_seconds: int = 0, may_evict: bool = True) -> SlotWriter:
        """Store a value in one piece. Raises PutRefused as the pool does."""
        writing = SlotWriter(
            self.volume, key, length=len(value), ttl_seconds=ttl_seconds, may_evict=may_evict
        )
        assert self.channel.run(writing.write(self.channel, 0, memoryview(value), self.deadline()))
        return writing

    def get(self, key: bytes, size: int | None = None, offset: int = 0) -> bytes | MissCause:
        """The value or a range of it, or why it is a miss."""
        reading = SlotReader(self.volume, key, self.prestage)
        try:
            return self.read(reading, size, offset)
        finally:
            reading.close()

    def read(self, reading: SlotReader, size: int | None = None, offset: int = 0) -> bytes | MissCause:
        into = bytearray(self.volume.settings.value_bytes if size is None else size)
        count = self.channel.run(
            reading.read(
                self.channel, offset, memoryview(into), self.deadline(self.volume.timing.read_deadline)
            )
        )
        if reading.cause is not None:
            assert count == 0
            return reading.cause
        return bytes(into[:count])

    def delete(self, key: bytes) -> bool:
        return self.channel.run(delete(self.volume, self.channel, key, self.deadline()))

    def age_directories(self) -> None:
        """Let enough time pass that a remembered directory is no longer believed to be fresh."""
        self.channel.clock += max(self.volume.timing.directory_fresh, PUT_FRESH_SECONDS) + 0.001

    def where(self, key: bytes) -> tuple[int, int, int]:
        """Namespace, byte offset of the slot and of the directory that hold a key, as remembered here."""
        pseudonym = self.volume.placement.pseudonym(key)
        sets = self.volume.borrow_sets(pseudonym)
        try:
            found = self.volume.find(sets, pseudonym)[0]
            return (
                found.cached.namespace,
                self.volume.slot_offset(found.cached, found.slot),
                found.cached.offset,
            )
        finally:
            self.volume.give_back_sets(sets)


class MemoryPool:
    """The flash that agents share. Sizes are not enforced: the namespaces are sparse."""

    def __init__(self, sets: Sequence[int] = (2, 2), **settings: object) -> None:
        self.namespaces = [MemoryNamespace(1 << 40) for _ in sets]
        self.settings = volume_settings(sets, **settings)  # type: ignore[arg-type]

    def agent(self, **options: object) -> PoolAgent:
        return PoolAgent(self.namespaces, self.settings, **options)  # type: ignore[arg-type]

    def directories(self) -> list[tuple[int, int, Directory]]:
        """Every directory as it lies on flash: namespace, offset, content."""
        found = []
        for extent in self.settings.extents:
            for number in range(extent.sets):
                offset = extent.offset + number * self.settings.set_bytes
                block = bytearray(self.settings.directory_bytes)
                self.namespaces[extent.namespace].load(offset, memoryview(block))
                found.append((extent.namespace, offset, Directory(block)))
        return found

    def slot_bytes(self, namespace: int, offset: int, length: int) -> bytes:
        """A slot as it lies on flash, header included, for a value of `length` bytes."""
        data = bytearray(HEADER_BYTES + -(-length // 4096) * 4096)
        self.namespaces[namespace].load(offset, memoryview(data))
        return bytes(data)


assert SLOTS_PER_SET * 64 == DIRECTORY_BYTES


def stage_now(volume: Volume, cache: PrestageCache, channel: IoChannel, key: bytes) -> Steps[bool]:
    """Announce a key and read it ahead at once. True where it is in the cache."""
    place = volume.settings.volume_id, volume.placement.pseudonym(key)
    if cache.expect(*place) is None:
        return True
    try:
        return (yield from stage(volume, cache, channel, place[1], key))
    finally:
        cache.expect_no_more(*place)
