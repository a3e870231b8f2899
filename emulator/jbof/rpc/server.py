"""The RPC socket of an enclosure. As with SPDK, malformed JSON closes the connection without an answer."""

import contextlib
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any, Final

from emulator.jbof.client_server import ClientServer
from emulator.jbof.enclosure import Enclosure
from emulator.jbof.rpc.dispatch import Dispatcher
from emulator.jbof.rpc.json_stream import JsonStream, MalformedStream

log = logging.getLogger(__name__)

CLIENTS_MAX: Final = 16
"""Connections at once. The next one gets the place of the longest silent one, after `SILENT_S`."""

SILENT_S: Final = 10.0
"""A client that was silent for so long may lose its place."""

IDLE_S: Final = 300.0
"""A client that neither asks nor reads for so long is disconnected."""

_PIECE_BYTES: Final = 64 << 10


class RpcServer(ClientServer):
    """Listens at `path` from construction to `close`. EnclosureError if it cannot."""

    def __init__(self, enclosure: Enclosure, path: Path) -> None:
        self.dispatcher = Dispatcher(enclosure)
        self._heard: dict[socket.socket, float] = {}
        """The time of each client's last bytes. Guarded by `_lock`."""
        super().__init__("rpc", path, CLIENTS_MAX)

    def make_room(self) -> bool:
        """Disconnect the client that was silent longest; whether there is a place then."""
        with self._lock:
            if not self._heard:
                return False
            client = min(self._heard, key=lambda each: self._heard[each])
            if self._heard[client] > time.monotonic() - SILENT_S:
                return False
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        return self._slots.acquire(timeout=1)

    def converse(self, client: socket.socket) -> None:
        client.settimeout(IDLE_S)
        stream = JsonStream()
        self._hear(client)
        try:
            while piece := client.recv(_PIECE_BYTES):
                self._hear(client)
                for request in stream.push(piece):
                    self._answer(client, self.dispatcher.answer(request))
        except MalformedStream as error:
            log.debug("rpc client: %s", error)
        finally:
            with self._lock:
                self._heard.pop(client, None)

    def _hear(self, client: socket.socket) -> None:
        with self._lock:
            self._heard[client] = time.monotonic()

    def _answer(self, client: socket.socket, answer: Any) -> None:
        if answer is not None:
            client.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
