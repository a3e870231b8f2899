"""What a guest holds: the nodes it was told of and what it has open, in memory and in a file beside it.

A guest does not notice that its device was killed and started again: its kernel goes on with the nodes and
handles that it had. So the books are kept where they outlive the process: in a file that is mapped and
written through the mapping, which costs no system call and survives SIGKILL (not a power cut; then the
guest's device is gone as well).

    header, 64 bytes   0 magic, 8 epoch u64, 16 identity (16 bytes), 32 INIT: flags u64, 40 minor u32,
                       44 transfer bytes u32, 48 ready u8
    records            0 kind u8, 1 padding, 2 bytes of name u16, 4 number u32, 8 a u64, 16 b u64, 24.. name

A record's kind is written last, so a record that was cut off is none. A full file is written anew, with
what still holds, and takes the old one's place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from agent.fs.fuse_abi import InitFlag
from agent.fs.fuse_protocol import Negotiated

MAGIC = b"g35vfs\0\1"
HEADER = struct.Struct("<8sQ16sQIIB15x")
RECORD = struct.Struct("<BxHIQQ")
READY_AT = 48
IDENTITY_BYTES = 16
FILE_BYTES_LEAST = 4 << 20
"""The file is written anew at this size, or at twice what held the last time; it is sparse until then."""
EPOCHS = 1 << 20
"""Restarts after which numbers of nodes and handles repeat."""

Handle = tuple[int, int]
"""Node and handle: faces number their handles by themselves."""

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


@dataclass(slots=True)
class _Held:
    nodes: dict[int, Node] = field(default_factory=dict)
    files: dict[Handle, OpenFile] = field(default_factory=dict)


class GuestBooks:
    """The books of one device. Safe from any thread."""

    def __init__(self, path: Path | None = None, identity: bytes = bytes(IDENTITY_BYTES)) -> None:
        """`path` None: in memory alone. `identity`: of what the device shows; books of another are void."""
        self.epoch = 0
        self.negotiated: Negotiated | None = None
        self._held = _Held()
        self._lock = threading.Lock()
        self._path = path
        self._identity = identity
        self._map: mmap.mmap | None = None
        self._at = 0
        if path is not None:
            with contextlib.suppress(FileNotFoundError, ValueError, struct.error):
                self._load(path.read_bytes())
            self.epoch = (self.epoch + 1) % EPOCHS
            self._write_anew()

    @property
    def nodes(self) -> dict[int, Node]:
        return self._held.nodes

    @property
    def files(self) -> dict[Handle, OpenFile]:
        return self._held.files

    # -- what happens ---------------------------------------------------------------------------

    def agreed(self, negotiated: Negotiated) -> None:
        """INIT was answered."""
        with self._lock:
            self.negotiated = negotiated
            self._write_header()

    def told(self, ino: int, parent: int, name: bytes) -> None:
        with self._lock:
            node = self._held.nodes.get(ino)
            if node is None:
                self._held.nodes[ino] = Node(1, parent, name)
            else:
                node.lookups += 1
            self._note(_Kind.TOLD, 1, ino, parent, name)

    def forgot(self, ino: int, count: int) -> int:
        """The guest gives back `count` references; how many of them it had. None are left of all it had."""
        with self._lock:
            node = self._held.nodes.get(ino)
            if node is None:
                return 0
            given_back = min(count, node.lookups)
            node.lookups -= given_back
            if not node.lookups:
                del self._held.nodes[ino]
            self._note(_Kind.FORGOT, given_back, ino)
            return given_back

    def opened(self, ino: int, handle: int, flags: int, *, is_folder: bool = False) -> None:
        with self._lock:
            file = self._held.files.get((ino, handle))
            if file is None:
                self._held.files[ino, handle] = OpenFile(flags, is_folder)
            else:
                file.times += 1
            self._note(_Kind.OPENED, flags & 0x7FFF_FFFF | is_folder << 31, ino, b=handle)

    def closed(self, ino: int, handle: int) -> bool:
        """One of the times that it was opened is over; False where it was not open."""
        with self._lock:
            file = self._held.files.get((ino, handle))
            if file is None:
                return False
            file.times -= 1
            if not file.times:
                del self._held.files[ino, handle]
            self._note(_Kind.CLOSED, 0, ino, b=handle)
            return True

    def wrote(self, ino: int, handle: int) -> None:
        """Data were written; cheap where that is known."""
        file = self._held.files.get((ino, handle))
        if file is not None and not file.dirty:
            with self._lock:
                file.dirty = True
                self._note(_Kind.DIRTY, 0, ino, b=handle)

    def settled(self, ino: int, handle: int) -> None:
        """What was written is kept."""
        file = self._held.files.get((ino, handle))
        if file is not None and file.dirty:
            with self._lock:
                file.dirty = False
                self._note(_Kind.CLEAN, 0, ino, b=handle)

    def clear(self) -> tuple[dict[int, Node], dict[Handle, OpenFile]]:
        """The guest holds nothing any more; what it held until now."""
        with self._lock:
            held, self._held = self._held, _Held()
            self.negotiated = None
            if self._map is not None:
                self._write_header()
                self._note(_Kind.NOTHING)
            return held.nodes, held.files

    def close(self) -> None:
        """Keep the file for whoever comes after."""
        with self._lock:
            if self._map is not None:
                self._map.close()
                self._map = None

    # -- the file -------------------------------------------------------------------------------

    def _note(self, kind: _Kind, number: int = 0, a: int = 0, b: int = 0, name: bytes = b"") -> None:
        mapped = self._map
        if mapped is None:
            return
        at, end = self._at, self._at + RECORD.size + len(name)
        if end >= len(mapped):
            self._write_anew()
            return
        if name:
            mapped[at + RECORD.size : end] = name
        RECORD.pack_into(mapped, at, 0, len(name), number, a, b)
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
        return HEADER.pack(MAGIC, self.epoch, self._identity, flags, minor, transfer, ready)

    def _write_anew(self) -> None:
        assert self._path is not None
        parts = [self._header(int(self.negotiated is not None))]
        for ino, node in self._held.nodes.items():
            head = RECORD.pack(_Kind.TOLD, len(node.name), node.lookups, ino, node.parent)
            parts.append(head + node.name)
        for (ino, handle), file in self._held.files.items():
            number = file.flags & 0x7FFF_FFFF | file.is_folder << 31
            parts += [RECORD.pack(_Kind.OPENED, 0, number, ino, handle)] * file.times
            if file.dirty:
                parts.append(RECORD.pack(_Kind.DIRTY, 0, 0, ino, handle))
        content = b"".join(parts)
        size = max(FILE_BYTES_LEAST, 2 * len(content))
        beside = self._path.with_name(self._path.name + ".new")
        beside.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(beside, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file_anew:
            file_anew.write(content)
            file_anew.truncate(size)
            file_anew.flush()
            mapped = mmap.mmap(file_anew.fileno(), size)
        os.replace(beside, self._path)
        if self._map is not None:
            self._map.close()
        self._map, self._at = mapped, len(content)

    def _load(self, content: bytes) -> None:
        """Take over what an earlier process held. What cannot be read ends the reading: it is not guessed."""
        magic, epoch, identity, flags, minor, transfer, ready = HEADER.unpack_from(content)
        if magic != MAGIC:
            return
        self.epoch = epoch
        if not ready or identity != self._identity:
            return
        self.negotiated = Negotiated(minor, InitFlag(flags), transfer)
        at = HEADER.size
        while at + RECORD.size <= len(content):
            kind, name_bytes, number, a, b = RECORD.unpack_from(content, at)
            name = content[at + RECORD.size : at + RECORD.size + name_bytes]
            at += RECORD.size + name_bytes
            if not self._again(kind, number, a, b, name):
                return

    def _again(self, kind: int, number: int, a: int, b: int, name: bytes) -> bool:
        held = self._held
        if kind == _Kind.TOLD:
            node = held.nodes.setdefault(a, Node(0, b, name))
            node.lookups += number
        elif kind == _Kind.FORGOT:
            self.forgot(a, number)
        elif kind == _Kind.OPENED:
            self.opened(a, b, number & 0x7FFF_FFFF, is_folder=bool(number >> 31))
        elif kind == _Kind.CLOSED:
            self.closed(a, b)
        elif kind in (_Kind.DIRTY, _Kind.CLEAN):
            file = held.files.get((a, b))
            if file is not None:
                file.dirty = kind == _Kind.DIRTY
        elif kind == _Kind.NOTHING:
            self._held = _Held()
        else:
            return False
        return True
