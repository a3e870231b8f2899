"""pyfuse3's handlers over a `FileSystem`. Read agent/fs/doors/pyfuse3_door.py first; it serves them.

Each handler is one call of the file system within `Handlers._run`, the last line of defence: an exception
that pyfuse3 does not expect would unmount the file system. Results become pyfuse3's records inside it, too.
"""

import contextlib
import errno
import queue
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, ModeT, XAttrNameT

from agent.fs.fuse.names import checked_name
from agent.fs.fuse.session import errno_for_kernel
from agent.fs.interface import (
    ROOT_INODE,
    Attributes,
    Caller,
    Entry,
    FileSystem,
    FsError,
    Opened,
    SetAttributes,
    Tree,
    face_of,
)
from agent.host_os.rate_limited_log import Complaints
from agent.pool.steps import Outcome, Runner, settle

T = TypeVar("T")


class Slot:
    """A thread with what one operation under way needs for itself: a runner and a read buffer.

    Not `trio.to_thread`: its threads come and go, and a runner belongs to one thread for good.
    """

    def __init__(self, index: int, make_runner: Callable[[int], Runner], buffer_bytes: int) -> None:
        self.buffer = memoryview(bytearray(buffer_bytes))
        self._index = index
        self._make_runner = make_runner
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Slot], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"pyfuse3-{index}", daemon=True)
        self._thread.start()

    def settle(self, outcome: Outcome[T]) -> T:
        return settle(outcome, self._runner)

    async def run(self, operation: "Callable[[Slot], T]") -> T:
        """What an operation comes to in this slot's thread."""
        result: Future[T] = Future()
        ended, token = trio.Event(), trio.lowlevel.current_trio_token()

        def tell(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(ended.set)

        result.add_done_callback(tell)
        self._jobs.put((result, operation))
        with trio.CancelScope(shield=True):
            await ended.wait()
        return result.result()

    def close(self, timeout: float) -> None:
        """End the thread after its last job, if that ends in time."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            self._runner = self._make_runner(self._index)
        except BaseException as refused:
            # Each operation that comes here answers EIO for it, rather than waiting for ever.
            failure = refused
        while (taken := self._jobs.get()) is not None:
            result, operation = taken
            try:
                if failure is not None:
                    raise RuntimeError("the runner could not be made") from failure
                result.set_result(operation(self))
            except BaseException as bug:
                result.set_exception(bug)


class Handlers(pyfuse3.Operations):
    """One mount's handlers, all on the trio loop's thread; `slots` bound how many operations run."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        tree: Tree,
        slots: list[Slot],
        complaints: Complaints,
        initialised: Callable[[], None],
    ) -> None:
        super().__init__()
        self._face = face_of(tree)
        self._slots = list(slots)
        self._free = trio.Semaphore(len(slots))
        self._complaints = complaints
        self._initialised = initialised
        # libfuse names open files by handle alone, `FileSystem` by inode and handle: a handle is unique
        # within a face only. So the kernel gets numbers of ours.
        self._handles: dict[int, tuple[int, int]] = {}
        self._last_handle = 0

    async def _run(self, doing: str, operation: Callable[[Slot], T]) -> T:
        """`operation` in a thread of its own slot. The slot is given back on the loop's thread, and
        pyfuse3 copies the answer before the loop runs anything else; so an answer may lie in the slot."""
        try:
            await self._free.acquire()
            slot = self._slots.pop()
            try:
                return await slot.run(operation)
            finally:
                self._slots.append(slot)
                self._free.release()
        except FsError as refusal:
            raise pyfuse3.FUSEError(errno_for_kernel(refusal.errno)) from None
        except trio.Cancelled:
            raise
        except BaseException as bug:
            self._complaints.bug(doing, bug)
            raise pyfuse3.FUSEError(errno.EIO) from None

    def _handle(self, fh: int) -> tuple[int, int]:
        found = self._handles.get(fh)
        if found is None:
            raise FsError(errno.EBADF)
        return found

    def _opened(self, fh: int) -> FileSystem:
        return self._face(self._handle(fh)[0])

    def _closed(self, fh: int) -> tuple[int, int]:
        found = self._handle(fh)
        del self._handles[fh]
        return found

    def _new_handle(self, ino: int, opened: Opened) -> FileHandleT:
        self._last_handle += 1
        self._handles[self._last_handle] = (ino, opened.handle)
        return FileHandleT(self._last_handle)

    def _file_info(self, ino: int, opened: Opened) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(
            fh=self._new_handle(ino, opened),
            direct_io=opened.direct_io,
            keep_cache=opened.keep_cache,
        )

    async def _settled(self, doing: str, operation: Callable[[], Outcome[T]]) -> T:
        return await self._run(doing, lambda slot: slot.settle(operation()))

    async def _entry(self, doing: str, operation: Callable[[], Outcome[Entry]]) -> pyfuse3.EntryAttributes:
        return await self._run(doing, lambda slot: entry_of(slot.settle(operation())))

    def init(self) -> None:
        self._initialised()

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        files, caller = self._face(parent_inode), caller_of(ctx)
        return await self._entry("LOOKUP", lambda: files.lookup(caller, parent_inode, checked_name(name)))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        def forget_all(_: Slot) -> None:
            for inode, lookups in inode_list:
                self._face(inode).forget(inode, lookups)

        with contextlib.suppress(pyfuse3.FUSEError):  # there is no answer to FORGET
            await self._run("FORGET", forget_all)

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        files, caller = self._face(inode), caller_of(ctx)
        return await self._run(
            "GETATTR", lambda slot: attributes_of(slot.settle(files.getattr(caller, inode, None)))
        )

    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        caller = caller_of(ctx)
        changes = SetAttributes(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )

        def change(slot: Slot) -> pyfuse3.EntryAttributes:
            handle = None if fh is None else self._handle(fh)[1]
            return attributes_of(slot.settle(self._face(inode).setattr(caller, inode, changes, handle)))

        return await self._run("SETATTR", change)

    async def readlink(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileNameT:
        files, caller = self._face(inode), caller_of(ctx)
        return FileNameT(await self._settled("READLINK", lambda: files.readlink(caller, inode)))

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        files, caller = self._face(parent_inode), caller_of(ctx)
        return await self._entry(
            "MKNOD", lambda: files.mknod(caller, parent_inode, checked_name(name), mode, rdev)
        )

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        files, caller = self._face(parent_inode), caller_of(ctx)
        return await self._entry("MKDIR", lambda: files.mkdir(caller, parent_inode, checked_name(name), mode))

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        files, caller = self._face(parent_inode), caller_of(ctx)
        return await self._entry(
            "SYMLINK", lambda: files.symlink(caller, parent_inode, checked_name(name), target)
        )

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        files, caller = self._face(parent_inode), caller_of(ctx)
        await self._settled("UNLINK", lambda: files.unlink(caller, parent_inode, checked_name(name)))

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        files, caller = self._face(parent_inode), caller_of(ctx)
        await self._settled("RMDIR", lambda: files.rmdir(caller, parent_inode, checked_name(name)))

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        caller = caller_of(ctx)

        def move(slot: Slot) -> None:
            old, new = checked_name(name_old), checked_name(name_new)
            face = self._face(parent_inode_old)
            slot.settle(face.rename(caller, parent_inode_old, old, parent_inode_new, new, flags))

        await self._run("RENAME", move)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        files, caller = self._face(inode), caller_of(ctx)
        return await self._entry(
            "LINK", lambda: files.link(caller, inode, new_parent_inode, checked_name(new_name))
        )

    async def open(self, inode: InodeT, flags: FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        files, caller = self._face(inode), caller_of(ctx)
        opened = await self._settled("OPEN", lambda: files.open(caller, inode, flags))
        return self._file_info(inode, opened)

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        caller = caller_of(ctx)

        def make(slot: Slot) -> tuple[int, Opened, pyfuse3.EntryAttributes]:
            made = self._face(parent_inode).create(caller, parent_inode, checked_name(name), mode, flags)
            entry, opened = slot.settle(made)
            return entry.attributes.ino, opened, entry_of(entry)

        ino, opened, attributes = await self._run("CREATE", make)
        return self._file_info(ino, opened), attributes

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        def fill(slot: Slot) -> memoryview:
            ino, handle = self._handle(fh)
            place = slot.buffer[:size]
            if len(place) < size:
                raise FsError(errno.EINVAL)
            return place[: slot.settle(self._face(ino).read(ino, handle, off, place))]

        # pyfuse3 takes any buffer, whatever its stub says, and copies from it once.
        return cast(bytes, await self._run("READ", fill))

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        def take(slot: Slot) -> int:
            ino, handle = self._handle(fh)
            taken = slot.settle(self._face(ino).write(ino, handle, off, memoryview(buf)))
            if not 0 <= taken <= len(buf):
                raise ValueError(f"write took {taken} of {len(buf)} bytes")
            return taken

        return await self._run("WRITE", take)

    async def flush(self, fh: FileHandleT) -> None:
        await self._settled("FLUSH", lambda: self._opened(fh).flush(*self._handle(fh)))

    async def release(self, fh: FileHandleT) -> None:
        await self._settled("RELEASE", lambda: self._opened(fh).release(*self._closed(fh)))

    async def releasedir(self, fh: FileHandleT) -> None:
        await self._settled("RELEASEDIR", lambda: self._opened(fh).releasedir(*self._closed(fh)))

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._settled("FSYNC", lambda: self._opened(fh).fsync(*self._handle(fh), bool(datasync)))

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._settled("FSYNCDIR", lambda: self._opened(fh).fsyncdir(*self._handle(fh), bool(datasync)))

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileHandleT:
        files, caller = self._face(inode), caller_of(ctx)
        opened = await self._settled("OPENDIR", lambda: files.opendir(caller, inode, 0))
        return self._new_handle(inode, opened)

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        def fill(slot: Slot) -> None:
            ino, handle = self._handle(fh)
            for listed in slot.settle(self._face(ino).readdir(ino, handle, start_id)):
                if listed.name in (b".", b".."):
                    attributes = pyfuse3.EntryAttributes()
                    attributes.st_ino, attributes.st_mode = InodeT(listed.ino), ModeT(listed.mode)
                    looked_up = None
                else:
                    # libfuse asks for READDIRPLUS, in which each name that is told is also looked up.
                    try:
                        looked_up = slot.settle(self._face(ino).lookup(Caller(), ino, listed.name))
                    except FsError:
                        continue  # gone since it was listed
                    attributes = entry_of(looked_up)
                if not pyfuse3.readdir_reply(token, listed.name, attributes, listed.cookie):
                    if looked_up is not None:
                        self._face(ino).forget(looked_up.attributes.ino, 1)
                    return

        await self._run("READDIR", fill)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        def fill(slot: Slot) -> pyfuse3.StatvfsData:
            found = slot.settle(self._face(ROOT_INODE).statfs(ROOT_INODE))
            told = pyfuse3.StatvfsData()
            told.f_bsize = told.f_frsize = found.block_size
            told.f_blocks = found.blocks
            told.f_bfree, told.f_bavail = found.blocks_free, found.blocks_available
            told.f_files, told.f_ffree, told.f_favail = found.files, found.files_free, found.files_free
            told.f_namemax = found.name_bytes_max
            return told

        return await self._run("STATFS", fill)

    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        files, caller = self._face(inode), caller_of(ctx)
        # pyfuse3 itself tells XATTR_CREATE and XATTR_REPLACE apart by asking first.
        await self._settled("SETXATTR", lambda: files.setxattr(caller, inode, name, value, 0))

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: pyfuse3.RequestContext) -> bytes:
        files, caller = self._face(inode), caller_of(ctx)
        return await self._run(
            "GETXATTR", lambda slot: bytes(slot.settle(files.getxattr(caller, inode, name, slot.buffer)))
        )

    async def listxattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> Sequence[XAttrNameT]:
        files, caller = self._face(inode), caller_of(ctx)
        return [
            XAttrNameT(n) for n in await self._settled("LISTXATTR", lambda: files.listxattr(caller, inode))
        ]

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: pyfuse3.RequestContext) -> None:
        files, caller = self._face(inode), caller_of(ctx)
        await self._settled("REMOVEXATTR", lambda: files.removexattr(caller, inode, name))


def caller_of(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid, ctx.umask)


def entry_of(entry: Entry) -> pyfuse3.EntryAttributes:
    told = attributes_of(entry.attributes)
    told.generation = entry.generation
    told.entry_timeout = entry.entry_seconds
    told.attr_timeout = entry.attribute_seconds
    return told


def attributes_of(attributes: Attributes) -> pyfuse3.EntryAttributes:
    told = pyfuse3.EntryAttributes()
    told.st_ino = InodeT(attributes.ino)
    told.entry_timeout, told.attr_timeout = 0, attributes.valid_seconds
    told.st_mode = ModeT(attributes.mode)
    told.st_nlink = attributes.nlink
    told.st_uid, told.st_gid = attributes.uid, attributes.gid
    told.st_rdev = attributes.rdev
    told.st_size = attributes.size
    told.st_blksize, told.st_blocks = attributes.block_size, attributes.blocks
    told.st_atime_ns = attributes.atime_ns
    told.st_mtime_ns = attributes.mtime_ns
    told.st_ctime_ns = attributes.ctime_ns
    return told
