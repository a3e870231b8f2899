"""FUSE opcodes as operations of a `FileSystem`: arguments in, body of the reply out.

Read abi.py and interface.py first; fuse/session.py is the only caller. Each handler decodes its arguments,
makes one call and encodes the answer. It raises `FsError` for an errno and `FuseFormatError` for a broken
request. READ and WRITE are in the session itself, where they cost the least.
"""

import errno
import stat
import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from agent.fs.fuse import requests
from agent.fs.fuse.abi import (
    FSYNC_DATA_ONLY,
    GETATTR_FH,
    OPEN_KILL_SUIDGID,
    FuseFormatError,
    Opcode,
    OpenFlag,
    SetattrValid,
)
from agent.fs.fuse.names import (
    checked_name,
    checked_xattr_name,
    decode_names_untrusted,
    name_at,
    pack_names,
    sized,
)
from agent.fs.fuse.replies import ATTR_OUT, ATTRIBUTES, ENTRY_OUT, IOCTL_OUT, OPEN_OUT, STATFS_OUT, Body
from agent.fs.interface import (
    Attributes,
    Caller,
    Entry,
    FileSystem,
    FsError,
    LockOwner,
    Opened,
    SetAttributes,
    Tree,
    face_of,
)
from agent.pool.steps import Outcome, Runner, settle

T = TypeVar("T")

OFFSET_MAX: Final = (1 << 63) - 1
"""Offsets and sizes are unsigned on the wire and signed (loff_t) everywhere else."""
TARGET_BYTES_MAX: Final = 4095  # of a symbolic link: PATH_MAX less its NUL
SECOND_NS: Final = 1_000_000_000
VALID_SECONDS_MAX: Final = 1 << 31

# Of the most frequent requests: a name of another module is looked up at every use.
_GETXATTR_IN: Final = requests.GETXATTR_IN
_IOCTL_IN: Final = requests.IOCTL_IN
_IOCTL_DONE: Final = IOCTL_OUT.pack(0, 0)
_VALID_FOR_NO_TIME: Final = ATTR_OUT.pack(0, 0)
"""The validity in most answers to GETATTR or SETATTR: none, so the kernel asks again."""
CAPABILITY_XATTR: Final = b"security.capability"


