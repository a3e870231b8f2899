"""One host's queue pair at an enclosure: the connection manager's side, the verbs and the controller queue.

Driven by the thread of `rdma_listener.py`, which is the only one that calls anything here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nvmeof.controller.rdma_queue import RdmaControllerQueue
from nvmeof.controller.rdma_rules import RdmaSettings, send_room
from nvmeof.controller.target import Target
from nvmeof.errors import ConnectionLost
from nvmeof.rdma.buffers import RegisteredBuffers
from nvmeof.rdma.work import Done
from nvmeof.transport.rdma_pair import ACK_TIMEOUT, Domain, QueuePair, verbs_errors
from nvmeof.transport.verbs_provider import Verbs
from nvmeof.wire.rdma import ConnectAccept, ConnectRequest

log = logging.getLogger(__name__)


class RdmaConnection:
    """Serves one accepted queue pair until `over`."""

    def __init__(
        self,
        verbs: Verbs,
        cmid: Any,
        pair: QueuePair,
        queue: RdmaControllerQueue,
        name: str,
    ) -> None:
        self.name = name
        self.queue = queue
        self.pair = pair
        self.due = queue.deadline()
        """When the queue wants to be looked at."""
        self.over = False
        self.cmid = cmid
        self._verbs = verbs

    @classmethod
    def accept(
        cls,
        verbs: Verbs,
        context: Any,
        domain: Domain,
        completions: Any,
        cmid: Any,
        request: ConnectRequest,
        *,
        host_reads: int,
        target: Target,
        buffers: RegisteredBuffers,
        settings: RdmaSettings,
        now: float,
        wake: Callable[[], None],
        name: str,
        peer: str,
    ) -> RdmaConnection:
        """Make the queue pair for a request that was judged, and accept it.

        Raises `ConnectionLost`, also where `peer` has too many guests; `cmid` is the caller's then, who can
        say no to the host by it.
        """
        entries = request.host_send_entries
        room = send_room(entries)
        pair = QueuePair(verbs, context, domain, completions, room=room, receives=entries)
        queue = RdmaControllerQueue(
            target, buffers, request, now=now, host_reads=host_reads, wake=wake, settings=settings
        )
        connection = cls(verbs, cmid, pair, queue, name)
        try:
            if not queue.session.enter(peer, now):
                raise ConnectionLost("too many connections have proven nothing")
            connection._establish(entries, min(host_reads, settings.max_reads))
        except BaseException:
            connection._give_back([pair.close])
            raise
        return connection

    def _establish(self, entries: int, reads: int) -> None:
        verbs, states = self._verbs, self._verbs.enums
        self.queue.start()
        with verbs_errors(verbs, "accepting"):
            self.pair.modify(self.cmid, states.IBV_QPS_INIT)
            # Receives before the answer: the first capsule may be there as soon as the host has it.
            self.post()
            self.pair.modify(self.cmid, states.IBV_QPS_RTR)
            self.pair.modify(self.cmid, states.IBV_QPS_RTS, timeout=ACK_TIMEOUT)
            private = ConnectAccept(entries).encode()
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
        """Post what the queue wants posted."""
        queue = self.queue
        receives, work = queue.take_receives(), queue.sends.take()
        if receives or work:
            self.pair.post(receives, work)

    def go_on(self, now: float) -> None:
        """After completions, a wake-up or the deadline: do what is due, post it, notice the end."""
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
        """Break the queue pair, hang up, give everything back."""
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
