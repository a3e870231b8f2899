"""What a queue's worker does with a request: has the guest's session answer it, in the guest's own memory.

Apart from `Device`, because this runs for every request.
"""

from __future__ import annotations

from agent.fs.fuse.session import FuseSession, Reply
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.fs.virtiofs.served_again import acknowledged, as_done_before, is_given_back, refused_again
from agent.inline.scatter import Target
from agent.pool.steps import Runner


class RequestService:
    """Answers the chains of one request queue, in its worker's thread."""

    def __init__(self, session: FuseSession, buffers: RequestBuffers, runner: Runner) -> None:
        self._session = session
        self._buffers = buffers
        self._runner = runner

    def serve(self, chain: Chain) -> int:
        """How many bytes were written into the chain's buffers."""
        buffers = self._buffers
        taken = buffers.take(chain.readable, chain.writable)
        message, received, data, room = taken.message, taken.received, taken.data, taken.room
        if chain.again:
            return self._serve_again(message, received, data, room)
        reply = self._session.answer(message, received, data, room, self._runner)
        return 0 if reply is None else self._put(message, reply)

    def _serve_again(self, message: memoryview, received: int, data: memoryview, room: Target) -> int:
        """A request that an earlier process had taken and not answered (served_again.py)."""
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
