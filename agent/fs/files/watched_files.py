"""Tables of /fs that keep their bounds by themselves, as they are shown among the bounds."""

from __future__ import annotations

from typing import Final

from agent.fs.files.open_files import OpenFiles
from agent.fs.files.staging import StagingMemory
from agent.fs.files.suspects import SUSPECTS_MAX, Suspects
from agent.host_os.bounds import ALL, Bounds, Limit

STAGED: Final = Limit(
    "staging-bytes", "bytes of files that are not sealed yet (`[files] staging`)", 256 << 20,
    by="everybody", share=ALL, refused="the oldest block is sealed", bytes_each=0,
)  # fmt: skip
NODES: Final = Limit(
    "fs-nodes", "nodes of /fs that kernels hold a reference to", 4_000_000,
    by="everybody", share=ALL, refused="there are no more files", bytes_each=256,
)  # fmt: skip
SUSPECT_BLOCKS: Final = Limit(
    "suspect-blocks", "blocks of files that are looked into", SUSPECTS_MAX,
    by="everybody", share=ALL, refused="not noted until it is read again", bytes_each=1024,
)  # fmt: skip


def watch_files(
    bounds: Bounds, files: OpenFiles, files_max: int, staging: StagingMemory, suspects: Suspects
) -> None:
    """Show what they hold."""
    bounds.watch(NODES, lambda: {"all": files.nodes()}, most=files_max)
    bounds.watch(STAGED, lambda: {"all": staging.lent}, most=staging.limit + staging.overdraft)
    bounds.watch(SUSPECT_BLOCKS, lambda: {"all": len(suspects)})
