"""Files with chunks that are on flash and that no directory names yet: a program may stop amid its file.

The chunks of a file are named together, sixteen at a time or with its close (file_writer.py). Where a program
writes half of a file and then nothing for long, upkeep names what is there. Else its slots would go to other
puts after a while (agent/pool/volume/puts_in_pieces.py), and the file with them.
"""

import contextlib
import threading
from typing import Final, Protocol

from agent.fs.interface import FsError
from agent.pool.steps import IoChannel, Steps

TURN_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 1.0
"""An enclosure that hangs keeps upkeep from its other duties for both together at the most."""
NAMED_WITH_DATA: Final = 2
"""The first chunks of a file that are named as values are, beside their data. The close of a short file then
writes the manifest alone. For a longer file each chunk would cost a write of a directory."""
UNNAMED_MAX: Final = 16
"""Chunks of one file that are on flash and that no directory names yet."""
TOGETHER_SECONDS: Final = 0.02
"""Chunks that come faster than this are named together: for so long a put trusts a directory that it read.
Where the operator says that no other agent writes, it may be longer."""
UNNAMED_SECONDS: Final = 0.5
"""What has waited for so long is named by upkeep (unnamed.py), where the program writes no more."""
UNNAMED_PART: Final = 8
"""Nothing evicts the slots of chunks that wait. So where they are more than this part of the volume, of all
files together, each is named at once."""


class Unnamed(Protocol):
    """A file that has such chunks (file_writer.py), or what a door holds for who looked it up, and has done
    nothing since (call_prediction.py)."""

    def name_stale(self, channel: IoChannel) -> Steps[None]: ...


class UnnamedChunks:
    """The files of all doors of an agent. Safe from any thread. As many as are being written at the most, and
    one more for each door."""

    def __init__(self) -> None:
        self._files: dict[int, Unnamed] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: Unnamed) -> None:
        with self._lock:
            self._files[id(file)] = file

    def discard(self, file: Unnamed) -> None:
        with self._lock:
            self._files.pop(id(file), None)

    def name(self, channel: IoChannel) -> Steps[None]:
        """Name what has waited long; of many files the next turn names the rest."""
        with self._lock:
            files = list(self._files.values())
        until = channel.now() + TURN_SECONDS
        for file in files:
            if channel.now() >= until:
                return
            with contextlib.suppress(FsError):
                yield from file.name_stale(channel)
