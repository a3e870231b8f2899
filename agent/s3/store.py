"""A tenant's objects as bytes: files of a file system of its own, over its own volumes of blocks.

It is another instance of the file system of /fs (agent/fs/files), with its own metadata, mounted nowhere. So
objects are sealed by the tenant's key, count against its quota and go with its erasure, and only this door
names their files. File names are numbers; the index says which object a file belongs to.

All methods block, and are called in a thread that has a channel (`runner` drives them).
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from agent.fs.files.block_store import BlockStore
from agent.fs.files.face import FilesFace
from agent.fs.files.metadata_pool import PoolOfNames
from agent.fs.files.options import FilesOptions
from agent.fs.files.sealed_reads import BlockRange
from agent.fs.interface import FACE_FILES, FACE_SHIFT, Caller, FsError
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Runner, settle
from agent.s3.errors import S3Error, of_file_system
from agent.s3.index import NAMES_BYTES, Index, Piece, StoredObject

log = logging.getLogger(__name__)

ROOT: Final = FACE_FILES << FACE_SHIFT | 1
FILE_MODE: Final = 0o600
TIDY_FILES: Final = 16
"""Spare files that one job removes, in 15 ms, so that others have their turn."""
TIDY_NAMES: Final = 1000
"""Spare files that one job looks at, because readers may hold many."""
_NOBODY: Final = Caller(0, 0, umask=0)


class ObjectStore:
    """The objects of one tenant. Safe from any thread."""

    def __init__(
        self,
        index: Path,
        metadata: Path,
        blocks: BlockStore,
        options: FilesOptions,
        home: PoolOfNames | None = None,
        is_erased: Callable[[], bool] = lambda: False,
        names_bytes: int = NAMES_BYTES,
    ) -> None:
        """`home`: where the blocks lie; `is_erased`: whether the tenant was erased; `names_bytes`: bound of
        the index on disk. Raises G35Error where a file of metadata is not usable.
        """
        self.is_erased = is_erased
        self.home_volumes = dict(home.volumes) if home is not None else {}
        """Of the blocks: the identifier of the volume by capacity."""
        self.index = Index(index, names_bytes)
        try:
            self.files = FilesFace(metadata, blocks, options, home=home)
        except BaseException:
            self.index.close()
            raise
        self.sealed = self.files.sealed_reads()
        self._lock = threading.Lock()
        self._count = 0
        self._writing: set[str] = set()
        self._complaints = Complaints(log)
        self._tidied = ""
        """The last spare file that this round has looked at."""
        self._read: Counter[str] = Counter()
        """Readers of each file: at most 10,000 files for each body under way."""

    def close(self) -> None:
        """No operation may be under way."""
        self.files.close()
        self.index.close()

    def new_name(self) -> str:
        with self._lock:
            self._count += 1
            name = self._name(self._count)
            self._writing.add(name)
            return name

    def _name(self, count: int) -> str:
        return f"{self.index.opening:08x}-{count:012x}"

    def written(self, name: str) -> None:
        """The file belongs to an object, or is spare, from here on."""
        with self._lock:
            self._writing.discard(name)

    def find(self, bucket: str, key: str) -> StoredObject:
        """Raises S3Error."""
        return self.index.find(bucket, key)

    def open(self, bucket: str, key: str) -> "tuple[StoredObject, ObjectReader]":
        """Raises S3Error, and LostObject where it was replaced meanwhile."""
        found, held = self.find_and_hold(bucket, key)
        return found, ObjectReader(self, found, held)

    def blocks(self, pieces: Sequence[Piece]) -> list[BlockRange] | None:
        """Where all bytes of an object lie whose files are held. None: only this store can read them."""
        found: list[BlockRange] = []
        for piece in pieces:
            ranges = self.sealed.ranges(piece.file.encode(), 0, piece.size) if piece.size else []
            if ranges is None:
                return None
            found += ranges
        return found

    def find_and_hold(self, bucket: str, key: str) -> tuple[StoredObject, list[Piece]]:
        """An object, and its file, which stays until `release`; none where it has several, or was refused.
        Raises S3Error."""
        return self.index.find_and_hold(bucket, key, self._hold)

    def hold(self, found: StoredObject) -> list[Piece]:
        """The files of an object, which stay until `release`. Raises LostObject where it was replaced."""
        # Removal takes the object out of the index before it looks for readers of its files. So files that
        # are held while the index has them stay.
        pieces = self.index.pieces(found, self._hold)
        if not pieces or sum(piece.size for piece in pieces) != found.size:
            self.release(pieces)
            raise LostObject("it was replaced while it was looked for")
        return pieces

    def _hold(self, pieces: Sequence[Piece]) -> None:
        with self._lock:
            self._read.update([piece.file for piece in pieces])

    def release(self, pieces: Sequence[Piece]) -> None:
        """A reader is done. `tidy` removes files that are spare by now."""
        with self._lock:
            for piece in pieces:
                self._read[piece.file] -= 1
                if not self._read[piece.file]:
                    del self._read[piece.file]

    def files_held(self) -> int:
        """Number of files that readers hold."""
        return len(self._read)

    def give_up(self, runner: Runner, bucket: str, found: StoredObject) -> None:
        """Remove an object that has lost bytes, and its remaining files."""
        try:
            spare = self.index.remove(bucket, found.key, only_id=found.id)
        except S3Error as refused:
            self._complaints.world("an object that is lost stays in the index for now", refused.message)
            return
        self.discard(runner, spare)

    def discard(self, runner: Runner, names: Sequence[str]) -> None:
        """Remove the first few of files that no object names any more. `tidy` removes the others, and those
        that are being read or cannot be removed now."""
        self._remove(runner, names[:TIDY_FILES])

    def tidy(self, runner: Runner) -> bool:
        """Remove some spare files; whether to go on with the next at once."""
        # A file that was being written before the table was read may be an object's by now; a newer one, too.
        with self._lock:
            writing, newest = set(self._writing), self._name(self._count)
        spare = self.index.spare(TIDY_NAMES, self._tidied)
        with self._lock:
            left = [name for name in spare if name not in self._read]
        names = [name for name in left if name not in writing and name <= newest]
        now, later = names[:TIDY_FILES], names[TIDY_FILES:]
        is_end = not later and len(spare) < TIDY_NAMES
        self._tidied = "" if is_end else now[-1] if later else spare[-1]
        try:
            refused = self._remove(runner, now)
            if refused is not None:
                # The disk is full, or the like: the others have their try, but not at once.
                self._tidied = refused
            return runner.run(self.files.collect()) or (refused is None and not is_end)
        except FsError as fault:
            self._complaints.world("what removed objects had is not freed for now", str(fault))
            return False

    def _remove(self, runner: Runner, names: Sequence[str]) -> str | None:
        """Remove files up to the first that cannot be removed; that one."""
        for name in names:
            with self._lock:
                if name in self._read:
                    continue
            try:
                settle(self.files.unlink(_NOBODY, ROOT, name.encode()), runner)
            except FsError as refused:
                if refused.errno != errno.ENOENT:
                    self._complaints.world("a file that no object names stays for now", str(refused))
                    return name
            try:
                self.index.forget(name)
            except S3Error as refused:
                self._complaints.world("a file that is gone stays among the spare ones", refused.message)
                return name
        return None

    def old_uploads(self, runner: Runner, seconds: float) -> list[str]:
        """Uploads older than `seconds`."""
        return self.index.old_uploads(time.time_ns() - int(seconds * 1e9))

    def end_upload(self, runner: Runner, name: str) -> None:
        with contextlib.suppress(S3Error):  # its client was quicker, or the next look ends it
            self.discard(runner, self.index.abort_upload(name))

    def holds_anything(self) -> bool:
        return self.files.gauges().is_anything


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refusals of the file system as S3Error."""
    try:
        yield
    except FsError as refused:
        raise of_file_system(refused) from None


