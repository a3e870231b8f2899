"""The questions of a reader's queue to the first process, one at a time (messages.py)."""

import os
import socket

from agent.fs.guest_sessions import Bound
from agent.fs.virtiofs.device_queue import BadRing, Chain, DeviceQueue
from agent.fs.virtiofs.processes.messages import (
    ANSWER_BYTES_MAX,
    LOOK,
    QUESTION,
    SERVE,
    decode_bound,
    decode_written,
)


class Carrier:
    """For the thread of the queue. The end of the socket ends this process: nobody answers its guest then."""

    def __init__(self, descriptor: int, queue: DeviceQueue) -> None:
        """The descriptor is the carrier's now."""
        self._socket = socket.socket(fileno=descriptor)
        self._queue = queue

    def carry(self, chain: Chain, handle: int = 0) -> tuple[int, Bound | None]:
        """Have the first process answer a chain: how many bytes it has written, and what is bound then in the
        session of that handle, where one is named. Raises BadRing."""
        question = QUESTION.pack(SERVE, chain.again, chain.head, 0, self._queue.taking(chain.head), handle)
        found = decode_written(self._ask(question))
        if isinstance(found, str):
            raise BadRing(found)
        return found

    def bound(self, handle: int) -> Bound:
        """In a session of the guest."""
        return decode_bound(self._ask(QUESTION.pack(LOOK, 0, 0, 0, 0, handle)))

    def _ask(self, question: bytes) -> bytes:
        try:
            self._socket.sendall(question)
            answer = self._socket.recv(ANSWER_BYTES_MAX)
        except ConnectionError:
            answer = b""
        if not answer:
            os._exit(1)
        return answer

    def close(self) -> None:
        self._socket.close()
