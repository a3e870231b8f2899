"""A door that speaks HTTP: listeners, connections, threads (agent/fs/doors/door.py has the contract).

An event loop of its own, in a thread, has the sockets; further threads have a channel each and do whatever
blocks (`Workers`). Nothing of a door runs in the supervisor's loop or in a worker of another door.
"""

import contextlib
import logging
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from agent.config.http_section import HttpSection, parse_listener
from agent.errors import ConfigError, G35Error
from agent.fs.doors.door import GRACE_SECONDS
from agent.host_os.per_user_bounds import Bound
from agent.host_os.rate_limited_log import Complaints
from agent.http.connection import HttpConnection
from agent.http.counters import DoorCounters
from agent.http.unauthenticated_clients import UnprovenClient, UnprovenClients
from agent.http.workers import Workers
from nvmeof.authentication.private_files import SecretFileError, check_private
from nvmeof.controller.unauthenticated_connections import peer_of

log = logging.getLogger(__name__)

BACKLOG: Final = 128
HANDSHAKE_SECONDS: Final = 10.0


class HttpDoor(ABC):
    """A `Door`. A subclass says who answers, and what else runs in the door's event loop."""

    def __init__(
        self,
        name: str,
        what: str,
        section: HttpSection,
        workers: Workers,
        connected: Bound,
        complaints: Complaints,
        counters: DoorCounters,
        *,
        is_shared: bool = False,
    ) -> None:
        """`name`: its section of the configuration, and its thread's. `what`: its protocol, for messages.
        `connected` bounds connections whose client has proven nothing. `is_shared`: other processes of this
        agent listen at the same ports, and the kernel gives connections to all. Raises ConfigError where the
        certificate is not usable."""
        self._name, self._what, self._is_shared = name, what, is_shared
        self._http = section
        self._clients = UnprovenClients(connected)
        self._workers = workers
        self._tls = _tls(name, section)
        self._complaints = complaints
        self._counted = counters
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopping = trio.Event()
        self._grace_seconds = GRACE_SECONDS
        self._room = trio.Semaphore(section.connections)
        self._nursery: trio.Nursery | None = None
        """Of the connections, while the door is open."""
        self._failure: BaseException | None = None
        """The error that ended its loop."""
        self.ports: list[int] = []
        """Its ports, in the order of the configuration."""

    async def _prepare(self) -> None:
        """In the event loop, before the first connection."""
        await trio.lowlevel.checkpoint()

    @abstractmethod
    def _connection(self, stream: trio.abc.Stream, known: Callable[[], None]) -> HttpConnection:
        """What answers on a stream."""

    async def _tend(self) -> None:
        """In the event loop, beside the connections, until it is cancelled."""
        await trio.sleep_forever()

    async def _finish(self) -> None:
        """In the event loop, after the last connection."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close a door that was never started, or has ended."""
        self._close_listeners()

    def start(self) -> None:
        """Listen and serve. Raises ConfigError."""
        try:
            for text in self._http.listen:
                self._listeners.append(_listener(self._name, text, is_shared=self._is_shared))
        except BaseException:
            self._close_listeners()
            raise
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._workers.start()
        began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(began,), name=self._name, daemon=True)
        self._thread.start()
        began.wait()
        if self._failure is not None:
            raise G35Error(f"the {self._what} door did not start", "the log says why") from self._failure

    def wait(self, timeout: float | None = None) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Take no more requests; those under way have the grace."""
        if self._thread is not None:
            self._grace_seconds = grace_seconds
            with contextlib.suppress(trio.RunFinishedError):
                assert self._token is not None, "it was set before start returned"
                self._token.run_sync_soon(self._stopping.set)
            self._thread.join()
            self._thread = None
        self.close()

    @property
    def addresses(self) -> list[str]:
        """Where it listens, each `ADDRESS:PORT`."""
        addresses = [text.rpartition(":")[0] for text in self._http.listen]
        return [f"{address}:{port}" for address, port in zip(addresses, self.ports, strict=False)]

    @property
    def speaks_tls(self) -> bool:
        return self._tls is not None

    def _run(self, began: threading.Event) -> None:
        try:
            trio.run(self._serve, began)
        except BaseException as bug:
            self._failure = bug
            log.exception("the %s door ended", self._what)
        finally:
            self._close_listeners()
            began.set()
            self._workers.stop()

    async def _serve(self, began: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        await self._prepare()
        began.set()
        async with trio.open_nursery() as connections:
            self._nursery = connections
            async with trio.open_nursery() as others:
                for listener in self._listeners:
                    others.start_soon(self._accept, listener, connections)
                others.start_soon(self._tend)
                await self._stopping.wait()
                others.cancel_scope.cancel()
            self._nursery = None
            connections.cancel_scope.deadline = trio.current_time() + self._grace_seconds
        await self._finish()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        accepting = trio.socket.from_stdlib_socket(listener)
        while True:
            await trio.lowlevel.wait_readable(listener)
            await self._wait_for_room()
            try:
                connected, address = await accepting.accept()
            except OSError as error:
                self._room.release()
                self._complaints.peer(f"accepting a connection of {self._what}", str(error))
                await trio.sleep(0.1)
                continue
            if (stranger := self._enter(str(address[0]))) is None:
                connected.close()
            else:
                nursery.start_soon(
                    self._serve_one, stranger, self._serve_stream, trio.SocketStream(connected)
                )

    async def _wait_for_room(self) -> None:
        if not self._room.value:
            self._clients.make_room()
        await self._room.acquire()

    def _enter(self, address: str) -> UnprovenClient | None:
        """A connection for which there is room; None where it is refused."""
        stranger = self._clients.enter(peer_of(address))
        if stranger is None:
            self._counted.connections_refused += 1
            self._room.release()
        else:
            self._counted.connections += 1
        return stranger

    async def _serve_one(
        self,
        stranger: UnprovenClient,
        serve: Callable[[trio.SocketStream, UnprovenClient], Awaitable[None]],
        stream: trio.SocketStream,
    ) -> None:
        try:
            with stranger.scope:
                await serve(stream, stranger)
            self._counted.connections_refused += stranger.scope.cancelled_caught
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the client's end, or the network's
        except _HandshakeFailed:
            self._counted.connections_refused += 1
        except Exception as bug:
            self._complaints.bug(f"a connection of {self._what}", bug)
        finally:
            self._counted.connections -= 1
            stranger.leave()
            self._room.release()

    async def _serve_stream(self, stream: trio.SocketStream, stranger: UnprovenClient) -> None:
        """Serve a connection to its end, or until it gives way."""
        async with stream:
            served: trio.abc.Stream = stream
            if self._tls is not None:
                served = await self._secured(stream)
            await self._connection(served, stranger.identify).serve()

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        assert self._tls is not None, "asked where there is TLS"
        secured = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                await secured.do_handshake()
        except (trio.TooSlowError, trio.BrokenResourceError):
            raise _HandshakeFailed from None
        return secured

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()


class _HandshakeFailed(Exception):
    """The TLS handshake failed."""


def _listener(name: str, text: str, *, is_shared: bool) -> socket.socket:
    address, port = parse_listener(text)
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen on {text}: {error.strerror}", f"choose another port in {name}.listen"
        ) from None
    return made


def _tls(name: str, section: HttpSection) -> ssl.SSLContext | None:
    if section.certificate is None or section.private_key is None:
        return None
    try:
        check_private(section.private_key)
        section.certificate.open("rb").close()
    except SecretFileError as refused:
        raise ConfigError(refused.message, refused.advice) from None
    except OSError as error:
        raise ConfigError(f"cannot open {section.certificate}: {error.strerror}", "check the path") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.certificate, section.private_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}.certificate or {name}.private_key is not usable: {error}", "both are PEM files"
        ) from None
    return context
