"""Files of /shared by path, and values of /kv by path beside them: four threads, whole files.

A get opens a file, reads it with one readv, and closes it; the files are read over and over. Without O_DIRECT
the page cache lets go of a file after each get, so that every byte comes through the mount. A put creates a
file, writes it with one writev, and closes it. What was put is removed before the next burst, untimed, and a
burst begins once the room is back. Of /shared that takes up to half a second, after which directories are
read again and caches are cold. So the bursts of /kv rest as long, and a burst has several files for each
thread. Every file is compared once before, and the last one that each thread got after each round.
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bench.contents import Contents, pages
from agent.bench.removed_room import free_blocks, wait_for_room
from agent.bench.rounds import Sample, Timed, Turn, in_bursts, rate, together
from agent.bench.sites import IN_FLIGHT, PoolShape, PoolSite, Sites
from agent.errors import G35Error
from agent.pool.format.directory import SLOTS_PER_SET

FILES_GOT: Final = 4
"""Files that are read over and over."""
PUT_BYTES: Final = 128 << 20
"""What is put before it is removed; of long files a file for each thread."""
REST_SECONDS: Final = 0.6
"""From the end of a burst to the next one at the least. The room of /shared comes back within it."""
SHARED_PART: Final = 5
"""A new pool has one part in so many for /shared (agent/cli/up/agent_toml.py)."""
DRIVE_LEAST: Final = 2 << 30
"""So that /shared has six sets, about as many as /kv: in a set writers wait for each other, and a pool has
thousands."""
ROOM: Final = 1.25
"""The pool has room for so many times what the probes store."""
WITH_NAMES: Final = 1.05
"""The room of chunks and their names, of chunks alone."""
CHUNK_MAX: Final = 4 << 20
"""As a slot of /kv is made for its values, so is a chunk for its files. With longer chunks the pool of a
bench would need many GiB of memory for a few sets of them."""
VALUE_MAX: Final = 16 << 20
"""The longest value of /kv; a file of /shared may be longer."""
REMOVED_WITHIN: Final = 30.0
"""Seconds until the room of removed files is back: an agent deletes their chunks beside its other work."""
LOOK_SECONDS: Final = 0.005


def files_put(file_bytes: int) -> int:
    return max(IN_FLIGHT, PUT_BYTES // file_bytes)


def shape_of_files(file_bytes: int) -> PoolShape:
    stored = (FILES_GOT + files_put(file_bytes)) * file_bytes
    value_bytes = min(file_bytes, VALUE_MAX)
    set_of_values = SLOTS_PER_SET * value_bytes
    chunk_bytes = min(file_bytes, CHUNK_MAX)
    set_of_chunks = SLOTS_PER_SET * chunk_bytes
    sets = 1 - int(-ROOM * stored // set_of_chunks)
    drive_bytes = max(int(SHARED_PART * WITH_NAMES * sets * set_of_chunks), 2 * set_of_values, DRIVE_LEAST)
    return PoolShape(value_bytes, drive_bytes >> 20 << 20, files=True, chunk_bytes=chunk_bytes)


@dataclass
class FileProbe:
    """Files of `file_bytes` in a folder of the mount, got or put."""

    sites: Sites
    folder: str
    verb: str
    file_bytes: int
    direct: bool = True

    def prepare(self) -> None:
        site = self.sites.pool(shape_of_files(self.file_bytes))
        self._files = _Files(site, site.mount / self.folder, self.file_bytes, self.direct)
        if self.verb == "get":
            self._files.store()

    def round(self, seconds: float) -> Sample:
        if self.verb == "put":
            return rate(in_bursts(self._files.put_burst, seconds))
        timed = together(self._files.readers, seconds)
        self._files.compare_last()
        return rate(timed)


class _Files:
    """The files of one folder, and the threads that read them."""

    def __init__(self, site: PoolSite, folder: Path, file_bytes: int, direct: bool) -> None:
        self._site, self._folder = site, folder
        self._direct = os.O_DIRECT if direct else 0
        self._is_kv = folder.parent.name == "kv"
        self._contents = Contents(file_bytes)
        self.readers = [_FileReader(self, range(first, FILES_GOT, IN_FLIGHT)) for first in range(IN_FLIGHT)]
        self._numbers = itertools.count()
        self._rested_at = 0.0
        """From when on the next burst may begin."""

    def contents(self, number: int) -> memoryview:
        return self._contents.value(number)

    def path(self, name: str, number: int) -> Path:
        return self._folder / f"{name}-{number}"

    def store(self) -> None:
        buffer = pages(self._contents.value_bytes)
        for number in range(FILES_GOT):
            path = self.path("get", number)
            if not path.exists():
                self.put(path, number)
            if self.get(path, buffer) != len(buffer) or buffer != self.contents(number):
                raise G35Error(f"{path} did not come back as it was stored")

    def put(self, path: Path, number: int) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | self._direct, 0o644)
        try:
            moved = os.writev(descriptor, [self.contents(number)])
        finally:
            os.close(descriptor)
        if moved != self._contents.value_bytes:
            raise G35Error(f"{moved} bytes of {path} were taken")
        self._site.bytes_put += moved if self._is_kv else 0
        return moved

    def get(self, path: Path, buffer: memoryview) -> int:
        descriptor = os.open(path, os.O_RDONLY | self._direct)
        try:
            moved = os.readv(descriptor, [buffer])
            if not self._direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        self._site.bytes_got += moved if self._is_kv else 0
        return moved

    def compare_last(self) -> None:
        for reader in self.readers:
            if reader.last >= 0 and reader.buffer != self.contents(reader.last):
                raise G35Error(f"wrong bytes in {self.path('get', reader.last)}")

    def _puts(self, numbers: Iterator[int]) -> Turn:
        def turn() -> int | None:
            number = next(numbers, None)
            return None if number is None else self.put(self.path("put", number), number)

        return turn

    def put_burst(self, seconds: float) -> Timed:
        free = free_blocks(self._folder)
        fresh = [next(self._numbers) for _ in range(files_put(self._contents.value_bytes))]
        turns = [self._puts(iter(fresh[first::IN_FLIGHT])) for first in range(IN_FLIGHT)]
        time.sleep(max(0.0, self._rested_at - time.monotonic()))
        timed = together(turns, seconds)
        self._rested_at = time.monotonic() + REST_SECONDS
        there = [path for path in (self.path("put", number) for number in fresh) if path.exists()]
        if len(there) * self._contents.value_bytes != timed.bytes:
            raise G35Error(f"{timed.bytes} bytes were stored, {len(there)} files are there")
        for path in there:
            path.unlink()
        wait_for_room(self._folder, free, REMOVED_WITHIN, LOOK_SECONDS)
        return timed


class _FileReader:
    """One thread's turns."""

    def __init__(self, files: _Files, numbers: range) -> None:
        self._files = files
        self.buffer = pages(files.contents(0).nbytes)
        self._round_about = itertools.cycle(numbers)
        self.last = -1

    def __call__(self) -> int:
        self.last = next(self._round_about)
        moved = self._files.get(self._files.path("get", self.last), self.buffer)
        if moved != len(self.buffer):
            raise G35Error(f"a read brought {moved} of {len(self.buffer)} bytes")
        return moved
