"""Structures of fuse.h as records with named fields, to build requests and to read replies as a kernel would.

Each lies as the layout of agent/fs/fuse says that it is made of; tests/vectors/make_fuse_abi.c holds both to
the kernel's header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar, dataclass_transform

from agent.fs.fuse import abi, replies, requests
from agent.fs.fuse.abi import Buffer, decode_untrusted


class WireRecord:
    """A structure of fuse.h. See `laid_out`."""

    __slots__: tuple[str, ...] = ()
    LAYOUT: ClassVar[struct.Struct]

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        """The record at `offset`; `FuseFormatError` where the buffer ends before it does."""
        return cls(*decode_untrusted(cls.LAYOUT, buffer, offset))

    def encode(self) -> bytes:
        """The bytes of the record."""
        return self.LAYOUT.pack(*(getattr(self, name) for name in self.__slots__))


R = TypeVar("R", bound=WireRecord)


@dataclass_transform(frozen_default=True)
def laid_out(layout: struct.Struct) -> Callable[[type[R]], type[R]]:
    """A record whose fields lie in this layout, in the same order."""

    def made(record: type[R]) -> type[R]:
        record.LAYOUT = layout
        return dataclass(frozen=True, slots=True)(record)

    return made


@laid_out(abi.IN_HEADER)
class InHeader(WireRecord):
    """fuse_in_header."""

    length: int
    opcode: int
    unique: int
    nodeid: int
    uid: int
    gid: int
    pid: int
    extension_words: int = 0


@laid_out(abi.OUT_HEADER)
class OutHeader(WireRecord):
    """fuse_out_header."""

    length: int
    error: int
    unique: int


@laid_out(abi.INIT_IN)
class InitIn(WireRecord):
    """fuse_init_in."""

    major: int
    minor: int
    max_readahead: int
    flags: int


@laid_out(abi.INIT_OUT)
class InitOut(WireRecord):
    """fuse_init_out."""

    major: int
    minor: int
    max_readahead: int
    flags: int
    max_background: int
    congestion_threshold: int
    max_write: int
    time_granularity: int
    max_pages: int
    map_alignment: int
    flags2: int


@laid_out(requests.FORGET_IN)
class ForgetIn(WireRecord):
    """fuse_forget_in."""

    lookups: int


@laid_out(requests.BATCH_FORGET_IN)
class BatchForgetIn(WireRecord):
    """fuse_batch_forget_in."""

    count: int


@laid_out(requests.FORGET_ONE)
class ForgetOne(WireRecord):
    """fuse_forget_one."""

    nodeid: int
    lookups: int


@laid_out(requests.GETATTR_IN)
class GetattrIn(WireRecord):
    """fuse_getattr_in."""

    flags: int
    handle: int


@laid_out(requests.SETATTR_IN)
class SetattrIn(WireRecord):
    """fuse_setattr_in."""

    valid: int
    handle: int
    size: int
    atime: int
    mtime: int
    ctime: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int


@laid_out(requests.MKNOD_IN)
class MknodIn(WireRecord):
    """fuse_mknod_in."""

    mode: int
    rdev: int
    umask: int


@laid_out(requests.MKDIR_IN)
class MkdirIn(WireRecord):
    """fuse_mkdir_in."""

    mode: int
    umask: int


@laid_out(requests.RENAME_IN)
class RenameIn(WireRecord):
    """fuse_rename_in."""

    new_parent: int


@laid_out(requests.RENAME2_IN)
class Rename2In(WireRecord):
    """fuse_rename2_in."""

    new_parent: int
    flags: int


@laid_out(requests.LINK_IN)
class LinkIn(WireRecord):
    """fuse_link_in."""

    old_nodeid: int


@laid_out(requests.OPEN_IN)
class OpenIn(WireRecord):
    """fuse_open_in."""

    flags: int
    open_flags: int


@laid_out(requests.CREATE_IN)
class CreateIn(WireRecord):
    """fuse_create_in."""

    flags: int
    mode: int
    umask: int
    open_flags: int


@laid_out(requests.READ_IN)
class ReadIn(WireRecord):
    """fuse_read_in."""

    handle: int
    offset: int
    size: int


@laid_out(requests.WRITE_IN)
class WriteIn(WireRecord):
    """fuse_write_in."""

    handle: int
    offset: int
    size: int
    flags: int
    owner: int = 0


@laid_out(requests.RELEASE_IN)
class ReleaseIn(WireRecord):
    """fuse_release_in."""

    handle: int
    flags: int
    release_flags: int


@laid_out(requests.FLUSH_IN)
class FlushIn(WireRecord):
    """fuse_flush_in."""

    handle: int
    owner: int = 0


@laid_out(requests.FSYNC_IN)
class FsyncIn(WireRecord):
    """fuse_fsync_in."""

    handle: int
    flags: int


@laid_out(requests.FALLOCATE_IN)
class FallocateIn(WireRecord):
    """fuse_fallocate_in."""

    handle: int
    offset: int
    length: int
    mode: int


@laid_out(requests.SETXATTR_IN)
class SetxattrIn(WireRecord):
    """fuse_setxattr_in."""

    size: int
    flags: int


@laid_out(requests.IOCTL_IN)
class IoctlIn(WireRecord):
    """fuse_ioctl_in."""

    handle: int
    flags: int
    command: int
    argument: int
    in_size: int
    out_size: int


@laid_out(requests.GETXATTR_IN)
class GetxattrIn(WireRecord):
    """fuse_getxattr_in."""

    size: int


@laid_out(replies.ATTRIBUTES)
class AttrOfFile(WireRecord):
    """fuse_attr."""

    ino: int
    size: int
    blocks: int
    atime: int
    mtime: int
    ctime: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    block_size: int
    flags: int = 0


@laid_out(replies.ATTR_OUT)
class AttrHead(WireRecord):
    """fuse_attr_out without its fuse_attr."""

    valid: int
    valid_ns: int


@laid_out(replies.ENTRY_OUT)
class EntryHead(WireRecord):
    """fuse_entry_out without its fuse_attr."""

    nodeid: int
    generation: int
    entry_valid: int
    attr_valid: int
    entry_valid_ns: int
    attr_valid_ns: int


@laid_out(replies.OPEN_OUT)
class OpenOut(WireRecord):
    """fuse_open_out."""

    handle: int
    flags: int


@laid_out(replies.WRITE_OUT)
class WriteOut(WireRecord):
    """fuse_write_out."""

    size: int


@laid_out(replies.IOCTL_OUT)
class IoctlOut(WireRecord):
    """fuse_ioctl_out."""

    result: int
    flags: int


@laid_out(replies.STATFS_OUT)
class StatfsOut(WireRecord):
    """fuse_statfs_out."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    block_size: int
    name_bytes_max: int
    fragment_size: int


@laid_out(replies.GETXATTR_OUT)
class GetxattrOut(WireRecord):
    """fuse_getxattr_out."""

    size: int


@laid_out(replies.DIRENT)
class DirentHead(WireRecord):
    """fuse_dirent."""

    ino: int
    cookie: int
    name_bytes: int
    kind: int


@dataclass(frozen=True, slots=True)
class AttrOut:
    """fuse_attr_out."""

    HEAD: ClassVar = AttrHead

    head: AttrHead
    attributes: AttrOfFile

    def encode(self) -> bytes:
        return self.head.encode() + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        head = AttrHead.decode_untrusted(buffer, offset)
        return cls(head, AttrOfFile.decode_untrusted(buffer, offset + head.LAYOUT.size))


@dataclass(frozen=True, slots=True)
class EntryOut:
    """fuse_entry_out."""

    HEAD: ClassVar = EntryHead

    head: EntryHead
    attributes: AttrOfFile

    def encode(self) -> bytes:
        return self.head.encode() + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        head = EntryHead.decode_untrusted(buffer, offset)
        return cls(head, AttrOfFile.decode_untrusted(buffer, offset + head.LAYOUT.size))

    @property
    def nodeid(self) -> int:
        return self.head.nodeid
