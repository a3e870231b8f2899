"""A vhost-user front-end's socket: messages and descriptors out, answers in. Thin; front_end.py decides."""

import os
import socket
from pathlib import Path

from agent.bench.virtio_driver.front_end import (
    BackEndFault,
    Conversation,
    Incoming,
    Outgoing,
    T,
    check_acknowledged,
)
from agent.virtio.vhost_user import (
    HEADER_BYTES,
    REGIONS_MAX,
    Header,
    VhostUserFormatError,
    decode_reply_untrusted,
)

ANSWER_SECONDS = 30.0
"""How long a back-end may take for an answer; stopping a ring may wait for a whole request."""


class BackEndGone(ConnectionError):
    """The world's fault, or the back-end's: nobody is there, or it closed the connection."""


class Connection:
    def __init__(self, path: Path | str, seconds: float = ANSWER_SECONDS) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(seconds)
        try:
            self._socket.connect(os.fspath(path))
        except OSError as error:
            self._socket.close()
            raise BackEndGone(f"nobody serves {path}: {error}") from None

    def run(self, conversation: Conversation[T]) -> T:
        """Send what a conversation says and answer it, to its end.

        Raises BackEndGone where the connection ends, BackEndFault where the back-end refuses or errs.
        """
        answer: Incoming | None = None
        while True:
            try:
                message = conversation.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            self.send(message.encode(), message.descriptors)
            answer = self._answer_to(message) if message.is_answered else None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send bytes, whatever they say, and descriptors."""
        try:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            if sent < len(data):
                self._socket.sendall(data[sent:])
        except OSError as error:
            raise BackEndGone(f"the back-end has gone: {error}") from None

    def receive(self) -> tuple[Header, bytes, tuple[int, ...]]:
        """The next message; BackEndGone at the end of the connection, BackEndFault where it is no message."""
        head, descriptors = self._exactly(HEADER_BYTES, b"", ())
        try:
            header = Header.decode_untrusted(head)
        except VhostUserFormatError as broken:
            _close(descriptors)
            raise BackEndFault(str(broken)) from None
        payload, descriptors = self._exactly(header.size, b"", descriptors)
        return header, payload, descriptors

    def close(self) -> None:
        """As QEMU ends when it is killed: the device is told nothing."""
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _answer_to(self, message: Outgoing) -> Incoming:
        header, payload, descriptors = self.receive()
        try:
            if header.request != message.request or not header.is_reply:
                raise BackEndFault(f"{message.request.name} was answered with message {header.request}")
            answer = Incoming(decode_reply_untrusted(header.request, payload), descriptors)
            check_acknowledged(message, answer)
        except VhostUserFormatError as broken:
            _close(descriptors)
            raise BackEndFault(f"the answer to {message.request.name}: {broken}") from None
        except BackEndFault:
            _close(descriptors)
            raise
        return answer

    def _exactly(self, size: int, got: bytes, descriptors: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        while len(got) < size:
            try:
                part, more, _flags, _address = socket.recv_fds(self._socket, size - len(got), REGIONS_MAX)
            except OSError as error:
                _close(descriptors)
                raise BackEndGone(f"no answer came: {error}") from None
            descriptors += tuple(more)
            if not part:
                _close(descriptors)
                raise BackEndGone("the back-end closed the connection")
            got += part
        return got, descriptors


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
