"""What a guest holds: the nodes it was told of and what it has open, in memory and in a file beside it.

A guest does not notice that its device was killed and started again: its kernel goes on with the nodes and
handles that it had. So the books are written through the mapping of a file, which costs no system call and
survives SIGKILL (not a power cut; then the guest's device is gone as well).

    header, 64 bytes   0 magic, 8 epoch u64, 16 identity (16 bytes), 32 INIT: flags u64, 40 minor u32,
                       44 transfer bytes u32, 48 ready u8, 60 CRC-32 of bytes 0 to 47
    records            0 kind u8, 1 bytes of name u8, 2 check u16, 4 number u32, 8 a u64, 16 b u64, 24.. name

The check is the low half of the CRC-32 of the record with a check of 0. A record's kind is written last, so
a record that was cut off is none, and one whose check is wrong ends the books. A full file is written anew,
with what still holds, and takes the old one's place.

Every block of the file is allocated when it is made: a write through a mapping that finds the disk full
would end the agent by SIGBUS. Where there is no room for a file the books go on in memory and say so.
"""

import contextlib
import errno
import logging
import mmap
import os
import struct
import threading
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from agent.errors import G35Error
from agent.fs.fuse.abi import InitFlag
from agent.fs.fuse.session import Negotiated
from agent.host_os.rate_limited_log import Complaints

log = logging.getLogger(__name__)

MAGIC: Final = b"g35vfs\0\2"
ANY_VERSION: Final = 7
"""So many bytes of the magic name the file, the last one its version."""
HEADER: Final = struct.Struct("<8sQ16sQIIB11xI")
RECORD: Final = struct.Struct("<BBHIQQ")
READY_AT: Final = 48
NAME_BYTES_MAX: Final = 255
NUMBER_MAX: Final = 0xFFFF_FFFF
IDENTITY_BYTES: Final = 16
FILE_BYTES_LEAST: Final = 4 << 20
"""The file is written anew at this size, or at twice what held the last time."""
EPOCHS: Final = 1 << 20
"""Restarts after which numbers of nodes and handles repeat."""

Handle = tuple[int, int]
"""Node and handle: faces number their handles by themselves."""

_DISK_IS_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

assert HEADER.size == 64
assert RECORD.size == 24


class _Kind(IntEnum):
    TOLD = 1
    FORGOT = 2
    OPENED = 3
    CLOSED = 4
    DIRTY = 5
    CLEAN = 6
    NOTHING = 7
    TIMES = 8
    """How often a file that was opened is open."""


def record(kind: int, number: int = 0, a: int = 0, b: int = 0, name: bytes = b"") -> bytes:
    head = RECORD.pack(kind, len(name), 0, number, a, b)
    return RECORD.pack(kind, len(name), zlib.crc32(name, zlib.crc32(head)) & 0xFFFF, number, a, b) + name


@dataclass(slots=True)
class Node:
    """How often the guest was told of it, and under which name. Both are as the guest knows them."""

    lookups: int
    parent: int
    name: bytes


@dataclass(slots=True)
class OpenFile:
    """How it was opened, how often, and whether data were written that no flush or fsync has followed."""

    flags: int
    is_folder: bool
    times: int = 1
    dirty: bool = False
    writes: int = field(default=0, compare=False)
    """Counts what was written, so that a flush knows whether more came while it went on."""


