"""The inodes of `/shared` that a kernel holds a reference to.

An inode of a file is one content, which never changes: another content of the same name has another number.
So what a kernel has cached of an inode stays true. A file that is being written has an inode of its own.
"""

import errno
import itertools
import stat
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from agent.fs.interface import FACE_SHARED, FACE_SHIFT, Attributes, DirectoryEntry, FsError
from agent.fs.shared.file_writer import FileWriter
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.paths import path_key
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import SHARED, Bounds, Holder, Limit

SHARED_ROOT: Final = FACE_SHARED << FACE_SHIFT | 1
VOLUMES_FROM: Final = SHARED_ROOT + 1
NODES_FROM: Final = SHARED_ROOT + (1 << 16)
"""Numbers below this are those of the root and the volumes, the same in every process."""
NODES: Final = Limit(
    "shared-nodes", "files and folders of /shared that kernels know, one more for each KiB of a manifest",
    131_072, by="user, guest", share=SHARED,
    refused="a file looked up long ago, and not open, goes; else ENFILE", bytes_each=8192,
)  # fmt: skip
READ_BYTES_HINT: Final = 1 << 20
LOOKS_FOR_ROOM: Final = 64
"""Nodes that are looked at for one that may go."""


@dataclass(slots=True, eq=False)
class Node:
    """A folder, a content of a file, or a file that is being written or is about to be."""

    volume: SharedVolume
    path: bytes
    """The path under which the file was found last."""
    holder: Holder
    """Who was told of it first."""
    manifest: Manifest | None = None
    """None: a file that is new."""
    replaced: Manifest | None = None
    """The manifest that the name of a file under way led to before."""
    writer: FileWriter | None = None
    is_written: bool = False
    """Whether the node is for writing: it has an inode of its own, and begins with `manifest`."""
    lookups: int = 1
    opens: int = 0
    cost: int = field(init=False)
    ino: int = 0
    """The inode number that the node was last told by."""

    def __post_init__(self) -> None:
        self.cost = 1 + (0 if self.manifest is None else self.manifest.size >> 10)

    @property
    def is_folder(self) -> bool:
        return self.manifest is not None and self.manifest.is_folder

    def identity(self) -> Hashable:
        """What another lookup finds the node by; None where none does."""
        if self.manifest is None or self.is_written:
            return None
        return self.volume.name, self.path if self.is_folder else self.manifest.identity, self.is_folder

    def attributes(self, ino: int, owner: tuple[int, int]) -> Attributes:
        """What stat(2) shows; `owner` is that of a file of which nothing is known any more."""
        # Each is read once: another thread changes them with the last close.
        if (writer := self.writer) is not None:
            return shown_written(ino, writer)
        if (manifest := self.manifest) is not None:
            return shown(ino, manifest)
        if (replaced := self.replaced) is not None:
            return replace(shown(ino, replaced), size=0, blocks=0)
        return Attributes(ino, stat.S_IFREG | 0o600, uid=owner[0], gid=owner[1])


