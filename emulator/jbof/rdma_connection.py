"""One host's queue pair at an enclosure: connection manager, verbs and controller queue.

Only the thread of `rdma_listener.py` calls it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nvmeof.controller.rdma_queue import RdmaControllerQueue, RdmaSettings, send_room
from nvmeof.controller.target import Target
from nvmeof.errors import ConnectionLost
from nvmeof.rdma.buffers import RegisteredBuffers
from nvmeof.rdma.work import Done
from nvmeof.transport.rdma_pair import ACK_TIMEOUT, Domain, QueuePair, verbs_errors
from nvmeof.transport.verbs_provider import Verbs
from nvmeof.wire.rdma import ConnectRequest, encode_connect_accept

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """What all queue pairs of a listener share."""

    verbs: Verbs
    context: Any
    domain: Domain
    completions: Any
    buffers: RegisteredBuffers
    target: Target
    settings: RdmaSettings


class RdmaConnection:
    """Serves one accepted queue pair until `over`."""

    def __init__(
        self,
        device: RdmaDevice,
        cmid: Any,
        request: ConnectRequest,
        *,
        host_reads: int,
        peer: str,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        """Make the queue pair for a request that was judged, and accept it.

        Raises `ConnectionLost`, also where `peer` has too many guests. The caller then owns `cmid`, by which
        it can reject the host.
        """
        self.name = f"rdma queue {request.qid}"
        self.cmid = cmid
        self.over = False
        self._verbs = device.verbs
        entries, settings = request.host_send_entries, device.settings
        self.pair = QueuePair(
            device.verbs, device.context, device.domain, device.completions,
            room=send_room(entries), receives=entries,
        )  # fmt: skip
        self.queue = RdmaControllerQueue(
            device.target, device.buffers, request, now=now, host_reads=host_reads, wake=wake,
            settings=settings,
        )  # fmt: skip
        self.due = self.queue.deadline()
        """When the queue wants to be looked at."""
        try:
            if not self.queue.session.enter(peer, now):
                raise ConnectionLost("too many connections have proven nothing")
            self._establish(entries, min(host_reads, settings.max_reads))
        except BaseException:
            self._give_back([self.pair.close])
            raise

    def _establish(self, entries: int, reads: int) -> None:
        verbs, states = self._verbs, self._verbs.enums
        self.queue.start()
        with verbs_errors(verbs, "accepting"):
            self.pair.modify(self.cmid, states.IBV_QPS_INIT)
            # Receives before the answer: the first capsule may be there as soon as the host has it.
            self.post()
            self.pair.modify(self.cmid, states.IBV_QPS_RTR)
            self.pair.modify(self.cmid, states.IBV_QPS_RTS, timeout=ACK_TIMEOUT)
            private = encode_connect_accept(entries)
            answer = verbs.cmid.ConnParam(
                resources=0,
                depth=reads,
                retry=7,
                rnr_retry=7,
                qp_num=self.pair.number,
                data_len=len(private),
            )
            answer.set_private_data(private)
            self.cmid.accept(answer)

    def completed(self, done: Done, now: float) -> None:
        """A work request of this pair has completed."""
        if not self.over:
            self.queue.completed(done, now)

    def post(self) -> None:
        queue = self.queue
        receives, work = queue.take_receives(), queue.sends.take()
        if receives or work:
            self.pair.post(receives, work)

    def go_on(self, now: float) -> None:
        """After completions, a wake-up or the deadline: run the queue, post its work, notice the end."""
        if self.over:
            return
        queue = self.queue
        queue.run(now)
        try:
            self.post()
        except ConnectionLost as error:
            log.debug("%s: %s", self.name, error)
            self.end()
            return
        if queue.finished:
            self.end()
        else:
            self.due = queue.deadline()

    def end(self, reason: str = "the connection was lost") -> None:
        """Break the queue pair, disconnect, release everything."""
        if self.over:
            return
        self._give_back([self.cmid.disconnect, self.pair.close, self.cmid.close], reason)
        log.debug("%s: %s", self.name, self.queue.end_reason)

    def _give_back(self, steps: Sequence[Callable[[], None]], reason: str = "it was not accepted") -> None:
        self.over = True
        self.pair.break_off()
        for step in steps:
            try:
                step()
            except self._verbs.error as error:
                log.debug("%s: %s", self.name, error)
        self.queue.connection_lost(reason)
