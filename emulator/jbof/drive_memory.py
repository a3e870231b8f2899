"""The memory of a drive, told apart from all other memory by its type.

A view of it is drive memory, however it was cut: `view.obj` is this. That is what a sender goes by that sends
pages by reference (`page_sender.py`), where to take scratch memory for a drive's would be wrong bytes.
"""

from __future__ import annotations

import mmap
from typing import Any


class DriveMemory(mmap.mmap):
    """Anonymous pages of this process alone."""

    # Private, not shared: only then do huge pages apply (a first write costs one fault per 2 MiB rather
    # than per 4 KiB) and does MADV_DONTNEED give zeros back.
    def __new__(cls, size: int) -> DriveMemory:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def is_drive_memory(view: Any) -> bool:
    """Whether it is a view of a drive's own bytes."""
    return isinstance(view, memoryview) and isinstance(view.obj, DriveMemory)
