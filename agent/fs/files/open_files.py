"""What is in use: open files, their handles, and what the kernel remembers of inodes.

`OpenFiles.state` is the one lock on everything in memory. It is held for dictionary work and around the
short transactions that must not race with an open. It is held, too, for copies of at most a request between a
buffer and staged memory, which hold the interpreter anyway. It is never held while steps are run.
"""

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.fs.files import inodes
from agent.fs.files.metadata_database import ROOT_LOCAL, Database
from agent.fs.files.staging import StagedBlock
from agent.fs.interface import FsError
from agent.host_os.per_user_bounds import SHARED, Bound, Holder, Limit

HANDLES: Final = Limit(
    "fs-open", "open handles of files of /fs", 65_536,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=1024,
)  # fmt: skip


class SealUnderWay:
    """The seal of one block that goes on beside other operations of its file (block_commit.py)."""

    __slots__ = ("ended", "failed", "is_over")

    def __init__(self) -> None:
        self.ended: Final = threading.Lock()
        """Held until the seal has ended: who acquires it, and releases it at once, has waited for the end."""
        self.ended.acquire()
        self.failed = True
        """True until the seal succeeds."""
        self.is_over = False

    def end(self) -> None:
        """End the seal, done or failed. Called once, with `OpenFiles.state` held."""
        self.is_over = True
        self.ended.release()


@dataclass(slots=True, eq=False)
class OpenFile:
    """A regular file that somebody uses: what all its handles share.

    `gate` admits one operation that changes the file at a time, across its waits for the fabric. `size`
    is the truth while the file is in use, and `committed_size` what the database says. `mtime_ns` is the
    time of a write that the database does not know of, or None. `failed`: the last attempt to seal one
    of its blocks did not succeed. `lost`: one of its blocks is gone, and so are its names; who has it open
    keeps it, and nobody opens it any more. `under_way`: seals that go on without the gate, by position, in
    the order in which they began. Nobody changes, drops or seals these blocks; an operation that may not
    meet them waits (`Sealer.quiet`).
    """

    ino: int
    block_bytes: int
    size: int
    committed_size: int
    gate: threading.Lock = field(default_factory=threading.Lock)
    uses: int = 0
    staged: dict[int, StagedBlock] = field(default_factory=dict)
    under_way: dict[int, SealUnderWay] = field(default_factory=dict)
    mtime_ns: int | None = None
    failed: bool = False
    lost: bool = False

    @property
    def pending(self) -> bool:
        """The database does not have the size or the time of the last write."""
        return self.size != self.committed_size or self.mtime_ns is not None

    @property
    def dirty_blocks(self) -> list[StagedBlock]:
        """What must be sealed, in the order of the file."""
        return [block for _, block in sorted(self.staged.items()) if block.dirty]


@dataclass(slots=True)
class Handle:
    """One open(2) of a file; `was_read` says that its access time is of interest."""

    file: OpenFile
    readable: bool
    writable: bool
    holder: Holder
    was_read: bool = False


class OpenFiles:
    """The table of open files, of handles and of lookup counts."""

    def __init__(self, database: Database, handles: Bound) -> None:
        self.state = threading.Lock()
        self._database = database
        self._bound = handles
        self._files: dict[int, OpenFile] = {}
        self._handles: dict[int, Handle] = {}
        self._lookups: dict[int, int] = {}
        self._last_handle = 0

    def nodes(self) -> int:
        """Which kernels hold a reference to."""
        return len(self._lookups)

    def pin(self, ino: int) -> OpenFile:
        """The file, kept in the table until `unpin`. ESTALE when it is gone, EISDIR and EINVAL by its type.

        The row is read under the lock, so that a remover of an inode (also under it) either sees this
        use or has removed it before.
        """
        with self.state:
            return self._pin(ino)

    def _pin(self, ino: int) -> OpenFile:
        file = self._files.get(ino)
        if file is None:
            inode = inodes.find(self._database, ino)
            if inode.is_directory:
                raise FsError(errno.EISDIR)
            if not inode.is_regular:
                raise FsError(errno.EINVAL)
            file = self._files[ino] = OpenFile(inode.ino, inode.block_bytes, inode.size, inode.size)
        file.uses += 1
        return file

    def unpin(self, file: OpenFile) -> None:
        """Undo one `pin`. The last one has left nothing staged."""
        with self.state:
            file.uses -= 1
            if file.uses == 0:
                assert not file.staged
                assert not file.under_way
                del self._files[file.ino]

    def get(self, ino: int) -> OpenFile | None:
        return self._files.get(ino)

    def in_use(self, ino: int) -> bool:
        return ino in self._files

    def open(self, ino: int, access: int, holder: Holder) -> tuple[int, OpenFile]:
        """Pin the file and number a handle on it; ENFILE when too many are open, ESTALE for a lost one.

        `access`: O_RDONLY, O_WRONLY or O_RDWR.
        """
        if not self._bound.take(holder):
            raise FsError(errno.ENFILE)
        try:
            with self.state:
                known = self._files.get(ino)
                if known is not None and known.lost:
                    raise FsError(errno.ESTALE)
                file = self._pin(ino)
                self._last_handle += 1
                readable, writable = access != os.O_WRONLY, access != os.O_RDONLY
                self._handles[self._last_handle] = Handle(file, readable, writable, holder)
                return self._last_handle, file
        except BaseException:
            self._bound.give_back(holder)
            raise

    def handle(self, ino: int, number: int) -> Handle:
        """The handle of that number; EBADF when it is none of this inode."""
        handle = self._handles.get(number)
        if handle is None or handle.file.ino != ino:
            raise FsError(errno.EBADF)
        return handle

    def drop_handle(self, ino: int, number: int) -> Handle:
        """Forget the number; its pin remains. EBADF as in `handle`."""
        with self.state:
            handle = self.handle(ino, number)
            del self._handles[number]
        self._bound.give_back(handle.holder)
        return handle

    def files(self) -> Sequence[OpenFile]:
        with self.state:
            return list(self._files.values())

    def live(self, ino: int) -> tuple[int, int | None, int] | None:
        """What the database does not know yet of an open file: size, time of the last write, staged bytes.

        Read it *before* the row (see face.py).
        """
        with self.state:
            file = self._files.get(ino)
            if file is None:
                return None
            dirty = sum(block.length for block in file.staged.values() if block.dirty)
            return file.size, file.mtime_ns, dirty

    def looked_up(self, ino: int) -> None:
        """The kernel was given one more reference to the inode."""
        if ino != ROOT_LOCAL:
            with self.state:
                self._lookups[ino] = self._lookups.get(ino, 0) + 1

    def forgotten(self, ino: int, lookups: int) -> bool:
        """The kernel dropped references; True when these were the last."""
        with self.state:
            left = self._lookups.get(ino, 0) - lookups
            if left > 0:
                self._lookups[ino] = left
                return False
            self._lookups.pop(ino, None)
            return True

    def known(self, ino: int) -> bool:
        """The kernel, or an open handle, may still ask for this inode."""
        return ino in self._lookups or ino in self._files
