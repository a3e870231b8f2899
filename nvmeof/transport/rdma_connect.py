"""Connecting a queue pair to a controller through the connection manager: the host's side.

Steps that wait are generators: each `yield` asks for an event on the link's `fd` (or its deadline). So one
text serves threads, which poll the descriptor, and trio, which waits for it.

The queue pair is ours: one of the connection manager's could neither bind windows nor post work that pyverbs
lets us see. So its states are ours to change: INIT, receives, `connect`, and on the answer INIT **again**,
RTR, RTS, `establish`. The access rights are known only with the answer; without the second INIT every RDMA
READ of the controller would be refused.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar

from nvmeof.errors import ConnectionLost, MalformedPdu
from nvmeof.rdma.work import Done, Receive, Work
from nvmeof.transport.base import Address, VerbsChoice
from nvmeof.transport.rdma_pair import ACK_TIMEOUT, Domain, QueuePair, poll, verbs_errors
from nvmeof.transport.verbs_provider import Verbs
from nvmeof.transport.verbs_waiting import Completions
from nvmeof.wire import rdma as wire

log = logging.getLogger(__name__)

RESPONDER_RESOURCES: Final = 16
"""RDMA READs of the controller that may be under way on one queue pair (IRD)."""

RETRIES: Final = 7

ANSWER_S: Final = 2.0
"""A controller that lives answers a request within milliseconds, and one that has died not at all: nothing
refuses in its stead. The connection manager would ask again every four seconds; a caller that wants the
controller tries again sooner, and finds it as soon as it is back."""


T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""Resumed when an event may be there, or the deadline has come."""


