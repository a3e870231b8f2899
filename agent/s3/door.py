"""The S3 door: listeners, connections, and their threads (agent/fs/doors/door.py has the contract).

An event loop of its own, in the thread `s3`, has the sockets; `s3-0` and so on have a channel each and do
whatever blocks. Nothing of it runs in the supervisor's loop or in a worker of another door.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import trio

from agent.config.s3_section import S3Section, parse_listener
from agent.errors import ConfigError, G35Error
from agent.fs.doors.door import GRACE_SECONDS, MakeRunner
from agent.host_os.complaints import Complaints
from agent.host_os.per_user_bounds import Bounds
from agent.pool.map.document import tenant_id
from agent.pool.steps import Runner
from agent.s3.connection import Connection
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.service import S3Service
from agent.s3.store import ObjectStore
from agent.s3.unproven_clients import CONNECTIONS, KNOWN, UnprovenClient, UnprovenClients, watch_shares
from agent.s3.workers import Workers
from nvmeof.authentication.private_files import SecretFileError, check_private
from nvmeof.controller.guest_connections import peer_of

log = logging.getLogger(__name__)

TIDY_SECONDS: Final = 0.5
UPLOADS_SECONDS: Final = 60.0
"""Between two looks for forgotten uploads."""
BACKLOG: Final = 128
HANDSHAKE_SECONDS: Final = 10.0


class S3Door:
    """A `Door`. It owns the stores."""

    def __init__(
        self,
        section: S3Section,
        keys: Sequence[AccessKey],
        stores: Mapping[str, ObjectStore],
        make_runner: MakeRunner,
        bounds: Bounds | None = None,
    ) -> None:
        """`stores` by tenant. Raises ConfigError where the certificate is not usable."""
        self._bounds = bounds or Bounds()
        self._clients = UnprovenClients(self._bounds.of(CONNECTIONS, section.connections, {KNOWN}))
        self._section = section
        self._keys = {key.key_id: key for key in keys}
        self._stores = dict(stores)
        self._workers = Workers(section.workers, make_runner)
        self._tls = _tls(section)
        self._complaints = Complaints(log)
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._lock = threading.Lock()
        """Held by other threads that use the stores, against their being closed meanwhile."""
        self._stopping = trio.Event()
        self._grace_seconds = GRACE_SECONDS
        self._failure: BaseException | None = None
        """The error that ended its loop."""
        self.counters = S3Counters()
        self.ports: list[int] = []
        """Its ports, in the order of the configuration."""

    def start(self) -> None:
        """Listen and serve. Raises ConfigError."""
        try:
            for text in self._section.listen:
                self._listeners.append(_listener(text))
        except BaseException:
            self._close_listeners()
            raise
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._workers.start()
        began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(began,), name="s3", daemon=True)
        self._thread.start()
        began.wait()
        if self._failure is not None:
            raise G35Error("the S3 door did not start; the log says why") from self._failure

    def wait(self, timeout: float | None = None) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Take no more requests; those under way have the grace. What they write is whole or absent."""
        if self._thread is not None:
            self._grace_seconds = grace_seconds
            with contextlib.suppress(trio.RunFinishedError):
                assert self._token is not None, "it was set before start returned"
                self._token.run_sync_soon(self._stopping.set)
            self._thread.join()
            self._thread = None
        self.close()

    def close(self) -> None:
        """Close a door that was never started, or has ended."""
        self._close_listeners()
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def snapshot(self) -> Mapping[str, Any]:
        """Counters for the agent's status."""
        addresses = [text.rpartition(":")[0] for text in self._section.listen]
        with self._lock:
            objects = sum(store.index.count() for store in self._stores.values())
        return {
            "listen": [f"{address}:{port}" for address, port in zip(addresses, self.ports, strict=False)],
            "tls": self._tls is not None,
            "objects": objects,
            **self.counters.snapshot(),
        }

    def holds_anything(self, tenant: bytes) -> bool:
        """Whether a tenant, by its id, has objects here, so that its volumes of blocks are in use."""
        with self._lock:
            return any(
                store.holds_anything()
                for name, store in self._stores.items()
                if bytes.fromhex(tenant_id(name)) == tenant
            )

    def orphans(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `blocks` that no object's file has; none once the door is closed."""
        with self._lock:
            left = blocks if self._stores else ()
            for store in self._stores.values():
                left = store.files.orphans(left)
        return left

    # -- the door's thread ----------------------------------------------------------------------

    def _run(self, began: threading.Event) -> None:
        try:
            trio.run(self._serve, began)
        except BaseException as bug:
            self._failure = bug
            log.exception("the S3 door ended")
        finally:
            self._close_listeners()
            began.set()
            self._workers.stop()

    async def _serve(self, began: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        service = S3Service(self._section, self._keys, self._stores, self._workers, self.counters)
        watch_shares(self._bounds, service, self._stores)
        room = trio.Semaphore(self._section.connections)
        await self._workers.run(None, self._make_buckets)
        began.set()
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as others:
                for listener in self._listeners:
                    others.start_soon(self._accept, listener, service, room, connections)
                others.start_soon(self._tend)
                await self._stopping.wait()
                others.cancel_scope.cancel()
            connections.cancel_scope.deadline = trio.current_time() + self._grace_seconds
        await self._seal()

    async def _accept(
        self, listener: socket.socket, service: S3Service, room: trio.Semaphore, nursery: trio.Nursery
    ) -> None:
        accepting = trio.socket.from_stdlib_socket(listener)
        while True:
            await trio.lowlevel.wait_readable(listener)
            if not room.value:
                self._clients.make_room()
            await room.acquire()
            try:
                connected, address = await accepting.accept()
            except OSError as error:
                room.release()
                self._complaints.peer("accepting a connection of S3", str(error))
                await trio.sleep(0.1)
                continue
            stranger = self._clients.enter(peer_of(str(address[0])))
            if stranger is None:
                self.counters.connections_refused += 1
                connected.close()
                room.release()
                continue
            self.counters.connections += 1
            nursery.start_soon(self._serve_one, trio.SocketStream(connected), stranger, service, room)

    async def _serve_one(
        self, stream: trio.SocketStream, stranger: UnprovenClient, service: S3Service, room: trio.Semaphore
    ) -> None:
        try:
            with stranger.scope:
                await self._serve_stream(stream, stranger, service)
            self.counters.connections_refused += stranger.scope.cancelled_caught
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the client's end, or the network's
        except _HandshakeFailed:
            self.counters.connections_refused += 1
        except Exception as bug:
            self._complaints.bug("a connection of S3", bug)
        finally:
            self.counters.connections -= 1
            stranger.leave()
            room.release()

    async def _serve_stream(
        self, stream: trio.SocketStream, stranger: UnprovenClient, service: S3Service
    ) -> None:
        """Serve a connection to its end, or until it gives way."""
        async with stream:
            served: trio.abc.Stream = stream
            if self._tls is not None:
                served = await self._secured(stream)
            idle_s = self._section.idle_s
            await Connection(service, served, idle_s, self._complaints, known=stranger.identify).serve()

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        assert self._tls is not None, "asked where there is TLS"
        secured = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                await secured.do_handshake()
        except (trio.TooSlowError, trio.BrokenResourceError):
            raise _HandshakeFailed from None
        return secured

    async def _tend(self) -> None:
        """Remove spare files, a batch at a time; end old uploads."""
        next_look, seconds = 0.0, self._section.upload_hours * 3600
        while True:
            more, now = False, trio.current_time()
            for store in self._stores.values():
                try:
                    more |= await self._workers.run(store, store.tidy)
                    if now >= next_look:
                        for name in await self._workers.run(
                            store, partial(store.old_uploads, seconds=seconds)
                        ):
                            await self._workers.run(store, partial(store.end_upload, name=name))
                except Exception as bug:
                    self._complaints.bug("tidying up behind S3", bug)
            if now >= next_look:
                next_look = now + UPLOADS_SECONDS
            await trio.sleep(0.0 if more else TIDY_SECONDS)

    def _make_buckets(self, runner: Runner) -> None:
        for tenant in self._section.tenants:
            store = self._stores.get(tenant.tenant)
            if store is None:
                continue  # it was erased
            for name in tenant.buckets:
                try:
                    store.index.make_bucket(name, time.time_ns())
                except S3Error as refused:
                    log.warning("bucket %s of %s was not made: %s", name, tenant.tenant, refused)

    async def _seal(self) -> None:
        """Seal everything that is staged."""

        def seal(runner: Runner) -> None:
            for store in self._stores.values():
                runner.run(store.files.seal_everything())

        await self._workers.run(None, seal)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()


class _HandshakeFailed(Exception):
    """The TLS handshake failed."""


def _listener(text: str) -> socket.socket:
    address, port = parse_listener(text)
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen on {text}: {error.strerror}", "choose another port in s3.listen"
        ) from None
    return made


def _tls(section: S3Section) -> ssl.SSLContext | None:
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
            f"s3.certificate or s3.private_key is not usable: {error}", "both are PEM files"
        ) from None
    return context
