"""The room of what was removed, which comes back after a moment: the next burst begins with it."""

import os
import time
from pathlib import Path

from agent.errors import G35Error


def free_blocks(folder: Path) -> int:
    """Blocks that are free, as statfs(2) of the file system says."""
    return os.statvfs(folder).f_bfree


def wait_for_room(folder: Path, blocks: int, seconds: float, look_seconds: float) -> None:
    """Until so many blocks are free, with a look every `look_seconds`. Raises G35Error after `seconds`."""
    until = time.monotonic() + seconds
    while free_blocks(folder) < blocks:
        if time.monotonic() >= until:
            raise G35Error(f"the room of what was removed from {folder} does not come back")
        time.sleep(look_seconds)
