"""What a queue's worker does with a request: has the guest's session answer it, in the guest's own memory.

A request that an earlier process had taken and not answered may have been carried out, or not.
Most can be carried out twice: a read, a lookup, a write to its place. Of the others

* what removed or moved a name and now finds none (ENOENT) has been done (and what finds one removes it,
  although somebody else may have made it since: docs/virtiofs.md);
* what gives a reference back is not done again: counted twice it would take one that the guest still has,
  left out it leaves one that is given back when the guest begins anew;
* an exchange of two names would undo itself, so it is not done again: EIO, and the caller looks;
* what makes a name and finds it there stays EEXIST. It may be this very request's, and it may be another
  guest's that was quicker: who makes a name exclusively must never be told so twice.
"""

import errno
from typing import Final

from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, OUT_HEADER, Opcode, encode_answer
from agent.fs.fuse.requests import RENAME2_IN
from agent.fs.fuse.session import FuseSession, Reply
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.inline.scatter import Target
from agent.pool.steps import Runner

RENAME_EXCHANGE: Final = 2
_GIVES_BACK: Final = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.RELEASEDIR})
"""A folder's handle may have been given out often; one of a file was given out once, and closing it twice
is refused."""
_REMOVES: Final = frozenset({Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2})


class RequestService:
    """Answers the chains of one request queue, in its worker's thread."""

    def __init__(self, session: FuseSession, buffers: RequestBuffers, runner: Runner) -> None:
        self._session = session
        self._buffers = buffers
        self._runner = runner

    def serve(self, chain: Chain) -> int:
        """How many bytes were written into the chain's buffers."""
        buffers = self._buffers
        message, received, data, room = buffers.take(chain.readable, chain.writable)
        if chain.again:
            return self._serve_again(message, received, data, room)
        reply = self._session.answer(message, received, data, room, self._runner)
        if reply is None:
            buffers.let_go()
            return 0
        return self._put(message, reply)

    def _serve_again(self, message: memoryview, received: int, data: memoryview, room: Target) -> int:
        if is_given_back(message, received):
            return self._buffers.put(acknowledged(message)) or 0
        reply = refused_again(message, received)
        if reply is None:
            reply = self._session.answer(message, received, data, room, self._runner)
        return 0 if reply is None else self._put(message, as_done_before(message, reply))

    def _put(self, message: memoryview, reply: Reply) -> int:
        written = self._buffers.put(reply)
        if written is None:
            # The guest left too little room for what it asked, and will not hear of it.
            self._session.reply_was_lost(message, reply, self._runner)
            written = self._buffers.put(self._session.refusal_of(message))
        return written or 0


def refused_again(message: memoryview, received: int) -> Reply | None:
    """The answer to a request that must not be carried out a second time; None for any other."""
    if received < IN_HEADER_BYTES + RENAME2_IN.size:
        return None
    opcode, unique = _opcode_and_unique(message)
    if opcode != Opcode.RENAME2:
        return None
    _, flags = RENAME2_IN.unpack_from(message, IN_HEADER_BYTES)
    return [encode_answer(errno.EIO, unique)] if flags & RENAME_EXCHANGE else None


def is_given_back(message: memoryview, received: int) -> bool:
    """Whether a request gives a reference back, which must not be counted twice."""
    return received >= IN_HEADER_BYTES and _opcode_and_unique(message)[0] in _GIVES_BACK


def acknowledged(message: memoryview) -> Reply:
    return [encode_answer(0, _opcode_and_unique(message)[1])]


def as_done_before(message: memoryview, reply: Reply) -> Reply:
    """The answer to a request that was carried out again, if it says that there was nothing left to do."""
    _, error, unique = OUT_HEADER.unpack_from(reply[0])
    if error != -errno.ENOENT or _opcode_and_unique(message)[0] not in _REMOVES:
        return reply
    return [encode_answer(0, unique)]


def _opcode_and_unique(message: memoryview) -> tuple[int, int]:
    _, opcode, unique, *_ = IN_HEADER.unpack_from(message)
    return opcode, unique
