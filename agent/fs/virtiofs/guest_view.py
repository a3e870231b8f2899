"""What one guest may see of a file system: the tree that it was given, and of that what it has looked up.

A guest could name the node or the handle of another guest's file. So a `GuestView` stands before the tree and
lets through only nodes that this guest was told of and handles that were opened for it. Its books also say
what to give back when the guest begins anew or is gone, and what the guest held when an earlier process of
the agent was killed (guest_books.py):

* a node of /fs is the same in every process, and so are volumes and `/.g35`. A value of /kv, or a file or
  folder of /shared, has another number now, and is looked up by its name when the guest next asks for it;
* a handle is opened again when it is next used, except where the bytes could be wrong. A file with data that
  no flush or fsync had followed says EIO once. A value being written is gone (EIO), and so is a file of
  /shared. One being read goes on only from its beginning, for it could have been stored anew meanwhile. A
  control session is gone (ENOTCONN).

Handles and nodes of different processes never have the same number: the epoch is part of them.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar, cast

from agent.fs.interface import (
    FACE_SHIFT,
    NOBODY,
    PAGES,
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
    Tree,
    Xattr,
    face_of,
)
from agent.fs.virtiofs.guest_books import GuestBooks, Handle
from agent.fs.virtiofs.left_open import WHOLE_OR_ABSENT, LeftOpen, is_value
from agent.host_os.per_user_bounds import ALL, Limit
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Outcome, Runner, Steps, is_steps, settle

log = logging.getLogger(__name__)

NODES_MAX: Final = 1 << 20
HANDLES_MAX: Final = 1 << 16
NODES: Final = Limit(
    "guest-nodes", "nodes that a guest holds a reference to", NODES_MAX,
    by="guest", share=ALL, refused="ENFILE", bytes_each=1024,
)  # fmt: skip
"""The nodes of each guest. A kernel gives back nodes that it has no room for."""
HANDLES: Final = Limit(
    "guest-open", "files and folders that a guest has open, each as often as it was opened", HANDLES_MAX,
    by="guest", share=ALL, refused="ENFILE", bytes_each=1024,
)  # fmt: skip
"""The open files and folders of each guest."""
EPOCH_SHIFT: Final = 40
"""Handles of a face count from 1 in each process; above these bits stands the epoch."""

T = TypeVar("T")


def then(outcome: Outcome[T], noted: Callable[[T], T]) -> Outcome[T]:
    """`noted` of what the outcome comes to."""
    if is_steps(outcome):
        return _then_later(cast("Steps[T]", outcome), noted)
    return noted(cast(T, outcome))


def _then_later(steps: Steps[T], noted: Callable[[T], T]) -> Steps[T]:
    return noted((yield from steps))


class GuestView(FileSystem):
    """A `FileSystem` in front of another. Safe from any thread."""

    def __init__(self, tree: Tree, books: GuestBooks | None = None, name: str = "guest") -> None:
        """`name`: under which the guest holds what it shares with others."""
        self._face = face_of(tree)
        self._name = name
        self.nodes_refused = self.opens_refused = 0
        self.books = books or GuestBooks()
        self._epoch = self.books.epoch << EPOCH_SHIFT
        self._open: dict[Handle, Handle] = {}
        """What the guest has open in this process: node and handle of the tree, by the guest's."""
        self._left = LeftOpen(tree, self.books, name)
        self._complaints = Complaints(log)

    def place_of(self, ino: int, handle: int) -> Handle | None:
        """Node and handle of the tree of what the guest has open in this process."""
        return self._open.get((ino, handle))

    def _node(self, ino: int) -> int:
        """The tree's node of a guest's. Raises ESTALE for one that this guest was not told of."""
        if ino not in self.books.nodes and ino != ROOT_INODE:
            raise FsError(errno.ESTALE, "a node that this guest was not told of")
        return self._left.moved.get(ino, ino)

    def _on(self, ino: int, operation: Callable[[int], Outcome[T]]) -> Outcome[T]:
        """An operation on a node, which may have to be found first."""
        if ino in self._left.values:
            self._node(ino)
            return self._left.found_then(ino, operation)
        return operation(self._node(ino))

    def _may_look_up(self) -> None:
        if len(self.books.nodes) >= NODES_MAX:
            self.nodes_refused += 1
            raise FsError(errno.ENFILE, "this guest holds too many nodes")

    def _may_open(self) -> None:
        if self.books.opens >= HANDLES_MAX:
            self.opens_refused += 1
            raise FsError(errno.ENFILE, "this guest has too many files open")

    def _named(self, caller: Caller) -> Caller:
        """The caller as one of this guest's, where what it is given is counted."""
        return Caller(caller.uid, caller.gid, caller.pid, caller.umask, self._name)

    def _told(self, parent: int, name: bytes) -> Callable[[Entry], Entry]:
        def noted(entry: Entry) -> Entry:
            self.books.told(entry.attributes.ino, parent, name if is_value(entry.attributes.ino) else b"")
            return entry

        return noted

    def _opened(self, ino: int, inner: int, opened: Opened, flags: int, *, is_folder: bool) -> Opened:
        handle = opened.handle | self._epoch
        self._open[ino, handle] = (inner, opened.handle)
        self.books.opened(ino, handle, flags, is_folder=is_folder)
        return replace(opened, handle=handle) if self._epoch else opened

    def _with(self, ino: int, handle: int, operation: Callable[[int, int], Outcome[T]]) -> Outcome[T]:
        """An operation on an open file, which may have to be opened again first."""
        place = self._open.get((ino, handle))
        if place is not None:
            return operation(*place)
        if (ino, handle) not in self.books.files:
            raise FsError(errno.EBADF, "a handle that this guest was not given")
        return self._left.opened_then(ino, handle, self._open, operation)

    def give_everything_back(self, runner: Runner) -> None:
        """The guest that held all this is no more: close its files, forget its nodes."""
        nodes, files = self.books.clear()
        held, self._open = self._open, {}
        moved, never_found = self._left.clear()
        for place, file in files.items():
            inner = held.get(place)
            if inner is None:
                continue
            face = self._face(inner[0])
            closing = face.releasedir if file.is_folder else face.release
            for _ in range(file.times):
                try:
                    settle(closing(*inner), runner)
                except Exception as failure:
                    what = f"a file that {self._name} left open could not be closed"
                    self._complaints.world(what, str(failure))
        for ino, node in nodes.items():
            if ino in moved:
                self._face(ino).forget(moved[ino], 1)
            elif ino not in never_found:
                self._face(ino).forget(ino, node.lookups)

    def settle_everything(self, runner: Runner) -> None:
        """Before an orderly end: flush the files that the guest has written, so that it finds it all there.

        Not values: a flush completes one, and half of it must not be stored as a whole.
        """
        for (ino, handle), file in list(self.books.files.items()):
            if file.dirty and (ino, handle) in self._open and ino >> FACE_SHIFT not in WHOLE_OR_ABSENT:
                try:
                    settle(self.flush(ino, handle), runner)
                except FsError as refusal:
                    self._complaints.world(f"a file of {self._name} could not be flushed", str(refusal))

    @property
    def held(self) -> tuple[int, int]:
        """Nodes that the guest holds a reference to, and files and folders that it has open."""
        return len(self.books.nodes), len(self.books.files)

    def _makes(
        self, parent: int, name: bytes, operation: Callable[[FileSystem, int], Outcome[Entry]]
    ) -> Outcome[Entry]:
        """An operation in a folder that tells the guest of a node."""
        self._may_look_up()
        made = self._on(parent, lambda node: operation(self._face(parent), node))
        return then(made, self._told(parent, name))

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        named = self._named(caller)
        return self._makes(parent, name, lambda face, node: face.lookup(named, node, name))

    def forget(self, ino: int, lookups: int) -> None:
        given_back = self.books.forgot(ino, lookups)
        if given_back:
            node, count = self._left.forgotten(ino, given_back)
            if count:
                self._face(ino).forget(node, count)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        # By the node alone where the handle is of an earlier process: it shows the same.
        place = None if handle is None else self._open.get((ino, handle))
        if handle is not None and place is None and (ino, handle) not in self.books.files:
            raise FsError(errno.EBADF, "a handle that this guest was not given")
        if place is not None:
            return self._face(ino).getattr(caller, *place)
        return self._on(ino, lambda node: self._face(ino).getattr(caller, node, None))

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        if handle is None:
            return self._on(
                ino, lambda node: self._face(ino).setattr(self._named(caller), node, changes, None)
            )
        return self._with(
            ino,
            handle,
            lambda node, inner: self._face(ino).setattr(self._named(caller), node, changes, inner),
        )

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        return self._on(ino, lambda node: self._face(ino).readlink(caller, node))

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        return self._makes(parent, name, lambda face, node: face.symlink(caller, node, name, target))

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        return self._makes(
            parent, name, lambda face, node: face.mknod(self._named(caller), node, name, mode, rdev)
        )

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        return self._makes(parent, name, lambda face, node: face.mkdir(self._named(caller), node, name, mode))

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        return self._on(parent, lambda node: self._face(parent).unlink(self._named(caller), node, name))

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        return self._on(parent, lambda node: self._face(parent).rmdir(self._named(caller), node, name))

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        def move(node: int, new_node: int) -> Outcome[None]:
            return self._face(parent).rename(self._named(caller), node, name, new_node, new_name, flags)

        return self._on(parent, lambda node: self._on(new_parent, lambda new: move(node, new)))

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        self._may_look_up()
        made = self._face(ino).link(caller, self._node(ino), self._node(new_parent), new_name)
        return then(made, self._told(new_parent, new_name))

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        named = self._named(caller)
        return self._opens(ino, flags, False, lambda node: self._face(ino).open(named, node, flags))

    def _opens(
        self, ino: int, flags: int, is_folder: bool, opening: Callable[[int], Outcome[Opened]]
    ) -> Outcome[Opened]:
        self._may_open()

        def on(node: int) -> Outcome[Opened]:
            return then(
                opening(node), lambda opened: self._opened(ino, node, opened, flags, is_folder=is_folder)
            )

        return self._on(ino, on)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        self._may_look_up()
        self._may_open()

        def noted(made: tuple[Entry, Opened]) -> tuple[Entry, Opened]:
            entry, opened = made
            ino = entry.attributes.ino
            self._told(parent, name)(entry)
            return entry, self._opened(ino, ino, opened, flags | os.O_CREAT, is_folder=False)

        named = self._named(caller)
        made = self._on(parent, lambda node: self._face(parent).create(named, node, name, mode, flags))
        return then(made, noted)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        place = self._open.get((ino, handle))
        if place is not None and place not in self._left.reading:
            return self._face(ino).read(place[0], place[1], offset, into)
        return self._with(ino, handle, lambda node, inner: self._left.read(node, inner, offset, into))

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        self.books.wrote(ino, handle)
        # Its process numbers are not this machine's.
        there = by if by is PAGES else LockOwner(by.owner)
        done = self._with(
            ino, handle, lambda node, inner: self._face(ino).write(node, inner, offset, data, there)
        )
        return then(done, self._wrote(ino, handle))

    def _wrote(self, ino: int, handle: int) -> Callable[[T], T]:
        """Note a write once more before it is acknowledged: a flush may have gone on meanwhile."""

        def noted(result: T) -> T:
            self.books.wrote(ino, handle)
            return result

        return noted

    def _settles(
        self, ino: int, handle: int, operation: Callable[[int, int], Outcome[None]]
    ) -> Outcome[None]:
        """A flush or fsync. It settles what was written before it began, and nothing that came after."""
        writes = self.books.writes(ino, handle)
        done = self._with(ino, handle, operation)
        return then(done, lambda nothing: self.books.settled(ino, handle, writes))

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        there = LockOwner(by.owner)
        return self._settles(ino, handle, lambda node, inner: self._face(ino).flush(node, inner, there))

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return self._settles(ino, handle, lambda node, inner: self._face(ino).fsync(node, inner, data_only))

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        self.books.wrote(ino, handle)
        done = self._with(
            ino, handle, lambda node, inner: self._face(ino).fallocate(node, inner, mode, offset, length)
        )
        return then(done, self._wrote(ino, handle))

    def release(self, ino: int, handle: int) -> Outcome[None]:
        return self._close(ino, handle, self._face(ino).release)

    def _close(self, ino: int, handle: int, closing: Callable[[int, int], Outcome[None]]) -> Outcome[None]:
        if not self.books.closed(ino, handle):
            raise FsError(errno.EBADF, "a handle that this guest was not given")
        place = self._open.get((ino, handle))
        if (ino, handle) not in self.books.files:
            self._open.pop((ino, handle), None)
            self._left.closed(ino, handle, place)
        return None if place is None else closing(*place)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        return self._opens(ino, flags, True, lambda node: self._face(ino).opendir(caller, node, flags))

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        return self._with(ino, handle, lambda node, inner: self._face(ino).readdir(node, inner, cookie))

    def releasedir(self, ino: int, handle: int) -> Outcome[None]:
        return self._close(ino, handle, self._face(ino).releasedir)

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return self._with(ino, handle, lambda node, inner: self._face(ino).fsyncdir(node, inner, data_only))

    def statfs(self, ino: int) -> Outcome[StatFs]:
        return self._on(ino, self._face(ino).statfs)

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        return self._on(ino, lambda node: self._face(ino).setxattr(caller, node, name, value, flags))

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[Xattr]:
        return self._on(ino, lambda node: self._face(ino).getxattr(caller, node, name, room))

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        return self._on(ino, lambda node: self._face(ino).listxattr(caller, node))

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        return self._on(ino, lambda node: self._face(ino).removexattr(caller, node, name))

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        # A guest's process numbers are not this machine's, and its memory is mapped already.
        raise FsError(errno.ENOTTY)
