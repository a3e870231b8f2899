"""The memory of a drive, as a type of its own.

`view.obj` of any view of it is a `DriveMemory`. `page_sender.py` sends only such memory by reference: scratch
memory would be wrong bytes.
"""

import mmap
from typing import Any


class DriveMemory(mmap.mmap):
    """Anonymous pages of this process alone."""

    # Private, not shared: only then do huge pages apply (a first write costs one fault per 2 MiB rather
    # than per 4 KiB) and does MADV_DONTNEED give zeros back.
    def __new__(cls, size: int) -> "DriveMemory":
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def is_drive_memory(view: Any) -> bool:
    return isinstance(view, memoryview) and isinstance(view.obj, DriveMemory)
