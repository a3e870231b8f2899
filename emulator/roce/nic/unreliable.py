"""Both ends of an unreliable connection: messages without acknowledgements (IBTA 9.8.3).

The requester is that of a reliable connection whose every packet counts as answered once sent: no clock, no
window, no repetition. Only the peer's socket buffer bounds the packets under way, so messages longer than
that may be lost.

The responder takes whole messages only. A packet out of order loses the current message; the next first or
only packet begins anew, from its own PSN. The receive that a lost SEND took serves the next message. A
request that RC would refuse is dropped and counted, and the queue pair goes on.
"""

from emulator.roce.nic.counters import Count
from emulator.roce.nic.pending_send import UNRELIABLE_SHAPES, extended_psn
from emulator.roce.nic.qp_context import QpContext
from emulator.roce.nic.requester import Requester
from emulator.roce.nic.responder import NotReady, Refusal, Responder, Responses
from emulator.roce.nic.verbs import Burst, WcStatus
from emulator.roce.nic.work_requests import ReceiveRequest
from emulator.roce.wire.extended import SYNDROME_ACK
from emulator.roce.wire.opcodes import class_of
from emulator.roce.wire.packet import Packet


class UnreliableRequester(Requester):
    """See the module's docstring."""

    def __init__(self, qp: QpContext) -> None:
        super().__init__(qp, UNRELIABLE_SHAPES)

    def next_burst(self, now: float) -> Burst | None:
        """The next packets to go out. A message completes with its last packet."""
        burst = super().next_burst(now)
        if burst is not None:
            self._progress(self._cursor, now)
        return burst

    def _request_failed(self) -> None:
        """Only the send queue ends, receives go on (IBTA 10.3.1.6)."""
        self._qp.send_queue_failed()


class _Silence(Responses):
    """No acknowledgement leaves, also where the peer asks for one, as rxe does."""

    def acknowledge(self, psn: int, messages: int, syndrome: int = SYNDROME_ACK) -> None:
        """Say nothing."""


class UnreliableResponder(Responder):
    """See the module's docstring."""

    def __init__(self, qp: QpContext) -> None:
        super().__init__(qp)
        self.responses = _Silence(qp)

    def receive(self, packet: Packet) -> None:
        """A packet of a message, checked as far as its form goes."""
        known = class_of(packet.opcode)
        psn = extended_psn(packet.psn, self.expected)
        if psn != self.expected or known.first:
            if self._operation is not None:
                self._lose_message()
            if not known.first:
                self._count(Count.MESSAGE_LOST)
                return
            self.expected = psn
        try:
            self._carry_out(packet, known)
        except NotReady:
            self._count(Count.NO_RECEIVE)
            self._lose_message()
        except Refusal as refusal:
            if refusal.status is WcStatus.LOC_PROT_ERR and self._receive is not None:
                # The memory of our own receive is at fault, and stays it for the next message.
                self._complete(refusal.status)
                self._qp.enter_error()
                return
            self._lose_message()

    def _lose_message(self) -> None:
        """Drop the current message without an answer; the next message gets its receive."""
        self._count(Count.MESSAGE_LOST)
        self._end_message()

    def _take_receive(self) -> ReceiveRequest:
        kept = self._receive
        return kept if kept is not None else super()._take_receive()
