"""The key-value face: `/kv/<volume>/<name>` is the value stored under that name.

A name of 32 hex digits is the key itself; any other name is hashed to one (control_wire.key_of_name).
Values are immutable: a file that exists is not opened for writing (EEXIST), and value_writer.py says when a
new one is complete. A program that writes on gets EIO and the value is removed again. An empty file
stores nothing.

An inode is a key and a length: stat(2) of an open file shows the length of what it reads. Where a value of
another length was stored meanwhile, the file reads as a miss.

A lookup is a hint from the directories, without a round trip while they are remembered; the read proves the
value. A value that went in between reads as an empty file, a miss. One that is lost in the middle reads as
EIO from there on: its beginning must not pass for a shorter value. Directories list nothing: that would need
an index, and would tell one tenant what another one holds.
"""

import errno
import itertools
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.fs.close_cause import how_closed
from agent.fs.file_users import Judge
from agent.fs.interface import (
    FACE_KV,
    FACE_SHIFT,
    FIXED_SECONDS,
    FOLDER_SECONDS,
    NOBODY,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
    SetAttributes,
    StatFs,
    folders,
)
from agent.fs.value_writer import ValueWriter
from agent.host_os.per_user_bounds import SHARED, Bounds, Holder, Limit
from agent.pool.access import ServedVolume
from agent.pool.counters import MissCause
from agent.pool.errors import PutRefused
from agent.pool.prestage.readahead import INACTIVE, Readahead, Trail
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.read.reader_base import Reader
from agent.pool.steps import IoChannel, Outcome, Steps
from host_shim.control_wire import key_of_name

KV_ROOT: Final = FACE_KV << FACE_SHIFT | 1
_VOLUMES_FROM: Final = KV_ROOT + 1
_VALUES_FROM: Final = KV_ROOT + (1 << 16)

OPEN_VALUES: Final = Limit(
    "kv-open", "files of /kv that are open for reading", 131_072,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=3584,
)  # fmt: skip
WRITERS: Final = Limit(
    "kv-writers", "values that are being written through files of /kv", 256,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=4096,
)  # fmt: skip
"""Each writer may also hold one unit that is not yet full, which puts_in_pieces.py bounds."""
NODES: Final = Limit(
    "kv-nodes", "values of /kv that kernels hold a reference to", 262_144,
    by="user, guest", share=SHARED, refused="one looked up long ago, and not open, goes", bytes_each=1024,
)  # fmt: skip
"""A kernel keeps them in its cache, and looks names up at each use: one that went has a new number then."""
LOOKS_FOR_ROOM: Final = 64
"""Nodes that are looked at for one that nobody has open."""
TRAILS_MAX: Final = 1024
"""Processes of which it is remembered which value they opened last, to learn what follows what."""
READ_BYTES_HINT: Final = 1 << 20
"""st_blksize of a value. A program that reads in small pieces would open the same unit over and over."""


@dataclass(slots=True)
class _Value:
    """An inode: a value of one length that the kernel holds a reference to."""

    volume: ServedVolume
    key: bytes
    holder: Holder
    """Who was told of it first."""
    lookups: int = 1
    length: int = 0
    """The length of the value; while it is being written, the bytes so far."""
    opens: int = 0

    def place(self) -> tuple[bytes, bytes, int]:
        return self.volume.settings.volume_id, self.key, self.length


class _Reader:
    """A value that is open for reading, and the length that stat(2) shows of it."""

    __slots__ = ("is_another", "length", "reading")

    def __init__(self, reading: Reader, length: int) -> None:
        self.reading = reading
        self.length = length
        self.is_another = False
        """What lies under the key now is not what was looked up: a miss."""


