"""The socket to a front-end: whole messages with their descriptors, received without ever blocking.

A process of its own reads the socket and passes on messages whose descriptors are memory and events: see
agent/host_os/foreign_descriptors.py. Replies go out of this process.
"""

import os
import socket
from typing import NamedTuple

from agent.fs.virtiofs.back_end import PeerError, Reply
from agent.host_os.foreign_descriptors import (
    ForeignRefused,
    MessageReceiver,
    StrangerGone,
    close_descriptor,
)
from agent.virtio.vhost_user import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    REGIONS_MAX,
    Header,
    VhostUserFormatError,
)


class Message(NamedTuple):
    header: Header
    payload: bytes
    fds: list[int]


class FrontEndGone(Exception):
    """The connection has ended."""


class FrontEndLink(MessageReceiver):
    """One connection. `fileno` is to be watched for messages, `connection` for its end."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises PeerError where its messages cannot be received; the connection is closed then."""
        connection.setblocking(False)
        try:
            super().__init__(
                connection,
                header_bytes=HEADER_BYTES,
                payload_bytes_max=PAYLOAD_BYTES_MAX,
                descriptors_max=REGIONS_MAX,
            )
        except (ForeignRefused, OSError) as failure:
            raise PeerError(f"nothing is taken from it: {failure}") from None

    def next_message(self) -> Message | None:
        """The next message, None while it is not whole. Raises FrontEndGone, and PeerError for no message."""
        try:
            received = self.receive()
        except ForeignRefused as refused:
            raise PeerError(str(refused)) from None
        except StrangerGone as gone:
            raise FrontEndGone(str(gone)) from None
        if received is None:
            return None
        whole, fds = received
        try:
            return Message(Header.decode_untrusted(whole[:HEADER_BYTES]), whole[HEADER_BYTES:], fds)
        except VhostUserFormatError as broken:
            for fd in fds:
                close_descriptor(fd)
            raise PeerError(str(broken)) from None

    def send(self, reply: Reply) -> None:
        """Raises FrontEndGone where it does not take the reply: replies are short, and it has asked."""
        fds = [] if reply.fd is None else [reply.fd]
        try:
            if socket.send_fds(self.connection, [reply.data], fds) != len(reply.data):
                raise FrontEndGone("it reads no replies")
        except BlockingIOError:
            raise FrontEndGone("it reads no replies") from None
        except OSError as error:
            raise FrontEndGone(error.strerror) from None
        finally:
            for fd in fds:
                os.close(fd)
