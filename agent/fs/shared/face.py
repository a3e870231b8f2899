"""`/shared/<volume>/…`: files of any length that every agent of the pool sees, without metadata servers.

The name of a file is a hash away from its manifest, and that from its chunks (manifest.py). Nothing else
knows of a file, so there is no table to ask, to lock or to lose (docs/decisions/0051-shared-files.md).

* A lookup reads the manifest anew each time: a file is there for all once its writer has closed it.
* An open asks for all chunks in one round trip and holds them. A file one of whose chunks went is ENOENT, and
  its manifest goes: never a shorter file, never a hole (file_reader.py).
* A file that is written is there for its own process alone until it is closed (file_writer.py). What it
  replaces stays until then, and is another inode.
* A folder is a manifest of its own. A listing shows the names that this agent has seen lately
  (recent_names.py).
* A rename puts the manifest under the new name and takes the old one away. Of two that race one is whole.
"""

# One idea in one file: the operations of the face; their tables and parts are in the other files here.

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent.fs.after_reply import AfterReply
from agent.fs.close_cause import how_closed
from agent.fs.file_users import Judge
from agent.fs.interface import (
    FIXED_SECONDS,
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
    check_same_face,
    folders,
)
from agent.fs.shared.call_prediction import Habits
from agent.fs.shared.chunks import STAGED, wall_ns
from agent.fs.shared.discards import Discards
from agent.fs.shared.file_reader import OpenFile, Prestage, ReadsUnderWay, asks_in_turn, let_go
from agent.fs.shared.file_writer import FileWriter
from agent.fs.shared.manifest import Manifest
from agent.fs.shared.names import FOLDER_MODE, GONE, NAMES_ASKED, Names, answered, folder
from agent.fs.shared.nodes import SHARED_ROOT, VOLUMES_FROM, Node, Nodes, listed, shown, shown_written
from agent.fs.shared.paths import ROOT_PATH, join
from agent.fs.shared.recent_names import NamesSeen
from agent.fs.shared.unnamed import UnnamedChunks
from agent.fs.shared.volume import Hold, SharedVolume, room_of
from agent.fs.shared.volume_folders import FOLDER_SECONDS, VolumeFolders
from agent.fs.shared.whole_files import WholeFiles
from agent.fs.shared.written_files import WrittenFiles, writes
from agent.host_os.per_user_bounds import SHARED, Bounds, Holder, Limit
from agent.pool.counters import MissCause
from agent.pool.read.prestage_cache import PrestageCache
from agent.pool.steps import IoChannel, Outcome, Steps

OPEN_FILES: Final = Limit(
    "shared-open", "files of /shared that are open for reading", 65_536,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=65_536,
)  # fmt: skip
WRITERS: Final = Limit(
    "shared-writers", "files of /shared that are being written", 1024,
    by="user, guest", share=SHARED, refused="ENFILE", bytes_each=262_144,
)  # fmt: skip
"""Each writer keeps the directories of its unnamed chunks remembered, UNNAMED_MAX at the most."""
RENAME_NOREPLACE: Final = 1


@dataclass(slots=True, eq=False)
class _Handle:
    """An open file: read as it is, or written."""

    node: Node
    holder: Holder
    reading: OpenFile | None = None
    writer: FileWriter | None = None
    may_write: bool = False


