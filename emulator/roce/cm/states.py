"""The life of a connection as a table (IBTA volume 1, 12.9.5 to 12.9.7). Nothing else moves it.

The states of the specification that differ only in whether an MRA was sent or received are one here: an MRA
moves a deadline and nothing more. DREQ received has no state either, since it is answered at once.
"""

from enum import Enum


class CmState(Enum):
    """Where a connection stands."""

    IDLE = "idle"
    REQ_SENT = "REQ sent"
    REP_RECEIVED = "REP received"
    REQ_RECEIVED = "REQ received"
    REP_SENT = "REP sent"
    ESTABLISHED = "established"
    DREQ_SENT = "DREQ sent"
    SIDR_SENT = "SIDR_REQ sent"
    SIDR_RECEIVED = "SIDR_REQ received"
    RESOLVED = "resolved"
    TIME_WAIT = "time-wait"
    CLOSED = "closed"


_IDLE, _REQ_SENT, _REP_RECEIVED = CmState.IDLE, CmState.REQ_SENT, CmState.REP_RECEIVED
_REQ_RECEIVED, _REP_SENT, _ESTABLISHED = CmState.REQ_RECEIVED, CmState.REP_SENT, CmState.ESTABLISHED
_SIDR_SENT, _SIDR_RECEIVED, _RESOLVED = CmState.SIDR_SENT, CmState.SIDR_RECEIVED, CmState.RESOLVED
_DREQ_SENT, _TIME_WAIT, _CLOSED = CmState.DREQ_SENT, CmState.TIME_WAIT, CmState.CLOSED

LEGAL: dict[CmState, frozenset[CmState]] = {
    # The active side begins with `connect`, the passive side with a REQ.
    _IDLE: frozenset({_REQ_SENT, _REQ_RECEIVED, _SIDR_SENT, _SIDR_RECEIVED, _CLOSED}),
    # Answered; rejected, or given up.
    _REQ_SENT: frozenset({_REP_RECEIVED, _TIME_WAIT, _CLOSED}),
    # `establish`; `disconnect` or DREQ before it; rejected by either side.
    _REP_RECEIVED: frozenset({_ESTABLISHED, _DREQ_SENT, _TIME_WAIT, _CLOSED}),
    # `accept`; `reject`, or the peer gave up.
    _REQ_RECEIVED: frozenset({_REP_SENT, _CLOSED}),
    # RTU, or data before it; DREQ, whose RTU was lost; rejected, or given up.
    _REP_SENT: frozenset({_ESTABLISHED, _DREQ_SENT, _TIME_WAIT, _CLOSED}),
    _ESTABLISHED: frozenset({_DREQ_SENT, _TIME_WAIT}),
    _DREQ_SENT: frozenset({_TIME_WAIT}),
    # A datagram service (12.11): answered; refused, given up or destroyed.
    _SIDR_SENT: frozenset({_RESOLVED, _CLOSED}),
    _SIDR_RECEIVED: frozenset({_RESOLVED, _CLOSED}),
    _RESOLVED: frozenset({_CLOSED}),
    _TIME_WAIT: frozenset({_CLOSED}),
    _CLOSED: frozenset(),
}
