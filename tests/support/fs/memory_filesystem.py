"""A complete POSIX-ish tree in memory behind `FileSystem`: what the doors are tested against.

It is deliberately plain: one lock, pages in a dictionary, so that files can be sparse and 2^62 bytes long.
`FaultyFileSystem` raises what a test tells it to.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agent.fs.interface import (
    NAME_BYTES_MAX,
    NOBODY,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FsError,
    LockOwner,
    Opened,
    SetAttributes,
    StatFs,
)
from agent.pool.steps import Outcome

PAGE = 1 << 16
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
XATTR_CREATE, XATTR_REPLACE = 1, 2
TREE_CAPACITY = 512 << 20


@dataclass(slots=True)
class Node:
    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int = 0
    nlink: int = 1
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    pages: dict[int, bytearray] = field(default_factory=dict)
    children: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # name: (inode, cookie)
    parent: int = 0
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    lookups: int = 0
    opens: int = 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class MemoryFileSystem:
    """The tree. `direct_io` is what `open` tells the kernel."""

    def __init__(self, *, direct_io: bool = False, capacity: int = TREE_CAPACITY) -> None:
        self._lock = threading.RLock()
        self._inodes = itertools.count(ROOT_INODE + 1)
        self._handles = itertools.count(1)
        self._cookies = itertools.count(3)
        self._open: dict[int, int] = {}
        self._direct_io = direct_io
        self._pages_free = capacity // PAGE
        self._capacity = capacity
        root = Node(ROOT_INODE, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), nlink=2)
        root.parent = ROOT_INODE
        root.atime_ns = root.mtime_ns = root.ctime_ns = time.time_ns()
        self.nodes: dict[int, Node] = {ROOT_INODE: root}

    @property
    def open_handles(self) -> int:
        return len(self._open)

    # Inner matters

    def _node(self, ino: int) -> Node:
        node = self.nodes.get(ino)
        if node is None:
            raise FsError(errno.ESTALE)
        return node

    def _directory(self, ino: int) -> Node:
        node = self._node(ino)
        if not node.is_directory:
            raise FsError(errno.ENOTDIR)
        return node

    def _child(self, parent: int, name: bytes) -> Node:
        if len(name) > NAME_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG)
        found = self._directory(parent).children.get(name)
        if found is None:
            raise FsError(errno.ENOENT)
        return self._node(found[0])

    def _attributes(self, node: Node) -> Attributes:
        return Attributes(
            ino=node.ino,
            mode=node.mode,
            size=node.size,
            nlink=node.nlink,
            uid=node.uid,
            gid=node.gid,
            rdev=node.rdev,
            blocks=len(node.pages) * (PAGE // 512),
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            ctime_ns=node.ctime_ns,
        )

    def _entry(self, node: Node) -> Entry:
        node.lookups += 1
        return Entry(self._attributes(node))

    def _touch(self, *nodes: Node, modified: bool = True) -> None:
        now = time.time_ns()
        for node in nodes:
            node.ctime_ns = now
            if modified:
                node.mtime_ns = now

    def _link_in(self, directory: Node, name: bytes, node: Node) -> None:
        directory.children[name] = (node.ino, next(self._cookies))
        if node.is_directory:
            directory.nlink += 1
            node.parent = directory.ino
        self._touch(directory)

    def _link_out(self, directory: Node, name: bytes, node: Node) -> None:
        del directory.children[name]
        if node.is_directory:
            directory.nlink -= 1
        self._touch(directory)

    def _drop_if_unused(self, node: Node) -> None:
        if node.nlink <= 0 and node.lookups <= 0 and node.opens <= 0:
            self._pages_free += len(node.pages)
            self.nodes.pop(node.ino, None)

    def _make(
        self, caller: Caller, parent: int, name: bytes, mode: int, *, rdev: int = 0, target: bytes = b""
    ) -> Node:
        directory = self._directory(parent)
        if len(name) > NAME_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG)
        if name in directory.children:
            raise FsError(errno.EEXIST)
        if directory.nlink <= 0:
            raise FsError(errno.ENOENT)
        gid = caller.gid
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        node = Node(next(self._inodes), mode, caller.uid, gid, rdev, target=target, size=len(target))
        node.nlink = 2 if stat.S_ISDIR(mode) else 1
        node.atime_ns = node.mtime_ns = node.ctime_ns = time.time_ns()
        self.nodes[node.ino] = node
        self._link_in(directory, name, node)
        return node

    def _opened(self, node: Node) -> Opened:
        handle = next(self._handles)
        self._open[handle] = node.ino
        node.opens += 1
        return Opened(handle, direct_io=self._direct_io and not node.is_directory)

    def _closed(self, handle: int) -> None:
        ino = self._open.pop(handle, None)
        if ino is None:
            raise FsError(errno.EBADF)
        node = self._node(ino)
        node.opens -= 1
        self._drop_if_unused(node)

    def _resize(self, node: Node, size: int) -> None:
        if size < node.size:
            last = size // PAGE
            for index in [
                index for index in node.pages if index > last or (index == last and not size % PAGE)
            ]:
                del node.pages[index]
                self._pages_free += 1
            if last in node.pages:
                start = size % PAGE
                node.pages[last][start:] = bytes(PAGE - start)
        node.size = size
        self._touch(node)

    def _zero(self, node: Node, start: int, end: int) -> None:
        for index, page in node.pages.items():
            first, last = max(start - index * PAGE, 0), min(end - index * PAGE, PAGE)
            if first < last:
                page[first:last] = bytes(last - first)

    # The operations

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        with self._lock:
            return self._entry(self._child(parent, name))

    def forget(self, ino: int, lookups: int) -> None:
        with self._lock:
            node = self.nodes.get(ino)
            if node is not None and ino != ROOT_INODE:
                node.lookups -= lookups
                self._drop_if_unused(node)

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        with self._lock:
            return self._attributes(self._node(ino))

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        with self._lock:
            node = self._node(ino)
            if changes.size is not None:
                if node.is_directory:
                    raise FsError(errno.EISDIR)
                self._resize(node, changes.size)
            if changes.mode is not None:
                node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(changes.mode)
            if changes.uid is not None:
                node.uid = changes.uid
            if changes.gid is not None:
                node.gid = changes.gid
            now = time.time_ns()
            if changes.atime_ns is not None or changes.touch_atime:
                node.atime_ns = now if changes.atime_ns is None else changes.atime_ns
            if changes.mtime_ns is not None or changes.touch_mtime:
                node.mtime_ns = now if changes.mtime_ns is None else changes.mtime_ns
            node.ctime_ns = now
            return self._attributes(node)

    def readlink(self, caller: Caller, ino: int) -> Outcome[bytes]:
        with self._lock:
            node = self._node(ino)
            if not stat.S_ISLNK(node.mode):
                raise FsError(errno.EINVAL)
            return node.target

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Outcome[Entry]:
        with self._lock:
            return self._entry(self._make(caller, parent, name, stat.S_IFLNK | 0o777, target=target))

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        with self._lock:
            if not stat.S_IFMT(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                raise FsError(errno.EINVAL)
            return self._entry(self._make(caller, parent, name, mode, rdev=rdev))

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Outcome[Entry]:
        with self._lock:
            return self._entry(self._make(caller, parent, name, stat.S_IFDIR | stat.S_IMODE(mode)))

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        with self._lock:
            node = self._child(parent, name)
            if node.is_directory:
                raise FsError(errno.EISDIR)
            self._link_out(self._directory(parent), name, node)
            node.nlink -= 1
            self._touch(node, modified=False)
            self._drop_if_unused(node)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Outcome[None]:
        with self._lock:
            node = self._child(parent, name)
            if not node.is_directory:
                raise FsError(errno.ENOTDIR)
            if node.children:
                raise FsError(errno.ENOTEMPTY)
            self._link_out(self._directory(parent), name, node)
            node.nlink = 0
            self._drop_if_unused(node)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Outcome[None]:
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise FsError(errno.EINVAL)
        if len(new_name) > NAME_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG)
        with self._lock:
            source, target = self._directory(parent), self._directory(new_parent)
            node = self._child(parent, name)
            found = target.children.get(new_name)
            other = self._node(found[0]) if found else None
            if flags == RENAME_EXCHANGE:
                if other is None:
                    raise FsError(errno.ENOENT)
                self._link_out(source, name, node)
                if other is not node:
                    self._link_out(target, new_name, other)
                self._link_in(target, new_name, node)
                self._link_in(source, name, other)
                self._touch(node, other, modified=False)
                return
            if other is node:
                return
            if other is not None:
                if flags == RENAME_NOREPLACE:
                    raise FsError(errno.EEXIST)
                if other.is_directory and not node.is_directory:
                    raise FsError(errno.EISDIR)
                if node.is_directory and not other.is_directory:
                    raise FsError(errno.ENOTDIR)
                if other.children:
                    raise FsError(errno.ENOTEMPTY)
                self._link_out(target, new_name, other)
                other.nlink = 0 if other.is_directory else other.nlink - 1
                self._touch(other, modified=False)
                self._drop_if_unused(other)
            self._link_out(source, name, node)
            self._link_in(target, new_name, node)
            self._touch(node, modified=False)

    def link(self, caller: Caller, ino: int, new_parent: int, new_name: bytes) -> Outcome[Entry]:
        with self._lock:
            node, directory = self._node(ino), self._directory(new_parent)
            if node.is_directory:
                raise FsError(errno.EPERM)
            if len(new_name) > NAME_BYTES_MAX:
                raise FsError(errno.ENAMETOOLONG)
            if new_name in directory.children:
                raise FsError(errno.EEXIST)
            self._link_in(directory, new_name, node)
            node.nlink += 1
            self._touch(node, modified=False)
            return self._entry(node)

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        with self._lock:
            node = self._node(ino)
            if node.is_directory:
                raise FsError(errno.EISDIR)
            if flags & os.O_TRUNC:
                self._resize(node, 0)
            return self._opened(node)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        with self._lock:
            if name in self._directory(parent).children and not flags & os.O_EXCL:
                node = self._child(parent, name)
                if flags & os.O_TRUNC:
                    self._resize(node, 0)
            else:
                node = self._make(caller, parent, name, stat.S_IFREG | stat.S_IMODE(mode))
            return self._entry(node), self._opened(node)

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Outcome[int]:
        with self._lock:
            node = self._node(ino)
            count = max(0, min(len(into), node.size - offset))
            done = 0
            while done < count:
                index, start = divmod(offset + done, PAGE)
                step, page = min(PAGE - start, count - done), node.pages.get(index)
                into[done : done + step] = page[start : start + step] if page else bytes(step)
                done += step
            return count

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Outcome[int]:
        with self._lock:
            node, done = self._node(ino), 0
            while done < len(data):
                index, start = divmod(offset + done, PAGE)
                step, page = min(PAGE - start, len(data) - done), node.pages.get(index)
                if page is None:
                    if not self._pages_free:
                        break
                    self._pages_free -= 1
                    page = node.pages[index] = bytearray(PAGE)
                page[start : start + step] = data[done : done + step]
                done += step
            if data and not done:
                raise FsError(errno.ENOSPC)
            node.size = max(node.size, offset + done)
            self._touch(node)
            return done

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        return None

    def release(self, ino: int, handle: int) -> Outcome[None]:
        with self._lock:
            self._closed(handle)

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        with self._lock:
            node = self._node(ino)
            if mode == FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE:
                self._zero(node, offset, offset + length)
            elif mode == 0:
                if length > self._capacity:
                    raise FsError(errno.ENOSPC)
                node.size = max(node.size, offset + length)
            elif mode != FALLOC_KEEP_SIZE:
                raise FsError(errno.EOPNOTSUPP)
            self._touch(node)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        with self._lock:
            return self._opened(self._directory(ino))

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        with self._lock:
            node = self._directory(ino)
            parent = self.nodes.get(node.parent, node)
            entries = [
                DirectoryEntry(b".", node.ino, node.mode, 1),
                DirectoryEntry(b"..", parent.ino, parent.mode, 2),
            ]
            for name, (child, place) in node.children.items():
                entries.append(DirectoryEntry(name, child, self._node(child).mode, place))
            return [entry for entry in entries if entry.cookie > cookie]

    def releasedir(self, ino: int, handle: int) -> Outcome[None]:
        with self._lock:
            self._closed(handle)

    def fsyncdir(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        return None

    def statfs(self, ino: int) -> Outcome[StatFs]:
        free = self._pages_free
        return StatFs(self._capacity // PAGE, free, free, 1 << 20, 1 << 20, block_size=PAGE)

    def setxattr(self, caller: Caller, ino: int, name: bytes, value: bytes, flags: int) -> Outcome[None]:
        with self._lock:
            xattrs = self._node(ino).xattrs
            if name.startswith(b"system."):
                raise FsError(errno.EOPNOTSUPP)
            if flags & XATTR_CREATE and name in xattrs:
                raise FsError(errno.EEXIST)
            if flags & XATTR_REPLACE and name not in xattrs:
                raise FsError(errno.ENODATA)
            xattrs[name] = value

    def getxattr(self, caller: Caller, ino: int, name: bytes, room: memoryview) -> Outcome[bytes]:
        with self._lock:
            value = self._node(ino).xattrs.get(name)
            if value is None:
                raise FsError(errno.ENODATA)
            return value

    def listxattr(self, caller: Caller, ino: int) -> Outcome[list[bytes]]:
        with self._lock:
            return list(self._node(ino).xattrs)

    def removexattr(self, caller: Caller, ino: int, name: bytes) -> Outcome[None]:
        with self._lock:
            if self._node(ino).xattrs.pop(name, None) is None:
                raise FsError(errno.ENODATA)

    def ioctl(self, caller: Caller, ino: int, handle: int, command: int, data: memoryview) -> Outcome[bytes]:
        raise FsError(errno.ENOTTY)


class FaultyFileSystem:
    """Another file system whose operations raise what `faults` names, as long as it names it."""

    def __init__(self, inner: MemoryFileSystem) -> None:
        self._inner = inner
        self.faults: dict[str, Callable[[], BaseException]] = {}
        self.raised = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)

        def guarded(*arguments: Any) -> Any:
            fault = self.faults.get(name)
            if fault is not None:
                self.raised += 1
                raise fault()
            return operation(*arguments)

        return guarded
