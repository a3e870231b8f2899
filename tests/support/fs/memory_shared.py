"""`/shared` over a pool in memory: two volumes on namespaces of their own, and agents with a face each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

from agent.fs.after_reply import AfterReply
from agent.fs.close_cause import Closing
from agent.fs.interface import Attributes, Caller, Entry, FsError, LockOwner, SetAttributes
from agent.fs.shared.discards import Discards
from agent.fs.shared.face import SharedFace
from agent.fs.shared.manifest import Manifest, decode_manifest_untrusted
from agent.fs.shared.paths import path_key
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import Bounds
from agent.pool.access import serve
from agent.pool.counters import MissCause
from agent.pool.format.directory import DIRECTORY_BYTES, Directory
from agent.pool.steps import Outcome, Steps, settle
from agent.pool.volume.directory_cache import DirectoryCache
from agent.pool.volume.settings import Timing, VolumeExtent, VolumeSettings
from agent.pool.volume.volume import Volume
from agent.remote.channel import BUFFER_BYTES
from tests.support.pool.memory_channel import MemoryChannel, MemoryNamespace
from tests.support.pool.memory_pool import EXTENT_AT, TENANT, fixed_secret, nguid_of

T = TypeVar("T")
CHUNK = 65_536
CALLER = Caller(0, 0, 1)
MAKER = LockOwner(11, CALLER.pid)
OTHER = Caller(0, 0, 2)
"""A process of another number; `Files.maker_of` says which of them are one."""


def settings_of(name: str, kind: str, value_bytes: int, first: int, sets: Sequence[int]) -> VolumeSettings:
    extents = tuple(
        VolumeExtent(first + number, nguid_of(first + number), EXTENT_AT, count)
        for number, count in enumerate(sets)
    )
    volume_id = name.encode().ljust(16, b".")
    return VolumeSettings(name, TENANT, volume_id, kind, value_bytes, 65_536, "aes-256-gcm", 0, extents)


class TickingChannel(MemoryChannel):
    """Time goes by between two operations, so that no agent believes a directory that another has written."""

    is_driving = False

    def run(self, steps: Steps[T]) -> T:
        self.clock += 0.05
        self.is_driving = True
        try:
            return super().run(steps)
        finally:
            self.is_driving = False

    def receive_buffer(self, size: int) -> memoryview:
        return super().receive_buffer(min(size, BUFFER_BYTES))

    def send_buffer(self, size: int) -> memoryview:
        """As a worker's channel: no more than its buffer, whoever asks for more."""
        return super().send_buffer(min(size, BUFFER_BYTES))

    def current(self) -> MemoryChannel:
        """As `current_channel`: there is one inside steps alone."""
        assert self.is_driving, "asked for outside of steps"
        return self


class SharedPool:
    """The flash that agents share."""

    def __init__(
        self, sets: Sequence[int] = (2, 2), name_sets: Sequence[int] = (4, 4), *, chunk_bytes: int = CHUNK
    ) -> None:
        self.namespaces = [MemoryNamespace(1 << 40) for _ in range(len(sets) + len(name_sets))]
        self.chunks = settings_of("v", "shared", chunk_bytes, 0, sets)
        self.names = settings_of("v.names", "shared-names", 16_384, len(sets), name_sets)

    def agent(self, bounds: Bounds | None = None, after_reply: AfterReply | None = None) -> Files:
        return Files(self, bounds, after_reply)


