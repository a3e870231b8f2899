"""Replies of the FUSE protocol with the fuse_attr that ends them, as a kernel would read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from agent.fs.fuse import replies
from agent.fs.fuse.abi import Buffer
from agent.fs.fuse.replies import AttrOfFile


@dataclass(frozen=True, slots=True)
class AttrOut:
    """fuse_attr_out."""

    head: replies.AttrOut
    attributes: AttrOfFile

    def encode(self) -> bytes:
        return self.head.encode() + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        head = replies.AttrOut.decode_untrusted(buffer, offset)
        return cls(head, AttrOfFile.decode_untrusted(buffer, offset + head.LAYOUT.size))


@dataclass(frozen=True, slots=True)
class EntryOut:
    """fuse_entry_out."""

    head: replies.EntryOut
    attributes: AttrOfFile

    def encode(self) -> bytes:
        return self.head.encode() + self.attributes.encode()

    @classmethod
    def decode_untrusted(cls, buffer: Buffer, offset: int = 0) -> Self:
        head = replies.EntryOut.decode_untrusted(buffer, offset)
        return cls(head, AttrOfFile.decode_untrusted(buffer, offset + head.LAYOUT.size))

    @property
    def nodeid(self) -> int:
        return self.head.nodeid
