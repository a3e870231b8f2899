"""A long file of /fs: read from its beginning to its end, or written and made durable, by one thread.

A read takes the next PIECE_BYTES of the file, by way of the page cache or with O_DIRECT. At the end of the
file the page cache lets go of it, so that every byte comes through the mount. A write makes a new file,
writes it piece by piece, calls fsync and closes it; that whole file is one operation. It is removed,
untimed, and the next begins once the room is back. Every piece is compared once before, and the last one
after each round; of a file that was written the first and the last.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bench.contents import Contents, pages
from agent.bench.one_file import LONG_NAME
from agent.bench.own_pool import OwnPool, own_pool
from agent.bench.removed_room import free_blocks, wait_for_room
from agent.bench.rounds import Sample, Timed, in_bursts, rate, together
from agent.bench.sites import LONG_MEMORY_FILE_BYTES, MEMORY_FILE_BYTES, Sites
from agent.errors import G35Error
from agent.pool.map.document import EXTENT_ALIGNMENT, set_size

PIECE_BYTES: Final = 4 << 20
BLOCKS: Final = {"files-small": (64 << 10, 0.06), "files-large": (4 << 20, 0.94)}
"""Volumes as docs/operating.md has them: slots of so many bytes, and the part of the room."""
FILES: Final = 2
"""As long as the one that is read: the other is written."""
ROOM: Final = 1.5
"""The volumes have room for so many times the files: a block goes into one of two sets."""
SPARE_BYTES: Final = 64 << 20
REMOVED_WITHIN: Final = 60.0
"""Seconds until the room of a removed file is back: an agent deletes its blocks beside its other work."""
LOOK_SECONDS: Final = 0.02


@contextmanager
def file_pool(folder: Path, file_bytes: int) -> Iterator[OwnPool]:
    """One drive in memory, with room for FILES files."""
    wanted = int(FILES * file_bytes * ROOM) + 2 * set_size(4 << 20) + SPARE_BYTES
    drive_bytes = -(-wanted // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
    volumes = "".join(
        f'[[volumes]]\nname = "{name}"\nkind = "files"\nvalue_size = {size}\nsuite = "aes-256-gcm"\n'
        f"share = {share}\n"
        for name, (size, share) in BLOCKS.items()
    )
    drives = ["--drives", "1", "--drive-size", str(drive_bytes), "--prefault"]
    # As `g35 up` has it: with one agent on the pool, what it remembers of a directory is what is there.
    with own_pool(folder, drives, volumes, "directory_fresh_ms = 1000\n") as pool:
        yield pool


@dataclass
class LongFileProbe:
    """A file of `file_bytes`, read or written; `direct`: with O_DIRECT."""

    sites: Sites
    verb: str
    file_bytes: int
    direct: bool = False

    def prepare(self) -> None:
        self._folder = self._pool().mount / "fs"
        self._contents, self._buffer = Contents(PIECE_BYTES), pages(PIECE_BYTES)
        self._pieces = self.file_bytes // PIECE_BYTES
        self._next = self._last = 0
        if self.verb == "read":
            path = self._folder / "read"
            if not path.exists():
                self._write(path)
            flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
            self._descriptor = os.open(path, flags)
            self.sites.at_end(lambda: os.close(self._descriptor))
            for _ in range(self._pieces):
                self._read_on()
                self._compare_last()

    def _wanted(self, piece: int) -> memoryview:
        return self._contents.value(piece)

    def _pool(self) -> OwnPool:
        name, file_bytes = f"files-{self.file_bytes}", self.file_bytes
        return self.sites.kept(name, lambda folder: file_pool(folder, file_bytes))

    def round(self, seconds: float) -> Sample:
        if self.verb == "write":
            return rate(in_bursts(self._write_burst, seconds))
        timed = together([self._read_on], seconds)
        self._compare_last()
        return rate(timed)

    def _read_on(self) -> int:
        number = self._last = self._next
        moved = os.preadv(self._descriptor, [self._buffer], number * PIECE_BYTES)
        if moved != PIECE_BYTES:
            raise G35Error(f"a read brought {moved} of {PIECE_BYTES} bytes")
        self._next = (number + 1) % self._pieces
        if not self._next and not self.direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return moved

    def _compare_last(self) -> None:
        if self._buffer != self._wanted(self._last):
            raise G35Error(f"wrong bytes in piece {self._last} of a long file")

    def _write(self, path: Path) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for number in range(self._pieces):
                moved = os.write(descriptor, self._contents.value(number))
                if moved != PIECE_BYTES:
                    raise G35Error(f"{moved} of {PIECE_BYTES} bytes were taken")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return self.file_bytes

    def _write_burst(self, seconds: float) -> Timed:
        """One file, whatever the time."""
        path, free = self._folder / "written", free_blocks(self._folder)
        timed = together([lambda: self._write(path)], 0.0, least=1)
        self._compare_ends(path)
        path.unlink()
        wait_for_room(self._folder, free, REMOVED_WITHIN, LOOK_SECONDS)
        return timed

    def _compare_ends(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for number in (0, self._pieces - 1):
                self._last = number
                os.preadv(descriptor, [self._buffer], number * PIECE_BYTES)
                self._compare_last()
        finally:
            os.close(descriptor)


class KernelReadProbe(LongFileProbe):
    """Such a read of a file that lies ready in memory behind our door: the pace of the page cache."""

    def prepare(self) -> None:
        self._content, self._buffer = Contents(MEMORY_FILE_BYTES).value(0), pages(PIECE_BYTES)
        self._pieces = min(self.file_bytes, LONG_MEMORY_FILE_BYTES) // PIECE_BYTES
        self._next = self._last = 0
        self._descriptor = os.open(self.sites.memory_file.with_name(LONG_NAME.decode()), os.O_RDONLY)
        self.sites.at_end(lambda: os.close(self._descriptor))
        for _ in range(self._pieces):
            self._read_on()
            self._compare_last()

    def _wanted(self, piece: int) -> memoryview:
        at = piece * PIECE_BYTES % MEMORY_FILE_BYTES
        return self._content[at : at + PIECE_BYTES]
