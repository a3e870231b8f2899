"""A guest's request in a reader: a get is served here, all else is carried to the first process.

Of the request a peek tells which it is, before anything is gathered. What a get comes to is answered here
if it is a value, its absence, or too little room for it. Any other answer is the first process' to give.
Where keys are bound to tickets, what is bound comes back with the answer. A guest that changes its memory
between the looks of both misleads itself alone: what it is told of are its own sessions.
"""

import errno
from collections.abc import Callable
from typing import Final

from agent.fs.fuse.abi import IN_HEADER, IN_HEADER_BYTES, OUT_HEADER, Opcode
from agent.fs.fuse.requests import WRITE_HEAD_BYTES, WRITE_IN
from agent.fs.fuse.session import FuseSession, Reply
from agent.fs.guest_sessions import Bound, GuestWords
from agent.fs.virtiofs.device_queue import Chain
from agent.fs.virtiofs.processes.carrier import Carrier
from agent.fs.virtiofs.request_buffers import RequestBuffers
from agent.pool.steps import Runner
from host_shim.control_wire import HEADER_BYTES, binds_reads

_IN_HEADER: Final = IN_HEADER
_OUT_HEADER: Final = OUT_HEADER
_WRITE_IN: Final = WRITE_IN
_WRITE: Final[int] = Opcode.WRITE.value
_GETS: Final = frozenset({Opcode.READ.value, Opcode.GETXATTR.value})
_HEAD_BYTES: Final = WRITE_HEAD_BYTES + HEADER_BYTES
_FINAL: Final = frozenset({0, -errno.ENODATA, -errno.ERANGE})


class ReaderService:
    """Answers the chains of one request queue, in its worker's thread."""

    def __init__(
        self,
        session: FuseSession,
        node: int,
        learn: Callable[[int, Bound], object],
        buffers: RequestBuffers,
        runner: Runner,
        words: GuestWords,
        carrier: Carrier,
    ) -> None:
        """`session`: over the gets that are served here, all of one `node`. `learn` is told what is bound in
        a session of the guest, by its handle."""
        self._session, self._node, self._learn = session, node, learn
        self._buffers, self._runner = buffers, runner
        self._words, self._carrier = words, carrier

    def serve(self, chain: Chain) -> int:
        """How many bytes were written into the chain's buffers. Raises BadRing."""
        opcode = self._opcode(chain.readable[0]) if chain.readable else 0
        if opcode in _GETS and self._words.is_live:
            buffers = self._buffers
            message, received, data, room = buffers.take(chain.readable, chain.writable)
            # The guest may have changed it since the peek. Only a get is the session's here: it says no INIT.
            if self._opcode(message) in _GETS:
                reply = self._session.answer(message, received, data, room, self._runner)
                if reply is not None and is_final(reply):
                    written = buffers.put(reply)
                    if written is not None:
                        return written
            buffers.let_go()
        handle = session_bound_by(chain) if opcode == _WRITE else 0
        written, bound = self._carrier.carry(chain, handle)
        if bound is not None:
            self._learn(handle, bound)
        return written

    def _opcode(self, head: memoryview) -> int:
        """That of a request about the node; 0 for any other."""
        if len(head) < IN_HEADER_BYTES:
            return 0
        opcode: int
        node: int
        _, opcode, _, node, *_ = _IN_HEADER.unpack_from(head)
        return opcode if node == self._node else 0


def is_final(reply: Reply) -> bool:
    """Whether the guest is to have this answer, and not the first process' own."""
    error: int = _OUT_HEADER.unpack_from(reply[0])[1]
    return error in _FINAL


def session_bound_by(chain: Chain) -> int:
    """The handle of a session in which a WRITE binds keys to be read; 0 for any other WRITE."""
    head = b""
    for run in chain.readable:
        head += run[: _HEAD_BYTES - len(head)]
        if len(head) == _HEAD_BYTES:
            handle: int
            offset: int
            handle, offset, *_ = _WRITE_IN.unpack_from(head, IN_HEADER_BYTES)
            return handle if not offset and binds_reads(head[WRITE_HEAD_BYTES:]) else 0
    return 0
