"""A relay in front of an HTTP server that spoils answers as it is told."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

CHUNK = 1 << 16


class FaultyHttp:
    """Relays TCP to a port of loopback. `fault` counts for bytes that come from now on:

    "slow": no answer passes. "cut": the connection ends after some bytes of an answer with a body. "flip": a
    bit amid each body is another. "503", "403": every request is answered so. "gone": connections
    end at once.
    """

    def __init__(self, port: int) -> None:
        self.fault = ""
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.fault == "gone":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._to))
            self._open |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._relay, args=(source, sink, is_answer))
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                if not is_answer and self.fault in ("503", "403"):
                    status = "503 Slow Down" if self.fault == "503" else "403 Forbidden"
                    source.sendall(
                        f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
                    )
                    break
                if self.fault == "gone":
                    break
                if is_answer and self.fault == "slow":
                    continue
                if is_answer and self.fault == "cut" and len(data) > 2000:
                    sink.sendall(data[:2000])
                    break
                if is_answer and self.fault == "flip" and len(data) > 2000:
                    middle = len(data) // 2
                    data = data[:middle] + bytes((data[middle] ^ 4,)) + data[middle + 1 :]
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._open.discard(each)
