"""NVMe/RDMA at an enclosure: one thread with an emulated RoCE device, its queue pairs and their queues.

The device has one UDP port, and a thread that waits on it receives for all: a thread for each connection
would only take turns. The thread takes completions of all queue pairs from one completion queue and
connection events from one channel, serves them, and waits for more or a deadline. Other threads reach it by
`wake`.

The passive side of the connection manager needs the connection of an event, which pyverbs 44 does not tell.
So an enclosure needs `emulator.roce`; hosts may use any provider.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from emulator.jbof.rdma_connection import RdmaConnection, RdmaDevice
from nvmeof.controller.rdma_queue import RdmaSettings, judge_request, send_room
from nvmeof.controller.served_queue import ServedQueue
from nvmeof.controller.target import Target
from nvmeof.controller.unauthenticated_connections import DISPLACED, peer_of
from nvmeof.errors import NvmeofError
from nvmeof.rdma.buffers import RegisteredBuffers
from nvmeof.rdma.work import Access
from nvmeof.transport.rdma_pair import Domain, poll, verbs_errors
from nvmeof.transport.verbs_provider import Verbs, load_verbs
from nvmeof.wire import rdma as wire

log = logging.getLogger(__name__)

PROVIDER: Final = "emulator.roce.pyverbs"

COMPLETIONS: Final = 32768
"""Entries of the completion queue. They bound the queue pairs, each of which may fill its queues. Those of
guests (`nvmeof/controller/unauthenticated_connections.py`) give way to newcomers."""

BACKLOG: Final = 128

WAKE_S: Final = 0.02
"""How soon a wake-up from another thread is noticed while the device is waited for."""

STOP_S: Final = 5.0


class RdmaListener:
    """Listens from `start` to `close`. Raises `ConnectionLost` or `VerbsUnavailable` where it cannot.

    `on_failure` is called once, from its thread, where that ends by an error.
    """

    def __init__(
        self,
        target: Target,
        settings: RdmaSettings,
        address: str,
        port: int,
        on_failure: Callable[[str], None],
    ) -> None:
        self._target = target
        self._on_failure = on_failure
        self._settings = settings
        self._address = address
        self.port = port
        self.accepted = 0
        self.refused = 0
        self._verbs: Verbs = load_verbs(PROVIDER)
        self._verbs.ensure_device(address)
        self._stopping = False
        self._woken: deque[RdmaConnection] = deque()
        self._jobs: deque[Callable[[], object]] = deque()
        self._by_pair: dict[int, RdmaConnection] = {}
        self._by_cmid: dict[Any, RdmaConnection] = {}
        self._entries_used = 0
        self._close: list[Callable[[], None]] = []
        self._serving = threading.Thread(target=self._serve, name="rdma", daemon=True)

    @property
    def connections(self) -> int:
        """Number of served queue pairs."""
        return len(self._by_pair)

    def start(self, media: Iterable[memoryview]) -> None:
        """Listen, and serve in a thread of its own; payload moves directly from and to `media`."""
        verbs, cm = self._verbs, self._verbs.cm_enums
        try:
            with verbs_errors(verbs, f"RDMA port {self.port}"):
                self._events = verbs.make_channel(verbs.cmid.CMEventChannel)
                self._close.append(self._events.channel.close)
                self._cmid = verbs.cmid.CMID(creator=self._events.channel, port_space=cm.RDMA_PS_TCP)
                self._close.append(self._cmid.close)
                where = verbs.cmid.AddrInfo(
                    src=self._address,
                    src_service=str(self.port),
                    port_space=cm.RDMA_PS_TCP,
                    flags=cm.RAI_PASSIVE,
                )
                self._cmid.bind_addr(where)
                self._cmid.listen(BACKLOG)
                name = self._cmid.dev_name
            device = name.decode() if isinstance(name, bytes) else str(name)
            context = verbs.open_context(device)
            self._close.append(lambda: verbs.release_context(device))
            domain = Domain(verbs, context)
            self._close.append(domain.close)
            self._buffers = RegisteredBuffers(domain, Access.LOCAL_WRITE)
            self._completions = verbs.make_completions(context, COMPLETIONS)
            self._close.append(self._completions.close)
            self._device = RdmaDevice(
                verbs, context, domain, self._completions.queue, self._buffers, self._target, self._settings
            )
            for view in media:
                self._buffers.register(view)
        except BaseException:
            self._give_back()
            raise
        self._serving.start()

    def add_medium(self, view: memoryview) -> None:
        """Register the memory of a new drive."""
        self._jobs.append(lambda: self._buffers.register(view))

    def remove_medium(self, view: memoryview) -> None:
        """Deregister the memory of a drive that is gone and has no payload under way."""
        self._jobs.append(lambda: self._buffers.forget(view))

    def close(self) -> None:
        """Stop serving and release everything. Idempotent."""
        self._stopping = True
        if self._serving.is_alive():
            self._serving.join(STOP_S)
        self._give_back()

    def _give_back(self) -> None:
        steps, self._close = self._close, []
        for step in reversed(steps):
            try:
                step()
            except self._verbs.error as error:
                log.debug("closing: %s", error)

    def _serve(self) -> None:
        why: Exception | None = None
        try:
            while not self._stopping:
                self._round()
        except Exception as error:
            # The last line of defence; without its thread the enclosure answers nobody, and says why.
            log.exception("the RDMA thread of the enclosure ends")
            why = error
        finally:
            for connection in list(self._by_pair.values()):
                connection.end("the enclosure stops")
            self._by_pair.clear()
            self._by_cmid.clear()
            if why is not None and not self._stopping:
                self._on_failure(f"nobody is served at {self._address}:{self.port} any more: {why}")

    def _round(self) -> None:
        """Serve everything that is there now, then wait for more."""
        while self._jobs:
            self._jobs.popleft()()
        if self._events.waits():
            self._take_event()
        touched: dict[RdmaConnection, None] = {}
        found = poll(self._verbs, self._completions)
        now = time.monotonic()
        for number, done in found:
            connection = self._by_pair.get(number)
            if connection is not None:
                connection.completed(done, now)
                touched[connection] = None
        while self._woken:
            touched[self._woken.popleft()] = None
        due = now + WAKE_S
        for connection in self._by_pair.values():
            if connection.due <= now:
                touched[connection] = None
            elif connection.due < due:
                due = connection.due
        for connection in touched:
            self._go_on(connection, now)
        if not found and not touched:
            self._completions.wait(due, lambda: self._events.waits() or self._woken)

    def _go_on(self, connection: RdmaConnection, now: float) -> None:
        try:
            connection.go_on(now)
        except Exception:
            # A bug ends one connection, not the enclosure.
            log.exception("%s", connection.name)
            connection.end()
        if connection.over:
            self._forget(connection)

    def _forget(self, connection: RdmaConnection) -> None:
        if self._by_pair.pop(connection.pair.number, None) is not None:
            self._entries_used -= _entries(connection.queue.entries)
        self._by_cmid.pop(connection.cmid, None)

    def _take_event(self) -> None:
        verbs, cm = self._verbs, self._verbs.cm_enums
        with verbs_errors(verbs, "connection events"):
            event = verbs.cmid.CMEvent(self._events.channel)
        try:
            kind, cmid = int(event.event_type), event.id
            if kind == cm.RDMA_CM_EVENT_CONNECT_REQUEST:
                self._request(cmid, bytes(event.private_data or b""), event)
                return
        finally:
            event.close()
        connection = self._by_cmid.get(cmid)
        if connection is not None and kind != cm.RDMA_CM_EVENT_ESTABLISHED:
            hung_up = kind == cm.RDMA_CM_EVENT_DISCONNECTED
            connection.end("the host hung up" if hung_up else f"connection manager event {kind}")
            self._forget(connection)

    def _request(self, cmid: Any, private: bytes, event: Any) -> None:
        """Accept or reject a host's request for a queue pair."""
        host_reads = event.param.initiator_depth
        try:
            request = wire.decode_connect_request_untrusted(private)
            limit = self._target.settings.max_io_queues
            judge_request(request, self._settings, max_io_queues=limit, host_reads=host_reads)
            peer = peer_of(cmid.connection().remote_ip)
            while self._entries_used + _entries(request.host_send_entries) > COMPLETIONS:
                if not self._displace_for(peer):
                    raise wire.UnacceptableRequest(
                        wire.RejectStatus.NO_RESOURCES, "there are as many queue pairs as fit"
                    )
        except wire.UnacceptableRequest as refusal:
            log.debug("refused: %s", refusal)
            self._reject(cmid, refusal.status)
            return
        try:
            connection = self._accept(cmid, request, host_reads, peer)
        except NvmeofError as error:
            log.debug("not accepted: %s", error)
            self._reject(cmid, wire.RejectStatus.NO_RESOURCES)
            return
        self.accepted += 1
        self._entries_used += _entries(request.host_send_entries)
        self._by_pair[connection.pair.number] = connection
        self._by_cmid[cmid] = connection

    def _displace_for(self, peer: str) -> bool:
        """End a guest's queue pair for a newcomer of `peer`; False where none gives way."""
        by_session: dict[ServedQueue, RdmaConnection] = {
            each.queue.session: each for each in self._by_pair.values()
        }
        with self._target.lock:
            victim = self._target.guests.make_room(peer, time.monotonic(), by_session)
        if victim is None:
            return False
        connection = by_session[victim]
        connection.end(DISPLACED)
        self._forget(connection)
        return True

    def _accept(self, cmid: Any, request: wire.ConnectRequest, host_reads: int, peer: str) -> RdmaConnection:
        made: list[RdmaConnection] = []

        def wake() -> None:
            # Nobody wakes a connection before `_by_pair` has it, but its own Connect may.
            self._woken.extend(made)

        now = time.monotonic()
        made.append(
            RdmaConnection(self._device, cmid, request, host_reads=host_reads, peer=peer, now=now, wake=wake)
        )
        return made[0]

    def _reject(self, cmid: Any, status: wire.RejectStatus) -> None:
        self.refused += 1
        try:
            cmid.reject(wire.encode_connect_reject(status))
            cmid.close()
        except self._verbs.error as error:
            log.debug("rejecting: %s", error)


def _entries(host_send_entries: int) -> int:
    """Completions that one queue pair may have at once."""
    return send_room(host_send_entries) + host_send_entries
