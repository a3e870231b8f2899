"""Files that are being written, by the name that each is to have; and who may know of them.

A file is there for its own process alone until it is closed (of a guest: for the guest). What is written has
an inode of its own, which the kernel gets by looking the name up once more.

Several processes may fill one file, each by an open of its path: who opens it to write, and does not empty
it, writes in the file that another process of the same user writes just then. It is there once all have
closed it.
"""

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NoReturn

from agent.fs.interface import Caller, FsError
from agent.fs.shared.file_writer import FileWriter
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.nodes import Node, Nodes
from agent.fs.shared.volume import SharedVolume
from agent.host_os.per_user_bounds import Holder

RETRIES_MAX: Final = 1024
"""Opens for writing that are under way: see `open_another`."""
RETRY_SECONDS: Final = 5.0
"""The time after which a try that has not come was given up."""


_Opener = tuple[Holder, int, str, bytes]
"""Of whom a thread or a user is, its number, a volume, and a path in it."""


class WrittenFiles:
    """The table of one door. Safe from any thread."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._written: dict[tuple[str, bytes], list[int]] = {}
        self._retries: OrderedDict[_Opener, tuple[float, Node]] = OrderedDict()
        """Nodes to be written, which the kernel is told of when it looks their names up again: until when,
        by the thread that opens."""
        self._opened: OrderedDict[_Opener, tuple[float, Node]] = OrderedDict()
        """The same by the user that opens: its other processes may open the path beside it, and join."""
        self._lock = threading.Lock()
        self.making: Final = threading.Lock()
        """Held while a name is created: of two processes that do so at once the second joins the first."""

    def by(self, caller: Caller, volume: SharedVolume, path: bytes) -> tuple[int, FileWriter] | None:
        """A file that is being written under this path, and that the caller may know of: its own process,
        or one of its guest."""
        for ino, _, writer in self._under(volume, path):
            if writer.unlinked:
                continue
            same = bool(caller.guest) and writer.holder == caller.guest
            if same or writer.users.has_opened(caller.pid):
                return ino, writer
        return None

    def to_join(self, caller: Caller, volume: SharedVolume, path: bytes, flags: int) -> Node | None:
        """A file that is being written under this path, and in which the caller writes, too, if it opens the
        path; None where what it writes is a file of its own. Nobody knows the processes of a guest, or those
        outside of our PID name space."""
        if flags & (os.O_TRUNC | os.O_EXCL) or caller.guest or caller.pid <= 0:
            return None
        for _, node, writer in self._under(volume, path):
            if not (writer.unlinked or writer.has_failed()) and writer.opener_uid == caller.uid:
                return node
        return None

    def replaced(
        self, volume: SharedVolume, path: bytes, before: Manifest | None, now: Manifest | None
    ) -> None:
        """Tell the files that are being written under a path what the name leads to now: a content that is
        given up with the next close, or, where it was `before` and went elsewhere, nothing."""
        for _, _, writer in self._under(volume, path):
            writer.told(before, now)

    def _under(self, volume: SharedVolume, path: bytes) -> Iterator[tuple[int, Node, FileWriter]]:
        """The files that are being written under a path, the latest first."""
        with self._lock:
            inos = list(self._written.get((volume.name, path), ()))
        for ino in reversed(inos):
            node = self._nodes.find(ino)
            # Read once: another thread takes it out with the last close.
            if node is not None and (writer := node.writer) is not None:
                yield ino, node, writer

    def has(self, volume: SharedVolume, path: bytes) -> bool:
        return (volume.name, path) in self._written

    def note(self, ino: int, writer: FileWriter) -> None:
        with self._lock:
            self._written.setdefault((writer.volume.name, writer.path), []).append(ino)

    def drop(self, ino: int, writer: FileWriter) -> None:
        with self._lock:
            place = (writer.volume.name, writer.path)
            left = [each for each in self._written.get(place, ()) if each != ino]
            if left:
                self._written[place] = left
            else:
                self._written.pop(place, None)

    def retry_of(self, caller: Caller, volume: SharedVolume, path: bytes) -> Node | None:
        if not self._retries:
            return None
        found = self._retries.get((caller.holder, caller.pid, volume.name, path))
        return None if found is None or found[0] < time.monotonic() else found[1]

    def retried(self, caller: Caller, node: Node) -> None:
        with self._lock:
            self._retries.pop((caller.holder, caller.pid, node.volume.name, node.path), None)

    def open_another(self, caller: Caller, node: Node, flags: int) -> NoReturn:
        """Have the kernel open a file for writing by an inode of its own: always raises ESTALE.

        What is written is another content, and an inode has one. At ESTALE the kernel looks the name up
        once more (path_openat of fs/namei.c), and is told of the other inode then. It may ask twice: whether
        what it knows is right, and then what is.
        """
        there, now = self.another(caller, node, flags), time.monotonic()
        with self._lock:
            thread = (caller.holder, caller.pid, node.volume.name, node.path)
            self._retries.pop(thread, None)
            self._retries[thread] = now + RETRY_SECONDS, there
            _expire(self._retries, now)
        raise FsError(errno.ESTALE, "to be looked up again, for it is to be written")

    def another(self, caller: Caller, node: Node, flags: int) -> Node:
        """The file that the caller writes by an open of what was found: one of its own, or one in which other
        processes write, too."""
        there = self.to_join(caller, node.volume, node.path, flags)
        base = None if flags & os.O_TRUNC else node.manifest
        place = (caller.holder, caller.uid, node.volume.name, node.path)
        now = time.monotonic()
        with self._lock:
            if there is None and base is not None:
                until, opened = self._opened.get(place, (0.0, node))
                if until >= now and _is_of(opened, base):
                    there = opened
            if there is None:
                there = Node(node.volume, node.path, caller.holder, base, node.manifest, is_written=True)
            # Also one that is joined: where its last close comes first, the next to open it is told of it.
            if base is not None and (caller.guest or caller.pid > 0):
                self._opened.pop(place, None)
                self._opened[place] = now + RETRY_SECONDS, there
            _expire(self._opened, now)
        return there


def writes(flags: int) -> bool:
    """Whether an open with these flags is to write."""
    return flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)


def _is_of(node: Node, base: Manifest) -> bool:
    """Whether a file that was opened to be written begins with this content, and may still be stored."""
    writer, manifest = node.writer, node.manifest
    if writer is not None and (writer.has_failed() or writer.unlinked):
        return False
    return manifest is not None and manifest.identity == base.identity


def _expire(table: OrderedDict[_Opener, tuple[float, Node]], now: float) -> None:
    while table and (len(table) > RETRIES_MAX or next(iter(table.values()))[0] < now):
        table.popitem(last=False)
