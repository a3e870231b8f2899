"""A stand-in answers a mount whose process is away, so that no caller of the mount waits for the process.

It answers the kernel's INIT, so that any process may go on with the mount (`FuseSession.resume`), and
everything else by ENOTCONN, as the kernel does where nobody is left. The process serves on clones of the
mount's descriptor; so what it had begun ends with it, and the mount does not.
"""

import contextlib
import errno
import os
from typing import Final

from agent.fs.fuse.abi import IN_HEADER, Opcode, encode_answer
from agent.fs.fuse.session import NO_ANSWER, FuseSession, Negotiated
from agent.fs.interface import RootFileSystem
from agent.pool.steps import NoRunner

_REQUEST_BYTES: Final = (1 << 20) + 4096
"""The kernel gives no request to a reader whose buffer is smaller than the largest one."""
_AT_ONCE: Final = 64
"""Requests that are answered with one look, so that nothing else waits for long."""


class StandIn:
    """The stand-in of one mount. `descriptor` is the mount's, and stays the caller's. For one thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        os.set_blocking(descriptor, False)
        self._session = FuseSession(RootFileSystem({}))
        self._request = memoryview(bytearray(_REQUEST_BYTES))
        self._runner = NoRunner()

    @property
    def negotiated(self) -> Negotiated | None:
        """What the kernel and this process have agreed on; None before."""
        return self._session.negotiated

    def answer_waiting(self) -> None:
        """Answer what waits. Raises OSError where the mount is gone."""
        for _ in range(_AT_ONCE):
            try:
                received = os.readv(self.descriptor, [self._request])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            self._answer(received)

    def _answer(self, received: int) -> None:
        if received < IN_HEADER.size:
            return
        _, opcode, unique, *_ = IN_HEADER.unpack_from(self._request)
        if opcode == Opcode.INIT:
            room = memoryview(b"")
            reply = self._session.answer(self._request, received, room, room, self._runner)
        elif opcode in NO_ANSWER:
            return
        else:
            reply = [encode_answer(errno.ENOTCONN, unique)]
        if reply is not None:
            with contextlib.suppress(OSError):  # it was interrupted meanwhile; or the mount is gone
                os.writev(self.descriptor, reply)
