"""The listener of the metrics: one thread, and a bound on everything, for any user of the machine may
connect.

It waits for nobody: it answers a whole request at once, in its one thread, for scrapes are few. A connection
has CONNECTION_SECONDS for all of it. There are CONNECTIONS_MAX of them, and the oldest goes for one more; so
a scrape, which asks as soon as it is connected, gets through between any number of idle ones.

HTTP is h11's, one request for each connection; a WSGI application answers. A fault ends its own request
alone, and the log tells of faults now and then, however many there are.
"""

import contextlib
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import h11

from agent.host_os.per_user_bounds import ALL, Limit
from agent.telemetry.http_connection import http_connection

log = logging.getLogger(__name__)

Application: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""One of WSGI."""

CONNECTIONS_MAX = 32
CONNECTIONS = Limit(
    "metrics-connections", "connections to the metrics", CONNECTIONS_MAX,
    by="process", share=ALL, refused="the oldest is closed", bytes_each=32 << 10,
)  # fmt: skip
BACKLOG = 128
"""Connections that the kernel holds and we have not taken yet. Beyond them a client waits for a second."""
CONNECTION_SECONDS = 5.0
"""For a connection, from its beginning to its end."""
HEAD_BYTES_MAX = 8 << 10
RECEIVE_BYTES = 4096
RESTING_SECONDS = 0.1
"""Until we try again where no connection can be taken, for instance because there is no descriptor left."""
FAULT_SECONDS = 60.0
"""Between two log lines that say that a request could not be answered."""
ACCEPT_CHARACTERS_MAX = 1024
"""A Prometheus sends about 250."""

_RANGE = re.compile(
    r"[ \t]*(application/openmetrics-text|text/plain|[a-z*]+/[a-z*]+)[ \t]*"
    r"(;[ \t]*(version=(0\.0\.1|0\.0\.4|1\.0\.0)|q=[01](\.[0-9]{0,3})?|charset=utf-8"
    r"|escaping=(allow-utf-8|underscores|dots|values))[ \t]*)*"
)


def understood(accept: str) -> str:
    """The media ranges of an Accept header that we know."""
    if len(accept) > ACCEPT_CHARACTERS_MAX:
        return ""
    return ",".join(each for each in accept.split(",") if _RANGE.fullmatch(each))


def with_formats_we_know(application: Application) -> Application:
    """The same application, told of an Accept header only the media ranges that we know.

    prometheus_client copies a version out of that header into the answer's own header, unseen. An unknown
    range is left out; a header with no range left gets the plain format (RFC 9110, 12.5.1).
    """

    def asked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        accept = understood(str(environ.get("HTTP_ACCEPT", "")))
        return application({**environ, "HTTP_ACCEPT": accept}, start_response)

    return asked


class _Connection:
    """One client: its request as far as it has come, and what is still to be sent to it."""

    def __init__(self, stream: socket.socket, ends_at: float) -> None:
        self.stream = stream
        self.ends_at = ends_at
        self.to_send = memoryview(b"")
        self.is_answered = False
        self._http = http_connection(HEAD_BYTES_MAX)

    def request_in(self, data: bytes) -> h11.Request | None:
        """The request, where it is whole with these bytes. Raises h11.RemoteProtocolError."""
        self._http.receive_data(data)
        event = self._http.next_event()
        return event if isinstance(event, h11.Request) else None

    def answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, is_told_length_only: bool
    ) -> None:
        """What is to be sent: all of it, for a scrape is some hundred KiB at the most."""
        headers = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
        head = h11.Response(status_code=status, headers=headers)
        events = [head, h11.Data(data=b"" if is_told_length_only else body), h11.EndOfMessage()]
        self.to_send = memoryview(b"".join(self._http.send(each) or b"" for each in events))
        self.is_answered = True


class Listener:
    """Serves an application on a loopback address, from `start` to `stop`."""

    def __init__(self, host: str, port: int, application: Application) -> None:
        """Raises OSError where the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._application = application
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        """In the order in which they came."""
        self._quiet_until = 0.0
        self._not_said = 0
        """Requests that could not be answered since the log was told of one."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(CONNECTION_SECONDS)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._socket:
                        self._take_all()
                    elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._go_on(connection)
                now = time.monotonic()
                for connection in [each for each in self._connections.values() if each.ends_at <= now]:
                    self._close(connection)
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            self._selector.close()
            for each in (self._socket, self._wake, self._woken):
                each.close()

    def _patience(self) -> float | None:
        """Seconds until a connection's time is over; the first that came is the first to go."""
        for connection in self._connections.values():
            return max(0.0, connection.ends_at - time.monotonic())
        return None

    def _take_all(self) -> None:
        """At most as many as there may be, so that those that are here have their turn."""
        for _ in range(CONNECTIONS_MAX):
            try:
                stream, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:
                self._stopping.wait(RESTING_SECONDS)
                return
            stream.setblocking(False)
            if len(self._connections) >= CONNECTIONS_MAX:
                self._close(next(iter(self._connections.values())))
            connection = _Connection(stream, time.monotonic() + CONNECTION_SECONDS)
            self._connections[stream] = connection
            self._selector.register(stream, selectors.EVENT_READ)
            self._go_on(connection)

    def _go_on(self, connection: _Connection) -> None:
        """Receive what is there, answer, send what goes out; close where that is over."""
        try:
            data = connection.stream.recv(RECEIVE_BYTES)
            if not data:
                self._close(connection)
                return
            if not connection.is_answered and not self._answer(connection, data):
                self._close(connection)
                return
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        except Exception:
            # What the application has answered cannot be sent: no header of HTTP, or none to this request.
            self._say_fault("a request for the metrics could not be answered")
            self._close(connection)
            return
        if connection.to_send:
            self._send(connection)

    def _answer(self, connection: _Connection, data: bytes) -> bool:
        """False for what is no request."""
        try:
            request = connection.request_in(data)
        except h11.RemoteProtocolError:
            return False
        if request is not None:
            connection.answer(*self._asked(request), is_told_length_only=request.method == b"HEAD")
        return True

    def _asked(self, request: h11.Request) -> tuple[int, list[tuple[str, str]], bytes]:
        path, _, query = request.target.decode("latin-1").partition("?")
        environ = {
            "REQUEST_METHOD": request.method.decode("latin-1"),
            "PATH_INFO": path,
            "QUERY_STRING": query,
        }
        for name, value in request.headers:
            if value.isascii():
                key = "HTTP_" + name.decode("ascii").upper().replace("-", "_")
                environ[key] = value.decode("ascii")
        told: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]]) -> None:
            told.append((status, headers))

        try:
            body = b"".join(self._application(environ, start_response))
            status, headers = told[0]
            return int(status.split()[0]), headers, body
        except Exception:
            self._say_fault("the metrics could not be taken")
            return 500, [], b""

    def _say_fault(self, what: str) -> None:
        """Tell the log of the exception at hand, unless it was told of one just now: anybody may ask."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._not_said += 1
            return
        log.exception("%s; nor could %d others since the last line like this", what, self._not_said)
        self._quiet_until, self._not_said = now + FAULT_SECONDS, 0

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.stream.send(connection.to_send)
            connection.to_send = connection.to_send[sent:]
            if not connection.to_send:
                # It is closed when the client has closed: what it may send still would reset it otherwise.
                connection.stream.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.to_send else 0)
        self._selector.modify(connection.stream, wanted)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.stream]
        self._selector.unregister(connection.stream)
        with contextlib.suppress(OSError):
            connection.stream.close()
