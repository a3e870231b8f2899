"""A guest's request in a reader: a get is served here, all else is carried to the first process.

Of the request a peek tells which it is, before anything is gathered. What a get comes to is answered here
if it is a value, its absence, or too little room for it. Any other answer is the first process' to give.
"""

import errno
from typing import Final

from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, OUT_HEADER, Opcode
from agent.fs.fuse.session import FuseSession, Reply
from agent.fs.guest_sessions import GuestWords
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.pool.steps import Runner

_IN_HEADER: Final = IN_HEADER
_OUT_HEADER: Final = OUT_HEADER
_READ: Final[int] = Opcode.READ.value
_GETXATTR: Final[int] = Opcode.GETXATTR.value
_FINAL: Final = frozenset({0, -errno.ENODATA, -errno.ERANGE})


class ReaderService:
    """Answers the chains of one request queue, in its worker's thread."""

    def __init__(
        self,
        session: FuseSession,
        node: int,
        buffers: RequestBuffers,
        runner: Runner,
        words: GuestWords,
        carrier: Carrier,
    ) -> None:
        """`session`: over the gets that are served here, all of one `node`."""
        self._session, self._node, self._buffers, self._runner = session, node, buffers, runner
        self._words, self._carrier = words, carrier

    def serve(self, chain: Chain) -> int:
        """How many bytes were written into the chain's buffers. Raises BadRing."""
        if chain.readable and self._is_get(chain.readable[0]) and self._words.is_live:
            buffers = self._buffers
            message, received, data, room = buffers.take(chain.readable, chain.writable)
            # The guest may have changed it since the peek. Only a get is the session's here: it says no INIT.
            if self._is_get(message):
                reply = self._session.answer(message, received, data, room, self._runner)
                if reply is not None and is_final(reply):
                    written = buffers.put(reply)
                    if written is not None:
                        return written
            buffers.let_go()
        return self._carrier.carry(chain)

    def _is_get(self, head: memoryview) -> bool:
        if len(head) < IN_HEADER_BYTES:
            return False
        opcode: int
        node: int
        _, opcode, _, node, *_ = _IN_HEADER.unpack_from(head)
        return node == self._node and opcode in (_READ, _GETXATTR)


def is_final(reply: Reply) -> bool:
    """Whether the guest is to have this answer, and not the first process' own."""
    error: int = _OUT_HEADER.unpack_from(reply[0])[1]
    return error in _FINAL
