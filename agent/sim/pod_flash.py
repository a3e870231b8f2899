"""The flash of a pod: enclosures of many drives, what becomes of them, and the maps that name them.

Only blocks that were written take memory. Every write is checked where it lands: inside the extent of a
volume of the pool, and nothing in it in clear.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from agent.inline.scatter import Buffer
from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET, Directory
from agent.pool.format.sealed_slot import HEADER_BYTES
from agent.pool.volume.settings import VolumeExtent, VolumeSettings
from agent.sim.faulty_flash import BLOCK, SimNamespace
from agent.sim.medium import EXTENT_AT, nguid_of
from agent.sim.seeded_scheduler import StepScheduler

VALUE_BYTES = 4096
MARK = b"a value in clear"
"""Every value begins with it, so that one that was not sealed can be told on flash."""
TENANTS = tuple(random.Random(f"tenant {number}").randbytes(16) for number in range(2))
LATENCY = (0.0001, 0.002)
SLOT_BYTES = HEADER_BYTES + VALUE_BYTES
SET_BYTES = DIRECTORY_BYTES + SLOTS_PER_SET * SLOT_BYTES


class Wrong(AssertionError):
    """Something that must hold, always, does not."""


@dataclass
class Drive(SimNamespace):
    """One namespace of an enclosure. `sick_until`: a get may miss what lies here, for the time being."""

    number: int = 0
    enclosure: int = 0
    end: int = EXTENT_AT
    """One past the last byte that belongs to the pool."""
    sick_until: float = 0.0
    strays: float = 0.0
    """Part of the reads of slots that bring other bytes than the slot's: those of another slot, or those that
    it held before its last write. Their header may be the right one. Only the proofs of a slot tell."""
    stray_reads: int = 0
    strayed_at: float = float("-inf")
    scheduler: StepScheduler | None = None
    before: dict[int, bytes] = field(default_factory=dict)
    """What blocks held before their last write."""

    def load(self, offset: int, into: memoryview) -> None:
        super().load(offset, into)
        within = (offset - EXTENT_AT) % SET_BYTES - DIRECTORY_BYTES
        if not self.strays or within < 0 or not len(into):
            return
        assert self.scheduler is not None
        dice = self.scheduler.random
        if dice.random() >= self.strays:
            return
        self.stray_reads, self.strayed_at = self.stray_reads + 1, self.scheduler.now
        other = offset + (dice.randrange(SLOTS_PER_SET) - within // SLOT_BYTES) * SLOT_BYTES
        is_stale = dice.random() < 0.5
        for at in range(dice.choice([0, BLOCK]), len(into), BLOCK):
            found = self.before.get(offset + at) if is_stale else self.blocks.get(other + at)
            into[at : at + BLOCK] = found or bytes(BLOCK)

    def store(self, offset: int, parts: Sequence[Buffer]) -> None:
        if offset < EXTENT_AT or offset + sum(map(len, parts)) > self.end:
            raise Wrong(f"a write at {offset} of namespace {self.number}, which is not the pool's")
        if any(MARK in bytes(part) for part in parts):
            raise Wrong(f"a value in clear at {offset} of namespace {self.number}")
        if self.strays:
            for at in range(offset, offset + sum(map(len, parts)), BLOCK):
                self.before[at] = self.blocks.get(at, bytes(BLOCK))
        super().store(offset, parts)


@dataclass(frozen=True)
class PodMap:
    """Which drives belong to the pool, as one version of the pool map has it."""

    version: int
    members: tuple[int, ...]
    sets: tuple[int, ...]
    """Of each volume on each drive."""
    settled: int = 0
    """As in the pool map: values may lie where the first so many members alone would have them."""

    def settings(self, volume: int) -> VolumeSettings:
        """A volume, a tenant's own, as agents with this map see it."""
        return _settings(self, volume)