class FileWriter:
    """One file being written, from its first byte to its last. Used by one thread at a time."""

    def __init__(self, store: ObjectStore, runner: Runner) -> None:
        """Raises S3Error."""
        self._store = store
        self.name = store.new_name()
        self.size = 0
        self._ended = False
        try:
            store.index.announce(self.name)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            with _refusals():
                made = store.files.create(_NOBODY, ROOT, self.name.encode(), FILE_MODE, flags)
                entry, opened = runner.run(made)
        except BaseException:
            store.written(self.name)
            raise
        self._ino, self._handle = entry.attributes.ino, opened.handle

    def write(self, runner: Runner, data: memoryview) -> None:
        """Append. Raises S3Error; then the writer is to be dropped."""
        files = self._store.files
        with _refusals():
            while data:
                taken = settle(files.write(self._ino, self._handle, self.size, data), runner)
                self.size += taken
                data = data[taken:]

    def finish(self, runner: Runner) -> Piece:
        """Seal everything and write it to the enclosures. Raises S3Error."""
        with _refusals():
            settle(self._store.files.flush(self._ino, self._handle), runner)
        return Piece(self.name, self.size)

    def keep(self, runner: Runner) -> None:
        """The index names the file now."""
        self._end(runner)
        self._store.written(self.name)

    def drop(self, runner: Runner) -> None:
        self._end(runner)
        self._store.written(self.name)
        self._store.discard(runner, [self.name])

    def _end(self, runner: Runner) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            runner.run(self._store.files.release(self._ino, self._handle))
        except FsError as refused:
            log.debug("a file was closed with a complaint: %s", refused)
        self._store.files.forget(self._ino, 1)


