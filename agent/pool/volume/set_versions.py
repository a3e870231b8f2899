"""A version for each directory, in memory that all processes of an agent share (docs/processes.md).

The process that writes directories raises the version of each, once its write has ended and before anybody
hears of it. The others compare: what they remember of a directory with another version is old, and they read
it again before they say that a key is absent. There is one version for all directories that hash to the same
place, so now and then one is read again in vain.
"""

import mmap
import threading
from typing import Final

from agent.host_os.shared_memory import shared_memory

VERSIONS: Final = 1 << 18
VERSION_BYTES: Final = 4
MAP_VERSION_BYTES: Final = 4096
"""The size of the page behind the versions, which begins with the version of the pool map."""
TOTAL_BYTES: Final = VERSIONS * VERSION_BYTES + MAP_VERSION_BYTES
_MASK: Final = VERSIONS - 1
_WRAPS_AT: Final = 1 << 32
_SPREAD: Final = 0x9E3779B1
"""Knuth's multiplier, 2 to the 32nd over the golden ratio: neighbours go to places far apart."""


def place_of(namespace: int, offset: int) -> int:
    """Where the version of the directory at a byte offset of a namespace lies."""
    return (((offset >> 12) * 31 + namespace) * _SPREAD >> 7) & _MASK


def is_later(version: int, other: int) -> bool:
    """Whether one version of a directory comes after another, also where they wrapped between."""
    return 0 < (version - other) % _WRAPS_AT < _WRAPS_AT >> 1


class SetVersions:
    """The versions as one process sees them. Safe from any thread."""

    def __init__(self, descriptor: int, *, is_writer: bool) -> None:
        """`descriptor`: of TOTAL_BYTES of shared memory, which may be closed then. Raises OSError."""
        self.is_writer: Final = is_writer
        """Whether this process writes directories. What it remembers is never old."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writer else 0)
        self._memory: Final = mmap.mmap(descriptor, TOTAL_BYTES, mmap.MAP_SHARED, access)
        whole = memoryview(self._memory)
        self._versions: Final = whole[: VERSIONS * VERSION_BYTES].cast("I")
        self._map_version: Final = whole[VERSIONS * VERSION_BYTES :].cast("Q")
        self._lock: Final = threading.Lock()

    def of(self, place: int) -> int:
        return self._versions[place]

    def raise_at(self, place: int) -> None:
        """A directory there was written, or may have been."""
        # Without the lock a thread that was interrupted between load and store would take it back.
        with self._lock:
            self._versions[place] = (self._versions[place] + 1) % _WRAPS_AT

    @property
    def map_version(self) -> int:
        """The version of the pool map by which the writing process stores values."""
        return self._map_version[0]

    def say_map_version(self, version: int) -> None:
        self._map_version[0] = version


def shared_versions() -> int:
    """A descriptor of new shared memory for the versions of one agent. Raises OSError."""
    return shared_memory("g35-set-versions", TOTAL_BYTES)
