"""Memory that requests fill and the configuration bounds, as it is shown among the bounds (agent/bounds.py).

Each table lets go of its oldest, or refuses, by itself; nothing is counted twice here.
"""

from __future__ import annotations

from typing import Final

from agent.bounds import ALL, Bounds, Limit
from agent.fs.registered_memory import RegisteredMemory
from agent.pool.begun_puts import BEGUN_BYTES, BegunPuts
from agent.pool.directory_cache import DirectoryCache
from agent.pool.prestage import PrestageCache

DIRECTORIES: Final = Limit(
    "directories", "remembered directories (`directory_cache` / 5 KiB)", 13_107,
    by="everybody", share=ALL, refused="the oldest that nobody uses goes", bytes_each=8192,
)  # fmt: skip
PRESTAGED: Final = Limit(
    "prestaged-bytes", "bytes of values that were prestaged (`[prestage] memory`)", 256 << 20,
    by="everybody", share=ALL, refused="the oldest goes", bytes_each=0,
)  # fmt: skip
REGISTERED: Final = Limit(
    "registered-bytes", "bytes of clients' memory that are mapped (`registered_memory`)", 64 << 30,
    by="session", share=ALL, refused="ENOSPC", bytes_each=0,
)  # fmt: skip
BEGUN: Final = Limit(
    "begun-bytes", "bytes of values that came in part and wait for their next piece", BEGUN_BYTES,
    by="everybody", share=ALL, refused="the one that has waited for 1 s goes, or EIO", bytes_each=0,
)  # fmt: skip


def watch_memory(
    bounds: Bounds,
    directories: DirectoryCache,
    prestage: PrestageCache,
    registered: RegisteredMemory,
    registered_max: int,
    begun: BegunPuts | None,
) -> None:
    """Show what they hold. `registered_max`: bytes. `begun`: where there is a volume."""
    bounds.watch(DIRECTORIES, lambda: {"all": len(directories)}, most=directories.capacity)
    bounds.watch(PRESTAGED, lambda: {"all": prestage.bytes_held}, most=prestage.budget_bytes)
    bounds.watch(REGISTERED, lambda: {"all": registered.mapped_bytes()}, most=registered_max)
    if begun is not None:
        bounds.watch(BEGUN, lambda: {"all": begun.bytes_held}, most=begun.bytes_max)
