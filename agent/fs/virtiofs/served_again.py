"""Requests that an earlier process had taken and not answered: it may have carried them out, or not.

Most can be carried out twice: a read, a lookup, a write to its place. Of the others

* what removed or moved a name and now finds none (ENOENT) has been done (and what finds one removes it,
  although somebody else may have made it since: docs/virtiofs.md);
* what gives a reference back is not done again: counted twice it would take one that the guest still has,
  left out it leaves one that is given back when the guest begins anew;
* an exchange of two names would undo itself, so it is not done again: EIO, and the caller looks;
* what makes a name and finds it there stays EEXIST. It may be this very request's, and it may be another
  guest's that was quicker: who makes a name exclusively must never be told so twice.
"""

from __future__ import annotations

import errno

from agent.fs.fuse.abi import IN_HEADER_BYTES, OUT_HEADER_BYTES, InHeader, Opcode, OutHeader
from agent.fs.fuse.requests import Rename2In
from agent.fs.fuse.session import Reply

RENAME_EXCHANGE = 2
_GIVES_BACK = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.RELEASEDIR})
"""A folder's handle may have been given out often; one of a file was given out once, and closing it twice
is refused."""
_REMOVES = frozenset({Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2})


def refused_again(message: memoryview, received: int) -> Reply | None:
    """The answer to a request that must not be carried out a second time; None for any other."""
    if received < IN_HEADER_BYTES + Rename2In.LAYOUT.size:
        return None
    header = InHeader.decode_untrusted(message)
    if header.opcode != Opcode.RENAME2:
        return None
    if not Rename2In.decode_untrusted(message, IN_HEADER_BYTES).flags & RENAME_EXCHANGE:
        return None
    return [OutHeader(OUT_HEADER_BYTES, -errno.EIO, header.unique).encode()]


def is_given_back(message: memoryview, received: int) -> bool:
    """Whether a request gives a reference back, which must not be counted twice."""
    return received >= IN_HEADER_BYTES and InHeader.decode_untrusted(message).opcode in _GIVES_BACK


def acknowledged(message: memoryview) -> Reply:
    """Success, without anything being done."""
    return [OutHeader(OUT_HEADER_BYTES, 0, InHeader.decode_untrusted(message).unique).encode()]


def as_done_before(message: memoryview, reply: Reply) -> Reply:
    """The answer to a request that was carried out again, if it says that there was nothing left to do."""
    answer = OutHeader.decode_untrusted(reply[0])
    if answer.error != -errno.ENOENT or InHeader.decode_untrusted(message).opcode not in _REMOVES:
        return reply
    return [OutHeader(OUT_HEADER_BYTES, 0, answer.unique).encode()]