class SharedFace(FileSystem):
    """`/shared`. Safe from any thread: tables have locks, and files have their own.

    `channel` gives the channel that drives the steps, so it is called inside steps only.
    """

    def __init__(
        self,
        volumes: Sequence[SharedVolume],
        channel: Callable[[], IoChannel],
        discards: Discards,
        prestage: PrestageCache | None = None,
        owner: tuple[int, int] = (0, 0),
        epoch: int = 0,
        ahead: Prestage | None = None,
        judge: Judge = how_closed,
        bounds: Bounds | None = None,
        seen: NamesSeen | None = None,
        unnamed: UnnamedChunks | None = None,
        after_reply: AfterReply | None = None,
    ) -> None:
        """`epoch`: nodes have other numbers in each, for a guest that outlives the agent. `judge` tells how
        a file was closed."""
        bounds = bounds or Bounds()
        self._judge = judge
        self._open_files, self._open_writers = bounds.of(OPEN_FILES), bounds.of(WRITERS)
        self._staged = bounds.of(STAGED)
        self._unnamed = UnnamedChunks() if unnamed is None else unnamed
        self._after_reply = after_reply or AfterReply(0)
        self._volumes = {VOLUMES_FROM + number: volume for number, volume in enumerate(volumes)}
        self._volume_inodes = {volume.name.encode(): ino for ino, volume in self._volumes.items()}
        self._channel = channel
        self._discards = discards
        self._prestage = prestage
        self._owner = owner
        self._ahead = ahead
        self._nodes = Nodes(bounds, epoch)
        self._habits = Habits(self._unnamed)
        self._under_way = ReadsUnderWay()
        self._seen = NamesSeen() if seen is None else seen
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(1)
        self._names = Names(channel, self._seen, owner)
        self._whole = WholeFiles(channel, self._names, self._seen, self._habits, discards)
        self._folders = VolumeFolders(self._volumes, channel, self._names, owner)
        self._written = WrittenFiles(self._nodes)
        self._lock = threading.Lock()

    # -- names ----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Outcome[Entry]:
        if parent == SHARED_ROOT:
            ino = self._volume_inodes.get(name)
            if ino is None or self._volumes[ino].erased:
                raise FsError(errno.ENOENT)
            return self._lookup_volume(ino)
        volume, path = self._place(parent, name)
        written = self._written.by(caller, volume, path)
        if written is not None:
            self._nodes.again(written[0])
            return Entry(shown_written(*written))
        retry = self._written.retry_of(caller, volume, path)
        if retry is not None:
            ino = self._nodes.told_again(retry)
            return Entry(retry.attributes(ino, self._owner))
        return self._lookup(caller, volume, path)

    def _lookup_volume(self, ino: int) -> Steps[Entry]:
        return Entry((yield from self._folders.find(ino)), FOLDER_SECONDS, FOLDER_SECONDS)

    def _lookup(
        self, caller: Caller, volume: SharedVolume, path: bytes, *, is_all: bool = True
    ) -> Steps[Entry]:
        """`is_all`: nothing else is done for the request."""
        before = self._habits.leads_to(volume.name, path)
        if is_all:
            self._channel().comes_again()
        if before is not None:
            self._patient_channel()  # who has just stored it renames it next
        found, held, is_whole = yield from self._whole.found_beside(caller, volume, path)
        if not (is_whole or isinstance(found, MissCause)):
            found, held = yield from self._whole.there(caller.holder, volume, path, found)
        there = None if isinstance(found, MissCause) else found
        if there is not None or found in GONE:  # else the lookup may come again, with as much patience
            self._habits.looked_up(volume.name, path, before, there)
        if isinstance(found, MissCause):
            self._habits.missed(caller, (volume.name, path))
            known = self._nodes.folder(volume.name, path)
            found = yield from self._names.folder_again(volume, path, found, known)
        self._seen.note(volume.name, path, is_folder=found.is_folder)
        try:
            ino, _ = self._nodes.told(Node(volume, path, caller.holder, found))
        except FsError:
            let_go(held)
            raise
        if found.is_folder:
            return Entry(shown(ino, found), FOLDER_SECONDS, FOLDER_SECONDS)
        self._habits.found(caller, ino, (volume.name, path))
        if held:
            self._habits.hold(ino, held, self._channel().now())
        # The kernel may not remember the name: another agent may remove or replace the file.
        return Entry(shown(ino, found), 0.0, 1.0)

    def _patient_channel(self) -> IoChannel:
        """For a change of names: by a look that came too late it would fail, or not see what is there."""
        channel = self._channel()
        channel.waits_for_slow()
        return channel

    def _place(self, parent: int, name: bytes) -> tuple[SharedVolume, bytes]:
        """The volume and the path of a name in a folder. Raises FsError."""
        if parent == SHARED_ROOT:
            raise FsError(errno.EPERM, "volumes are made by g35 pool")
        volume, folder = self._folder_of(parent)
        path = join(folder, name)
        if len(path) > volume.path_bytes_max:
            raise FsError(errno.ENAMETOOLONG)
        return volume, path

    def _folder_of(self, ino: int) -> tuple[SharedVolume, bytes]:
        volume = self._volumes.get(ino)
        if volume is not None:
            if volume.erased:
                raise FsError(errno.ENOENT)
            return volume, ROOT_PATH
        node = self._nodes.get(ino)
        if not node.is_folder:
            raise FsError(errno.ENOTDIR)
        return node.volume, node.path

    def forget(self, ino: int, lookups: int) -> None:
        self._nodes.forget(ino, lookups)
        # The kernel looks a name up twice where what it knew is another inode, and forgets the first answer.
        if self._nodes.find(ino) is None:
            self._habits.drop_held(ino)

    def _published(self, writer: FileWriter) -> None:
        self._seen.note(writer.volume.name, writer.path, is_folder=False)
        if writer.manifest is not None:
            self._habits.know(writer.volume.name, writer.manifest)
            self._written.replaced(writer.volume, writer.path, None, writer.manifest)

    # -- attributes -----------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: int, handle: int | None) -> Outcome[Attributes]:
        if ino == SHARED_ROOT:
            return self._root()
        if ino in self._volumes:
            self._folder_of(ino)
            return self._folders.find_again(ino)
        return self._nodes.get(ino).attributes(ino, self._owner)

    def _root(self) -> Attributes:
        mode = stat.S_IFDIR | FOLDER_MODE
        uid, gid = self._owner
        return Attributes(SHARED_ROOT, mode, nlink=2, uid=uid, gid=gid, valid_seconds=FIXED_SECONDS)

    def setattr(
        self, caller: Caller, ino: int, changes: SetAttributes, handle: int | None
    ) -> Outcome[Attributes]:
        if ino == SHARED_ROOT:
            raise FsError(errno.EPERM)
        if ino in self._volumes:
            volume, _ = self._folder_of(ino)
            return self._change_folder(ino, volume, ROOT_PATH, changes)
        node = self._nodes.get(ino)
        if node.is_folder:
            return self._change_folder(ino, node.volume, node.path, changes)
        writer = node.writer
        if writer is not None:
            return self._change_written(ino, writer, changes)
        if changes.size is not None and node.manifest is not None and changes.size != node.manifest.length:
            return self._truncate(caller, ino, node, changes.size)
        if changes.touch_atime or changes.touch_mtime or changes.mtime_ns is not None:
            return self._touch(ino, node)
        # Mode, owner and times of a file that is complete stay as they are.
        return node.attributes(ino, self._owner)

    def _change_written(self, ino: int, writer: FileWriter, changes: SetAttributes) -> Steps[Attributes]:
        channel = self._channel()
        if changes.size is not None:
            yield from writer.resize(channel, changes.size)
        yield from writer.change(channel, changes)
        return shown_written(ino, writer)

    def _change_folder(
        self, ino: int, volume: SharedVolume, path: bytes, changes: SetAttributes
    ) -> Steps[Attributes]:
        """Mode and owner of a folder are kept: it has no content that another agent could replace."""
        channel = self._patient_channel()
        now_ns = wall_ns(channel)
        found = answered((yield from self._names.newest(volume, path)))
        if isinstance(found, MissCause):
            known = self._folders.known(ino) or self._nodes.folder(volume.name, path)
            found = known or folder(path, FOLDER_MODE, *self._owner, now_ns)
        elif not found.is_folder:
            raise FsError(errno.ESTALE, "another agent has stored a file in the folder's place")
        changed = replace(
            found,
            mode=found.mode if changes.mode is None else changes.mode,
            uid=found.uid if changes.uid is None else changes.uid,
            gid=found.gid if changes.gid is None else changes.gid,
            ctime_ns=now_ns,
        )
        yield from self._names.put(channel, volume, changed)
        if ino in self._volumes:
            self._folders.is_now(ino, changed)
        node = self._nodes.find(ino)
        if node is not None:
            node.manifest = changed
        return shown(ino, changed)

    def _truncate(self, caller: Caller, ino: int, node: Node, size: int) -> Steps[Attributes]:
        """truncate(2) of a file that nobody has open for writing: its next content."""
        channel, manifest = self._patient_channel(), node.manifest
        assert manifest is not None
        writer = self._writer(caller, ino, node, base=manifest, replaced=manifest)
        try:
            if size:
                writer.built_on.hold(manifest, (yield from self._whole.hold(caller.holder, node)))
            yield from writer.resize(channel, size)
            yield from writer.publish(channel)
            return shown_written(ino, writer)
        finally:
            writer.abandon()
            self._open_writers.give_back(writer.holder)

    def _touch(self, ino: int, node: Node) -> Steps[Attributes]:
        """Times are not kept, but a touch is a use: the chunks were asked for a moment ago."""
        let_go((yield from self._whole.hold(node.holder, node)))
        return node.attributes(ino, self._owner)

    def statfs(self, ino: int) -> Outcome[StatFs]:
        if ino == SHARED_ROOT:
            volumes = [volume for volume in self._volumes.values() if not volume.erased]
        elif ino in self._volumes:
            volumes = [self._folder_of(ino)[0]]
        else:
            volumes = [self._nodes.get(ino).volume]
        return room_of(volumes)

    # -- folders --------------------------------------------------------------------------------

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Steps[Entry]:
        volume, path = self._place(parent, name)
        channel = self._patient_channel()
        found = answered((yield from self._names.newest(volume, path)))
        if not isinstance(found, MissCause):
            raise FsError(errno.EEXIST)
        mode &= 0o7777 & ~caller.umask
        made = folder(path, mode, caller.uid, caller.gid, wall_ns(channel))
        yield from self._names.put(channel, volume, made)
        self._seen.note(volume.name, path, is_folder=True)
        ino, _ = self._nodes.told(Node(volume, path, caller.holder, made))
        return Entry(shown(ino, made), FOLDER_SECONDS, FOLDER_SECONDS)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> Steps[None]:
        volume, path = self._place(parent, name)
        channel = self._patient_channel()
        found = yield from self._names.newest(volume, path)
        if not isinstance(found, MissCause) and not found.is_folder:
            raise FsError(errno.ENOTDIR)
        if (yield from self._names.has_names(volume, path, [NAMES_ASKED])):
            raise FsError(errno.ENOTEMPTY)
        self._seen.forget(volume.name, path)
        if isinstance(found, MissCause):
            raise FsError(errno.ENOENT)
        yield from self._names.take_away(channel, volume, path)

    def opendir(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        if ino != SHARED_ROOT:
            self._folder_of(ino)
        self._habits.listed(caller)
        return Opened(0)

    def readdir(self, ino: int, handle: int, cookie: int) -> Outcome[Iterable[DirectoryEntry]]:
        if ino == SHARED_ROOT:
            rows = [(b".", ino), (b"..", ROOT_INODE)]
            rows += [(name, at) for name, at in self._volume_inodes.items() if not self._volumes[at].erased]
            return folders(rows, cookie)
        volume, path = self._folder_of(ino)
        return listed(ino, path, self._seen.within(volume.name, path), cookie)

    # -- removing and renaming --------------------------------------------------------------------

    def unlink(self, caller: Caller, parent: int, name: bytes) -> Steps[None]:
        volume, path = self._place(parent, name)
        channel = self._patient_channel()
        self._habits.removed(caller)
        written = self._written.by(caller, volume, path)
        if written is not None:
            # First, so that a close which is under way has published, or never will.
            yield from written[1].unlink(channel)
        found = yield from self._names.newest(volume, path)
        self._seen.forget(volume.name, path)
        if isinstance(found, MissCause):
            if written is None:
                raise FsError(errno.ENOENT)
            answered(found)
        elif found.is_folder:
            raise FsError(errno.EISDIR)
        else:
            yield from self._names.take_away(channel, volume, path)
            self._discards.replaced(volume, found)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Steps[None]:
        check_same_face(parent, new_parent)
        volume, path = self._place(parent, name)
        new_volume, new_path = self._place(new_parent, new_name)
        if flags & ~RENAME_NOREPLACE:
            raise FsError(errno.EINVAL)
        if volume is not new_volume:
            raise FsError(errno.EXDEV)
        channel = self._patient_channel()
        self._habits.renamed(caller)
        written = self._written.by(caller, volume, path)
        self._written.replaced(volume, path, None, None)  # before the look: what is found is not given up
        known = self._habits.know_no_more(volume.name, path)
        found = yield from self._whole.newest(caller, volume, path)
        there = yield from self._whole.newest(caller, volume, new_path)
        if isinstance(found, MissCause) and written is None:
            self._seen.forget(volume.name, path)
            raise FsError(errno.ENOENT)
        if not isinstance(found, MissCause) and found.is_folder:
            # Its files would have to be moved one by one, and nobody knows them all.
            raise FsError(errno.EXDEV, "a folder is not renamed")
        if not isinstance(there, MissCause):
            if flags & RENAME_NOREPLACE:
                raise FsError(errno.EEXIST)
            if there.is_folder:
                raise FsError(errno.EISDIR)
        elif flags & RENAME_NOREPLACE or not isinstance(found, MissCause):
            answered(there)
        if path == new_path:
            return
        if not isinstance(found, MissCause):
            moved = replace(found, path=new_path, ctime_ns=wall_ns(channel))
            known_there = self._habits.known(volume.name, new_path)
            yield from self._names.put(channel, volume, moved)
            self._seen.note(volume.name, new_path, is_folder=False)
            self._habits.know(volume.name, moved)
            self._written.replaced(volume, path, found, None)
            self._written.replaced(volume, new_path, None, moved)
            # Else another process has published a file there meanwhile.
            if self._habits.leads_to(volume.name, path) in (None, known, found.identity):
                self._habits.know_no_more(volume.name, path)
                yield from self._names.take_away(channel, volume, path)
            for gone in (there, known_there):
                if isinstance(gone, Manifest):
                    self._discards.replaced(volume, gone, moved)
        self._seen.forget(volume.name, path)
        if written is not None:
            ino, writer = written
            self._written.drop(ino, writer)
            is_moved = not isinstance(found, MissCause)
            behind = found if is_moved else there
            replaced = None if isinstance(behind, MissCause) else behind
            yield from writer.move(channel, new_path, replaced, is_moved=is_moved)
            self._note_written(ino, writer)
            self._nodes.moved(ino, new_path)

    # -- opening --------------------------------------------------------------------------------

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> Outcome[tuple[Entry, Opened]]:
        asked = (caller, *self._place(parent, name), mode, flags)
        return self._create(*asked) or self._create_there(*asked)

    def _create_there(
        self, caller: Caller, volume: SharedVolume, path: bytes, mode: int, flags: int
    ) -> Steps[tuple[Entry, Opened]]:
        """Open what this agent has stored under a name that is to be made, since the caller looked it up."""
        found = answered((yield from self._whole.newest(caller, volume, path)))
        if isinstance(found, MissCause):
            self._habits.know_no_more(volume.name, path)
            if (made := self._create(caller, volume, path, mode, flags)) is not None:
                return made
            raise FsError(errno.EIO, "others store and remove it again and again")
        if flags & os.O_EXCL:
            raise FsError(errno.EEXIST, "it was stored a moment ago")
        node = Node(volume, path, caller.holder, found)
        if writes(flags) and not node.is_folder:
            node = self._written.another(caller, node, flags)
            ino = self._nodes.told_again(node)
        else:
            ino, node = self._nodes.told(node)
        try:
            opened = self.open(caller, ino, flags)
            opened = opened if isinstance(opened, Opened) else (yield from opened)
        except BaseException:
            self._nodes.forget(ino, 1)
            raise
        return Entry(node.attributes(ino, self._owner)), opened

    def _create(
        self, caller: Caller, volume: SharedVolume, path: bytes, mode: int, flags: int
    ) -> tuple[Entry, Opened] | None:
        """None where this agent has stored one since the caller looked the name up."""
        with self._written.making:
            if flags & os.O_EXCL and self._written.has(volume, path):
                raise FsError(errno.EEXIST, "it is being written")
            there = self._written.to_join(caller, volume, path, flags)
            joined = self._joined(caller, there, flags) if there is not None and writes(flags) else None
            if joined is not None:
                return joined
            if not flags & os.O_TRUNC and self._habits.leads_to(volume.name, path) is not None:
                return None
            node = Node(volume, path, caller.holder, is_written=True)
            ino, node = self._nodes.told(node)
            self._habits.created(caller, (volume.name, path))
            identity, mode = self._habits.take_prepared((volume.name, path)), mode & 0o7777 & ~caller.umask
            try:
                writer = self._writer(caller, ino, node, None, None, mode, identity)
            except FsError:
                self._nodes.forget(ino, 1)
                raise
            writer.gaps.is_bare = not flags & (os.O_TRUNC | os.O_EXCL)
            # One that only reads has nothing to publish where another makes the file.
            writer.unlinked = there is not None and not writes(flags)
            taken = self._take_writer(ino, node, writer, is_new=True)
            assert taken, "the kernel has not been told of the inode"
        opened = self._opened_writer(ino, node, writer, flags)
        return Entry(shown_written(ino, writer)), opened

    def _joined(self, caller: Caller, node: Node, flags: int) -> tuple[Entry, Opened] | None:
        """Open what another process has made and not closed yet; None where it has closed it meanwhile."""
        if (writer := node.writer) is None:
            return None
        writer.users.join(caller.pid)
        if not self._take_writer(node.ino, node, writer, is_new=False):
            return None
        self._nodes.again(node.ino)
        return Entry(shown_written(node.ino, writer)), self._opened_writer(node.ino, node, writer, flags)

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Outcome[Entry]:
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise FsError(errno.EPERM)
        return self._mknod(caller, *self._place(parent, name), mode)

    def _mknod(self, caller: Caller, volume: SharedVolume, path: bytes, mode: int) -> Steps[Entry]:
        """An empty file."""
        channel = self._channel()
        node = Node(volume, path, caller.holder, is_written=True)
        writer = self._writer(caller, 0, node, mode=mode & 0o7777 & ~caller.umask)
        try:
            yield from writer.publish(channel)
        finally:
            writer.abandon()
            self._open_writers.give_back(writer.holder)
        return (yield from self._lookup(caller, volume, path, is_all=False))

    def _writer(
        self,
        caller: Caller,
        ino: int,
        node: Node,
        base: Manifest | None = None,
        replaced: Manifest | None = None,
        mode: int | None = None,
        identity: bytes | None = None,
    ) -> FileWriter:
        """Raises FsError where too many files are being written."""
        if not self._open_writers.take(caller.holder):
            raise FsError(errno.ENFILE, "too many files are being written")
        if mode is None:
            mode = 0o644 if replaced is None else replaced.mode
        writer = FileWriter(
            node.volume, node.path, ino, caller, mode, time.time_ns(), self._staged, self._discards,
            self._judge, base, replaced, self._published, identity, self._unnamed, self._after_reply,
        )  # fmt: skip
        writer.told(None, self._habits.known_or(node.volume.name, node.path, replaced))
        return writer

    def _take_writer(self, ino: int, node: Node, writer: FileWriter, *, is_new: bool) -> bool:
        """Count one more open of the writer. False: another thread has made one, or ended this, meanwhile."""
        with self._lock:
            if node.writer is not (None if is_new else writer):
                if is_new:
                    self._open_writers.give_back(writer.holder)
                return False
            node.writer = writer
            writer.opens += 1
        if is_new:
            self._written.note(ino, writer)
        return True

    def _note_written(self, ino: int, writer: FileWriter) -> None:
        """Note the name of a file that is being written, unless its last close has come meanwhile."""
        node = self._nodes.find(ino)
        with self._lock:  # the last close drops the name after it has taken the writer out
            if node is not None and node.writer is writer:
                self._written.note(ino, writer)

    def _opened_writer(self, ino: int, node: Node, writer: FileWriter, flags: int) -> Opened:
        handle = self._new_handle(ino, _Handle(node, writer.holder, writer=writer, may_write=writes(flags)))
        return Opened(handle, direct_io=True, parallel_direct_writes=True)

    def _new_handle(self, ino: int, opened: _Handle) -> int:
        handle = next(self._numbers)
        self._handles[handle] = opened
        self._nodes.opened(ino, 1)
        return handle

    def open(self, caller: Caller, ino: int, flags: int) -> Outcome[Opened]:
        node = self._nodes.get(ino)
        if node.is_folder:
            raise FsError(errno.EISDIR)
        begins = not flags & os.O_TRUNC and node.manifest is not None
        if node.is_written and (node.writer is not None or writes(flags)):
            if begins and node.writer is None:
                return self._open_whole(caller, ino, node, flags)
            return self._open_written(caller, ino, node, flags)
        if writes(flags):
            if begins:
                return self._open_another(caller, ino, node, flags)
            self._written.open_another(caller, node, flags)
        return self._open(caller, ino, node, flags)

    def _open_another(self, caller: Caller, ino: int, node: Node, flags: int) -> Steps[Opened]:
        """Open for writing what is there, if it is there whole; by another inode, so this raises FsError."""
        held = self._habits.take_held(ino, self._channel().now())
        try:
            let_go(held or (yield from self._whole.hold(caller.holder, node)))
        except FsError:
            if (yield from self._names.newest(node.volume, node.path)) in GONE:
                raise FsError(errno.ESTALE, "a chunk of the file was gone, and so is its name") from None
            raise
        if (newer := (yield from self._whole.newer(node))) is not None:
            node = Node(node.volume, node.path, caller.holder, newer)
        self._written.open_another(caller, node, flags)

    def _open_whole(self, caller: Caller, ino: int, node: Node, flags: int) -> Steps[Opened]:
        """Open what is written from an earlier content on, which is there whole and stays."""
        self._written.retried(caller, node)  # if it is not there whole, no lookup is told of it again
        while True:
            manifest = node.manifest
            assert manifest is not None
            self._discards.opened(manifest)
            try:
                held = yield from self._whole.hold(caller.holder, node)
                newer = None if node.writer is not None else (yield from self._whole.newer(node))
                if newer is None:
                    opened = self._open_written(caller, ino, node, flags, held)
                    return opened if isinstance(opened, Opened) else (yield from opened)
                let_go(held)
                if flags & os.O_APPEND:
                    raise FsError(errno.ESTALE, "it was replaced, and the kernel knows the length it had")
                with self._lock:
                    if node.writer is None:
                        node.manifest = node.replaced = newer
            finally:
                self._discards.closed(manifest)

    def _open_written(
        self, caller: Caller, ino: int, node: Node, flags: int, held: Sequence[Hold] = ()
    ) -> Outcome[Opened]:
        self._written.retried(caller, node)
        try:
            while True:
                writer = node.writer
                is_new = writer is None
                if writer is None:
                    if node.manifest is None and not flags & os.O_TRUNC:
                        raise FsError(errno.ESTALE, "it was given up before it was closed")
                    writer = self._writer(caller, ino, node, node.manifest, node.replaced)
                elif writes(flags) and not caller.guest and caller.pid > 0:
                    writer.users.join(caller.pid)
                if self._take_writer(ino, node, writer, is_new=is_new):
                    break
        except FsError:
            let_go(held)
            raise
        if is_new and node.manifest is not None:
            writer.built_on.hold(node.manifest, held)
        else:
            let_go(held)
        opened = self._opened_writer(ino, node, writer, flags)
        return self._emptied(ino, writer, opened) if flags & os.O_TRUNC and not is_new else opened

    def _emptied(self, ino: int, writer: FileWriter, opened: Opened) -> Steps[Opened]:
        try:
            yield from writer.resize(self._channel(), 0)
        except BaseException:
            # The kernel releases no file whose open has failed.
            if (released := self.release(ino, opened.handle)) is not None:
                yield from released
            raise
        return opened

    def _open(self, caller: Caller, ino: int, node: Node, flags: int) -> Steps[Opened]:
        manifest = node.manifest
        if manifest is None:
            raise FsError(errno.ENOENT, "it was given up before it was closed")
        if not self._open_files.take(caller.holder):
            raise FsError(errno.ENFILE, "too many files are open")
        self._discards.opened(manifest)
        self._habits.opened(caller, ino)
        channel = self._channel()
        channel.comes_again()
        held = self._habits.take_held(ino, channel.now())
        try:
            held = held or (yield from self._whole.hold(caller.holder, node))
        except BaseException:
            self._discards.closed(manifest)
            self._open_files.give_back(caller.holder)
            raise
        reading = OpenFile(node.volume, manifest, held, self._prestage, self._ahead, self._under_way)
        handle = self._new_handle(ino, _Handle(node, caller.holder, reading=reading))
        # An inode that was written through has had other contents.
        direct_io = node.is_written or asks_in_turn(manifest, flags)
        return Opened(handle, direct_io=direct_io, keep_cache=not direct_io, no_flush=True)

    # -- open files -----------------------------------------------------------------------------

    def _handle(self, handle: int) -> _Handle:
        found = self._handles.get(handle)
        if found is None:
            raise FsError(errno.EBADF)
        return found

    def _writer_of(self, handle: int) -> FileWriter:
        found = self._handle(handle)
        if found.writer is None or not found.may_write:
            raise FsError(errno.EBADF, "it is not open for writing")
        return found.writer

    def read(self, ino: int, handle: int, offset: int, into: memoryview) -> Steps[int]:
        found = self._handle(handle)
        if found.reading is not None:
            channel = self._channel()
            channel.comes_again()
            return (yield from found.reading.read(channel, offset, into))
        assert found.writer is not None
        return (yield from found.writer.read(self._channel(), offset, into))

    def write(
        self, ino: int, handle: int, offset: int, data: memoryview, by: LockOwner = NOBODY
    ) -> Steps[int]:
        yield from self._writer_of(handle).write(self._channel(), offset, data, by)
        return len(data)

    def flush(self, ino: int, handle: int, by: LockOwner = NOBODY) -> Outcome[None]:
        writer = self._handle(handle).writer
        return None if writer is None else self._closed(writer, by)

    def _closed(self, writer: FileWriter, by: LockOwner) -> Steps[None]:
        yield from writer.close(self._channel(), by)

    def fsync(self, ino: int, handle: int, data_only: bool) -> Outcome[None]:
        writer = self._handle(handle).writer
        return None if writer is None else self._synced(writer)

    def _synced(self, writer: FileWriter) -> Steps[None]:
        yield from writer.sync(self._channel())

    def fallocate(self, ino: int, handle: int, mode: int, offset: int, length: int) -> Outcome[None]:
        if mode & ~_KEEP_SIZE:
            raise FsError(errno.EOPNOTSUPP)
        writer = self._writer_of(handle)
        if mode or offset + length <= writer.length:
            return None
        return self._resized(writer, offset + length)

    def _resized(self, writer: FileWriter, length: int) -> Steps[None]:
        yield from writer.resize(self._channel(), length)

    def release(self, ino: int, handle: int) -> Outcome[None]:
        found = self._handles.pop(handle, None)
        if found is None:
            return None
        self._nodes.opened(ino, -1)
        if found.reading is not None:
            found.reading.close()
            self._discards.closed(found.reading.manifest)
            self._open_files.give_back(found.holder)
            return None
        writer = found.writer
        assert writer is not None
        with self._lock:
            writer.opens -= 1
            is_last = not writer.opens
            writer.ending += is_last
        return self._end(ino, found.node, writer) if is_last else None

    def _end(self, ino: int, node: Node, writer: FileWriter) -> Steps[None]:
        try:
            yield from writer.end(self._channel())
        finally:
            with self._lock:
                writer.ending -= 1
                is_over = not (writer.opens or writer.ending) and node.writer is writer
                if is_over:
                    kept = None if writer.unlinked or writer.has_failed() else node.manifest
                    node.manifest = node.replaced = writer.manifest or kept
                    node.writer = None
            if is_over:  # else somebody has opened it meanwhile
                writer.abandon()
                self._written.drop(ino, writer)
                self._open_writers.give_back(writer.holder)


_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: nothing is set aside beyond the end
