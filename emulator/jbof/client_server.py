"""A Unix socket of mode 0600 with a thread for each of a few clients: of control and RPC alike."""

import contextlib
import logging
import math
import os
import socket
import stat
import struct
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from emulator.jbof.enclosure import EnclosureError

log = logging.getLogger(__name__)

_PEER: Final = struct.Struct("iII")
"""struct ucred: process, user, group."""

ACCEPT_AGAIN_S: Final = 0.05
"""The pause after an accept that failed."""

WARN_EVERY_S: Final = 10.0

STOP_S: Final = 5.0
"""How long `close` waits for each thread."""


class ClientServer(ABC):
    """Listens at `path` from construction to `close`; `converse` has the protocol. EnclosureError if it
    cannot."""

    def __init__(self, name: str, path: Path, clients_max: int) -> None:
        self.path = path
        self._name = name
        self._slots = threading.BoundedSemaphore(clients_max)
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._warn_at = -math.inf
        self._listener = listen_at(path, clients_max)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def converse(self, client: socket.socket) -> None:
        """Serve one client to its end, in a thread of its own. OSError ends it, too."""

    def make_room(self) -> bool:
        """Called at the limit of clients: whether a slot was freed and taken."""
        return False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors, or a client that was gone before we took it: go on, but not hot.
                self._warn("%s: accept: %s", self._name, error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            user = peer_user(client)
            if user not in (0, os.geteuid()):
                # The mode keeps others out, unless somebody has changed it, or passed the socket on.
                self._warn("%s: user %d may not use it, and is disconnected", self._name, user)
                client.close()
                continue
            if not self._slots.acquire(blocking=False) and not self.make_room():
                log.debug("%s: there are as many clients as may be", self._name)
                client.close()
                continue
            name = f"{self._name}-client"
            thread = threading.Thread(target=self._serve, args=(client,), name=name, daemon=True)
            with self._lock:
                self._clients[client] = thread
            try:
                thread.start()
            except RuntimeError as error:
                # No thread now: served clients go on, and the next may have better luck.
                self._warn("%s: a client is disconnected: %s", self._name, error)
                with self._lock:
                    self._clients.pop(client, None)
                self._slots.release()
                client.close()
                time.sleep(ACCEPT_AGAIN_S)

    def _warn(self, text: str, *arguments: object) -> None:
        """Log at intervals: clients can cause warnings at any rate."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning(text, *arguments)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                self.converse(client)
        except OSError as error:
            log.debug("%s client: %s", self._name, error)
        finally:
            with self._lock:
                self._clients.pop(client, None)
            self._slots.release()

    def close(self) -> None:
        """Stop listening, disconnect all clients, and remove the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(STOP_S)
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in clients.values():
            thread.join(STOP_S)
        self.path.unlink(missing_ok=True)


def peer_user(client: socket.socket) -> int:
    """The user id of a client (SO_PEERCRED, unix(7)); -1: unknown."""
    try:
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return -1
    _process, user, _group = _PEER.unpack(credentials)
    return int(user)


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A socket for its owner alone. Replaces one that a killed enclosure left behind."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if _answers(path):
                raise EnclosureError(f"another enclosure listens at {path}")
            path.unlink()
        listener.bind(str(path))
        os.chmod(path, 0o600)  # Nobody can connect before listen, so there is no gap.
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        # Python refuses a path that is too long, without an errno.
        hint = "" if error.errno else "; take a shorter folder"
        raise EnclosureError(f"cannot listen at {path}: {error.strerror or error}{hint}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
