"""The socket to a front-end: whole messages with their descriptors, received without ever blocking.

A message is read in two pieces of exactly its own length, header and payload, because the kernel hands
descriptors over with the first byte that they were sent with: so they are never taken for another's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

from agent.fs.virtiofs.back_end import PeerError, Reply
from agent.virtio.vhost_user import HEADER_BYTES, REGIONS_MAX, Header, VhostUserFormatError

_FD = struct.Struct("=i")


class Message(NamedTuple):
    header: Header
    payload: bytes
    fds: list[int]


class FrontEndGone(Exception):
    """The connection has ended."""


class FrontEndLink:
    """One connection. Descriptors of a message that was not completed are closed with it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._header: Header | None = None
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Message | None:
        """The next message, None while it is not whole. Raises FrontEndGone, and PeerError for no message."""
        while True:
            wanted = HEADER_BYTES if self._header is None else self._header.size
            if len(self._received) < wanted and not self._more(wanted - len(self._received)):
                return None
            if len(self._received) < wanted:
                continue
            piece = bytes(self._received)
            self._received.clear()
            if self._header is None:
                try:
                    self._header = Header.decode_untrusted(piece)
                except VhostUserFormatError as broken:
                    raise PeerError(str(broken)) from None
                if self._header.size:
                    continue
                piece = b""
            message = Message(self._header, piece, self._fds)
            self._header, self._fds = None, []
            return message

    def _more(self, count: int) -> bool:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                count, socket.CMSG_SPACE(REGIONS_MAX * _FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise FrontEndGone(error.strerror) from None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) // _FD.size * _FD.size
                self._fds += [fd for (fd,) in _FD.iter_unpack(content[:whole])]
        if flags & socket.MSG_CTRUNC or len(self._fds) > REGIONS_MAX:
            raise PeerError(f"more than {REGIONS_MAX} descriptors with one message")
        if not data:
            raise FrontEndGone("it has closed the connection")
        self._received += data
        return True

    def send(self, reply: Reply) -> None:
        """Raises FrontEndGone where it does not take the reply: replies are short, and it has asked."""
        fds = [] if reply.fd is None else [reply.fd]
        try:
            if socket.send_fds(self._socket, [reply.data], fds) != len(reply.data):
                raise FrontEndGone("it reads no replies")
        except BlockingIOError:
            raise FrontEndGone("it reads no replies") from None
        except OSError as error:
            raise FrontEndGone(error.strerror) from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        self._socket.close()
