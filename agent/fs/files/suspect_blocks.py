"""Blocks of files that did not prove themselves to a reader: looked into later, and only then given up.

A reader that meets such a block gets EIO, and nothing is removed: damage on the way looks the same as a
medium that has lost the block. `FilesFace.collect` has the store examine it again, LOOKS times and
LOOK_SECONDS apart. It is lost if each look found the very same thing against it, and the store vouched each
time for the enclosures. A look of which nothing can be said begins the count anew. UNDECIDED_MAX of those, or
a look that finds the block whole or something else, end the suspicion.

A lost block takes its file: its names go, and reading it is ENOENT. A block that was written over, cut off or
removed meanwhile is no suspect. All is in memory and bounded; after a restart readers find again what is bad.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from agent.fs.files import block_rows
from agent.fs.files.block_rows import SealedBlock
from agent.fs.files.block_store import BlockStore, StoreUnavailable, block_id
from agent.fs.files.metadata_database import Database
from agent.fs.files.open_files import OpenFile, OpenFiles
from agent.fs.files.space_reclaim import Reclaimer
from agent.fs.interface import FsError
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Steps

log = logging.getLogger(__name__)

SUSPECTS_MAX: Final = 4096
"""The most suspects. One more is not noted: its next reader brings it again."""
LOOKS: Final = 4
LOOK_SECONDS: Final = 5.0
"""The time before each look. An enclosure whose trouble is over by then costs no file."""
UNDECIDED_MAX: Final = 4
"""Looks of which nothing can be said; then the next reader has to bring the block again."""
TURN_SECONDS: Final = 0.5
"""A turn of who cleans up begins no further look after that; one look takes the store's deadlines at most."""


@dataclass(slots=True)
class _Suspicion:
    block: SealedBlock
    due: float
    looks: int = 0
    undecided: int = 0
    against: bytes | None = None


@dataclass(slots=True, eq=False)
class Suspects:
    """The suspects of one face. Safe from any thread; one at a time looks into them.

    `_let_go` undoes a pin of a file. `_clock` in seconds.
    """

    _database: Database
    _store: BlockStore
    _open_files: OpenFiles
    _reclaimer: Reclaimer
    _let_go: Callable[[OpenFile], Steps[None]]
    _clock: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _complaints: Complaints = field(default_factory=lambda: Complaints(log))
    _found: OrderedDict[tuple[int, int], _Suspicion] = field(default_factory=OrderedDict)
    """The suspicions, by inode and position in the file; the suspicion that is due first comes first."""

    def __len__(self) -> int:
        return len(self._found)

    def note(self, file: OpenFile, position: int, block: SealedBlock) -> None:
        """A reader has met a block that does not prove itself, or is not there."""
        if file.lost:
            return
        at = (file.ino, position)
        with self._lock:
            known = self._found.get(at)
            if known is not None and known.block.version == block.version:
                return
            if known is None and len(self._found) >= SUSPECTS_MAX:
                return
            self._found.pop(at, None)
            self._found[at] = _Suspicion(block, self._clock() + LOOK_SECONDS)
        what = "a block of a file does not prove itself, and is looked into"
        self._complaints.world(what, f"inode {file.ino}", logging.INFO)

    def look(self) -> Steps[None]:
        """Have those examined that are due, for TURN_SECONDS."""
        end = self._clock() + TURN_SECONDS
        while self._clock() < end:
            with self._lock:
                at, suspicion = next(iter(self._found.items()), (None, None))
                if at is None or suspicion is None or suspicion.due > self._clock():
                    return
                # Its next turn is behind all others; `due` keeps a second thread from it.
                self._found.move_to_end(at)
                suspicion.due = self._clock() + LOOK_SECONDS
            if not (yield from self._goes_on(*at, suspicion)):
                with self._lock:
                    if self._found.get(at) is suspicion:
                        del self._found[at]

    def _goes_on(self, ino: int, position: int, suspicion: _Suspicion) -> Steps[bool]:
        """Look once at a block. Returns whether other looks are to follow."""
        block = suspicion.block
        if not self._is_current(ino, position, block):
            return False
        name = block_id(self._database.file_system_id, ino, position, block.version)
        try:
            against = yield from self._store.examine(name, block.capacity)
        except StoreUnavailable as undecided:
            self._complaints.world("a suspect block is left", f"inode {ino}, {undecided}", logging.INFO)
            suspicion.undecided += 1
            suspicion.looks, suspicion.against = 0, None
            suspicion.due = self._clock() + LOOK_SECONDS
            return suspicion.undecided < UNDECIDED_MAX
        if against is None or (suspicion.against is not None and against != suspicion.against):
            return False
        suspicion.against = against
        suspicion.looks += 1
        suspicion.due = self._clock() + LOOK_SECONDS
        if suspicion.looks < LOOKS:
            return True
        with contextlib.suppress(FsError):
            if (yield from self._give_up(ino, position, block)):
                yield from self._store.give_up(name, block.capacity)
        return False

    def _is_current(self, ino: int, position: int, block: SealedBlock) -> bool:
        now = block_rows.sealed_at(self._database, ino, position)
        return now is not None and now.version == block.version

    def _give_up(self, ino: int, position: int, block: SealedBlock) -> Steps[bool]:
        """The block is lost, and so is the file that has it, if it has it still. Raises FsError."""
        file = self._open_files.pin(ino)
        try:
            with (yield from self._reclaimer.hold(file.gate)):
                with self._open_files.state:
                    is_staged = position in file.staged
                if is_staged or not self._is_current(ino, position, block):
                    return False
                self._reclaimer.lose(file)
                return True
        finally:
            yield from self._let_go(file)