class ObjectReader:
    """The bytes of one object as it was when it was found, also while it is replaced or removed.

    Used by one thread at a time, and closed by its maker.
    """

    def __init__(self, store: ObjectStore, found: StoredObject, held: Sequence[Piece] = ()) -> None:
        """`held`: its files, where they are held already. Raises LostObject."""
        self._store = store
        self._open: tuple[str, int, int] | None = None
        self._pieces = list(held) or store.hold(found)

    def read(self, runner: Runner, offset: int, into: memoryview) -> None:
        """Fill `into`. Raises LostObject, or S3Error where the bytes may come back."""
        at = 0
        for piece in self._pieces:
            if not into:
                return
            if offset < at + piece.size:
                count = min(len(into), at + piece.size - offset)
                self._fill(runner, piece, offset - at, into[:count])
                into, offset = into[count:], offset + count
            at += piece.size
        if into:
            raise LostObject("it has fewer bytes than it should")

    def _fill(self, runner: Runner, piece: Piece, offset: int, into: memoryview) -> None:
        files = self._store.files
        try:
            # Nobody writes a file that an object names, and this reader holds its name.
            if self._open is None and runner.run(self._store.sealed.read(piece.file.encode(), offset, into)):
                return
            ino, handle = self._opened(runner, piece)
            count = settle(files.read(ino, handle, offset, into), runner)
        except FsError as refused:
            if refused.errno in (errno.ENOENT, errno.ESTALE) or self._is_lost(runner, piece):
                raise LostObject(f"its bytes are gone: {refused}") from None
            raise of_file_system(refused) from None
        if count != len(into):
            raise LostObject("a file of it is too short")

    def _opened(self, runner: Runner, piece: Piece) -> tuple[int, int]:
        if self._open is not None:
            if self._open[0] == piece.file:
                return self._open[1:]
            self._shut(runner)
        files = self._store.files
        entry = settle(files.lookup(_NOBODY, ROOT, piece.file.encode()), runner)
        try:
            opened = runner.run(files.open(_NOBODY, entry.attributes.ino, os.O_RDONLY))
        except BaseException:
            files.forget(entry.attributes.ino, 1)
            raise
        self._open = (piece.file, entry.attributes.ino, opened.handle)
        return self._open[1:]

    def _is_lost(self, runner: Runner, piece: Piece) -> bool:
        """A file that lost a block has lost its name (agent/fs/files/space_reclaim.py)."""
        try:
            entry = settle(self._store.files.lookup(_NOBODY, ROOT, piece.file.encode()), runner)
        except FsError as refused:
            return refused.errno == errno.ENOENT
        self._store.files.forget(entry.attributes.ino, 1)
        return False

    def close(self, runner: Runner) -> None:
        self._shut(runner)
        pieces, self._pieces = self._pieces, []
        self._store.release(pieces)

    def _shut(self, runner: Runner) -> None:
        if self._open is not None:
            _, ino, handle = self._open
            self._open = None
            # A release only notes the time of the read: a full disk must not cost the answer.
            with contextlib.suppress(FsError):
                runner.run(self._store.files.release(ino, handle))
            self._store.files.forget(ino, 1)


class LostObject(Exception):
    """The object was replaced, or its bytes are gone for good: its reader gets NoSuchKey."""