class KvFace(FileSystem):
    """`/kv`. Safe from any thread: a lock guards the tables, handles are each guarded by their own.

    `channel` gives the channel that drives the steps, so it is called inside steps only.
    """

    def __init__(
        self,
        volumes: Sequence[ServedVolume],
        channel: Callable[[], IoChannel],
        prestage: PrestageCache | None = None,
        owner: tuple[int, int] = (0, 0),
        epoch: int = 0,
        continuer: Readahead = INACTIVE,
        judge: Judge = how_closed,
        bounds: Bounds | None = None,
        may_read: Callable[[ServedVolume], bool] | None = None,
        first_handle: int = 1,
    ) -> None:
        """`epoch`: values have other numbers in each, for a guest that outlives the agent. `judge` tells
        how a file was closed. `may_read`: where this process reads values alone, whether it may read those of
        a volume now. Handles begin with `first_handle`."""
        self._judge = judge
        self._may_read = may_read
        bounds = bounds or Bounds()
        self._open_values, self._open_writers = bounds.of(OPEN_VALUES), bounds.of(WRITERS)
        self._nodes = bounds.of(NODES)
        self._opened_by: dict[int, Holder] = {}
        self._volumes = {_VOLUMES_FROM + number: volume for number, volume in enumerate(volumes)}
        self._volume_inodes = {volume.settings.name.encode(): ino for ino, volume in self._volumes.items()}
        self._channel = channel
        self._prestage = prestage
        self._owner = owner
        self._values: OrderedDict[int, _Value] = OrderedDict()
        """The values that kernels know; the value looked up longest ago comes first."""
        self._inode_of: dict[tuple[bytes, bytes, int], int] = {}
        self._continuer = continuer
        self._trails: OrderedDict[int, Trail] = OrderedDict()
        self._readers: dict[int, _Reader] = {}
        self._writers: dict[int, ValueWriter] = {}
        self._numbers = itertools.count(_VALUES_FROM + (epoch << 32))
        self._handles = itertools.count(first_handle)
        self._lock = threading.Lock()

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if parent == KV_ROOT:
            ino = self._volume_inodes.get(name)
            if ino is None or self._volumes[ino].erased:
                raise FsError(errno.ENOENT)
            return Entry(self._folder(ino), FIXED_SECONDS, FOLDER_SECONDS)
        return self._lookup_value(caller.holder, self._volume(parent), name)

    def _lookup_value(self, holder: Holder, volume: ServedVolume, name: bytes) -> Steps[Entry]:
        key = _key(name)
        length = yield from volume.find_length(self._channel(), key)
        if length is None:
            raise FsError(errno.ENOENT)
        ino = self._remember(holder, volume, key, length)
        # The kernel may not remember the name: another agent may remove or evict it.
        return Entry(self._file(ino, length), 0.0, 1.0)

    def _remember(self, holder: Holder, volume: ServedVolume, key: bytes, length: int) -> int:
        place = (volume.settings.volume_id, key, length)
        with self._lock:
            ino = self._inode_of.get(place)
            if ino is None:
                ino = self._inode_of[place] = self._new_node(holder, volume, key, length)
                return ino
            value = self._values[ino]
            if value.holder != holder and self._nodes.take(holder):
                # The last to ask is charged: another may keep it after the first has let go.
                self._nodes.give_back(value.holder)
                value.holder = holder
            value.lookups += 1
            self._values.move_to_end(ino)
            return ino

    def _new_node(self, holder: Holder, volume: ServedVolume, key: bytes, length: int) -> int:
        """Make a node, with the lock held. Raises FsError where there is no room for it."""
        if not self._nodes.take(holder) and not self._took_anothers_place(holder):
            raise FsError(errno.ENFILE, "too many values are held open")
        ino = next(self._numbers)
        self._values[ino] = _Value(volume, key, holder, 1, length)
        return ino

    def _complete(self, ino: int, length: int) -> None:
        """What was written is a value now, and the kernel has an inode of it already."""
        with self._lock:
            value = self._values.get(ino)
            if value is not None:
                value.length = length
                self._inode_of.setdefault(value.place(), ino)

    def _took_anothers_place(self, holder: Holder) -> bool:
        for _ in range(min(LOOKS_FOR_ROOM, len(self._values))):
            ino = next(iter(self._values))
            value = self._values[ino]
            if value.opens:
                self._values.move_to_end(ino)
                continue
            self._drop_node(ino, value)
            if self._nodes.take(holder):
                return True
        return False

    def _drop_node(self, ino: int, value: _Value) -> None:
        del self._values[ino]
        self._nodes.give_back(value.holder)
        if self._inode_of.get(value.place()) == ino:
            del self._inode_of[value.place()]

    def _note_open(self, ino: int, change: int) -> None:
        """Note that a value is open. Called with the lock held."""
        value = self._values.get(ino)
        if value is not None:
            value.opens += change

    def forget(self, ino: int, lookups: int) -> None:
        with self._lock:
            value = self._values.get(ino)
            if value is None:
                return
            value.lookups -= lookups
            if value.lookups <= 0:
                self._drop_node(ino, value)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        self._want_writer()
        return self._unlink(parent, name)

    def _unlink(self, parent: int, name: bytes) -> Steps[None]:
        volume, key, channel = self._volume(parent), _key(name), self._channel()
        if self._prestage is not None:
            self._prestage.discard(volume.settings.volume_id, volume.pseudonym(key))
        channel.gives_way()
        try:
            there = yield from volume.delete(channel, key, channel.now() + volume.timing.write_deadline)
        except PutRefused as refused:
            raise FsError(errno.EIO, str(refused)) from None
        if not there:
            raise FsError(errno.ENOENT)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        if ino == KV_ROOT:
            return self._folder(ino)
        if ino in self._volumes:
            self._volume(ino)
            return self._folder(ino)
        return self._file(ino, self._value(ino).length)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        if ino not in self._values:
            raise FsError(errno.EPERM)
        value = self._value(ino)
        length = value.length
        if changes.size is not None and changes.size != length:
            writer = None if handle is None else self._writers.get(handle)
            if writer is None:
                raise FsError(errno.EPERM, "a value is immutable")
            writer.declare(changes.size)
            length = value.length = changes.size
        # Modes, owners and times are not kept: a key-value has no metadata beyond its slot.
        return self._file(ino, length)

    def statfs(self, ino: int) -> Outcome[StatFs]:
        volumes = [self._volumes[ino]] if ino in self._volumes else list(self._volumes.values())
        total = free = 0
        for volume in volumes:
            if volume.erased:
                continue
            slots, taken = volume.volume.usage()
            blocks = volume.settings.value_bytes // 4096
            total += slots * blocks
            free += (slots - taken) * blocks
        return StatFs(total, free, free)

    def _folder(self, ino: int) -> Attributes:
        uid, gid = self._owner
        mode = stat.S_IFDIR | 0o755
        return Attributes(ino, mode, nlink=2, uid=uid, gid=gid, valid_seconds=FOLDER_SECONDS)

    def _file(self, ino: int, length: int) -> Attributes:
        uid, gid = self._owner
        blocks = -(-length // 512)
        return Attributes(
            ino, stat.S_IFREG | 0o644, length, uid=uid, gid=gid, blocks=blocks, block_size=READ_BYTES_HINT
        )

    def _value(self, ino: int) -> _Value:
        value = self._values.get(ino)
        if value is None or value.volume.erased:
            raise FsError(errno.ENOENT)
        return value

    def _volume(self, ino: int) -> ServedVolume:
        volume = self._volumes.get(ino)
        if volume is None:
            raise FsError(errno.EPERM if ino == KV_ROOT else errno.ENOTDIR)
        if volume.erased:
            raise FsError(errno.ENOENT)
        if self._may_read is not None and not self._may_read(volume):
            raise FsError(errno.EREMOTE, "another process of the agent serves the volume")
        return volume

    def _want_writer(self) -> None:
        """Raises EROFS where this process reads values alone."""
        if self._may_read is not None:
            raise FsError(errno.EROFS, "this process of the agent serves gets alone")

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        if ino != KV_ROOT and ino not in self._volumes:
            raise FsError(errno.ENOTDIR)
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        parent = ROOT_INODE if ino == KV_ROOT else KV_ROOT
        rows = [(b".", ino), (b"..", parent)]
        if ino == KV_ROOT:
            rows += [(name, at) for name, at in self._volume_inodes.items() if not self._volumes[at].erased]
        return folders(rows, cookie)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        value = self._value(ino)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FsError(errno.EEXIST, "a value is immutable; remove it first")
        handle = next(self._handles)
        with self._lock:
            if not self._open_values.take(caller.holder):
                raise FsError(errno.ENFILE)
            self._opened_by[handle] = caller.holder
            self._note_open(ino, 1)
            reading = value.volume.reader(value.key, self._prestage)
            self._readers[handle] = _Reader(reading, value.length)
            trail = self._trail(caller.pid) if self._continuer.active else None
        if trail is not None:
            self._continuer.chain(value.volume.in_sets, (value.key,), trail)
            self._continuer.reads(value.volume.in_sets, value.key)
        return Opened(handle, direct_io=True, no_flush=True)

    def _trail(self, process: int) -> Trail:
        trail = self._trails.get(process)
        if trail is None:
            trail = self._trails[process] = Trail()
            if len(self._trails) > TRAILS_MAX:
                self._trails.popitem(last=False)
        else:
            self._trails.move_to_end(process)
        return trail

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        self._want_writer()
        volume, key = self._volume(parent), _key(name)
        handle = next(self._handles)
        with self._lock:
            # Its own inode: what others have looked up under this name is another value.
            ino = self._new_node(caller.holder, volume, key, 0)
            is_room = self._open_writers.take(caller.holder)
            if is_room:
                self._opened_by[handle] = caller.holder
                self._note_open(ino, 1)
                writing = volume.writer(key)
                self._writers[handle] = ValueWriter(volume, writing, name, ino, caller.pid, self._judge)
        if not is_room:
            self.forget(ino, 1)
            raise FsError(errno.ENFILE)
        return Entry(self._file(ino, 0)), Opened(handle, direct_io=True)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Steps[int]:
        reader = self._readers.get(handle)
        if reader is None:
            raise FsError(errno.EBADF, "a value being written is read after it is closed")
        reading, channel = reader.reading, self._channel()
        if reader.is_another:
            return 0
        deadline = channel.now() + reading.volume.timing.read_deadline
        count = yield from reading.read(channel, offset, into, deadline)
        if reading.length is not None and reading.length != reader.length:
            # stat(2) has shown the length of the value that was there before.
            reading.give_up(channel, MissCause.EVICTED)
            reader.is_another = True
            return 0
        if reading.cause is not None and reading.length is not None:
            raise FsError(errno.EIO, f"the value was lost while it was read: {reading.cause.name.lower()}")
        return count

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Steps[int]:
        writer = self._writer(handle)
        yield from writer.write(self._channel(), offset, data, by)
        self._show(writer, ino)
        return len(data)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        writer = self._writers.get(handle)
        if writer is None or not writer.writing.received:
            return None
        return self._flush(writer, ino, by)

    def _flush(self, writer: ValueWriter, ino: int, holder: LockOwner) -> Steps[None]:
        yield from writer.close(self._channel(), holder)
        self._show(writer, ino)

    def _show(self, writer: ValueWriter, ino: int) -> None:
        if writer.writing.stored:
            self._complete(ino, writer.writing.received)
            return
        value = self._values.get(ino)
        if value is not None:
            value.length = writer.length

    def _writer(self, handle: int) -> ValueWriter:
        writer = self._writers.get(handle)
        if writer is None:
            raise FsError(errno.EBADF)
        return writer

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        writer = self._writers.get(handle)
        if writer is not None:
            writer.sync()
        return None

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        if mode or offset:
            raise FsError(errno.EOPNOTSUPP)
        writer = self._writer(handle)
        writer.declare(length)
        self._show(writer, ino)
        return None

    def release(self, ino: int, handle: int) -> Outcome[None]:
        with self._lock:
            reader = self._readers.pop(handle, None)
            writer = self._writers.pop(handle, None)
            holder = self._opened_by.pop(handle, None)
            if holder is not None:
                self._note_open(ino, -1)
        if reader is not None:
            reader.reading.close()
            if holder is not None:
                self._open_values.give_back(holder)
        if writer is None:
            return None
        if holder is not None:
            self._open_writers.give_back(holder)
        return self._end(writer)

    def _end(self, writer: ValueWriter) -> Steps[None]:
        yield from writer.end(self._channel())


def _key(name: bytes) -> bytes:
    if len(name) > 255:
        raise FsError(errno.ENAMETOOLONG)
    return key_of_name(name)