class Request:
    """One request while it is served. Its buffers belong to the worker."""

    __slots__ = ("arguments", "face", "gid", "node", "pid", "room", "runner", "uid")

    def __init__(
        self,
        face: FileSystem,
        node: int,
        uid: int,
        gid: int,
        pid: int,
        arguments: memoryview,
        room: memoryview,
        runner: Runner,
    ) -> None:
        self.face: Final = face
        self.node: Final = node
        self.uid: Final = uid
        self.gid: Final = gid
        self.pid: Final = pid
        self.arguments: Final = arguments
        self.room: Final = room
        self.runner: Final = runner

    def caller(self, umask: int = 0) -> Caller:
        return Caller(self.uid, self.gid, self.pid, umask)

    def settle(self, outcome: Outcome[T]) -> T:
        return settle(outcome, self.runner)

    def done(self, outcome: Outcome[None]) -> bytes:
        """The empty reply, once the operation has ended."""
        settle(outcome, self.runner)
        return b""

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The arguments that every request of its opcode has."""
        try:
            return layout.unpack_from(self.arguments)
        except struct.error as error:
            raise FuseFormatError(f"its arguments are truncated: {error}") from None

    def name(self, offset: int = 0) -> bytes:
        return checked_name(name_at(self.arguments, offset))


def checked_offset(offset: int) -> int:
    if offset > OFFSET_MAX:
        raise FsError(errno.EINVAL, "an offset beyond 2^63 - 1")
    return offset


def seconds_and_ns(seconds: float) -> tuple[int, int]:
    """How long the kernel may believe something, in its two fields."""
    held = min(max(seconds, 0.0), float(VALID_SECONDS_MAX))
    whole = int(held)
    return whole, int((held - whole) * SECOND_NS)


def time_ns(seconds: int, nanoseconds: int) -> int:
    if nanoseconds >= SECOND_NS:
        raise FsError(errno.EINVAL, "nanoseconds of more than a second")
    return seconds * SECOND_NS + nanoseconds


def encode_attributes(attributes: Attributes) -> bytes:
    """fuse_attr. Without a record in between: GETATTR is among the most frequent requests."""
    atime, atime_ns = divmod(attributes.atime_ns, SECOND_NS)
    mtime, mtime_ns = divmod(attributes.mtime_ns, SECOND_NS)
    ctime, ctime_ns = divmod(attributes.ctime_ns, SECOND_NS)
    return ATTRIBUTES.pack(
        attributes.ino,
        attributes.size,
        attributes.blocks,
        atime,
        mtime,
        ctime,
        atime_ns,
        mtime_ns,
        ctime_ns,
        attributes.mode,
        attributes.nlink,
        attributes.uid,
        attributes.gid,
        attributes.rdev,
        attributes.block_size,
        0,
    )


def encode_opened(opened: Opened, drops_pages: bool = False) -> bytes:
    """fuse_open_out. `drops_pages`: the kernel drops the pages of what is written directly."""
    direct_io = opened.direct_io or (opened.direct_writes and drops_pages)
    flags = (
        direct_io * OpenFlag.DIRECT_IO.value
        | opened.keep_cache * OpenFlag.KEEP_CACHE.value
        | opened.no_flush * OpenFlag.NOFLUSH.value
        | opened.parallel_direct_writes * OpenFlag.PARALLEL_DIRECT_WRITES.value
    )
    return OPEN_OUT.pack(opened.handle, flags)


class FuseOperations:
    """The table from opcode to handler, over one file system."""

    def __init__(self, tree: Tree) -> None:
        self._face = face_of(tree)
        self.drops_pages = False
        """Whether the kernel drops the pages of what is written directly. INIT says it."""
        # We tell the kernel that we clear set-id bits after a write (HANDLE_KILLPRIV_V2): without it the
        # kernel asks for an extended attribute before every buffered write. Only nodes that were shown
        # with such a bit can need it, so these are remembered, until the kernel forgets them.
        self.set_id_nodes: set[int] = set()
        # An opcode is served by the method of its name.
        found = ((opcode, getattr(self, f"_{opcode.name.lower()}", None)) for opcode in Opcode)
        self.table: dict[int, Callable[[Request], Body]] = {
            opcode: handler for opcode, handler in found if handler is not None
        }

    # Names and nodes

    def _entry(self, entry: Entry) -> bytes:
        attributes = entry.attributes
        entry_valid, entry_valid_ns = seconds_and_ns(entry.entry_seconds)
        attr_valid, attr_valid_ns = seconds_and_ns(entry.attribute_seconds)
        self._note_set_id(attributes)
        head = ENTRY_OUT.pack(
            attributes.ino, entry.generation, entry_valid, attr_valid, entry_valid_ns, attr_valid_ns
        )
        return head + encode_attributes(attributes)

    def _attributes(self, attributes: Attributes) -> bytes:
        self._note_set_id(attributes)
        head = _VALID_FOR_NO_TIME
        if attributes.valid_seconds:
            head = ATTR_OUT.pack(*seconds_and_ns(attributes.valid_seconds))
        return head + encode_attributes(attributes)

    def _note_set_id(self, attributes: Attributes) -> None:
        if attributes.mode & (stat.S_ISUID | stat.S_ISGID) and not stat.S_ISDIR(attributes.mode):
            self.set_id_nodes.add(attributes.ino)
        elif self.set_id_nodes:
            self.set_id_nodes.discard(attributes.ino)

    def _mode_without_set_id(self, node: int, handle: int | None, runner: Runner) -> int:
        mode = settle(self._face(node).getattr(Caller(), node, handle), runner).mode
        kept = mode & ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            kept &= ~stat.S_ISGID  # without group execution the bit once meant mandatory locking
        return stat.S_IMODE(kept)

    def clear_set_id(self, node: int, handle: int | None, runner: Runner) -> None:
        """What the kernel leaves to us after it saw an unprivileged caller write or truncate."""
        changes = SetAttributes(mode=self._mode_without_set_id(node, handle, runner))
        self._note_set_id(settle(self._face(node).setattr(Caller(), node, changes, handle), runner))

    def _lookup(self, request: Request) -> Body:
        return self._entry(
            request.settle(request.face.lookup(request.caller(), request.node, request.name()))
        )

    def forget(self, node: int, lookups: int) -> None:
        self.set_id_nodes.discard(node)
        self._face(node).forget(node, lookups)

    def _forget(self, request: Request) -> Body:
        (lookups,) = request.fields(requests.FORGET_IN)
        self.forget(request.node, lookups)
        return b""

    def _batch_forget(self, request: Request) -> Body:
        for node, lookups in requests.decode_forgets_untrusted(request.arguments):
            self.forget(node, lookups)
        return b""

    def _getattr(self, request: Request) -> Body:
        flags, number = request.fields(requests.GETATTR_IN)
        handle = number if flags & GETATTR_FH else None
        return self._attributes(request.settle(request.face.getattr(request.caller(), request.node, handle)))

    def _setattr(self, request: Request) -> Body:
        (
            bits, number, size, atime, mtime, _, atime_ns, mtime_ns, _, mode_asked, uid, gid,
        ) = request.fields(requests.SETATTR_IN)  # fmt: skip
        valid = SetattrValid(bits & 0xFFF)
        handle = number if valid & SetattrValid.FH else None
        mode = stat.S_IMODE(mode_asked) if valid & SetattrValid.MODE else None
        clears = valid & (SetattrValid.UID | SetattrValid.GID | SetattrValid.KILL_SUIDGID)
        if mode is None and clears and request.node in self.set_id_nodes:
            mode = self._mode_without_set_id(request.node, handle, request.runner)
        touch_atime = bool(valid & SetattrValid.ATIME_NOW)
        touch_mtime = bool(valid & SetattrValid.MTIME_NOW)
        sets_atime = valid & SetattrValid.ATIME and not touch_atime
        sets_mtime = valid & SetattrValid.MTIME and not touch_mtime
        changes = SetAttributes(
            mode=mode,
            uid=uid if valid & SetattrValid.UID else None,
            gid=gid if valid & SetattrValid.GID else None,
            size=checked_offset(size) if valid & SetattrValid.SIZE else None,
            atime_ns=time_ns(atime, atime_ns) if sets_atime else None,
            mtime_ns=time_ns(mtime, mtime_ns) if sets_mtime else None,
            touch_atime=touch_atime,
            touch_mtime=touch_mtime,
        )
        return self._attributes(
            request.settle(request.face.setattr(request.caller(), request.node, changes, handle))
        )

    def _readlink(self, request: Request) -> Body:
        return request.settle(request.face.readlink(request.caller(), request.node))

    def _symlink(self, request: Request) -> Body:
        (name, target), _ = decode_names_untrusted(request.arguments, 2)
        if not target or len(target) > TARGET_BYTES_MAX:
            raise FsError(errno.ENAMETOOLONG if target else errno.EINVAL)
        made = request.face.symlink(request.caller(), request.node, checked_name(name), target)
        return self._entry(request.settle(made))

    def _mknod(self, request: Request) -> Body:
        mode, rdev, umask = request.fields(requests.MKNOD_IN)
        name = request.name(requests.MKNOD_IN.size)
        made = request.face.mknod(request.caller(umask), request.node, name, mode, rdev)
        return self._entry(request.settle(made))

    def _mkdir(self, request: Request) -> Body:
        mode, umask = request.fields(requests.MKDIR_IN)
        made = request.face.mkdir(
            request.caller(umask), request.node, request.name(requests.MKDIR_IN.size), mode
        )
        return self._entry(request.settle(made))

    def _unlink(self, request: Request) -> Body:
        return request.done(request.face.unlink(request.caller(), request.node, request.name()))

    def _rmdir(self, request: Request) -> Body:
        return request.done(request.face.rmdir(request.caller(), request.node, request.name()))

    def _rename(self, request: Request) -> Body:
        (new_parent,) = request.fields(requests.RENAME_IN)
        return self._move(request, requests.RENAME_IN.size, new_parent, 0)

    def _rename2(self, request: Request) -> Body:
        new_parent, flags = request.fields(requests.RENAME2_IN)
        return self._move(request, requests.RENAME2_IN.size, new_parent, flags)

    def _move(self, request: Request, names_at: int, new_parent: int, flags: int) -> Body:
        (name, new_name), _ = decode_names_untrusted(request.arguments[names_at:], 2)
        moved = request.face.rename(
            request.caller(), request.node, checked_name(name), new_parent, checked_name(new_name), flags
        )
        return request.done(moved)

    def _link(self, request: Request) -> Body:
        (node,) = request.fields(requests.LINK_IN)
        name = request.name(requests.LINK_IN.size)
        return self._entry(request.settle(self._face(node).link(request.caller(), node, request.node, name)))

    # Open files

    def _open(self, request: Request) -> Body:
        flags, open_flags = request.fields(requests.OPEN_IN)
        if open_flags & OPEN_KILL_SUIDGID and request.node in self.set_id_nodes:
            self.clear_set_id(request.node, None, request.runner)
        opened = request.settle(request.face.open(request.caller(), request.node, flags))
        return encode_opened(opened, self.drops_pages)

    def _create(self, request: Request) -> Body:
        flags, mode, umask, _ = request.fields(requests.CREATE_IN)
        name = request.name(requests.CREATE_IN.size)
        made = request.face.create(request.caller(umask), request.node, name, mode, flags)
        entry, opened = request.settle(made)
        return self._entry(entry) + encode_opened(opened, self.drops_pages)

    def _flush(self, request: Request) -> Body:
        handle, owner = request.fields(requests.FLUSH_IN)
        return request.done(request.face.flush(request.node, handle, LockOwner(owner, request.pid)))

    def _release(self, request: Request) -> Body:
        handle = request.fields(requests.RELEASE_IN)[0]
        return request.done(request.face.release(request.node, handle))

    def _fsync(self, request: Request) -> Body:
        handle, flags = request.fields(requests.FSYNC_IN)
        return request.done(request.face.fsync(request.node, handle, bool(flags & FSYNC_DATA_ONLY)))

    def _fallocate(self, request: Request) -> Body:
        handle, offset, length, mode = request.fields(requests.FALLOCATE_IN)
        checked_offset(offset + length)
        return request.done(request.face.fallocate(request.node, handle, mode, offset, length))

    # Directories

    def _opendir(self, request: Request) -> Body:
        flags = request.fields(requests.OPEN_IN)[0]
        opened = request.face.opendir(request.caller(), request.node, flags)
        return encode_opened(request.settle(opened))

    def _readdir(self, request: Request) -> Body:
        return self._listed(request, None)

    def _readdirplus(self, request: Request) -> Body:
        def look_up(name: bytes) -> bytes:
            found = request.face.lookup(request.caller(), request.node, name)
            return self._entry(request.settle(found))

        return self._listed(request, look_up)

    def _listed(self, request: Request, look_up: Callable[[bytes], bytes] | None) -> Body:
        handle, offset, size = request.fields(requests.READ_IN)
        room = request.room[:size]
        entries = request.face.readdir(request.node, handle, checked_offset(offset))
        packed = pack_names(request.settle(entries), room, look_up)
        return room[:packed]

    def _releasedir(self, request: Request) -> Body:
        handle = request.fields(requests.RELEASE_IN)[0]
        return request.done(request.face.releasedir(request.node, handle))

    def _fsyncdir(self, request: Request) -> Body:
        handle, flags = request.fields(requests.FSYNC_IN)
        return request.done(request.face.fsyncdir(request.node, handle, bool(flags & FSYNC_DATA_ONLY)))

    # The whole, and extended attributes

    def _statfs(self, request: Request) -> Body:
        found = request.settle(request.face.statfs(request.node))
        return STATFS_OUT.pack(
            found.blocks,
            found.blocks_free,
            found.blocks_available,
            found.files,
            found.files_free,
            found.block_size,
            found.name_bytes_max,
            found.block_size,
        )

    def _setxattr(self, request: Request) -> Body:
        size, flags = request.fields(requests.SETXATTR_IN)
        rest = request.arguments[requests.SETXATTR_IN.size :]
        (name,), value_at = decode_names_untrusted(rest, 1)
        value = bytes(rest[value_at : value_at + size])
        if len(value) != size:
            raise FuseFormatError("the value of an extended attribute is cut short")
        checked_xattr_name(name)
        if name == CAPABILITY_XATTR:
            # With HANDLE_KILLPRIV_V2 we would have to drop it at every write; the mount is nosuid, so it
            # could never count.
            raise FsError(errno.EOPNOTSUPP)
        done = request.face.setxattr(request.caller(), request.node, name, value, flags)
        return request.done(done)

    def _getxattr(self, request: Request) -> Body:
        arguments = request.arguments
        if len(arguments) < _GETXATTR_IN.size:
            raise FuseFormatError("GETXATTR is truncated")
        size: int = _GETXATTR_IN.unpack_from(arguments)[0]
        name = checked_xattr_name(name_at(arguments, _GETXATTR_IN.size))
        wanted = min(size, requests.XATTR_BYTES_MAX) or requests.XATTR_BYTES_MAX
        room = request.room[:wanted]
        if len(room) < wanted:  # a guest lays it out as it likes
            room = memoryview(bytearray(wanted))
        found = request.face.getxattr(request.caller(), request.node, name, room)
        return sized(cast(Body, request.settle(found)), size)

    def _listxattr(self, request: Request) -> Body:
        (room,) = request.fields(requests.GETXATTR_IN)
        names = request.settle(request.face.listxattr(request.caller(), request.node))
        return sized(b"".join(name + b"\0" for name in names), room)

    def _removexattr(self, request: Request) -> Body:
        name = checked_xattr_name(name_at(request.arguments, 0))
        return request.done(request.face.removexattr(request.caller(), request.node, name))

    def _ioctl(self, request: Request) -> Body:
        arguments = request.arguments
        if len(arguments) < _IOCTL_IN.size:
            raise FuseFormatError("IOCTL is truncated")
        handle, flags, command, _, in_size, out_size = _IOCTL_IN.unpack_from(arguments)
        if flags:  # a directory's, or of a program with another size of pointers
            raise FsError(errno.ENOTTY)
        caller, data = request.caller(), arguments[_IOCTL_IN.size :]
        if len(data) != in_size:
            raise FuseFormatError("the data of an ioctl are cut short")
        body: bytes = request.settle(request.face.ioctl(caller, request.node, handle, command, data))
        if len(body) > out_size:
            raise FsError(errno.EINVAL, "the caller has no room for the answer")
        return _IOCTL_DONE + body
