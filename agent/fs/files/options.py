"""What an operator can set about /fs, and what /fs counts about itself."""

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

BLOCK_BYTES_USUAL = 4 * MIB
"""The block size of new files is the largest capacity up to this one."""


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """Sizes are bytes, times are seconds.

    `block_bytes`: the block size of new files, one of the store's capacities; None chooses the largest up
    to 4 MiB (or the smallest there is). `staging_bytes`: memory for files being written;
    `workers` times a block more may be used for a moment when all files are busy. `on_full`: refuse with
    ENOSPC, or remove whole least-recently-used closed files. `cache_seconds`: how long the kernel may
    believe names and attributes. `patience_seconds`: how long an operation waits for another one on the
    same file before it gives up with EIO; the other one's own waits are bounded by the store.
    """

    staging_bytes: int = 256 * MIB
    block_bytes: int | None = None
    on_full: Literal["enospc", "evict"] = "enospc"
    files_max: int = 4_000_000
    handles_max: int = 65_536
    workers: int = 16
    cache_seconds: float = 1.0
    patience_seconds: float = 60.0
    root_mode: int = 0o755
    root_uid: int = 0
    root_gid: int = 0

    def block_bytes_for(self, capacities: tuple[int, ...]) -> int:
        if not capacities or list(capacities) != sorted(set(capacities)) or capacities[0] <= 0:
            raise ValueError(f"capacities must ascend from above zero, not {capacities}")
        if self.block_bytes is not None:
            if self.block_bytes not in capacities:
                raise ValueError(f"block_bytes {self.block_bytes} is none of the capacities {capacities}")
            return self.block_bytes
        return max((size for size in capacities if size <= BLOCK_BYTES_USUAL), default=capacities[0])


@dataclass(slots=True)
class FilesCounters:
    """How often things happened since the start; for metrics, so a lost update between threads is borne."""

    blocks_sealed: int = 0
    bytes_sealed: int = 0
    seals_failed: int = 0
    blocks_deleted: int = 0
    blocks_lost: int = 0
    files_lost: int = 0
    files_evicted: int = 0
    bytes_discarded: int = 0


@dataclass(frozen=True, slots=True)
class FilesGauges:
    """What /fs holds at a moment; `staging_bytes` never exceeds the configured bound and its overdraft."""

    inodes: int
    open_files: int
    staged_blocks: int
    staging_bytes: int
    doomed_blocks: int
    doomed_bytes: int

    @property
    def is_anything(self) -> bool:
        """Whether there is a file, or a block that is to be deleted."""
        return self.inodes > 1 or self.doomed_blocks > 0  # One is the root folder.