class Nodes:
    """The table. Safe from any thread."""

    def __init__(self, bounds: Bounds, epoch: int = 0) -> None:
        """`epoch`: nodes have other numbers in each, for a guest that outlives the agent."""
        self._bound = bounds.of(NODES)
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        """The nodes that kernels know; the node looked up longest ago comes first."""
        self._found: dict[Hashable, int] = {}
        self._numbers = itertools.count(NODES_FROM + (epoch << 32))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, ino: int) -> Node:
        """Raises FsError."""
        node = self._nodes.get(ino)
        if node is None or node.volume.erased:
            raise FsError(errno.ENOENT)
        return node

    def folder(self, volume: str, path: bytes) -> Manifest | None:
        """A folder as kernels were told of it last; None where none knows it."""
        with self._lock:
            ino = self._found.get((volume, path, True))
            return None if ino is None else self._nodes[ino].manifest

    def find(self, ino: int) -> Node | None:
        return self._nodes.get(ino)

    def told(self, node: Node) -> tuple[int, Node]:
        """A kernel is told of a node: its number, and the node that is there already where one is.

        Raises FsError where there is no room.
        """
        place = node.identity()
        with self._lock:
            ino = self._found.get(place) if place is not None else None
            if ino is None:
                ino = self._add(node)
                if place is not None:
                    self._found[place] = ino
                return ino, node
            there = self._nodes[ino]
            there.path = node.path
            if there.is_folder:
                there.manifest = node.manifest
            if there.holder != node.holder and self._bound.take(node.holder, there.cost):
                # The last to ask is charged: another may keep it after the first has let go.
                self._bound.give_back(there.holder, there.cost)
                there.holder = node.holder
            there.lookups += 1
            self._nodes.move_to_end(ino)
            return ino, there

    def _add(self, node: Node) -> int:
        if not self._bound.take(node.holder, node.cost) and not self._took_anothers_place(node):
            raise FsError(errno.ENFILE, "too many files and folders are held")
        node.ino = ino = next(self._numbers)
        self._nodes[ino] = node
        return ino

    def _took_anothers_place(self, newcomer: Node) -> bool:
        for _ in range(min(LOOKS_FOR_ROOM, len(self._nodes))):
            ino, node = next(iter(self._nodes.items()))
            if node.opens or node.is_folder or node.writer is not None:
                self._nodes.move_to_end(ino)
                continue
            self._drop(ino, node)
            if self._bound.take(newcomer.holder, newcomer.cost):
                return True
        return False

    def told_again(self, node: Node) -> int:
        """A kernel is told of a node that it may have been told of, and has perhaps given back since: its
        number. Raises FsError where there is no room."""
        with self._lock:
            if self._nodes.get(node.ino) is node:
                node.lookups += 1
            else:
                node.lookups = 1
                self._add(node)
            return node.ino

    def again(self, ino: int) -> None:
        """A kernel is told once more of a node by its number."""
        with self._lock:
            node = self._nodes.get(ino)
            if node is not None:
                node.lookups += 1

    def moved(self, ino: int, path: bytes) -> None:
        """Note that a file which is being written has another name."""
        with self._lock:
            node = self._nodes.get(ino)
            if node is not None:
                node.path = path

    def opened(self, ino: int, change: int) -> None:
        """Note that a node was opened (1), or closed (-1)."""
        with self._lock:
            node = self._nodes.get(ino)
            if node is not None:
                node.opens += change

    def forget(self, ino: int, lookups: int) -> None:
        with self._lock:
            node = self._nodes.get(ino)
            if node is None:
                return
            node.lookups -= lookups
            if node.lookups <= 0:
                self._drop(ino, node)

    def _drop(self, ino: int, node: Node) -> None:
        del self._nodes[ino]
        self._bound.give_back(node.holder, node.cost)
        place = node.identity()
        if place is not None and self._found.get(place) == ino:
            del self._found[place]


def shown_written(ino: int, writer: FileWriter) -> Attributes:
    return Attributes(
        ino, stat.S_IFREG | writer.mode, writer.length, 1, writer.uid, writer.gid, 0,
        -(-writer.length // 512), READ_BYTES_HINT, writer.atime_ns, writer.mtime_ns, writer.ctime_ns,
    )  # fmt: skip


def shown(ino: int, found: Manifest) -> Attributes:
    kind, nlink = (stat.S_IFDIR, 2) if found.is_folder else (stat.S_IFREG, 1)
    return Attributes(
        ino, kind | found.mode, found.length, nlink, found.uid, found.gid, 0, -(-found.length // 512),
        READ_BYTES_HINT, found.atime_ns, found.mtime_ns, found.ctime_ns,
    )  # fmt: skip


def listed(ino: int, path: bytes, names: Iterable[tuple[bytes, bool]], cookie: int) -> list[DirectoryEntry]:
    """The entries of a folder from `cookie` on. The numbers of its names are made up."""
    rows = [(b".", True), (b"..", True), *names]
    entries = []
    for at, (name, is_folder) in enumerate(rows[cookie:], cookie + 1):
        number = NODES_FROM + int.from_bytes(path_key(path + b"/" + name)[:5], "little")
        number = ino if name == b"." else SHARED_ROOT if name == b".." else number
        entries.append(DirectoryEntry(name, number, stat.S_IFDIR if is_folder else stat.S_IFREG, at))
    return entries
