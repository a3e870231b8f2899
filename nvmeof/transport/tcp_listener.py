"""NVMe/TCP at one address of a target: a listening socket, its thread, and its connections.

A connection is a guest of the target until its host has proven who it is
(`nvmeof/controller/unauthenticated_connections.py`). So strangers displace one another, and not the
connected hosts.
"""

import logging
import math
import socket
import threading
import time
from typing import Any, Final

from nvmeof.controller.target import Target
from nvmeof.controller.tcp_rules import TcpSettings
from nvmeof.controller.unauthenticated_connections import peer_of
from nvmeof.transport.tcp_connection import Connection

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
"""Sockets served at once by one listener; one thread each. The next newcomer takes a guest's place, or is
closed."""

MAX_LEAVING: Final = 64
"""Displaced connections that still have their thread. While there are more, nobody is accepted."""

LEAVING_LOOK_S: Final = 0.002
WARN_EVERY_S: Final = 10.0
"""The log gets one warning about refused connections in that time."""

_BACKLOG: Final = 128
_RETRY_S: Final = 0.05
_STOP_S: Final = 5.0


class TcpListener:
    """Listens from construction to `close`; port 0 asks for any. OSError where the address cannot be had."""

    def __init__(
        self, target: Target, settings: TcpSettings, address: str, port: int, port_id: int = 1
    ) -> None:
        self._target = target
        self._settings = settings
        self.port_id = port_id
        self.accepted = 0
        self.refused = 0
        self._lock = threading.Lock()
        self._open = True
        self._warn_at = -math.inf
        self._connections: set[Connection] = set()
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, port))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of served sockets."""
        with self._lock:
            return sum(connection.thread.is_alive() for connection in self._connections)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if not self._open:
                    return
                # Out of descriptors, or a connection that was gone before we took it: go on, but not hot.
                self._warn("accept: %s", error)
                time.sleep(_RETRY_S)
                continue
            self._take(sock, peer)
            while self._open and self._leaving() > MAX_LEAVING:
                time.sleep(LEAVING_LOOK_S)

    def _take(self, sock: socket.socket, peer: Any) -> None:
        with self._lock:
            self._connections = {each for each in self._connections if each.thread.is_alive()}
            if not self._open:
                sock.close()
                return
            try:
                connection = Connection(sock, self._target, self._settings, f"host-{peer[0]}:{peer[1]}")
            except OSError as error:
                self._warn("cannot serve %s: %s", peer, error)
                sock.close()
                return
            served = [each for each in self._connections if not each.queue.session.displaced]
            sessions = {each.queue.session for each in served} if len(served) >= MAX_CONNECTIONS else None
            session = connection.queue.session
            session.port_id = self.port_id
            if not session.enter(peer_of(peer[0]), time.monotonic(), full_of=sessions):
                self.refused += 1
                connection.discard()
                return
            self.accepted += 1
            try:
                connection.thread.start()
            except RuntimeError as error:
                self._warn("cannot serve %s: %s", peer, error)
                connection.discard()
                return
            self._connections.add(connection)

    def _leaving(self) -> int:
        """Number of displaced connections that still have their thread."""
        with self._lock:
            return sum(each.queue.session.displaced and each.thread.is_alive() for each in self._connections)

    def _warn(self, text: str, *arguments: object) -> None:
        """Log at intervals: strangers can cause warnings at any rate."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning(text, *arguments)

    def close(self) -> None:
        """Stop listening and end its connections. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            connections, self._connections = self._connections, set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_STOP_S)
        for connection in connections:
            connection.stop("the target stops listening here")
        deadline = time.monotonic() + _STOP_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))