class GuestBooks:
    """The books of one device. Safe from any thread."""

    def __init__(self, path: Path | None = None, identity: bytes = bytes(IDENTITY_BYTES)) -> None:
        """`path` None: in memory alone. `identity`: of what the device shows; books of another are void.

        Raises G35Error where the file cannot be had for another reason than a full disk.
        """
        self.epoch = 0
        self.negotiated: Negotiated | None = None
        self.nodes: dict[int, Node] = {}
        self.files: dict[Handle, OpenFile] = {}
        self.opens = 0
        """How often files and folders are open, all together: the sum of their `times`."""
        self._lock = threading.Lock()
        self._complaints = Complaints(log)
        self._path = path
        self._identity = identity
        self._map: mmap.mmap | None = None
        self._at = 0
        if path is not None:
            try:
                with contextlib.suppress(FileNotFoundError, ValueError, struct.error):
                    self._load(path.read_bytes())
                self.epoch = (self.epoch + 1) % EPOCHS
                self._write_anew()
            except OSError as why:
                raise G35Error(
                    f"the books of a guest cannot be kept at {path}: {why.strerror or why}",
                    "agent.state must be a folder that the agent may write to; what lies at that path may go "
                    "while no guest is running",
                ) from None

    def agreed(self, negotiated: Negotiated) -> None:
        """INIT was answered."""
        with self._lock:
            self.negotiated = negotiated
            if self._map is None and self._path is not None:
                # There was no room for a file; this guest begins anew, and there may be room now.
                with contextlib.suppress(OSError):
                    self._write_anew()
            self._write_header()

    def told(self, ino: int, parent: int, name: bytes) -> None:
        with self._lock:
            node = self.nodes.get(ino)
            if node is None:
                self.nodes[ino] = Node(1, parent, name)
            else:
                node.lookups += 1
            self._note(_Kind.TOLD, 1, ino, parent, name)

    def forgot(self, ino: int, count: int) -> int:
        """The guest gives back `count` references; how many of them it had. None are left of all it had."""
        with self._lock:
            node = self.nodes.get(ino)
            if node is None:
                return 0
            given_back = min(count, node.lookups, NUMBER_MAX)
            node.lookups -= given_back
            if not node.lookups:
                del self.nodes[ino]
            self._note(_Kind.FORGOT, given_back, ino)
            return given_back

    def opened(self, ino: int, handle: int, flags: int, *, is_folder: bool = False) -> None:
        with self._lock:
            file = self.files.get((ino, handle))
            if file is None:
                self.files[ino, handle] = OpenFile(flags, is_folder)
            else:
                file.times += 1
            self.opens += 1
            self._note(_Kind.OPENED, flags & 0x7FFF_FFFF | is_folder << 31, ino, b=handle)

    def closed(self, ino: int, handle: int) -> bool:
        """One of the times that it was opened is over; False where it was not open."""
        with self._lock:
            file = self.files.get((ino, handle))
            if file is None:
                return False
            file.times -= 1
            self.opens -= 1
            if not file.times:
                del self.files[ino, handle]
            self._note(_Kind.CLOSED, 0, ino, b=handle)
            return True

    def wrote(self, ino: int, handle: int) -> None:
        """Data are about to be written, or have just been: before a write, because the process may end in
        it, and after it, because a flush that was going on meanwhile may or may not have seen the data."""
        file = self.files.get((ino, handle))
        if file is None:
            return
        with self._lock:
            file.writes += 1
            if not file.dirty:
                file.dirty = True
                self._note(_Kind.DIRTY, 0, ino, b=handle)

    def writes(self, ino: int, handle: int) -> int:
        """What `settled` wants to know from before a flush."""
        file = self.files.get((ino, handle))
        return 0 if file is None else file.writes

    def settled(self, ino: int, handle: int, writes: int) -> None:
        """What had been written when `writes` was asked for is kept, and all, unless more came since."""
        file = self.files.get((ino, handle))
        if file is None:
            return
        with self._lock:
            if file.dirty and file.writes == writes:
                file.dirty = False
                self._note(_Kind.CLEAN, 0, ino, b=handle)

    def clear(self) -> tuple[dict[int, Node], dict[Handle, OpenFile]]:
        """The guest holds nothing any more; what it held until now."""
        with self._lock:
            nodes, files = self.nodes, self.files
            self._hold_nothing()
            self.negotiated = None
            if self._map is not None:
                self._write_header()
                self._note(_Kind.NOTHING)
            return nodes, files

    def _hold_nothing(self) -> None:
        self.nodes, self.files, self.opens = {}, {}, 0

    def close(self) -> None:
        """Keep the file for a successor."""
        with self._lock:
            if self._map is not None:
                self._map.close()
                self._map = None

    def _note(self, kind: _Kind, number: int = 0, a: int = 0, b: int = 0, name: bytes = b"") -> None:
        mapped = self._map
        if mapped is None:
            return
        content = record(kind, number, a, b, name[:NAME_BYTES_MAX])
        at, end = self._at, self._at + len(content)
        if end >= len(mapped):
            try:
                self._write_anew()
            except OSError as why:
                self._without_file(why)
            return
        mapped[at + 1 : end] = content[1:]
        mapped[at] = kind
        self._at = end

    def _write_header(self) -> None:
        mapped, agreed = self._map, self.negotiated
        if mapped is None:
            return
        mapped[READY_AT] = 0
        mapped[: HEADER.size] = self._header(0)
        mapped[READY_AT] = agreed is not None

    def _header(self, ready: int) -> bytes:
        agreed = self.negotiated
        flags, minor, transfer = (
            (int(agreed.flags), agreed.minor, agreed.transfer_bytes) if agreed is not None else (0, 0, 0)
        )
        head = HEADER.pack(MAGIC, self.epoch, self._identity, flags, minor, transfer, ready, 0)
        return head[:-4] + zlib.crc32(head[:READY_AT]).to_bytes(4, "little")

    def _write_anew(self) -> None:
        """Make a file of what holds now. A full disk is said, and leaves the books in memory.

        Raises OSError for anything else that keeps it from being made.
        """
        try:
            try:
                self._make_file()
            except OSError as why:
                if why.errno not in _DISK_IS_FULL:
                    raise
                # The old file's room may do. It would be void anyway: it will not hear what happens now.
                self._drop_file()
                self._make_file()
        except OSError as why:
            if why.errno not in _DISK_IS_FULL:
                raise
            self._without_file(why)

    def _drop_file(self) -> None:
        assert self._path is not None
        if self._map is not None:
            self._map[READY_AT] = 0
            self._map.close()
            self._map = None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _without_file(self, why: OSError) -> None:
        """Go on in memory, and leave no file that the next process could believe."""
        with contextlib.suppress(OSError):
            self._drop_file()
        self._complaints.world(
            f"no room for the books of a guest at {self._path}",
            f"{why.strerror or why}; if the agent is killed now, that guest must mount again; make room, and "
            "they are kept again from the guest's next mount on",
        )

    def _content(self) -> bytes:
        parts = [self._header(int(self.negotiated is not None))]
        for ino, node in self.nodes.items():
            left = node.lookups
            while left:
                number = min(left, NUMBER_MAX)
                parts.append(record(_Kind.TOLD, number, ino, node.parent, node.name[:NAME_BYTES_MAX]))
                left -= number
        for (ino, handle), file in self.files.items():
            number = file.flags & 0x7FFF_FFFF | file.is_folder << 31
            parts.append(record(_Kind.OPENED, number, ino, handle))
            if file.times > 1:
                parts.append(record(_Kind.TIMES, file.times, ino, handle))
            if file.dirty:
                parts.append(record(_Kind.DIRTY, 0, ino, handle))
        return b"".join(parts)

    def _make_file(self) -> None:
        assert self._path is not None
        content = self._content()
        size = max(FILE_BYTES_LEAST, 2 * len(content))
        beside = self._path.with_name(self._path.name + ".new")
        beside.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with open(beside, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file_anew:
                os.posix_fallocate(file_anew.fileno(), 0, size)
                file_anew.write(content)
                file_anew.flush()
                mapped = mmap.mmap(file_anew.fileno(), size)
            os.replace(beside, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        if self._map is not None:
            self._map.close()
        self._map, self._at = mapped, len(content)

    def _load(self, content: bytes) -> None:
        """Take over what an earlier process held. What cannot be read ends the reading: it is not guessed."""
        magic, epoch, identity, flags, minor, transfer, ready, check = HEADER.unpack_from(content)
        if magic[:ANY_VERSION] != MAGIC[:ANY_VERSION]:
            return
        self.epoch = epoch % EPOCHS
        if magic != MAGIC or check != zlib.crc32(content[:READY_AT]):
            return
        if not ready or identity != self._identity:
            return
        self.negotiated = Negotiated(minor, InitFlag(flags), transfer)
        at = HEADER.size
        while at + RECORD.size <= len(content):
            kind, name_bytes, _, number, a, b = RECORD.unpack_from(content, at)
            end = at + RECORD.size + name_bytes
            name = content[at + RECORD.size : end]
            if content[at:end] != record(kind, number, a, b, name):
                return
            if not self._again(kind, number, a, b, name):
                return
            at = end

    def _again(self, kind: int, number: int, a: int, b: int, name: bytes) -> bool:
        if kind == _Kind.TOLD:
            node = self.nodes.setdefault(a, Node(0, b, name))
            node.lookups += number
        elif kind == _Kind.FORGOT:
            self.forgot(a, number)
        elif kind == _Kind.OPENED:
            self.opened(a, b, number & 0x7FFF_FFFF, is_folder=bool(number >> 31))
        elif kind == _Kind.CLOSED:
            self.closed(a, b)
        elif kind == _Kind.TIMES:
            file = self.files.get((a, b))
            if file is not None:
                self.opens += number - file.times
                file.times = number
        elif kind in (_Kind.DIRTY, _Kind.CLEAN):
            file = self.files.get((a, b))
            if file is not None:
                file.dirty = kind == _Kind.DIRTY
        elif kind == _Kind.NOTHING:
            self._hold_nothing()
        else:
            return False
        return True
