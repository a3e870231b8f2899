"""The RPC socket of an enclosure: a Unix socket of mode 0600, one thread for each client, a few at most.

As SPDK does it, what is not JSON closes the connection without a word, and part of a request waits for the
rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from emulator.jbof.control import ACCEPT_AGAIN_S, listen_at
from emulator.jbof.enclosure import Enclosure
from emulator.jbof.rpc.dispatch import Dispatcher
from emulator.jbof.rpc.json_stream import JsonStream, MalformedStream

log = logging.getLogger(__name__)

CLIENTS_MAX: Final = 16
"""Connections at once. One more gets the place of the one that has been silent longest, if that is long."""

SILENT_S: Final = 10.0
"""A client that has asked nothing for so long may lose its place to a new one."""

IDLE_S: Final = 300.0
"""A client that neither asks nor reads for so long is hung up on."""

_PIECE_BYTES: Final = 64 << 10


class RpcServer:
    """Listens at `path` from construction to `close`. EnclosureError if it cannot."""

    def __init__(self, enclosure: Enclosure, path: Path) -> None:
        self.path = path
        self.dispatcher = Dispatcher(enclosure)
        self._slots = threading.BoundedSemaphore(CLIENTS_MAX)
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._heard: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._listener = listen_at(path, CLIENTS_MAX)
        self._thread = threading.Thread(target=self._accept, name="rpc", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors, or a client that was gone before we took it: go on, but not hot.
                log.warning("rpc: accept: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._slots.acquire(blocking=False) and not self._make_room():
                log.debug("rpc client: there are %d already", CLIENTS_MAX)
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name="rpc-client", daemon=True)
            with self._lock:
                self._clients[client] = thread
                self._heard[client] = time.monotonic()
            thread.start()

    def _make_room(self) -> bool:
        """Hang up on the client that has been silent longest; whether there is a place then."""
        with self._lock:
            if not self._heard:
                return False
            client = min(self._heard, key=lambda each: self._heard[each])
            if self._heard[client] > time.monotonic() - SILENT_S:
                return False
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        return self._slots.acquire(timeout=1)

    def _serve(self, client: socket.socket) -> None:
        try:
            client.settimeout(IDLE_S)
            stream = JsonStream()
            with client:
                while piece := client.recv(_PIECE_BYTES):
                    with self._lock:
                        self._heard[client] = time.monotonic()
                    for request in stream.push(piece):
                        self._answer(client, self.dispatcher.answer(request))
        except MalformedStream as error:
            log.debug("rpc client: %s", error)
        except OSError as error:
            log.debug("rpc client: %s", error)
        finally:
            with self._lock:
                self._clients.pop(client, None)
                self._heard.pop(client, None)
            self._slots.release()

    def _answer(self, client: socket.socket, answer: Any) -> None:
        if answer is not None:
            client.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Stop listening, hang up on everybody, and remove the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in clients.values():
            thread.join(5)
        self.path.unlink(missing_ok=True)