class Files:
    """One agent's face, driven as a door does, with paths instead of nodes."""

    def __init__(
        self, pool: SharedPool, bounds: Bounds | None = None, after_reply: AfterReply | None = None
    ) -> None:
        self.channel = TickingChannel(pool.namespaces)
        cache = DirectoryCache(64 << 20)
        chunks = Volume(pool.chunks, fixed_secret(1), cache, Timing())
        names = Volume(pool.names, fixed_secret(2), cache, Timing())
        self.chunks, self.names = chunks, names
        self.volume = SharedVolume("v", serve(chunks), serve(names), chunks.usage)
        self.discards = Discards()
        self.closing = Closing.MEANT
        self.face = SharedFace(
            [self.volume], self.channel.current, self.discards, bounds=bounds, judge=lambda *_: self.closing,
            after_reply=after_reply,
        )  # fmt: skip
        self.root = self.face._volume_inodes[b"v"]

    def settle(self, outcome: Outcome[object]) -> object:
        return settle(outcome, self.channel)

    def lookup(self, path: str, caller: Caller = CALLER) -> Entry:
        """Walk a path as the kernel does: each name is looked up."""
        node, entry = self.root, None
        for name in path.encode().split(b"/"):
            entry = settle(self.face.lookup(caller, node, name), self.channel)
            node = entry.attributes.ino
        assert entry is not None
        return entry

    def folder(self, path: str) -> tuple[int, bytes]:
        """The node of the folder, and the last name."""
        folder, _, name = path.rpartition("/")
        return self.lookup(folder).attributes.ino if folder else self.root, name.encode()

    def stat(self, path: str, caller: Caller = CALLER) -> Attributes | None:
        try:
            return self.lookup(path, caller).attributes
        except FsError:
            return None

    def create(self, path: str, caller: Caller = CALLER, flags: int = os.O_WRONLY) -> tuple[int, int]:
        folder, name = self.folder(path)
        entry, opened = settle(
            self.face.create(caller, folder, name, 0o644, flags | os.O_CREAT), self.channel
        )
        return entry.attributes.ino, opened.handle

    def open_node(self, ino: int) -> tuple[int, int]:
        """Open for reading what was looked up just now."""
        return ino, settle(self.face.open(CALLER, ino, os.O_RDONLY), self.channel).handle

    def open(self, path: str, flags: int = os.O_RDONLY, caller: Caller = CALLER) -> tuple[int, int]:
        """As open(2): where the node is stale the name is looked up once more."""
        ino = self.lookup(path, caller).attributes.ino
        try:
            opened = settle(self.face.open(caller, ino, flags), self.channel)
        except FsError as refused:
            if refused.errno != errno.ESTALE:
                raise
            ino = self.lookup(path, caller).attributes.ino
            opened = settle(self.face.open(caller, ino, flags), self.channel)
        return ino, opened.handle

    def pwrite(self, file: tuple[int, int], offset: int, data: bytes, by: LockOwner = MAKER) -> None:
        written = settle(self.face.write(*file, offset, memoryview(data), by), self.channel)
        assert written == len(data)

    def pread(self, file: tuple[int, int], offset: int, size: int) -> bytes:
        into = bytearray(b"\xa5" * size)
        count = settle(self.face.read(*file, offset, memoryview(into)), self.channel)
        return bytes(into[:count])

    def ftruncate(self, file: tuple[int, int], size: int) -> None:
        settle(self.face.setattr(CALLER, file[0], SetAttributes(size=size), file[1]), self.channel)

    def flush(self, file: tuple[int, int], by: LockOwner = MAKER, how: Closing = Closing.MEANT) -> None:
        self.closing = how
        settle(self.face.flush(*file, by), self.channel)

    def release(self, file: tuple[int, int]) -> None:
        settle(self.face.release(*file), self.channel)

    def close(self, file: tuple[int, int], by: LockOwner = MAKER, how: Closing = Closing.MEANT) -> None:
        try:
            self.flush(file, by, how)
        finally:
            self.release(file)

    def put(self, path: str, data: bytes, piece: int = 1 << 20) -> None:
        file = self.create(path, flags=os.O_WRONLY | os.O_TRUNC)
        for at in range(0, len(data), piece):
            self.pwrite(file, at, data[at : at + piece])
        self.close(file)

    def get(self, path: str) -> bytes:
        file = self.open(path)
        try:
            size = self.stat(path)
            assert size is not None
            return self.pread(file, 0, size.size + 1)
        finally:
            self.release(file)

    def rename(self, path: str, new_path: str, flags: int = 0, caller: Caller = CALLER) -> None:
        (old, name), (new, new_name) = self.folder(path), self.folder(new_path)
        self.lookup(path, caller)
        settle(self.face.rename(caller, old, name, new, new_name, flags), self.channel)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        folder, name = self.folder(path)
        settle(self.face.mkdir(CALLER, folder, name, mode), self.channel)

    def unlink(self, path: str) -> None:
        settle(self.face.unlink(CALLER, *self.folder(path)), self.channel)

    def rmdir(self, path: str) -> None:
        settle(self.face.rmdir(CALLER, *self.folder(path)), self.channel)

    def listdir(self, path: str = "") -> set[str]:
        node = self.lookup(path).attributes.ino if path else self.root
        entries = settle(self.face.readdir(node, 0, 0), self.channel)
        return {entry.name.decode() for entry in entries} - {".", ".."}

    def collect(self) -> None:
        while settle(self.discards.collect(self.channel), self.channel):
            continue

    def manifest(self, path: str) -> Manifest | None:
        """What lies under the path's key, whatever it says."""
        key = path_key(path.encode())
        found = settle(self.volume.names.newest(self.channel, key, self.channel.now() + 5), self.channel)
        return None if isinstance(found, MissCause) else decode_manifest_untrusted(found)

    def taken(self) -> int:
        """Slots of chunks that flash names just now."""
        return sum(len(list(directory)) for _, _, directory in self._directories(self.chunks))

    def reserved(self) -> int:
        """Slots of chunks that are being written, or are on flash and unnamed."""
        return sum(len(each.reserved) for each in self.chunks.cache.snapshot())

    def name(self) -> None:
        """As upkeep does."""
        settle(self.face._unnamed.name(self.channel), self.channel)

    def evict(self, volume: Volume, key: bytes) -> None:
        """Another agent evicts a key: its entry goes, and leaves a ghost."""
        pseudonym = volume.placement.pseudonym(key)
        for namespace, offset, directory in self._directories(volume):
            for slot in directory.find_all(pseudonym):
                directory.clear(slot, ghost=pseudonym)
                namespace.store(offset, [directory.image()])

    def _directories(self, volume: Volume) -> Iterator[tuple[MemoryNamespace, int, Directory]]:
        for number, offset in volume.settings.set_places(volume.settings.extents):
            block = bytearray(DIRECTORY_BYTES)
            namespace = self.channel.namespaces[number]
            namespace.load(offset, memoryview(block))
            yield namespace, offset, Directory(block)


def refused(number: int, action: object, *arguments: object, **options: object) -> None:
    with pytest.raises(FsError) as raised:
        action(*arguments, **options)  # type: ignore[operator]
    assert os.strerror(raised.value.errno) == os.strerror(number)