@lru_cache(16)
def _settings(pod_map: PodMap, volume: int) -> VolumeSettings:
    name, volume_id = f"v{volume}", bytes([volume + 1] * 16)
    settings = VolumeSettings(
        name, TENANTS[volume], volume_id, "kv", VALUE_BYTES, 1 << 16, "aes-256-gcm", 0, ()
    )
    offset = EXTENT_AT + sum(pod_map.sets[:volume]) * settings.set_bytes
    nguids = {number: _nguid(number) for number in pod_map.members}
    return replace(
        settings,
        extents=tuple(
            VolumeExtent(number, nguid, offset, pod_map.sets[volume]) for number, nguid in nguids.items()
        ),
        settled_extents=pod_map.settled,
    )


_nguid = lru_cache(4096)(nguid_of)


@dataclass
class Flash:
    """All drives of a pod, whether the map names them or not."""

    scheduler: StepScheduler
    enclosures: int
    drives_each: int
    strays: float = 0.0
    drives: list[Drive] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.enclosures * self.drives_each):
            drive = Drive(1 << 40, latency=LATENCY, number=number, enclosure=number // self.drives_each)
            drive.strays, drive.scheduler = self.strays, self.scheduler
            self.drives.append(drive)

    def give_room(self, pod_map: PodMap) -> None:
        """What the volumes take of each drive."""
        set_bytes = pod_map.settings(0).set_bytes
        for drive in self.drives:
            drive.end = EXTENT_AT + sum(pod_map.sets) * set_bytes

    def drives_of(self, enclosure: int) -> list[Drive]:
        return self.drives[enclosure * self.drives_each : (enclosure + 1) * self.drives_each]

    def names(self, place: tuple[int, int], pseudonym: bytes) -> bool:
        """Whether the directory on flash at (namespace, offset) names a key."""
        return self._directory(*place).find(pseudonym) is not None

    def taken(self, namespace: int, offset: int) -> int:
        """How many slots of a set are taken, as its directory on flash says."""
        return self._directory(namespace, offset).taken

    def _directory(self, namespace: int, offset: int) -> Directory:
        block = bytearray(DIRECTORY_BYTES)
        self.drives[namespace].load(offset, memoryview(block))
        return Directory(block)

    # -- what becomes of an enclosure ----------------------------------------------------------------

    def stop(self, enclosure: int, until: float) -> None:
        """As by SIGSTOP: the connections stand, nothing is answered. What was sent is done later on."""
        for drive in self.drives_of(enclosure):
            drive.hang()
            self.scheduler.call_at(until, lambda drive=drive: drive.wake(self.scheduler))  # type: ignore[misc]

    def kill(self, enclosure: int, until: float) -> None:
        """Gone with everything that was under way, and back with what was on flash."""
        for drive in self.drives_of(enclosure):
            drive.down = drive.tainted = True
            self.scheduler.call_at(until, lambda drive=drive: setattr(drive, "down", False))  # type: ignore[misc]

    def slow(self, enclosure: int, until: float, times: float) -> None:
        """Everything takes longer, and comes."""
        for drive in self.drives_of(enclosure):
            drive.latency = (LATENCY[0] * times, LATENCY[1] * times)
            drive.sick_until = until + 1.0
            self.scheduler.call_at(until, lambda drive=drive: setattr(drive, "latency", LATENCY))  # type: ignore[misc]

    def err(self, enclosure: int, until: float, share: float) -> None:
        """Some commands end with an error of the medium."""
        for drive in self.drives_of(enclosure):
            drive.erring = share
            drive.sick_until = until + 1.0
            self.scheduler.call_at(until, lambda drive=drive: setattr(drive, "erring", 0.0))  # type: ignore[misc]

    def lose(self, drive: Drive, until: float) -> None:
        """A drive dies; another one, blank, takes its place."""
        drive.down = drive.tainted = True
        drive.blocks.clear()
        self.scheduler.call_at(until, lambda: setattr(drive, "down", False))

    def heal(self) -> None:
        for drive in self.drives:
            drive.down = False
            drive.erring, drive.latency, drive.sick_until = 0.0, LATENCY, 0.0
            drive.strays, drive.strayed_at = 0.0, float("-inf")
            drive.wake(self.scheduler)