class RdmaLink:
    """A queue pair, its completions and its connection. Used by one thread or task at a time.

    `resolve`, `make_pair`, `connect` first; then `post` and `take`; `close` in any case.
    """

    def __init__(self, choice: VerbsChoice, verbs: Verbs) -> None:
        self._choice = choice
        self._verbs = verbs
        self._address = Address("", 0)
        self._device = ""
        self._context: Any = None
        self._cmid: Any = None
        self._established = False
        self.domain: Domain | None = None
        self.pair: QueuePair | None = None
        self.completions: Completions | None = None
        self.gone: str | None = None
        """Why the connection is over, as the connection manager tells it."""
        self.windows: list[int] = []
        verbs.require_device()
        with verbs_errors(verbs, "no event channel"):
            self._events = verbs.make_channel(verbs.cmid.CMEventChannel)

    @property
    def windows_serve_once(self) -> bool:
        return self._verbs.windows_serve_once

    def resolve(self, address: Address, deadline: float) -> Waiting[None]:
        """Find the way to the controller, and open the device that leads there. Raises `ConnectionLost`."""
        verbs, cm = self._verbs, self._verbs.cm_enums
        self._address = address
        local_address = verbs.source_for(self._choice.local_address, address.host)
        source = {"src": local_address} if local_address else {}
        with verbs_errors(verbs, f"cannot reach {address}"):
            info = verbs.cmid.AddrInfo(
                dst=address.host, dst_service=str(address.port), port_space=cm.RDMA_PS_TCP, **source
            )
            self._cmid = verbs.cmid.CMID(creator=self._events.channel, port_space=cm.RDMA_PS_TCP)
            left = max(1, int((deadline - time.monotonic()) * 1000))
            self._cmid.resolve_addr(info, left)
            yield from self._expect(cm.RDMA_CM_EVENT_ADDR_RESOLVED, deadline)
            self._cmid.resolve_route(left)
            yield from self._expect(cm.RDMA_CM_EVENT_ROUTE_RESOLVED, deadline)
            name = self._cmid.dev_name
            device = name.decode() if isinstance(name, bytes) else str(name)
            self._context = verbs.open_context(device)
            self._device = device

    def make_pair(self, *, room: int, receives: int, windows: int) -> Domain:
        """The domain and the queue pair; `windows` type 2 windows, fewer (none) where there are none."""
        verbs, context = self._verbs, self._context
        self.domain = Domain(verbs, context)
        with verbs_errors(verbs, "no completion queue"):
            self.completions = verbs.make_completions(context, room + receives)
        self.completions.watch(self.fd)
        self.pair = QueuePair(
            verbs, context, self.domain, self.completions.queue, room=room, receives=receives
        )
        if windows:
            try:
                self.windows = self.domain.make_windows(windows)
            except ConnectionLost as error:
                # The controller may then write to a worker's buffers whenever it likes (docs/security.md).
                log.warning("%s has no memory windows: plain keys instead (%s)", self._device, error)
        self.pair.modify(self._cmid, verbs.enums.IBV_QPS_INIT)
        return self.domain

    def connect(self, request: wire.ConnectRequest, deadline: float) -> Waiting[int]:
        """Connect; receives are posted. The entries of the controller's receive queue.

        Raises `ConnectionLost`, with the controller's reason if any.
        """
        verbs, cm, states = self._verbs, self._verbs.cm_enums, self._verbs.enums
        assert self.pair is not None
        private = request.encode()
        with verbs_errors(verbs, f"cannot connect to {self._address}"):
            parameters = verbs.cmid.ConnParam(
                resources=RESPONDER_RESOURCES,
                depth=0,
                retry=RETRIES,
                rnr_retry=RETRIES,
                qp_num=self.pair.number,
                data_len=len(private),
            )
            parameters.set_private_data(private)
            self._cmid.connect(parameters)
            soon = min(deadline, time.monotonic() + ANSWER_S)
            answer = yield from self._expect(cm.RDMA_CM_EVENT_CONNECT_RESPONSE, soon)
            accept = wire.decode_connect_accept_untrusted(answer)
            self.pair.modify(self._cmid, states.IBV_QPS_INIT)
            self.pair.modify(self._cmid, states.IBV_QPS_RTR)
            self.pair.modify(self._cmid, states.IBV_QPS_RTS, timeout=ACK_TIMEOUT)
            self._cmid.establish()
        self._established = True
        return accept

    def _expect(self, wanted: int, deadline: float) -> Waiting[bytes]:
        """Wait for an event; its private data. Raises `ConnectionLost` for any other."""
        while True:
            kind, private = self._next_event()
            if kind == wanted:
                return private
            if kind is not None:
                raise ConnectionLost(f"{self._address}: {self._why(kind, private)}")
            if time.monotonic() >= deadline:
                raise ConnectionLost(f"no answer from {self._address}")
            yield

    def wait_event(self, deadline: float) -> None:
        """Until an event waits, or the deadline of the step has come; for threads."""
        self._events.wait(min(ANSWER_S, max(0.0, deadline - time.monotonic())))

    def _next_event(self) -> tuple[int | None, bytes]:
        """The event that made the descriptor readable; closed at once, for a CMID waits for its events."""
        try:
            event = self._verbs.cmid.CMEvent(self._events.channel)
        except self._verbs.error:
            return None, b""
        try:
            return int(event.event_type), bytes(event.private_data or b"")
        finally:
            event.close()

    def _why(self, kind: int, private: bytes) -> str:
        cm = self._verbs.cm_enums
        if kind == cm.RDMA_CM_EVENT_REJECTED:
            try:
                status = wire.decode_connect_reject_untrusted(private)
            except MalformedPdu:
                status = 0
            # Without a consumer behind it a rejection has no private data, or only zeros.
            if not status:
                return "it refuses without a reason, as where nobody listens"
            return f"it refuses: {wire.describe_reject(status)}"
        return {
            cm.RDMA_CM_EVENT_ADDR_ERROR: "no RDMA device leads there",
            cm.RDMA_CM_EVENT_ROUTE_ERROR: "there is no route",
            cm.RDMA_CM_EVENT_UNREACHABLE: "it does not answer",
            cm.RDMA_CM_EVENT_CONNECT_ERROR: "the connection failed",
            cm.RDMA_CM_EVENT_DISCONNECTED: "it hung up",
            cm.RDMA_CM_EVENT_DEVICE_REMOVAL: "the RDMA device was removed",
        }.get(kind, f"connection manager event {kind}")

    def post(self, receives: list[Receive], work: list[Work]) -> None:
        """Post what there is. Raises `ConnectionLost`."""
        assert self.pair is not None
        if receives or work:
            self.pair.post(receives, work)

    def take(self) -> list[Done]:
        """What has completed. Raises `ConnectionLost`."""
        assert self.completions is not None
        return [done for _, done in poll(self._verbs, self.completions)]

    def look_at_events(self) -> None:
        """Take events of the connection manager; sets `gone` when the connection is over."""
        while True:
            kind, private = self._next_event()
            if kind is None:
                return
            if kind != self._verbs.cm_enums.RDMA_CM_EVENT_ESTABLISHED:
                self.gone = self._why(kind, private)

    @property
    def fd(self) -> int:
        """Readable while an event of the connection manager waits."""
        return self._events.fd

    def event_waits(self) -> bool:
        return self._events.waits()

    def break_off(self) -> None:
        """The controller reaches no memory of ours from now on."""
        if self.pair is not None:
            self.pair.break_off()

    def close(self) -> None:
        """Break off, say goodbye, give everything back. May be called twice."""
        verbs = self._verbs
        self.break_off()
        if self._established:
            self._established = False
            with suppress(verbs.error):
                self._cmid.disconnect()
        pair, self.pair = self.pair, None
        completions, self.completions = self.completions, None
        domain, self.domain = self.domain, None
        steps: list[Callable[[], None]] = [each.close for each in (pair, completions, domain) if each]
        cmid, self._cmid = self._cmid, None
        if cmid is not None:
            steps.append(cmid.close)
        steps.append(self._events.channel.close)
        for step in steps:
            with suppress(verbs.error):
                step()
        device, self._device = self._device, ""
        if device:
            verbs.release_context(device)
