"""What a volume is, from the pool map, and the bounds in time that the operator sets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agent.pool.format.directory import DIRECTORY_BYTES, SLOTS_PER_SET
from agent.pool.format.mark_block import MARK_BLOCK_BYTES
from agent.pool.format.occupancy import SetPlace
from agent.pool.format.sealed_slot import HEADER_BYTES

LOCAL_NGUID: Final = b"g35l"
"""How the NGUID of a local namespace begins (agent/local/device.py). So every agent knows from the pool map
alone which namespaces are a server's own SSDs."""


@dataclass(frozen=True, slots=True)
class VolumeExtent:
    """Where a volume lies in one namespace: `offset` in bytes, `sets` sets from there on."""

    namespace: int
    nguid: bytes
    offset: int
    sets: int

    @property
    def is_local(self) -> bool:
        """Whether it lies on a server's own SSD, and not in an enclosure."""
        return self.nguid.startswith(LOCAL_NGUID)


@dataclass(frozen=True, slots=True)
class KvShare:
    """A KV namespace that a volume has to itself, and its capacity in bytes."""

    namespace: int
    nguid: bytes
    bytes: int


@dataclass(frozen=True, slots=True)
class VolumeSettings:
    """What a volume is, from the pool map. Sizes in bytes, times in seconds (0: no expiry)."""

    name: str
    tenant: bytes
    volume_id: bytes
    kind: str
    value_bytes: int
    unit_bytes: int
    suite: str
    ttl_seconds: int
    extents: tuple[VolumeExtent, ...]
    shares: tuple[KvShare, ...] = ()
    """Where it lies on KV namespaces; then it has no extents (kv/volume.py)."""
    settled_extents: int = 0
    """Values may still lie where the first so many extents alone would have them: others joined since
    (join.py). 0: none does."""
    copies: int = 1
    """2: each value in a slot of both its sets (replication.py)."""
    local_first: bool = False
    """Of two copies the first lies on a server's own SSD, the second in an enclosure (placement.py)."""
    names_of: bytes = b""
    """Of the kind `shared-names`: the id of the shared volume whose names it has."""
    mark_blocks: int = 0
    """1: a directory has a second block, of marks of values in G4 (mark_block.py)."""

    @property
    def may_lose(self) -> bool:
        """Whether its values may be evicted, or dropped where they do not open: all but blocks of /fs."""
        return self.kind != "files"

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.value_bytes

    @property
    def directory_bytes(self) -> int:
        return DIRECTORY_BYTES + self.mark_blocks * MARK_BLOCK_BYTES

    @property
    def set_bytes(self) -> int:
        return self.directory_bytes + SLOTS_PER_SET * self.slot_bytes

    @property
    def slots(self) -> int:
        return sum(extent.sets for extent in self.extents) * SLOTS_PER_SET

    @property
    def old_extents(self) -> tuple[VolumeExtent, ...]:
        """Those that were there before others joined."""
        return self.extents[: self.settled_extents]

    def set_places(self, extents: Sequence[VolumeExtent]) -> Iterator[SetPlace]:
        """The place of every set of some of the extents."""
        for extent in extents:
            for number in range(extent.sets):
                yield extent.namespace, extent.offset + number * self.set_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """Bounds in time, seconds, that the operator sets."""

    read_deadline: float = 0.05
    write_deadline: float = 5.0
    directory_fresh: float = 0.0
    """For how long an absent entry in a remembered directory is believed without asking again; so is what a
    name leads to that may be replaced."""
